"""One line of a benchmark: a figure beside a limit or peer of the same run, and what is asked of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvoffload.bench.timing import Measure, Timed, interleaved


@dataclass(frozen=True, slots=True)
class Unit:
    """What a figure is counted in. of: seconds of one round to the figure."""

    name: str
    of: Callable[[float], float]


def rate(nbytes: int) -> Unit:
    """Bytes moved per round, as 10^9 bytes a second."""
    return Unit("GB/s", lambda seconds: nbytes / seconds / 1e9)


def each(count: int, item: str) -> Unit:
    """Nanoseconds for each of the `count` items of a round."""
    return Unit(f"ns/{item}", lambda seconds: seconds * 1e9 / count)


MILLISECONDS = Unit("ms", lambda seconds: seconds * 1e3)


@dataclass(frozen=True, slots=True)
class Target:
    """What design.md asks for: the figure itself, or figure / limit, is at most or at least `bound`."""

    bound: float
    at_most: bool = True
    of_ratio: bool = False

    def met(self, figure: float, ratio: float) -> bool:
        value = ratio if self.of_ratio else figure
        return value <= self.bound if self.at_most else value >= self.bound

    def __str__(self) -> str:
        return f"{'<=' if self.at_most else '>='} {self.bound:g}{'x' if self.of_ratio else ''}"


def at_most(bound: float) -> Target:
    return Target(bound)


def ratio_at_most(bound: float) -> Target:
    return Target(bound, at_most=True, of_ratio=True)


def ratio_at_least(bound: float) -> Target:
    return Target(bound, at_most=False, of_ratio=True)


@dataclass(frozen=True, slots=True)
class Limit:
    """Something to be measured against, that does the same work with less, or as others do it."""

    name: str
    seconds: Timed
    target: Target | None = None


@dataclass(frozen=True, slots=True)
class CopyCase:
    """What one measurement of copies moves. fragment: bytes. merged: fragments that continue each other."""

    fragment: int
    direction: str
    mode: str
    merged: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """name: what is measured. beside: what it is compared with, "" = nothing. limit: None = nothing beside it.

    ratio: figure / limit, of the medians; 0 without a limit. met: None where nothing is asked.
    case, cpu: of copies, what is moved and the microseconds of this process's CPU time per fragment.
    """

    name: str
    unit: str
    figure: Measure
    beside: str = ""
    limit: Measure | None = None
    target: Target | None = None
    case: CopyCase | None = None
    cpu: Measure | None = None

    @property
    def ratio(self) -> float:
        return self.figure.median / self.limit.median if self.limit and self.limit.median else 0.0

    @property
    def met(self) -> bool | None:
        return self.target.met(self.figure.median, self.ratio) if self.target else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        return {
            "name": self.name,
            "unit": self.unit,
            **_plain(self.figure),
            "beside": self.beside or None,
            "limit": _plain(self.limit) if self.limit else None,
            "ratio": self.ratio if self.limit else None,
            "target": str(self.target) if self.target else None,
            "met": self.met,
            **(asdict(self.case) if self.case else {}),
            **({"cpu_us_per_fragment": _plain(self.cpu)} if self.cpu else {}),
        }


def compare(
    name: str, unit: Unit, ours: Timed, limits: Sequence[Limit], rounds: int, target: Target | None = None
) -> list[Row]:
    """A row per limit, one without a limit if there is none. All run in turn, so a noisy moment hits all of them.

    target: of the figure itself; it stands in the first row that has no target of its own.
    """
    mine, *others = (
        Measure.of(map(unit.of, seconds))
        for seconds in interleaved([ours, *(limit.seconds for limit in limits)], rounds)
    )
    if not limits:
        return [Row(name, unit.name, mine, target=target)]
    rows = []
    for limit, other in zip(limits, others, strict=True):
        asked = limit.target or target
        target = None if asked is target else target
        rows.append(Row(name, unit.name, mine, limit.name, other, asked))
    return rows


def constant(name: str, unit: str, value: float, target: Target | None = None) -> Row:
    """A figure that is counted and not timed."""
    return Row(name, unit, Measure(value, value, value), target=target)


def _plain(measure: Measure) -> dict[str, float]:
    return {"median": measure.median, "low": measure.low, "high": measure.high, "spread": measure.spread}
