"""What an engine asks of a connector, in the words of no engine: one object in its scheduler, one per worker.

A step of an engine, in this order:

    hit = scheduler.match(request, computed)             every step, for a request that waits
    scheduler.allocated(request, pages, computed, taken) when it has pages; late, with less, or never
    metadata = scheduler.step(scheduled, now)            once a step, also when nothing is scheduled
    worker.before_forward(metadata)                      on every worker
    ... the forward ...
    worker.after_forward(metadata)
    update = scheduler.update(reports of all workers)
    scheduler.release(request_id, reason)                finished, aborted or preempted

Metadata and reports are opaque to the engine, which only carries them between processes. Tokens and blocks count from
the start of the sequence. Scheduler side: one thread. Worker side: one thread per worker.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvoffload.events import Event
from kvoffload.layout import Pools
from kvoffload.messages import RequestId
from kvoffload.requests import ChainLike, Pages, RequestInfo

PREEMPT = "preempt"
"""The reason of a release after which the same request may come back."""


class EngineRequest(Protocol):
    """What a connector sees of a request. The engine owns it, and it grows while the request runs.

    tokens: confirmed ones: the prompt, and what has been generated and accepted; no placeholder of a token that is
    scheduled and not made yet. prompt: tokens of the prompt. chain: keys of full blocks of confirmed tokens; may lag
    behind `tokens`.
    """

    @property
    def info(self) -> RequestInfo: ...
    @property
    def chain(self) -> ChainLike: ...
    @property
    def tokens(self) -> int: ...
    @property
    def prompt(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Hit:
    """tokens: how many could be loaded beyond the computed ones; at least one token of the request is left over, except
    where the engine takes one back after the load by itself.

    disk: of these, tokens that would come from disk. wait: asking again next step will give more for less; an engine
    that cannot wait goes on with `tokens`. It ends after a deadline of the connector's.
    """

    tokens: int = 0
    disk: int = 0
    wait: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Scheduled:
    """A request that runs this step. computed: tokens whose bytes are in `pages` once the step's forward has ended;
    it may count placeholders, which the connector leaves out. pages: as in requests.Pages."""

    request: EngineRequest
    computed: int
    pages: Pages


@dataclass(frozen=True, slots=True)
class Loaded:
    """The load of a request has ended. boundary: tokens that are on the device now, never less than were computed
    when it began. failed: blocks that did not arrive."""

    request: RequestId
    boundary: int
    failed: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Update:
    """News since the last step. freed: holds (see SchedulerConnector.release) whose pages nobody touches any more."""

    loaded: tuple[Loaded, ...] = ()
    freed: tuple[int, ...] = ()


class SchedulerConnector(ABC):
    """The part in the engine's scheduler. Nothing here waits for a copy or for I/O.

    `match`, `allocated`, `step` and `release` never raise because of a storage failure: that is a miss.
    """

    @abstractmethod
    def match(self, request: EngineRequest, computed: int) -> Hit:
        """What could be loaded beyond `computed` tokens, which the engine has in pages already.

        Asked every step while the request waits, also with another `computed`: cheap, takes and pins nothing.
        """

    @abstractmethod
    def allocated(self, request: EngineRequest, pages: Pages, computed: int, taken: int) -> int:
        """The request has pages, and `taken` tokens (0 to what the last hit offered) beyond `computed` are to be
        loaded into them.

        With taken > 0 exactly one Loaded follows, unless the request is released before; until then the pages of
        these tokens belong to the connector and the request does not run. Called again after a preemption.
        Returns the tokens whose load has begun, 0 to `taken`.
        """

    @abstractmethod
    def step(self, scheduled: Sequence[Scheduled], now: float) -> Any:
        """What the workers are to be told this step; `now` in seconds, never going back."""

    @abstractmethod
    def update(self, reports: Iterable[Any]) -> Update:
        """Take in what the workers reported since the last step."""

    @abstractmethod
    def release(self, request_id: RequestId, reason: str) -> int:
        """The request has ended (any reason, "abort" too), or PREEMPT: it loses its pages and may come back.

        Returns a hold: the pages stay as they are until an Update names it in `freed`; 0 = they are free at once. A
        request that the connector does not know, or that has been released already, is fine.
        """

    def attach(self, rank: int, handshake: Any) -> None:  # noqa: B027  a connector may need no handshake
        """Take what the worker of this rank returned from `register`. Before the last one, everything is a miss."""

    def prefetch(self, request: EngineRequest, deadline: float) -> None:  # noqa: B027  a hint
        """The request will be asked for soon: bring what is slow nearer until `deadline`."""

    def take_events(self) -> Sequence[Event]:
        """What became visible in a tier and what went away since the last call, for the engine's own event stream."""
        return ()

    def reset(self) -> bool:
        """Forget all that is stored; False where that cannot be done. Running jobs end on their own."""
        return False


class WorkerConnector(ABC):
    """The part in one worker: it moves the bytes."""

    @abstractmethod
    def register(self, pools: Pools) -> Any:
        """The device memory of this worker; called once, first. Returns the handshake for the scheduler's part."""

    @abstractmethod
    def before_forward(self, metadata: Any) -> None:
        """Begin what the forward of this step does not produce: loads, and everything between lower tiers."""

    @abstractmethod
    def after_forward(self, metadata: Any) -> None:
        """Begin what reads the forward's results; on a device with streams, ordered behind it."""

    @abstractmethod
    def poll(self) -> Sequence[Any]:
        """Reports for SchedulerConnector.update since the last call. Never blocks."""

    @abstractmethod
    def close(self) -> None:
        """End every job and release memory, threads and files. Idempotent."""
