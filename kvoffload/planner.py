"""The half that decides: which key lies in which slot, what is stored, loaded, written, and when it is given up.

Pure decision: no threads, no I/O, no clock of its own (time comes in with `tick` and `finish`), no torch. One thread
owns a Planner. Until every rank has attached, everything is a miss.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvoffload.config import Config
from kvoffload.errors import LayoutError
from kvoffload.index import Index, Matcher
from kvoffload.inflight import InFlight, Running
from kvoffload.layout import Layout
from kvoffload.loads import Loads
from kvoffload.messages import CopyFlag, Copies, Geometry, Inventory, Job, JobKind, Outcome, Plans, Status
from kvoffload.requests import (
    ChainLike,
    Finished,
    LoadPlan,
    Match,
    Offer,
    Pages,
    RequestId,
    RequestInfo,
    RequestState,
)
from kvoffload.stats import Counters, Stats

HOST, DISK = 0, 1

WRITE_JOB_BLOCKS = 256
"""Most blocks in one disk write job: small enough that a load never waits long behind it."""

FINISH_REASONS = {"": 0, "tool_use": 1, "end_turn": 2, "abort": 3, "preempt": 4, "length": 5}


@dataclass(frozen=True, slots=True)
class ExactSlots:
    """Slot counts instead of bytes, for replays of one group: the last slab of a tier is cut short."""

    host: int = -1
    transit: int = -1
    disk: int = -1


class Planner:
    """Scheduler side of kvoffload. Jobs collect until `tick` hands them out as Plans, in order."""

    def __init__(
        self, layout: Layout, config: Config, *, ranks: int = 1, exact: ExactSlots | None = None
    ) -> None:
        self.layout = layout
        self.config = config
        self.counters = Counters()
        self._ranks = ranks
        self._exact = exact or ExactSlots()
        self._sizes = tuple(g.tokens_per_block for g in layout.groups)
        self._inventories: dict[int, Inventory] = {}
        self._requests: dict[RequestId, RequestState] = {}
        self._inflight = InFlight(ranks)
        self._jobs: list[Job] = []
        self._cancels: list[int] = []
        self._finished: list[Finished] = []
        self._geometry: Geometry | None = None
        self._reset_disk = False
        self._disk_ok: dict[int, bool] = {}
        self._now = 0.0
        self._index: Index | None = None
        self._loads: Loads | None = None

    # ---- start ----

    def attach(self, rank: int, inventory: Inventory) -> None:
        """One rank is ready. With the last one the index opens, and what all ranks hold on disk is restored.

        Raises LayoutError for a rank out of range, attached twice, or that differs in its number of groups.
        """
        if not 0 <= rank < self._ranks or rank in self._inventories:
            raise LayoutError(f"rank {rank} cannot attach: ranks 0 to {self._ranks - 1} attach once each")
        if len(inventory.slots_per_slab) != len(self.layout.groups):
            raise LayoutError(
                f"rank {rank} has {len(inventory.slots_per_slab)} groups, the planner {len(self.layout.groups)}"
            )
        self._inventories[rank] = inventory
        if len(self._inventories) == self._ranks:
            self._open([self._inventories[r] for r in range(self._ranks)])

    def _open(self, ranks: Sequence[Inventory]) -> None:
        geometry = Geometry(
            tuple(min(counts) for counts in zip(*(r.slots_per_slab for r in ranks), strict=True)),
            min(r.host_slabs for r in ranks),
            min(r.transit_slabs for r in ranks),
            min(r.disk_slabs for r in ranks),
        )
        self._index = Index(
            [
                (int(g.kind), m, g.lookback)
                for g, m in zip(self.layout.groups, self.layout.multiples, strict=True)
            ],
            self.layout.base_tokens,
            geometry.slots_per_slab,
            geometry.host_slabs,
            geometry.transit_slabs,
            geometry.disk_slabs,
            host_slots=self._exact.host,
            transit_slots=self._exact.transit,
            disk_slots=self._exact.disk,
            host_policy=self.config.host_policy,
            disk_policy=self.config.disk_policy,
        )
        self._loads = Loads(self.layout, self._index, self._inflight, self.counters, self._send)
        self._geometry = geometry
        self.counters.add("restored", self._index.restore(_common_records(ranks)))
        for state in self._requests.values():
            self._bind(state)

    @property
    def ready(self) -> bool:
        """Whether every rank has attached."""
        return self._index is not None

    # ---- requests ----

    def match(self, request: RequestInfo, chain: ChainLike, *, computed: int = 0) -> Match:
        """What could be restored beyond `computed` tokens. Pins nothing; cheap to ask every step."""
        state = self._state(request, chain)
        if self._index is None:
            return Match(computed, computed, 0, 0, False)
        state.computed = computed
        boundary, pending, host, disk, loading = state.matcher.update(chain.keys, computed)
        if not state.matched:
            state.matched = True
            self.counters.add("matched_host", host)
            self.counters.add("matched_disk", disk)
        return Match(boundary, pending, host, disk, loading)

    def load(self, request: RequestInfo, chain: ChainLike, boundary: int, pages: Pages) -> LoadPlan:
        """Begin loading tokens [computed of the last match, boundary) into `pages`; blocks without a page are left
        out. What is no longer there shortens the load: see LoadPlan. The pages belong to the load until it has
        Finished, also after an abort."""
        state = self._state(request, chain)
        if self._index is None or self._loads is None:
            return LoadPlan(0, state.computed, 0, boundary - state.computed)
        state.matcher.update(chain.keys, state.computed)
        options = state.matcher.boundaries()
        fitting = options[: np.searchsorted(options, boundary, side="right")]
        best = int(fitting[-1]) if len(fitting) else 0
        if best <= state.computed:
            return LoadPlan(0, state.computed, 0, max(0, boundary - state.computed))
        plan = self._loads.begin(state, best, pages, self._now + self.config.deadline_s)
        return LoadPlan(plan.id, best, plan.blocks, boundary - best)

    def prefetch(self, request: RequestInfo, chain: ChainLike, deadline: float) -> int:
        """Bring what disk holds of the restorable prefix into host before it is asked for; the job's id or 0."""
        state = self._state(request, chain)
        if self._index is None or self._loads is None:
            return 0
        boundary = state.matcher.update(chain.keys, state.computed)[0]
        return self._loads.prefetch(state, boundary, deadline) if boundary > state.computed else 0

    def offer(self, request: RequestInfo, chain: ChainLike, computed: int, pages: Pages) -> Offer:
        """Tokens [0, computed) of the request are, or will be at the end of this step, in `pages`: store what is new.

        The first offer of a request walks from block 0, later ones from the cursor. The pages named by the job
        belong to it until it has Finished.
        """
        state = self._state(request, chain)
        if self._index is None:
            return Offer(0, 0, 0, False)
        keys = chain.keys
        computed = min(computed, len(keys) * self.layout.base_tokens)
        self._count_produced(state, computed)
        ends = [0 if g.transient else computed // g.tokens_per_block for g in self.layout.groups]
        copies, cursors, resident, busy, refused = self._index.offer(
            state.segment, keys, state.cursors, ends, pages
        )
        state.cursors = cursors
        self.counters.add("dedup", resident)
        self.counters.add("in_flight_dedup", busy)
        self.counters.add("refused", refused)
        job = 0
        if len(copies):
            running = self._inflight.add(
                JobKind.STORE, copies, self._now + self.config.deadline_s, state.info.id
            )
            state.jobs.add(running.job.id)
            self._send(running)
            job = running.job.id
        blocked = cursors != ends
        cursor = min((c * s for c, s in zip(cursors, self._sizes, strict=True)), default=0)
        return Offer(job, len(copies), cursor if blocked else computed, blocked)

    def _count_produced(self, state: RequestState, computed: int) -> None:
        """Base blocks that this request computed itself: beyond what it had, and beyond earlier offers."""
        if not state.offered:
            state.offered = True
            state.had = max(state.had, state.computed)
        base = self.layout.base_tokens
        known = max(state.seen, state.had) // base
        self.counters.add("produced", max(0, computed // base - known))
        state.seen = max(state.seen, computed)

    def preempt(self, request_id: RequestId) -> tuple[int, ...]:
        """The engine takes the request's pages away: its cursors go back to 0. Returns the ids of the running jobs
        that still touch its pages."""
        state = self._requests.get(request_id)
        if state is None:
            return ()
        state.cursors = [0] * len(self._sizes)
        state.computed = 0
        return tuple(sorted(state.jobs))

    def finish(self, request_id: RequestId, reason: str, now: float) -> tuple[int, ...]:
        """The request has ended (also: "abort"). Returns the ids of the running jobs that still touch its pages;
        they end on their own, and the pages must stay until then. An unknown request is fine."""
        self._now = max(self._now, now)
        state = self._requests.pop(request_id, None)
        if state is None:
            return ()
        if self._index is not None and self._loads is not None:
            self._index.close_segment(state.segment, FINISH_REASONS.get(reason, 0), now)
            self._loads.detach(state)
        return tuple(sorted(state.jobs))

    def _state(self, request: RequestInfo, chain: ChainLike) -> RequestState:
        state = self._requests.get(request.id)
        if state is None:
            state = RequestState(request, 0, None, [0] * len(self._sizes))
            self._requests[request.id] = state
            if self._index is not None:
                self._bind(state)
        state.chain = chain
        return state

    def _bind(self, state: RequestState) -> None:
        assert self._index is not None
        state.segment = self._index.open_segment(self._now)
        state.matcher = Matcher(self._index)

    # ---- steps ----

    def tick(self, now: float) -> Plans:
        """Everything that is to go to the movers now. Call once a step, after the offers and loads of the step."""
        self._now = max(self._now, now)
        if self._index is None or self._loads is None:
            return Plans()
        for running in self._inflight.expired(self._now):
            self._overdue(running)
        self._finished += self._loads.advance(self._now)
        self._plan_writes()
        plans = Plans(tuple(self._jobs), tuple(self._cancels), self._geometry, self._reset_disk)
        self._jobs, self._cancels, self._geometry, self._reset_disk = [], [], None, False
        return plans

    def _overdue(self, running: Running) -> None:
        """Nobody is to wait for these blocks any more. A job that touches no page is cancelled; a store goes on
        until the device confirms, since its pages are being read."""
        assert self._index is not None and self._loads is not None
        self._index.expire(running.copies)
        self.counters.add("overdue", 1)
        if running.load:
            self._loads.overdue(running)
        if running.job.kind is not JobKind.STORE:
            self._cancels.append(running.job.id)

    def _plan_writes(self) -> None:
        assert self._index is not None
        while len(copies := self._index.next_writes(WRITE_JOB_BLOCKS)):
            self._send(self._inflight.add(JobKind.WRITE, copies, self._now + self.config.deadline_s))

    def _send(self, running: Running) -> None:
        self._jobs.append(running.job)

    def complete(self, outcomes: Iterable[Outcome]) -> list[Finished]:
        """Take in what movers reported; the loads and stores that have ended on all ranks since the last call."""
        for outcome in outcomes:
            self._note_health(outcome)
            running = self._inflight.report(outcome)
            if running is not None:
                self._end(running)
        if self._loads is not None:
            self._finished += self._loads.advance(self._now)
        finished, self._finished = self._finished, []
        return finished

    def _note_health(self, outcome: Outcome) -> None:
        if self._index is None or self._disk_ok.get(outcome.rank, True) is outcome.disk_ok:
            return
        self._disk_ok[outcome.rank] = outcome.disk_ok
        self._index.set_online(DISK, all(self._disk_ok.values()))
        self.counters.add("disk_back" if outcome.disk_ok else "disk_lost", 1)

    def _end(self, running: Running) -> None:
        assert self._index is not None and self._loads is not None
        kind = running.job.kind
        if kind is JobKind.STORE:
            self._end_store(running)
        elif kind is JobKind.WRITE:
            self._index.complete_write(running.copies, running.status)
            good = len(running.copies) - _bad(running)
            self.counters.add("stored_disk", good)
        else:
            self._finished += self._loads.ended(running)

    def _end_store(self, running: Running) -> None:
        assert self._index is not None
        copies, status = running.copies, running.status
        self._index.complete_store(copies, status)
        transit = (copies["flags"] & CopyFlag.TRANSIT) != 0
        good = transit if status is None else transit & (status == Status.OK)
        if good.any():
            self._send(self._inflight.add(JobKind.WRITE, copies[good], self._now + self.config.deadline_s))
        failed = _bad(running)
        self.counters.add("stored_host", len(copies) - failed - int(good.sum()))
        if status is not None and failed:
            self._rewind(copies[status != Status.OK])
        state = self._requests.get(running.owner)  # type: ignore[call-overload]
        if state is not None:
            state.jobs.discard(running.job.id)
        self._finished.append(
            Finished(
                running.job.id,
                JobKind.STORE,
                state.info.id if state else None,
                0,
                failed,
                running.overdue,
                "; ".join(running.errors),
            )
        )

    def _rewind(self, failed: Copies) -> None:
        """Whoever offered one of these blocks, or was told that it was in flight, offers it again."""
        self.counters.add("store_failed", len(failed))
        for state in self._requests.values():
            if state.chain is None:
                continue
            keys = state.chain.keys
            for group, multiple in enumerate(self.layout.multiples):
                rows = failed[failed["group"] == group]
                ends = (rows["depth"] + 1) * multiple - 1
                inside = ends < len(keys)
                mine = rows["depth"][inside][(keys[ends[inside]] == rows["key"][inside]).all(axis=1)]
                if len(mine):
                    state.cursors[group] = min(state.cursors[group], int(mine.min()))

    # ---- whole tiers ----

    def reset(self, tiers: Iterable[str] = ("host", "disk")) -> None:
        """Nothing in these tiers is visible any more; running jobs end on their own.

        Raises ValueError for a name other than "host" or "disk".
        """
        for tier in tiers:
            if tier not in ("host", "disk"):
                raise ValueError(f"no tier is called {tier!r}; the tiers are host and disk")
            if self._index is not None:
                self._index.reset(HOST if tier == "host" else DISK)
                self._reset_disk |= tier == "disk"
        for state in self._requests.values():
            state.cursors = [0] * len(self._sizes)

    @property
    def idle(self) -> bool:
        """No job runs, waits or is about to be sent."""
        return not (len(self._inflight) or self._jobs or (self._loads is not None and len(self._loads)))

    def describe(self) -> str:
        """The running jobs in words, for messages and logs: id, kind, blocks, who still owes a report."""
        jobs = [
            f"job {r.job.id} {r.job.kind.name} {len(r.copies)} blocks, ranks {sorted(r.waiting)}"
            for r in self._inflight
        ]
        waiting = 0 if self._loads is None else len(self._loads)
        return "; ".join([*jobs, f"{waiting} loads", f"{len(self._jobs)} jobs unsent"])

    def backlog(self) -> tuple[int, int]:
        """(blocks queued for disk that can still be evicted unwritten, slots pinned by running writes)."""
        return (0, 0) if self._index is None else self._index.pending_writes()

    def pinned(self) -> int:
        """Entries of the index that a job holds."""
        return 0 if self._index is None else int(self._index.usage(HOST)["pinned"])

    def check_integrity(self) -> None:
        """Raises RuntimeError naming the first invariant of the index that does not hold."""
        if self._index is not None:
            self._index.check_integrity()

    def stats(self) -> Stats:
        """Counters since start, and gauges of now."""
        slots = {g.slot_bytes for g in self.layout.groups}
        return Stats.collect(
            self.counters,
            self._index,
            slot_bytes=slots.pop() * self._ranks if len(slots) == 1 else 0,
            config=self.config.effective(),
        )


def _bad(running: Running) -> int:
    return 0 if running.status is None else int(np.count_nonzero(running.status))


def _common_records(ranks: Sequence[Inventory]) -> Copies:
    """Records, by (group, slot, key), that every rank reports; rank 0's copy of them."""
    records = ranks[0].records
    for other in ranks[1:]:
        records = records[np.isin(_places(records), _places(other.records))]
    return records


def _places(records: Copies) -> Copies:
    """(n,) of 22-byte strings: group, slot and key of each record."""
    packed = np.empty(len(records), [("group", "<u2"), ("slot", "<i4"), ("key", "u1", (16,))])
    for name in ("group", "slot", "key"):
        packed[name] = records[name]
    return packed.view("V22")
