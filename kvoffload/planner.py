"""The half that decides: which key lies in which slot, what is stored, loaded, written, and when it is given up.

Pure decision: no threads, no I/O, no clock of its own (time comes in with `tick` and `finish`), no torch. One thread
owns a Planner. Until every rank has attached, everything is a miss.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvoffload.agreement import agree, common_records
from kvoffload.config import Config
from kvoffload.errors import LayoutError
from kvoffload.events import Event, EventStream
from kvoffload.index import Index
from kvoffload.inflight import InFlight, LateJobs, Running
from kvoffload.layout import Layout
from kvoffload.live import LiveRequests, covered, fork_point, newly_produced, restorable
from kvoffload.messages import Geometry, Inventory, JobKind, Outcome, Plans, RequestId
from kvoffload.requests import (
    ChainLike,
    Finished,
    LoadPlan,
    Match,
    Offer,
    Pages,
    RequestInfo,
)
from kvoffload.stats import Counters, Stats
from kvoffload.tier_set import ExactSlots, Shared, TierSet, open_tiers

__all__ = ["ExactSlots", "Planner"]

HOST, DISK = 0, 1
NOTHING = Plans()
FINISH_REASONS = {"": 0, "tool_use": 1, "end_turn": 2, "abort": 3, "preempt": 4, "length": 5}
"""How a request ended, as the index is told; any other word is 0, unknown."""


class Planner:
    """Scheduler side of kvoffload. Jobs collect until `tick` hands them out as Plans, in order."""

    def __init__(
        self,
        layout: Layout,
        config: Config,
        *,
        ranks: int = 1,
        exact: ExactSlots | None = None,
        joined: bool = False,
        events: bool = False,
    ) -> None:
        """joined: the layout's block bytes are those of all ranks together, not of each. events: `take_events` tells
        what became visible and what went away."""
        self.layout = layout
        self.config = config
        self.counters = Counters()
        self.ranks = ranks
        self.find_forks = True
        """False only to measure what the tails at fork points are worth."""
        self.alike = 1 if joined else ranks
        self._exact = exact or ExactSlots()
        self._inventories: dict[int, Inventory] = {}
        self.requests = LiveRequests(layout)
        self._inflight = InFlight(ranks)
        self._late = LateJobs()
        self._cancels: list[int] = []
        self._finished: list[Finished] = []
        self._geometry: Geometry | None = None
        self._reset_disk = False
        self._disk_ok = dict.fromkeys(range(ranks), True)
        self._now = 0.0
        self._tiers: TierSet | None = None
        self.tells_events = events
        self._events: EventStream | None = None

    # ---- start ----

    def attach(self, rank: int, inventory: Inventory) -> None:
        """One rank is ready. With the last one the index opens, and what all ranks hold on disk is restored.

        Raises LayoutError for a rank out of range, attached twice, or that differs in its number of groups.
        """
        if not 0 <= rank < self.ranks or rank in self._inventories:
            raise LayoutError(f"rank {rank} cannot attach: ranks 0 to {self.ranks - 1} attach once each")
        if len(inventory.slots_per_slab) != len(self.layout.groups):
            raise LayoutError(
                f"rank {rank} has {len(inventory.slots_per_slab)} groups, the planner {len(self.layout.groups)}"
            )
        self._inventories[rank] = inventory
        if len(self._inventories) == self.ranks:
            found = [self._inventories[r] for r in range(self.ranks)]
            self._geometry = agree(found)
            self._tiers = open_tiers(
                self.layout,
                self.config,
                self._geometry,
                self._exact,
                Shared(self._inflight, self.counters, self.alike),
            )
            if not self._reset_disk:
                self.counters.add("restored", self._tiers.index.restore(common_records(found)))
            self.requests.open(self._tiers.index)
            self._events = EventStream(self.layout, self._tiers.index) if self.tells_events else None

    @property
    def ready(self) -> bool:
        """Whether every rank has attached."""
        return self._tiers is not None

    # ---- requests ----

    def match(self, request: RequestInfo, chain: ChainLike, *, computed: int = 0) -> Match:
        """What could be restored beyond `computed` tokens. Pins nothing; cheap to ask every step."""
        state = self.requests.get_or_make(request, chain, self._now)
        state.computed = computed
        if state.matcher is None:
            return Match(computed, computed, 0, 0, False)
        found = Match(*state.matcher.update(chain.keys, computed))
        if not state.matched:
            state.matched = True
            self.counters.add("matched_host", found.host)
            self.counters.add("matched_disk", found.disk)
        return found

    def load(
        self, request: RequestInfo, chain: ChainLike, boundary: int, pages: Pages, *, retry: bool = True
    ) -> LoadPlan:
        """Begin loading tokens [computed of the last match, boundary) into `pages`; blocks of windows
        without a page are left out, and full groups end the load at the first block without one. What is no longer
        there shortens the load: see LoadPlan. The pages belong to the load until it has Finished, also after an
        abort. retry: a failed block is tried once more; not for an engine that goes on at once without it."""
        state = self.requests.get_or_make(request, chain, self._now)
        best = restorable(state, boundary)
        if best > state.computed:
            paged = covered(self.layout, (state.computed, best), pages)
            best = best if paged == best else restorable(state, paged)
        if self._tiers is None or best <= state.computed:
            return LoadPlan(0, state.computed, 0, max(0, boundary - state.computed))
        if self._events is not None:
            self._events.name_load(state, best)
        plan = self._tiers.loads.begin(state, best, pages, self._deadline, retry)
        return LoadPlan(plan.id, best, plan.blocks, max(0, boundary - best))

    def prefetch(self, request: RequestInfo, chain: ChainLike, deadline: float) -> int:
        """Bring what disk holds of the restorable prefix into host before it is asked for; the job's id or 0."""
        state = self.requests.get_or_make(request, chain, self._now)
        best = restorable(state, len(chain.keys) * self.layout.base_tokens)
        if self._tiers is None or best <= state.computed:
            return 0
        if self._events is not None:
            self._events.name_load(state, best)
        return self._tiers.loads.prefetch(state, best, deadline)

    def offer(self, request: RequestInfo, chain: ChainLike, computed: int, pages: Pages) -> Offer:
        """Tokens [0, computed) of the request are, or will be at the end of this step, in `pages`: store what is new.

        The first offer of a request walks from block 0, later ones from the cursor. The pages named by the job
        belong to it until it has Finished.
        """
        state = self.requests.get_or_make(request, chain, self._now)
        if self._tiers is None:
            return Offer(0, 0, 0, False)
        computed = min(computed, len(chain.keys) * self.layout.base_tokens)
        if self._tiers.tails.by_boundary and self.find_forks and not state.offered:
            state.forks = fork_point(state, self.layout)
        self.counters.add("produced", newly_produced(state, computed, self.layout.base_tokens))
        offer = self._tiers.stores.offer(state, computed, pages, self._deadline)
        running = None if self._events is None else self._inflight.get(offer.job)
        if self._events is not None and running is not None:
            self._events.name_copies(chain, running.copies)
        return offer

    def preempt(self, request_id: RequestId) -> tuple[int, ...]:
        """The engine takes the request's pages away: its cursors go back to 0. Returns the ids of the running jobs
        that still touch its pages."""
        state = self.requests.get(request_id)
        if state is None:
            return ()
        state.cursors = self.requests.cursors()
        state.computed = 0
        return tuple(sorted(state.jobs))

    def finish(self, request_id: RequestId, reason: str, now: float) -> tuple[int, ...]:
        """The request has ended (also: "abort"). Returns the ids of the running jobs that still touch its pages;
        they end on their own, and the pages must stay until then. An unknown request is fine."""
        self._now = max(self._now, now)
        state = self.requests.pop(request_id)
        if state is None:
            return ()
        if self._tiers is not None:
            self._tiers.tails.finish(state)
            self._tiers.index.close_segment(state.segment, FINISH_REASONS.get(reason, 0), self._now)
            self._tiers.loads.detach(state)
        return tuple(sorted(state.jobs)) if state.jobs else ()

    # ---- steps ----

    @property
    def _deadline(self) -> float:
        return self._now + self.config.deadline_s

    def tick(self, now: float) -> Plans:
        """Everything that is to go to the movers now. Call once a step, after the offers and loads of the step."""
        passed = now - self._now if now > self._now else 0.0
        self._now += passed
        tiers = self._tiers
        if tiers is None:
            return NOTHING
        self._inflight.postpone(passed)
        tiers.loads.postpone(passed)
        for running in self._inflight.expired(self._now):
            self._late.name(running, self.layout, self._now)
            self.counters.add("overdue")
            if _give_up(running, tiers):
                self._cancels.append(running.job.id)
        self._finished += tiers.loads.advance(self._now)
        tiers.stores.plan_writes(self._now, self._deadline)
        jobs = self._inflight.take_unsent(self._now)
        if not (jobs or self._cancels or self._geometry or self._reset_disk):
            return NOTHING
        plans = Plans(jobs, tuple(self._cancels), self._geometry, self._reset_disk)
        self._cancels, self._geometry, self._reset_disk = [], None, False
        return plans

    def complete(self, outcomes: Iterable[Outcome]) -> list[Finished]:
        """Take in what movers reported; the loads and stores that have ended on all ranks since the last call."""
        tiers = self._tiers
        if tiers is None:
            return []
        deadline = self._deadline
        for outcome in outcomes:
            if self._disk_ok.get(outcome.rank, outcome.disk_ok) is not outcome.disk_ok:
                before = all(self._disk_ok.values())
                self._disk_ok[outcome.rank] = outcome.disk_ok
                _switch_disk(tiers.index, self.counters, before, all(self._disk_ok.values()))
            if outcome.disk_hung:
                self.counters.add("disk_hung", outcome.disk_hung)
            running = self._inflight.report(outcome)
            if running is None:
                continue
            if running.load:
                self._finished += tiers.loads.ended(running)
            else:
                self._finished += tiers.stores.ended(running, deadline, self.requests)
        self._finished += tiers.loads.advance(self._now)
        tiers.stores.plan_writes(self._now, deadline)
        finished, self._finished = self._finished, []
        return finished

    def take_events(self) -> list[Event]:
        """What became visible and what went away since the last call; nothing unless the planner was made with events.

        Call it once a step or so: when more has changed than the index keeps, everything is told again.
        """
        return [] if self._events is None else self._events.take(all(self._disk_ok.values()))

    # ---- whole tiers ----

    def reset(self, tiers: Iterable[str] = ("host", "disk")) -> None:
        """Nothing in these tiers is visible any more; running jobs end on their own.

        Raises ValueError for a name other than "host" or "disk".
        """
        for tier in tiers:
            if tier not in ("host", "disk"):
                raise ValueError(f"no tier is called {tier!r}; the tiers are host and disk")
            self._reset_disk |= tier == "disk"
            if self._tiers is not None:
                self._tiers.index.reset(HOST if tier == "host" else DISK)
                if tier == "disk":
                    self._tiers.stores.forget_writes()
        self.requests.rewind_all()

    @property
    def idle(self) -> bool:
        """No job runs, waits or is about to be sent."""
        loads = 0 if self._tiers is None else len(self._tiers.loads)
        return not (len(self._inflight) or loads)

    def backlog(self) -> tuple[int, int]:
        """(blocks queued for disk that can still be evicted unwritten, slots pinned by running writes)."""
        return (0, 0) if self._tiers is None else self._tiers.index.pending_writes()

    def pinned(self) -> int:
        """Slots of all tiers that a job holds."""
        if self._tiers is None:
            return 0
        index = self._tiers.index
        return sum(int(row["pinned"]) for tier in (HOST, DISK) for row in index.usage(tier)["groups"])

    def usage(self, tier: str) -> dict[str, Any]:
        """Slots of a tier by group, and slabs that no group owns: as Index.usage. REQUIRES: ready."""
        assert self._tiers is not None
        return self._tiers.index.usage(HOST if tier == "host" else DISK)

    def check_integrity(self) -> None:
        """Raises RuntimeError naming the first invariant of the index that does not hold."""
        if self._tiers is not None:
            self._tiers.index.check_integrity()

    def describe(self) -> str:
        """The running jobs in words, for messages and logs: id, kind, blocks, who still owes a report."""
        jobs = [
            f"job {r.job.id} {r.job.kind.name} {len(r.copies)} blocks, ranks {sorted(r.waiting)}"
            for r in self._inflight
        ]
        loads = 0 if self._tiers is None else len(self._tiers.loads)
        return "; ".join([*jobs, f"{loads} loads"])

    def stats(self) -> Stats:
        """Counters since start, and gauges of now."""
        return Stats.collect(
            self.counters,
            None if self._tiers is None else self._tiers.index,
            [g.slot_bytes * self.alike for g in self.layout.groups],
            self.config.effective(),
        )


def _give_up(running: Running, tiers: TierSet) -> bool:
    """Nobody is to wait for these blocks any more. True if the job may be cancelled, since it touches no page; a
    store goes on until the device confirms: its pages are being read."""
    tiers.index.expire(running.copies)
    if running.load:
        tiers.loads.overdue(running)
    return running.job.kind is not JobKind.STORE


def _switch_disk(index: Index, counters: Counters, before: bool, after: bool) -> None:
    """The disk tier is on only while that of every rank works."""
    if before is not after:
        index.set_online(DISK, after)
        counters.add("disk_back" if after else "disk_lost")
