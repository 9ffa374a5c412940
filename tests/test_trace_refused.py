"""Mooncake lines that cannot be read: each is refused with its place, its value and the way out."""

from __future__ import annotations

import gzip
import json
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_files import refused, write_lines

from kvoffload.errors import TraceError
from kvoffload.traces import open_trace

QUICK = settings(max_examples=60, derandomize=True, deadline=None, database=None)
FULL = {"timestamp": 1500, "input_length": 1000, "output_length": 7, "hash_ids": [4, 9]}
FIELD = st.sampled_from([*FULL, "session_id", "delay", "turn", "hash_runs", "block_size", "aligned", "agent"])
JUNK = st.none() | st.booleans() | st.integers(-3, 2**70) | st.floats() | st.text(max_size=3)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"input_length": -1}, ["input_length = -1", "at least 0"]),
        ({"input_length": 10.0}, ["input_length = 10.0", "integer"]),
        ({"input_length": True}, ["input_length = true"]),
        ({"input_length": None}, ["input_length = null"]),
        ({"output_length": "7"}, ['output_length = "7"']),
        ({"timestamp": -2}, ["timestamp = -2"]),
        ({"timestamp": float("nan")}, ["timestamp = NaN"]),
        ({"hash_ids": [1, "2"]}, ['hash_ids = "2"', "integers only"]),
        ({"hash_ids": [1, True]}, ["hash_ids = true"]),
        ({"hash_ids": [1, 2.0]}, ["hash_ids = 2.0"]),
        ({"hash_ids": [1, -2]}, ["hash_ids = -2"]),
        ({"hash_ids": [1, 2**63]}, ["hash_ids", "2**63"]),
        ({"hash_ids": {"0": 1}}, ["hash_ids", "a list"]),
        ({"hash_ids": None}, ["hash_ids = null"]),
        ({"hash_runs": [[1, 2]]}, ["both hash_ids and hash_runs"]),
        ({"hash_ids": None, "hash_runs": [[1, 0]]}, ["hash_runs", "count"]),
        ({"hash_ids": None, "hash_runs": [[1, 2**40]]}, ["hash_runs", "count"]),
        ({"hash_ids": None, "hash_runs": [[1, 900], [2000, 900]]}, ["hash_runs", "at most 1000 ids"]),
        ({"hash_ids": None, "hash_runs": [[1, 2, 3]]}, ["hash_runs = [1, 2, 3]"]),
        ({"session_id": 3}, ["session_id = 3", "a string"]),
        ({"turn": "1"}, ['turn = "1"']),
        ({"block_size": 0}, ["block_size = 0", "at least 1"]),
        ({"aligned": 1}, ["aligned = 1"]),
        ({"prioritty": 3}, ["unknown field prioritty = 3", "remove"]),
    ],
)
def test_bad_value_names_file_line_and_field(
    tmp_path: Path, change: dict[str, object], parts: list[str]
) -> None:
    """A value of the wrong type or range, or an unknown field, is refused with place, field and value."""
    path = write_lines(tmp_path / "t.jsonl", [FULL, "", {**FULL, **change}])
    refused(path, f"{path}:3", *parts)


@pytest.mark.parametrize("text", ["{", "[1", '{"a": 1} {"b": 2}', "nonsense", "9" * 5000, "[" * 100_000])
def test_line_that_is_not_json_is_refused(tmp_path: Path, text: str) -> None:
    """A line that is not one JSON value is refused with its place."""
    path = write_lines(tmp_path / "t.jsonl", [FULL, text])
    refused(path, f"{path}:2", "not JSON")


def test_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    """Missing, empty, cut-off, not gzip, not UTF-8, a bare value: each is a TraceError with the path."""
    refused(tmp_path / "none.jsonl", "none.jsonl", "no such file")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    refused(tmp_path / "empty.jsonl", "empty")
    (tmp_path / "empty.json").write_text("")
    refused(tmp_path / "empty.json", "empty")
    packed = gzip.compress((json.dumps(FULL) + "\n").encode() * 500)
    (tmp_path / "cut.jsonl.gz").write_bytes(packed[:-20])
    refused(tmp_path / "cut.jsonl.gz", "cut.jsonl.gz", "cannot be read")
    (tmp_path / "plain.jsonl.gz").write_text(json.dumps(FULL))
    refused(tmp_path / "plain.jsonl.gz", "cannot be read")
    (tmp_path / "latin.jsonl").write_bytes(b'{"session_id": "\xe9"}')
    refused(tmp_path / "latin.jsonl", "cannot be read")
    refused(write_lines(tmp_path / "list.jsonl", [[1, 2]]), "list.jsonl:1", "not a JSON object")
    refused(write_lines(tmp_path / "x.jsonl", [FULL]), "block size 0", block_size=0)
    refused(write_lines(tmp_path / "x.jsonl", [FULL]), "form 'both'", form="both")


@QUICK
@given(
    st.lists(
        st.dictionaries(FIELD, JUNK | st.lists(JUNK | st.lists(JUNK, max_size=2), max_size=3)), max_size=4
    )
)
def test_any_row_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, object]]
) -> None:
    """Rows of any JSON values are read or refused with TraceError; nothing else escapes."""
    path = write_lines(
        tmp_path_factory.getbasetemp() / "junk.jsonl", [FULL, *({**FULL, **row} for row in rows)]
    )
    with suppress(TraceError):
        assert len(open_trace(path, 512).requests) == len(rows) + 1
