"""Times of things that stand beside each other: taken in turns in one run, so that what disturbs one disturbs all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one thing over the repeats."""

    median: float
    low: float
    high: float

    @property
    def spread(self) -> float:
        """How far apart the slowest and the fastest repeat lie, as a part of the median."""
        return (self.high - self.low) / self.median


def interleaved(things: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, Timing]:
    """Each thing once to warm up, then all of them in turns, `repeats` times. REQUIRES: repeats >= 1."""
    for thing in things.values():
        thing()
    taken: dict[str, list[float]] = {name: [] for name in things}
    for _ in range(repeats):
        for name, thing in things.items():
            begin = time.perf_counter()
            thing()
            taken[name].append(time.perf_counter() - begin)
    return {name: Timing(statistics.median(t), min(t), max(t)) for name, t in taken.items()}
