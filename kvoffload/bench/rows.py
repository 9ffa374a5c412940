"""One line of a benchmark: ours beside a limit, measured in turn in the same run."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

ROUNDS = 5
"""Measurements of each thing; the median counts."""


@dataclass(frozen=True, slots=True)
class Row:
    """name: what is measured. rate, limit_rate: bytes/s, medians; the lows and highs are over the rounds.

    target: the least rate / limit_rate that is asked for; 0 = shown only.
    """

    name: str
    limit: str
    rate: float
    low: float
    high: float
    limit_rate: float
    limit_low: float
    limit_high: float
    target: float

    @property
    def ratio(self) -> float:
        """How much of the limit is reached."""
        return self.rate / self.limit_rate

    @property
    def reached(self) -> bool:
        """True where the target is met."""
        return self.ratio >= self.target


@dataclass(frozen=True, slots=True)
class Limit:
    """Something to be measured against: seconds() moves the same bytes once."""

    name: str
    target: float
    seconds: Callable[[], float]


def compare(name: str, nbytes: int, ours: Callable[[], float], limits: list[Limit], rounds: int) -> list[Row]:
    """A row per limit. Ours and the limits run in turn, so that a noisy moment hits all of them."""
    everything = [ours, *(limit.seconds for limit in limits)]
    for run in everything:
        run()
    seconds = [[run() for run in everything] for _ in range(rounds)]
    rates = [sorted(nbytes / s for s in column) for column in zip(*seconds, strict=True)]
    mine, others = rates[0], rates[1:]
    return [
        Row(
            name=name,
            limit=limit.name,
            rate=statistics.median(mine),
            low=mine[0],
            high=mine[-1],
            limit_rate=statistics.median(other),
            limit_low=other[0],
            limit_high=other[-1],
            target=limit.target,
        )
        for limit, other in zip(limits, others, strict=True)
    ]
