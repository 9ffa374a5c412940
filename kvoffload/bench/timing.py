"""Times of things that stand beside each other: taken in turns in one run, so that what disturbs one disturbs all.

What one thread computes without waiting (index, planner, hashes) is measured in CPU time of that thread: a busy
neighbour then adds cold caches, and not its own time. Copies and disk are measured by the clock on the wall.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

ROUNDS = 7
"""Measurements of each thing; the median counts."""

Timed = Callable[[], float]
"""Does its work once and says how many seconds of it count: what it prepares is left out."""


@dataclass(frozen=True, slots=True)
class Measure:
    """One thing over the rounds, in any unit."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Measure:
        """REQUIRES: at least one value."""
        found = sorted(values)
        return cls(statistics.median(found), found[0], found[-1])

    @property
    def spread(self) -> float:
        """How far apart the highest and the lowest round lie, as a part of the median."""
        return (self.high - self.low) / self.median if self.median else 0.0


def interleaved(things: Sequence[Timed], rounds: int) -> list[list[float]]:
    """Seconds by thing and round: each thing once to warm up, then all of them in turns. REQUIRES: rounds >= 1."""
    for thing in things:
        thing()
    taken: list[list[float]] = [[] for _ in things]
    for _ in range(rounds):
        for mine, thing in zip(taken, things, strict=True):
            mine.append(thing())
    return taken


def timed(work: Callable[[], object], clock: Callable[[], float] = time.thread_time) -> Timed:
    """All of `work` counts."""

    def run() -> float:
        begin = clock()
        work()
        return clock() - begin

    return run


class Metered:
    """`thing`, and the CPU seconds that all threads of this process spent in each of its calls."""

    def __init__(self, thing: Timed) -> None:
        self._thing = thing
        self.cpu: list[float] = []

    def __call__(self) -> float:
        begin = time.process_time()
        seconds = self._thing()
        self.cpu.append(time.process_time() - begin)
        return seconds
