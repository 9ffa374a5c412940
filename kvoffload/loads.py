"""Loads and prefetches from their first block to their one ending: parts, transit shortage, retry, deadline.

A load is cut into parts. Each part is one job; parts exist because a load longer than host takes transit slots in
bursts, and because blocks that another job is bringing into host are waited for. A failed copy is tried once more
(same slots, still pinned); only then does the index hear of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvoffload.index import Index
from kvoffload.inflight import InFlight, Running
from kvoffload.layout import Layout
from kvoffload.messages import Copies, CopyFlag, JobKind, Status, StatusArray
from kvoffload.requests import Finished, LoadPlan, Pages, RequestState
from kvoffload.retention import last_boundary
from kvoffload.stats import Counters

_READ, _WAIT = np.uint16(CopyFlag.READ), np.uint16(CopyFlag.WAIT)
"""As the array's own type: an enum member costs microseconds to convert."""


@dataclass(slots=True, eq=False)
class Part:
    """Copies of one job. retried: indices into copies that the running retry is about, None before it."""

    load: Load
    copies: Copies
    status: StatusArray | None = None
    retried: np.ndarray[tuple[int], np.dtype[np.intp]] | None = None


@dataclass(slots=True, eq=False)
class Load:
    """One load or prefetch. Tokens [start, boundary) are to come; rest: by group, first block not begun yet.

    state: the asker, None for a prefetch and once the asker has gone. begins, good: by group the blocks [begins, good)
    are on the device when all has ended, as far as known; failures lower `good`. running: parts sent or held.
    """

    id: int
    kind: JobKind
    state: RequestState | None
    start: int
    boundary: int
    deadline: float
    keys: np.ndarray[tuple[int, int], np.dtype[np.uint8]]
    pages: Pages
    rest: list[int] | None
    begins: list[int]
    ends: list[int]
    good: list[int]
    running: int = 0
    failed: int = 0
    blocks: int = 0
    retry: bool = True
    expired: bool = False
    errors: list[str] = field(default_factory=list)


class Loads:
    """All loads of one planner."""

    def __init__(
        self,
        layout: Layout,
        index: Index,
        inflight: InFlight,
        counters: Counters,
        ranks: int,
    ) -> None:
        self._layout = layout
        self._index = index
        self._inflight = inflight
        self._counters = counters
        self._ranks = ranks
        self._loads: dict[int, Load] = {}
        self._parts: dict[int, Part] = {}
        self._held: list[Part] = []
        self._short: list[Load] = []
        self._fresh: list[Load] = []

    def __len__(self) -> int:
        return len(self._loads)

    def begin(
        self, state: RequestState, boundary: int, pages: Pages, deadline: float, retry: bool = True
    ) -> LoadPlan:
        """Start loading tokens [state.computed, boundary) of the request. REQUIRES: boundary is restorable."""
        assert state.chain is not None
        begins, ends = self._spans(state.computed, boundary)
        load = Load(
            self._inflight.new_id(),
            JobKind.LOAD,
            state,
            state.computed,
            boundary,
            deadline,
            state.chain.keys,
            pages,
            begins,
            begins,
            ends,
            ends[:],
            retry=retry,
        )
        self._loads[load.id] = load
        self._fresh.append(load)
        state.jobs.add(load.id)
        self._burst(load)
        if not load.running and load.rest is None:  # nothing was begun: it ends with the next step
            self._short.append(load)
        return LoadPlan(load.id, boundary, load.blocks, 0)

    def postpone(self, seconds: float) -> None:
        """So long passed before loads begun since the last call could be sent: it is not held against them."""
        if self._fresh:
            for load in self._fresh:
                load.deadline += seconds
            self._fresh = []

    def prefetch(self, state: RequestState, boundary: int, deadline: float) -> int:
        """Start bringing [state.computed, boundary) from disk into host; the job's id, 0 when nothing is to do."""
        assert state.chain is not None
        begins, ends = self._spans(state.computed, boundary)
        keys = state.chain.keys
        copies = self._index.begin_read(state.segment, keys, begins, ends)
        if not len(copies):
            return 0
        load = Load(
            self._inflight.new_id(),
            JobKind.READ,
            None,
            0,
            0,
            deadline,
            keys,
            (),
            None,
            begins,
            ends,
            ends[:],
            running=1,
        )
        self._loads[load.id] = load
        self._start(Part(load, copies))
        return load.id

    def _spans(self, start: int, boundary: int) -> tuple[list[int], list[int]]:
        """By group, the blocks [begin, end) needed to resume at `boundary` when [0, start) is on the device."""
        spans = [group.needs(start, boundary) for group in self._layout.groups]
        return [begin for begin, _ in spans], [end for _, end in spans]

    def _burst(self, load: Load) -> None:
        """Begin as much of the rest as slots allow."""
        assert load.rest is not None
        room = self._index.transit_free()
        begun_from = load.rest
        copies, reached = self._index.begin_load(
            load.state.segment if load.state else 0,
            load.keys,
            begun_from,
            load.ends,
            load.pages,
            max(1, room // 2) if room else 0,
        )
        if reached == load.ends:
            load.rest = None
        elif len(copies) or ((not room or self._all_there(load)) and self._slots_may_come()):
            load.rest = list(reached)
            self._short.append(load)
        else:
            self._cut(load, reached)
        if len(copies):
            load.blocks += len(copies)
            load.running += 1
            part = Part(load, copies)
            if self._hold_back(part):
                self._start(part)

    def _hold_back(self, part: Part) -> bool:
        """Keep what still waits as a part of its own, so that it never waits for slots that the others of its load
        hold; False when nothing else is left to go on with."""
        if not np.count_nonzero(part.copies["flags"]):
            return True
        waits = (part.copies["flags"] & _WAIT) != 0
        if not np.count_nonzero(waits):
            return True
        rest, part.copies = Part(part.load, part.copies[waits]), part.copies[~waits]
        self._held.append(rest)
        if not len(part.copies):
            return False
        part.load.running += 1
        return True

    def _slots_may_come(self) -> bool:
        """Whether anything is under way that can give slots back: else waiting for them would have no end."""
        return bool(len(self._inflight) or self._held)

    @staticmethod
    def _all_there(load: Load) -> bool:
        """Whether tiers still have all that the load needs, so that only slots are short: another group's transit slots
        are no help."""
        state = load.state
        if state is None or state.matcher is None or state.chain is None:
            return False
        return state.matcher.update(state.chain.keys, load.start)[0] >= load.boundary

    def _cut(self, load: Load, reached: list[int]) -> None:
        """No tier has the block after `reached` any more: the load ends before it."""
        load.good = [min(g, r) for g, r in zip(load.good, reached, strict=True)]
        load.failed += sum(e - r for r, e in zip(reached, load.ends, strict=True))
        load.rest = None

    def _start(self, part: Part) -> None:
        load = part.load
        copies = part.copies if part.retried is None else part.copies[part.retried]
        owner = load.state.info.id if load.state else None
        begun = load.rest is None and not load.failed and load.blocks == len(copies)
        whole = owner is not None and begun and part.retried is None
        running = self._inflight.add(load.kind, copies, load.deadline, owner, load.id, whole)
        self._parts[running.job.id] = part

    def advance(self, now: float) -> list[Finished]:
        """Send what waited for slots or for other jobs; end what waited too long."""
        finished: list[Finished] = []
        if not (self._short or self._held):
            return finished
        short, self._short = self._short, []
        for load in short:
            if load.rest is not None and (load.expired or now >= load.deadline):
                load.expired = True
                self._cut(load, load.rest)
            if load.rest is not None:
                self._burst(load)
            finished += self._maybe_end(load)
        held, self._held = self._held, []
        for part in held:
            if now >= part.load.deadline or part.load.expired:
                part.load.expired = True
                self._settle(part, np.full(len(part.copies), Status.NOT_DONE, np.uint8))
                finished += self._maybe_end(part.load)
            else:
                self._index.ready(part.copies)
                if self._hold_back(part):
                    self._release(part)
                    finished += self._maybe_end(part.load)
        return finished

    def _release(self, part: Part) -> None:
        """Nothing is waited for any more: send what came, give up what did not."""
        there = part.copies["host"] >= 0
        if not there.all():
            gone = Part(part.load, part.copies[~there])
            part.load.running += 1
            self._settle(gone, np.full(len(gone.copies), Status.NOT_DONE, np.uint8))
            part.copies = part.copies[there]
        if len(part.copies):
            self._start(part)
        else:
            part.load.running -= 1

    def overdue(self, running: Running) -> None:
        """The deadline of a sent part has passed: nobody waits for its blocks, and no further part is begun."""
        part = self._parts[running.job.id]
        part.load.expired = True

    def ended(self, running: Running) -> list[Finished]:
        """A part has ended on all ranks: retry its failures once, or settle it."""
        part = self._parts.pop(running.job.id)
        load = part.load
        load.errors += running.errors
        status = running.status
        if part.retried is not None:
            assert part.status is not None
            part.status[part.retried] = 0 if status is None else status
            status = part.status
        elif status is not None and load.retry and not load.expired:
            failed = np.flatnonzero((status == Status.READ_FAILED) | (status == Status.COPY_FAILED))
            if len(failed):
                part.status, part.retried = status, failed
                self._counters.add("retried", len(failed))
                self._start(part)
                return []
        self._settle(part, status)
        return self._maybe_end(load)

    def _settle(self, part: Part, status: StatusArray | None) -> None:
        """Tell the index how the part's copies ended. A failed key leaves the index here, before any report."""
        load, copies = part.load, part.copies
        load.running -= 1
        self._index.complete_load(copies, status)
        good = copies if status is None else copies[status == Status.OK]
        read = 0
        if np.count_nonzero(good["flags"]):
            from_disk = good["group"][(good["flags"] & _READ) != 0]
            read = len(from_disk)
            self._counters.add("load_bytes_disk", self._ranks * self._layout.bytes_of(from_disk))
        if load.kind is JobKind.READ:
            self._counters.add("prefetched", read)
        else:
            self._counters.add("loaded_disk", read)
            self._counters.add("loaded_host", len(good) - read)
            self._counters.add("load_bytes_host", self._ranks * self._layout.bytes_of(good["group"]))
        if len(good) < len(copies):
            bad = copies[status != Status.OK]
            for group in np.unique(bad["group"]).tolist():
                lost = int(bad["depth"][bad["group"] == group].min())
                load.good[group] = min(load.good[group], lost)
            load.failed += len(bad)
            if load.rest is not None:
                self._cut(load, load.rest)

    def _maybe_end(self, load: Load) -> list[Finished]:
        if load.running or load.rest is not None or load.id not in self._loads:
            return []
        del self._loads[load.id]
        state = load.state
        boundary = self._restored(load)
        if state is not None:
            state.jobs.discard(load.id)
            state.had = max(state.had, boundary)
            self._counters.add("used", (boundary - load.start) // self._layout.base_tokens)
        error = "; ".join(load.errors)
        name = state.info.id if state else None
        return [Finished(load.id, load.kind, name, boundary, load.failed, load.expired, error)]

    def _restored(self, load: Load) -> int:
        """Tokens that can be resumed from."""
        if load.good == load.ends:
            return load.boundary
        return last_boundary(self._layout, (load.start, load.boundary), load.begins, load.good)

    def detach(self, state: RequestState) -> None:
        """The asker has gone; transfers go on for the sake of their keys, no further part is begun."""
        for load_id in state.jobs:
            load = self._loads.get(load_id)
            if load is not None:
                load.state = None
                if load.rest is not None:
                    self._cut(load, load.rest)
