"""Which blocks requests touched when: how many are new, and how many a cache must hold to serve the last minutes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvoffload.keys import KeyArray

SPANS_S = (60, 300, 900)
"""Seconds of the working sets."""

POINTS = 50


class BlockLog:
    """Blocks by the time of the request that touched them, in order of time. Half a key stands for a block: among
    a million of them the chance that two are taken for one is below 1e-7."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._parts: list[NDArray[np.uint64]] = []
        self._mark = 0

    def add(self, when: float, keys: KeyArray) -> None:
        """One request and all its full blocks."""
        self._times.append(when)
        self._parts.append(np.ascontiguousarray(keys).view("<u8").reshape(-1, 2)[:, 0].astype(np.uint64))

    def mark(self) -> None:
        """The measured part begins: what follows is counted, what came before only makes blocks known."""
        self._mark = len(self._parts)

    def blocks(self) -> int:
        """Blocks of all measured requests, repeated ones again."""
        return sum(len(part) for part in self._parts[self._mark :])

    def new_by_request(self) -> NDArray[np.int64]:
        """For every measured request, its blocks that no request before it had."""
        if not self._parts:
            return np.zeros(0, np.int64)
        ends = np.cumsum([len(part) for part in self._parts])
        firsts = np.unique(np.concatenate(self._parts), return_index=True)[1]
        owners = np.searchsorted(ends, firsts, side="right")
        return np.bincount(owners, minlength=len(self._parts))[self._mark :].astype(np.int64)

    def growth(self) -> tuple[tuple[float, int], ...]:
        """(seconds, new blocks so far) at up to POINTS requests."""
        total = np.cumsum(self.new_by_request())
        picked = np.unique(np.linspace(0, len(total) - 1, min(POINTS, len(total))).astype(int))
        return tuple((self._times[self._mark + i], int(total[i])) for i in picked.tolist())

    def working_sets(self, spans: Sequence[int] = SPANS_S) -> dict[int, int]:
        """By seconds, the most distinct blocks that were touched in one span of that length, spans laid end to end."""
        return {span: self._largest(span) for span in spans}

    def _largest(self, span: int) -> int:
        largest, begin = 0, self._mark
        for at in range(self._mark, len(self._parts) + 1):
            if at < len(self._parts) and self._times[at] // span == self._times[begin] // span:
                continue
            if at > begin:
                largest = max(largest, len(np.unique(np.concatenate(self._parts[begin:at]))))
            begin = at
        return largest
