"""What a replay is made of: requests with their keys, and the tiers that they are replayed over."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvoffload.requests import ChainLike, Finished, LoadPlan, Match, Offer, RequestInfo
from kvoffload.testing.pool import KeyArray, Pages
from kvoffload.traces.record import Ids, Trace, trace_keys


@dataclass(frozen=True, slots=True, eq=False)
class ReplayRequest:
    """One request of a trace: its chain of block ids. `tokens`: prompt length; `index`: position in the file;
    `t`: when it starts, in seconds.

    namespace: of the trace; with an id it makes a key.
    """

    index: int
    session: str
    agent: str
    reason: str
    tokens: int
    ids: Ids
    namespace: bytes = bytes(16)
    t: float = 0.0

    def chain(self) -> TraceChain:
        """The keys of the prompt's blocks."""
        return TraceChain(trace_keys(self.ids, self.namespace))


def requests_of(trace: Trace) -> list[ReplayRequest]:
    """All requests of a trace, in file order."""
    return [
        ReplayRequest(i, r.session, r.agent, r.finish_reason, r.input_tokens, r.ids, trace.namespace, r.t)
        for i, r in enumerate(trace.requests)
    ]


@dataclass(frozen=True, slots=True, eq=False)
class TraceChain:
    """The keys of one request."""

    keys: KeyArray


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks that tiers took so far, and those that were meant for a tier and did not get there, by reason.

    restored: found on disk at start, from an earlier run.
    """

    host: int = 0
    disk: int = 0
    restored: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Backlog:
    """exposed: blocks queued for disk that may be evicted unwritten; idle: no job runs and no block is
    queued."""

    exposed: int
    idle: bool


class Tiers(ABC):
    """All that a replay asks of the tiers. One thread calls."""

    @abstractmethod
    def match(self, request: RequestInfo, chain: ChainLike, computed: int) -> Match:
        """See Planner.match."""

    @abstractmethod
    def load(self, request: RequestInfo, chain: ChainLike, boundary: int, pages: Sequence[Pages]) -> LoadPlan:
        """See Planner.load."""

    @abstractmethod
    def offer(self, request: RequestInfo, chain: ChainLike, computed: int, pages: Sequence[Pages]) -> Offer:
        """See Planner.offer."""

    @abstractmethod
    def finish(self, request: RequestInfo, reason: str, now: float) -> tuple[int, ...]:
        """End a request; the ids of jobs that still touch its pages."""

    @abstractmethod
    def step(self, now: float) -> Sequence[Finished]:
        """Send what is decided, take in what has ended; never blocks on a copy."""

    @abstractmethod
    def backlog(self) -> Backlog:
        """What is still under way, without stepping."""

    @abstractmethod
    def stored(self) -> Stored:
        """Blocks stored per tier and dropped so far."""
