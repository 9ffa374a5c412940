"""docs/traces.md: its examples are read as the form they are shown for."""

from __future__ import annotations

import re
from pathlib import Path

from kvoffload.traces import SynthSpec, open_trace

DOC = Path(__file__).parents[1] / "docs" / "traces.md"


def test_examples_are_read_as_their_form(tmp_path: Path) -> None:
    """Each example opens without options and has the form its heading says."""
    blocks = re.findall(r"^```jsonl (\w+)\n(.*?)^```", DOC.read_text(), re.M | re.S)
    assert [form for form, _ in blocks] == ["full", "full", "delta", "weka"]
    for form, text in blocks:
        path = tmp_path / "example.jsonl"
        path.write_text(text)
        assert open_trace(path).form == form


def test_every_option_of_the_generator_is_described() -> None:
    """The option table names each field of SynthSpec."""
    table = DOC.read_text().split("| option |")[1]
    for name in vars(SynthSpec()):
        assert name in table
