"""The scheduler's part of a connector over a Planner: what every engine plug-in shares on that side.

It keeps the rules that no engine may break: one token at least is left to compute, only confirmed tokens become
blocks, a request waits for others' transfers until a deadline and no longer, pages stay until the last job that
touches them has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvoffload.connector import PREEMPT, EngineRequest, Hit, Loaded, Scheduled, SchedulerConnector, Update
from kvoffload.events import Event, tokens_of
from kvoffload.keys import KeyArray
from kvoffload.layout import GroupKind, Layout
from kvoffload.messages import Inventory, JobKind, Outcome, Plans, RequestId
from kvoffload.planner import Planner
from kvoffload.requests import ChainLike, Finished, Match, Pages

_NO_TOKENS = np.empty(0, np.uint32)


@dataclass(frozen=True, slots=True)
class _Head:
    """The first keys of a longer chain, and all tokens that it knows."""

    keys: KeyArray
    token_ids: NDArray[np.uint32]


@dataclass(slots=True, eq=False)
class _Live:
    """One request. load: id of its running load. offered: tokens up to which nothing is left to offer.

    waiting: it has been told to wait. since: the step after which it first was, None before that step. patient: it may
    still be told to. burnt: its last load brought nothing, so the next admission takes none.
    """

    request: EngineRequest
    load: int = 0
    start: int = 0
    offered: int = 0
    waiting: bool = False
    since: float | None = None
    patient: bool = True
    burnt: bool = False


def _may_repeat(layout: Layout) -> bool:
    """Whether the last token before any boundary can be computed again from what the boundary needs: no state has taken
    it in, and every window's first block reaches one token further back."""
    kinds = [g for g in layout.groups if not g.transient and g.kind is not GroupKind.FULL]
    return all(g.kind is GroupKind.SLIDING and g.lookback % g.tokens_per_block for g in kinds)


class PlannerConnector(SchedulerConnector):
    """Thread: the scheduler's. The planner is this object's from here on; nobody else calls tick or complete."""

    def __init__(self, planner: Planner, *, whole: bool = False) -> None:
        """whole: a load may bring every token of a request, since the engine then computes the last one again."""
        self.planner = planner
        self._kept = 0 if whole and _may_repeat(planner.layout) else 1
        self._live: dict[RequestId, _Live] = {}
        self._loads: dict[int, _Live] = {}
        self._holds: dict[int, set[int]] = {}
        self._holders: dict[int, list[int]] = {}
        self._next_hold = 1
        self._loaded: list[Loaded] = []
        self._newly_waiting: list[_Live] = []
        self._now = 0.0
        self.on_store: Callable[[RequestId, int], None] = lambda request_id, blocks: None
        """Called with every store job: whose blocks, and how many."""

    def attach(self, rank: int, handshake: Inventory) -> None:
        self.planner.attach(rank, handshake)

    def match(self, request: EngineRequest, computed: int) -> Hit:
        live = self._known(request)
        found = self._match(live, computed)
        if live.burnt:
            return Hit(0, 0, False)
        tokens = found.boundary - computed
        disk = min(found.disk * self.planner.layout.base_tokens, tokens)
        return Hit(tokens, disk, self._wait(live, found))

    def allocated(
        self, request: EngineRequest, pages: Pages, computed: int, taken: int, *, retry: bool = True
    ) -> int:
        """retry=False: the engine waits for the load inside this step and computes what fails."""
        live = self._known(request)
        live.waiting, live.patient, live.start, live.burnt = False, True, computed, False
        found = self._match(live, computed).boundary - computed
        base, count = self.planner.layout.base_tokens, self.planner.counters.add
        count("declined", max(0, found - taken) // base)
        if taken <= 0:
            return 0
        plan = self.planner.load(request.info, self._head(request), computed + taken, pages, retry=retry)
        count("vanished", max(0, computed + taken - plan.boundary) // base)
        if plan.id:
            live.load = plan.id
            self._loads[plan.id] = live
        else:
            self._loaded.append(Loaded(request.info.id, computed))
        return max(0, plan.boundary - computed) if plan.id else 0

    def step(self, scheduled: Sequence[Scheduled], now: float) -> Plans:
        self._now = max(self._now, now)
        for live in self._newly_waiting:
            live.since = self._now
        self._newly_waiting = []
        for item in scheduled:
            self._offer(item, self._known(item.request))
        return self.planner.tick(self._now)

    def store_rest(self, item: Scheduled) -> int:
        """The request is about to be released: the id of the job that stores what no step could, 0 = nothing was left.
        An engine that builds steps before the tokens of earlier ones are known needs it. The job goes out with the next
        step, and the pages must hold until then."""
        return self._offer(item, self._known(item.request))

    def update(self, reports: Iterable[Outcome]) -> Update:
        freed: list[int] = []
        for item in self.planner.complete(reports):
            self._take(item)
            freed += self._ended(item.id)
        loaded, self._loaded = tuple(self._loaded), []
        return Update(loaded, tuple(freed))

    def release(self, request_id: RequestId, reason: str) -> int:
        live = self._live.get(request_id)
        if live is not None:
            self._loads.pop(live.load, None)
            self._loaded = [x for x in self._loaded if x.request != request_id]
        if reason != PREEMPT:
            self._live.pop(request_id, None)
            return self._hold(self.planner.finish(request_id, reason, self._now))
        if live is not None:
            self._live[request_id] = _Live(live.request, burnt=live.burnt)
        return self._hold(self.planner.preempt(request_id))

    def prefetch(self, request: EngineRequest, deadline: float) -> None:
        live = self._known(request)
        self._match(live, 0)
        self.planner.prefetch(request.info, self._head(request), deadline)

    def take_events(self) -> Sequence[Event]:
        return self.planner.take_events()

    def reset(self) -> bool:
        self.planner.reset()
        for live in self._live.values():
            live.offered = 0
        return True

    # ---- one request ----

    def _known(self, request: EngineRequest) -> _Live:
        live = self._live.get(request.info.id)
        if live is None:
            live = self._live[request.info.id] = _Live(request)
        live.request = request
        return live

    def _head(self, request: EngineRequest) -> ChainLike:
        """The keys of what may be loaded: the last token is always computed, for its logits."""
        blocks = max(0, request.tokens - self._kept) // self.planner.layout.base_tokens
        tokens = tokens_of(request.chain) if self.planner.tells_events else _NO_TOKENS
        return _Head(request.chain.keys[:blocks], tokens)

    def _match(self, live: _Live, computed: int) -> Match:
        return self.planner.match(live.request.info, self._head(live.request), computed=computed)

    def _wait(self, live: _Live, found: Match) -> bool:
        """Whether to ask again later; once the deadline has passed, never again before the request has pages."""
        if not (found.wait and live.patient):
            live.waiting = False
            return False
        if not live.waiting:
            live.waiting, live.since = True, None
            self._newly_waiting.append(live)
        live.patient = live.since is None or self._now < live.since + self.planner.config.deadline_s
        return live.patient

    def _offer(self, item: Scheduled, live: _Live) -> int:
        """The id of the job that stores what is new, or 0."""
        base = self.planner.layout.base_tokens
        limit = item.request.tokens if self.planner.config.store_generated else item.request.prompt
        most = min(item.computed, limit) // base * base
        if most <= live.offered:
            return 0
        ready = min(most, len(item.request.chain.keys) * base)
        if ready <= live.offered:
            return 0
        offer = self.planner.offer(item.request.info, item.request.chain, ready, item.pages)
        live.offered = offer.cursor if offer.blocked else ready
        if offer.blocks:
            self.on_store(item.request.info.id, offer.blocks)
        return offer.job

    def _take(self, item: Finished) -> None:
        live = self._loads.pop(item.id, None)
        if live is not None:
            live.load = 0
            boundary = max(item.boundary, live.start)
            live.burnt = boundary == live.start
            self._loaded.append(Loaded(live.request.info.id, boundary, item.failed, item.error))
        elif item.kind is JobKind.STORE and item.failed:
            for other in self._live.values():
                other.offered = 0

    # ---- pages of released requests ----

    def _hold(self, jobs: Iterable[int]) -> int:
        """A hold that ends with the last of these jobs; 0 for none."""
        waited = set(jobs)
        if not waited:
            return 0
        hold = self._next_hold
        self._next_hold += 1
        self._holds[hold] = waited
        for job in waited:
            self._holders.setdefault(job, []).append(hold)
        return hold

    def _ended(self, job: int) -> list[int]:
        """The holds that this job was the last one of."""
        freed = []
        for hold in self._holders.pop(job, ()):
            self._holds[hold].discard(job)
            if not self._holds[hold]:
                del self._holds[hold]
                freed.append(hold)
        return freed
