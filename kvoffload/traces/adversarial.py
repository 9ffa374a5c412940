"""Traffic that a policy which learns agents could fall for: five shapes, each from a seed.

Every session grows by a few blocks a turn, above a prefix that all sessions share, and takes turns with the others.
What differs is when sessions come back:

    one-law    all after a time of the same law: nothing tells them apart
    scans      sessions of one law, and as many prompts again that come once and never return
    shift      half of the sessions are quick and half are slow, until they change places in the middle
    bursts     quiet sessions that all come at the same moments, many requests within a second each
    restart    all sessions end at once, three times, and as many new ones begin with other prompts
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvoffload.errors import TraceError
from kvoffload.traces.record import MAIN, NO_PARENT, Request, Trace, seconds
from kvoffload.traces.synth import END_TURN, TOOL_USE, Dice

ADVERSARY_PREFIX = "adversary:"
BLOCK_TOKENS = 64
SESSIONS = 24
SHARED_BLOCKS = 16
FIRST_BLOCKS = (40, 160)
GROWTH_BLOCKS = (2, 12)
END_OF_TURN = 0.15
"""Share of requests that end a turn; the others call a tool."""
LONGEST_BLOCKS = 400
"""A session whose prompt is longer starts anew, as after a compaction."""


class Builder:
    """Requests of one trace, in order of time. Ids are new numbers, except for what is shared or repeated."""

    def __init__(self, seed: int) -> None:
        self.dice = Dice(seed)
        self.requests: list[Request] = []
        self._next = SHARED_BLOCKS
        self._paths: dict[int, list[int]] = {}
        self._turns: dict[int, int] = {}

    def blocks(self, low: int, high: int) -> list[int]:
        """Ids of new blocks."""
        count = int(self.dice.uniform(low, high + 1))
        self._next += count
        return list(range(self._next - count, self._next))

    def ask(self, session: int, t: float) -> str:
        """The session's next request; its finish reason."""
        path = self._paths.get(session)
        if path is None or len(path) > LONGEST_BLOCKS:
            path = [*range(SHARED_BLOCKS), *self.blocks(*FIRST_BLOCKS)]
        else:
            path = [*path, *self.blocks(*GROWTH_BLOCKS)]
        self._paths[session] = path
        reason = END_TURN if self.dice.chance(END_OF_TURN) else TOOL_USE
        turn = self._turns.get(session, 0)
        self._turns[session] = turn + 1
        self.requests.append(
            Request(
                session=f"s{session}",
                agent=MAIN,
                turn=turn,
                t=seconds(t * 1e6),
                parent=turn - 1 if turn else NO_PARENT,
                ids=np.array(path, np.int64),
                input_tokens=len(path) * BLOCK_TOKENS,
                output_tokens=BLOCK_TOKENS,
                finish_reason=reason,
                service_s=None,
            )
        )
        return reason


Gap = Callable[[int, float, str], float]
"""Seconds until a session asks again, from its number, the time, and how its last request ended."""


def _turns(builder: Builder, sessions: range, begin: float, requests: int, gap: Gap) -> float:
    """`requests` requests of these sessions, each after its own gaps; when the last one started."""
    due = [(begin + builder.dice.uniform(0, 60), session) for session in sessions]
    heapq.heapify(due)
    t = begin
    for _ in range(requests):
        t, session = heapq.heappop(due)
        reason = builder.ask(session, t)
        heapq.heappush(due, (t + gap(session, t, reason), session))
    return t


def _one_law(builder: Builder, requests: int) -> None:
    _turns(builder, range(SESSIONS), 0.0, requests, lambda *_: builder.dice.lognormal(30.0, 1.0))


def _scans(builder: Builder, requests: int) -> None:
    once = iter(range(SESSIONS, SESSIONS + requests))

    def gap(session: int, t: float, reason: str) -> float:
        builder.ask(next(once), t)
        return builder.dice.lognormal(30.0, 1.0)

    _turns(builder, range(SESSIONS), 0.0, requests // 2, gap)


def _shift(builder: Builder, requests: int) -> None:
    def paced(slow: int) -> Gap:
        return lambda session, t, reason: builder.dice.lognormal(240.0 if session % 2 == slow else 15.0, 0.7)

    middle = _turns(builder, range(SESSIONS), 0.0, requests // 2, paced(0))
    _turns(builder, range(SESSIONS), middle, requests - requests // 2, paced(1))


def _bursts(builder: Builder, requests: int) -> None:
    def gap(session: int, t: float, reason: str) -> float:
        period = 120.0
        return (t // period + 1) * period - t + builder.dice.uniform(0, 1)

    _turns(builder, range(SESSIONS), 0.0, requests, gap)


def _restart(builder: Builder, requests: int) -> None:
    def gap(session: int, t: float, reason: str) -> float:
        return builder.dice.lognormal(9.0 if reason == TOOL_USE else 122.0, 1.3)

    t, part = 0.0, requests // 4
    for generation in range(4):
        first = generation * SESSIONS
        t = _turns(builder, range(first, first + SESSIONS), t, part, gap)


GENERATORS: dict[str, Callable[[Builder, int], None]] = {
    "one-law": _one_law,
    "scans": _scans,
    "shift": _shift,
    "bursts": _bursts,
    "restart": _restart,
}


@dataclass(frozen=True, slots=True)
class Adversary:
    """One trace: which shape, from which seed, of how many requests."""

    shape: str
    seed: int = 0
    requests: int = 3000

    def trace(self) -> Trace:
        """The same on every machine but for the last digit of a time. Raises TraceError for an unknown shape."""
        if self.shape not in GENERATORS:
            raise TraceError(f"no shape {self.shape!r}; there are {', '.join(GENERATORS)}")
        builder = Builder(self.seed)
        GENERATORS[self.shape](builder, self.requests)
        return Trace(
            name=f"{self.shape}-{self.seed}",
            source=f"adversarial {self.shape} seed {self.seed}",
            block_tokens=BLOCK_TOKENS,
            partial_tail="floor",
            form="synth",
            aligned=True,
            requests=tuple(builder.requests),
        )


def parse_adversary(spec: str) -> Adversary:
    """The trace that "adversary:SHAPE:SEED:REQUESTS" names; SEED and REQUESTS may be left out. Raises TraceError."""
    shape, *numbers = spec.removeprefix(ADVERSARY_PREFIX).split(":")
    if len(numbers) > 2 or not all(n.isdecimal() for n in numbers):
        raise TraceError(f"{spec}: give it as adversary:SHAPE:SEED:REQUESTS, like adversary:scans:3:1000")
    return Adversary(shape, *map(int, numbers))
