"""The benchmarks run, compare like with like and leave nothing behind. No test looks at a time."""

from __future__ import annotations

import os

from kvoffload.bench.copy import bench_copy
from kvoffload.bench.disk import bench_disk
from kvoffload.bench.rows import Limit, compare


def test_compare_takes_the_median_of_rounds_in_turn():
    """Ours and the limits run in turn, once unmeasured; a row holds medians, extremes and the ratio."""
    calls = []

    def timed(name, seconds):
        def run():
            calls.append(name)
            return next(seconds)

        return run

    ours = timed("ours", iter([9, 1, 2, 4]))
    limit = Limit("limit", 0.9, timed("limit", iter([9, 1, 1, 2])))
    (row,) = compare("x", 8, ours, [limit], 3)
    assert calls == ["ours", "limit"] * 4
    assert (row.low, row.rate, row.high, row.limit_rate) == (2, 4, 8, 8)
    assert (row.ratio, row.reached) == (0.5, False)


def test_copy_rows():
    """A row per direction, fragment, thread count and limit."""
    rows = list(bench_copy((4096, 8192), (1, 2), 1 << 20, 1))
    assert len(rows) == 2 * 2 * 2 * 2
    assert len({(r.name, r.limit) for r in rows}) == len(rows)
    assert all(r.rate > 0 and r.limit_rate > 0 for r in rows)


def test_disk_rows(tmp_path, monkeypatch):
    """Write and read rows, and fio's where it is installed; the folder is empty afterwards."""
    tools = tmp_path / "tools"
    tools.mkdir()
    fio = tools / "fio"
    fio.write_text('#!/bin/sh\necho \'{"jobs": [{"read": {"bw_bytes": 1000000}}]}\'\n')
    fio.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    place = tmp_path / "disk"
    place.mkdir()
    rows = list(bench_disk(place, 64 << 10, 2 << 20, 1))
    assert [r.name.split()[0] for r in rows] == ["write", "read", "read"]
    assert round(rows[2].limit_rate) == 1_000_000
    assert os.listdir(place) == []
