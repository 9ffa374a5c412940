"""The optimum against an exhaustive search, and against its known values on real traces."""

from __future__ import annotations

from functools import cache
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffload.replay.optimum import Future
from kvoffload.traces.load import open_trace

PATHS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=4), min_size=1, max_size=6)


def chained(words: list[list[int]]) -> list[tuple[int, ...]]:
    """Ids of all prefixes of each word."""
    names: dict[tuple[int, ...], int] = {}
    return [
        tuple(names.setdefault(tuple(word[: i + 1]), len(names)) for i in range(len(word))) for word in words
    ]


def exhaustive(paths: list[tuple[int, ...]], capacity: int) -> int:
    """The best total over every choice of what to hold after each request."""

    @cache
    def best(request: int, held: frozenset[int]) -> int:
        if request == len(paths):
            return 0
        path = paths[request]
        hits = next((i for i, block in enumerate(path) if block not in held), len(path))
        pool = held | set(path)
        sizes = min(capacity, len(pool))
        later = max(best(request + 1, frozenset(keep)) for keep in combinations(sorted(pool), sizes))
        return hits + later

    return best(0, frozenset())


@settings(max_examples=150, deadline=None, derandomize=True)
@given(words=PATHS, capacity=st.integers(0, 4))
def test_the_optimum_is_that_of_an_exhaustive_search(words: list[list[int]], capacity: int) -> None:
    """On random small tries no choice of blocks to keep reaches more hits, and some choice reaches as many."""
    paths = chained(words)
    found = Future([np.array(p, np.int64) for p in paths]).optimum(capacity)
    assert found.total == exhaustive(paths, capacity)


@pytest.mark.parametrize(
    ("name", "percent"),
    [
        ("cc_v8_sample12_b64", {2000: 51.41, 3000: 66.08, 5000: 84.83, 8000: 94.65}),
        (
            "cc_v8_sample36_gap300_b64",
            {3000: 47.10, 5000: 62.84, 8000: 77.36, 12000: 87.19, 20000: 93.99},
        ),
    ],
)
def test_the_optimum_of_real_traces(traces: Path, name: str, percent: dict[int, float]) -> None:
    """The hits on real agent sessions are those of an independent simulation, to the last digit published."""
    trace = open_trace(traces / f"{name}.mooncake.jsonl.gz")
    ids = [r.ids for r in trace.requests]
    total = sum(map(len, ids))
    future = Future(ids)
    found = {c: round(100 * future.optimum(c).total / total, 2) for c in percent}
    assert found == percent


def test_without_requests_or_room_nothing_is_hit() -> None:
    """No request and no capacity give no hits and no writes; an unlimited tier hits every repeat."""
    path = np.arange(5)
    assert Future([]).optimum(10).total == 0
    assert Future([path, path]).optimum(0).hits == (0, 0)
    whole = Future([path, path]).optimum(9)
    assert (whole.hits, whole.written) == ((0, 5), 5)
