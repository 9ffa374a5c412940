"""The code in README.md runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


def test_the_library_example_runs_twice_and_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example is under 40 lines, asserts its own bytes, and finds its blocks on disk the second time."""
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)

    assert len(code.splitlines()) < 40
    first: dict[str, object] = {}
    exec(code, first)
    again = code.replace("kv.planner.match(turn1, chain)", "earlier = kv.planner.match(turn1, chain)")
    second: dict[str, object] = {}
    exec(again, second)
    assert second["earlier"].boundary == 96  # type: ignore[attr-defined]
    assert second["earlier"].disk == 6  # type: ignore[attr-defined]
