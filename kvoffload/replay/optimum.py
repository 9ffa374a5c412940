"""The most block hits that any policy can reach with one tier, under the sequential rule of docs/replay.md.

MIN with bypass: after a request evict, out of what was held and the request's own blocks, the block whose next use
is farthest; ties from the deepest block. Along a path the next use never gets earlier, so what is held stays closed
under prefixes and MIN solves the relaxed interval problem exactly. It maximises the number of blocks hit, not a cost
that grows with depth.

What is held and next used by request r lies on r's path, in intervals of depth. One that a later request adds lies
above those added before, since it shares a shorter prefix with r: the first interval of r is the deepest.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Optimum:
    """Blocks. hits: by request; written: blocks stored and still held when their request ended."""

    hits: tuple[int, ...]
    written: int

    @property
    def total(self) -> int:
        """Hits of all requests."""
        return sum(self.hits)


@dataclass(slots=True)
class _Interval:
    """Depths [low, high) of a path that are held."""

    low: int
    high: int


class _Held:
    """What is held, by the request that uses it next."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._used = 0
        self._by_use: defaultdict[int, deque[_Interval]] = defaultdict(deque)
        self._farthest: list[int] = []  # negated; requests that were dropped meanwhile are passed over

    def take(self, request: int) -> int:
        """The blocks held for this request, which is no future use any more."""
        count = sum(i.high - i.low for i in self._by_use.pop(request, ()))
        self._used -= count
        return count

    def add(self, use: int, low: int, high: int) -> _Interval:
        """Hold depths [low, high) of the path of `use`; they lie above those that it has."""
        if not self._by_use[use]:
            heapq.heappush(self._farthest, -use)
        interval = _Interval(low, high)
        self._by_use[use].append(interval)
        self._used += high - low
        return interval

    def evict(self) -> None:
        """Give up the farthest, deepest blocks until the capacity holds."""
        while self._used > self._capacity:
            intervals = self._by_use.get(-self._farthest[0])
            if not intervals:
                heapq.heappop(self._farthest)
                continue
            deepest = intervals[0]
            count = min(self._used - self._capacity, deepest.high - deepest.low)
            deepest.high -= count
            self._used -= count
            if deepest.low == deepest.high:
                intervals.popleft()


class Future:
    """Which request uses each block next; the optimum for any capacity from it."""

    def __init__(self, requests: Sequence[NDArray[np.int64]]) -> None:
        """REQUIRES: chained ids: an id stands for its block and all before it."""
        uses = _next_uses(_dense(requests))
        never = len(uses)
        self._runs: list[
            list[tuple[int, int, int]]
        ] = []  # by request: (next use, low, high), used again only
        for use in uses:
            cuts = [0, *(np.flatnonzero(np.diff(use)) + 1).tolist(), len(use)]
            runs = [(int(use[low]), low, high) for low, high in pairwise(cuts) if low < high]
            self._runs.append([run for run in runs if run[0] < never])

    def optimum(self, capacity: int) -> Optimum:
        """Replay over a tier of `capacity` blocks that knows what comes."""
        held = _Held(capacity)
        hits: list[int] = []
        written = 0
        for request, runs in enumerate(self._runs):
            hit = held.take(request)
            hits.append(hit)
            kept = [held.add(*run) for run in runs]
            held.evict()
            written += sum(max(0, k.high - max(k.low, hit)) for k in kept)
        return Optimum(tuple(hits), written)


def _dense(requests: Sequence[NDArray[np.int64]]) -> list[NDArray[np.int64]]:
    """The same paths with ids from 0 upwards."""
    if not requests:
        return []
    inverse = np.unique(np.concatenate(requests), return_inverse=True)[1].astype(np.int64)
    return np.split(inverse, np.cumsum([len(r) for r in requests])[:-1])


def _next_uses(paths: Sequence[NDArray[np.int64]]) -> list[NDArray[np.int64]]:
    """By request and depth, the next request that uses the block; len(paths) = none."""
    never = len(paths)
    following = np.full(1 + max((int(p.max()) for p in paths if len(p)), default=0), never, np.int64)
    uses: list[NDArray[np.int64]] = []
    for request in range(never - 1, -1, -1):
        uses.append(following[paths[request]])
        following[paths[request]] = request
    return uses[::-1]
