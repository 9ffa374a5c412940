"""Errors of odd traces name the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvoffload.errors import TraceError
from kvoffload.traces.load import open_trace


def test_an_undecided_block_size_names_the_line(tmp_path: Path) -> None:
    """One request of one token fits many block sizes: the error says where, what fits and how to choose."""
    path = tmp_path / "t.jsonl"
    path.write_text(
        json.dumps({"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1]}) + "\n"
    )
    with pytest.raises(TraceError, match=r"t\.jsonl:1: no block_size .* fit 1, 2, 4, 8; .*--block-size"):
        open_trace(path)
