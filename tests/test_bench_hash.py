"""The hash benchmark compares like with like and reports every row."""

from __future__ import annotations

import pytest

from kvoffload.bench import hash as bench
from kvoffload.bench.timing import Timing, interleaved
from kvoffload.keys import HASHES


def test_rows_cover_every_hash():
    """A short run gives a cold and a single-block row per hash, with times above 0 and a table line each."""
    rows = list(bench.run(tokens=330, block=16, repeats=2))

    assert [r.name.split()[0] for r in rows] == [name for name in HASHES for _ in range(2)]
    assert all(r.ours.median > 0 and r.limit.median > 0 for r in rows)
    assert {r.blocks for r in rows} == {20}
    assert len(list(bench.report(iter(rows)))) == len(rows) + 2


def test_different_keys_are_not_compared(monkeypatch):
    """If the bare loop made other keys than the chain, the comparison would be worthless and is refused."""
    monkeypatch.setattr(bench, "_bare", lambda namespace, ids: b"")
    with pytest.raises(RuntimeError, match="different keys"):
        list(bench.run(tokens=64, block=16, repeats=1))


def test_things_are_timed_in_turns():
    """Each thing warms up once, then all run in turns; median, lowest and highest are of the repeats alone."""
    calls = []
    times = interleaved({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 3)

    assert "".join(calls) == "ab" * 4
    assert all(0 <= t.low <= t.median <= t.high for t in times.values())
    assert Timing(2.0, 1.0, 4.0).spread == 1.5
