"""What offload does to each request by itself: the same ones with no offload, with it, and with an infinite cache.

Sessions in a closed loop have no such order: who is answered sooner asks sooner, so more users are at work at once,
their answers slow each other down, and other blocks are evicted. Here the requests of all sessions come in the order of
the trace, each PAUSE_S after the answer to the one before it, so that all three runs see the same requests in the same
order and no two at once. Then the device evicts the same blocks in all of them, and of every single request

    computed without offload >= computed with it >= computed with an infinite cache,

and so for the seconds of its arithmetic; for the first token wherever loading a block is faster than computing it; and
the answer's tokens come equally fast, since nobody else decodes. What holds of every request holds of every percentile,
mean and sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvoffload.replay.report import percentile
from kvoffload.replay.trees import Tree, Turn

PAUSE_S = 10.0
"""Virtual seconds between an answer and the next request: what has to be stored is stored."""

CONTROLS = ("no offload", "offload", "infinite")
"""The runs that are compared, worst first."""

SLACK = 1e-6
"""Of a figure: rounding of sums is no difference."""


class Each(NamedTuple):
    """One request. made: prompt tokens computed. speed: answer tokens per second, 0 for an answer of one token."""

    made: int
    prefill_s: float
    ttft: float
    speed: float


@dataclass(frozen=True, slots=True)
class Bracket:
    """One figure of all requests. values: by run in CONTROLS, p50, p90, p99 and sum. outside: requests whose figure
    with offload does not lie between those of the controls. claimed: whether it must."""

    name: str
    values: tuple[tuple[float, float, float, float], ...]
    outside: int
    claimed: bool

    def to_dict(self) -> dict[str, Any]:
        ranks = ("p50", "p90", "p99", "sum")
        rows = zip(CONTROLS, self.values, strict=True)
        runs = {run: dict(zip(ranks, values, strict=True)) for run, values in rows}
        return {"figure": self.name, "outside": self.outside, "claimed": self.claimed, **runs}


FIGURES: tuple[tuple[str, Callable[[Each], float], int, bool], ...] = (
    ("computed tokens", lambda r: r.made, 1, True),
    ("prefill, s", lambda r: r.prefill_s, 1, True),
    ("TTFT, s", lambda r: r.ttft, 1, False),
    ("tokens/s", lambda r: r.speed, -1, True),
)
"""Name, value, 1 where less is better, claimed for every cost model and every size."""


def in_one_row(trees: Sequence[Tree]) -> Tree:
    """All requests by their time in the trace, each after the end of the one before it."""
    turns = sorted((turn for tree in trees for turn in tree.turns), key=lambda turn: turn.request.t)
    return Tree(
        "all",
        tuple(Turn(t.request, (i - 1,) if i else (), PAUSE_S) for i, t in enumerate(turns)),
    )


def brackets(runs: Sequence[Sequence[Each]]) -> tuple[Bracket, ...]:
    """Every figure of the runs in CONTROLS. REQUIRES: request i of each is the same request."""
    found = []
    for name, value, sign, claimed in FIGURES:
        columns = [[sign * value(request) for request in run] for run in runs]
        outside = sum(
            1
            for none, mine, best in zip(*columns, strict=True)
            if not _falls(none, mine) or not _falls(mine, best)
        )
        values = tuple(_summary(column, sign) for column in columns)
        found.append(Bracket(name, values, outside, claimed))
    return tuple(found)


def broken(found: Sequence[Bracket]) -> list[str]:
    """Claims that do not hold, in words."""
    text = "one by one: {} of {} requests is outside its controls"
    return [text.format(b.name, b.outside) for b in found if b.claimed and b.outside]


def between(one: float, value: float, other: float) -> bool:
    """Whether the value lies between two others, in either order, but for rounding."""
    return (_falls(one, value) and _falls(value, other)) or (_falls(other, value) and _falls(value, one))


def _falls(first: float, second: float) -> bool:
    return second <= first + SLACK * max(abs(first), abs(second))


def _summary(column: Sequence[float], sign: int) -> tuple[float, float, float, float]:
    ranks = [percentile([round(v * 1e6) for v in column], p) * sign / 1e6 for p in (50, 90, 99)]
    return ranks[0], ranks[1], ranks[2], sum(column) * sign
