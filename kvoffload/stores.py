"""Stores: device -> host, host -> disk, and device -> disk through transit, from offer to the last outcome."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvoffload.index import Index, IndexTier
from kvoffload.inflight import InFlight, Running
from kvoffload.layout import Layout
from kvoffload.messages import Copies, CopyFlag, JobKind, RequestId, Status
from kvoffload.requests import Finished, Offer, Pages, RequestState
from kvoffload.stats import TIERS, Counters
from kvoffload.tails import Tails

WRITE_JOB_BLOCKS = 256
"""Most blocks in one disk write job: small enough that a load never waits long behind it."""

SECONDS_PER_HOUR = 3600.0

_STORED = {tier: (f"stored_{tier}", f"store_bytes_{tier}") for tier in TIERS}

_TRANSIT = np.uint16(CopyFlag.TRANSIT)
"""As the array's own type: an enum member costs microseconds to convert, on every step."""


class WriteBudget:
    """Bytes that may go to disk, refilled evenly; at most one hour's worth is saved up. None = no bound."""

    def __init__(self, bytes_per_hour: int | None) -> None:
        self._rate = bytes_per_hour
        self._left = float(bytes_per_hour or 0)
        self._then: float | None = None

    @property
    def bounded(self) -> bool:
        return self._rate is not None

    @property
    def spent(self) -> bool:
        """Bounded, and nothing is left."""
        return self._rate is not None and self._left < 1

    def refill(self, now: float) -> None:
        if self._rate is None:
            return
        passed = 0.0 if self._then is None else max(0.0, now - self._then)
        self._then = now
        self._left = min(float(self._rate), self._left + passed * self._rate / SECONDS_PER_HOUR)

    def blocks(self, block_bytes: int) -> int:
        """Whole blocks that may be written now, at most WRITE_JOB_BLOCKS."""
        if self._rate is None:
            return WRITE_JOB_BLOCKS
        return max(0, min(WRITE_JOB_BLOCKS, int(self._left // max(1, block_bytes))))

    def spend(self, count: int) -> None:
        """`count` bytes are on their way, whether or not they were asked for with `blocks`."""
        self._left -= count


class Stores:
    """All stores and writes of one planner."""

    def __init__(
        self,
        layout: Layout,
        index: Index,
        inflight: InFlight,
        counters: Counters,
        budget: WriteBudget,
        ranks: int,
        tails: Tails,
    ) -> None:
        self._layout = layout
        self._index = index
        self._inflight = inflight
        self._counters = counters
        self._budget = budget
        self._ranks = ranks
        self._tails = tails
        self._sizes = tuple(0 if g.transient else g.tokens_per_block for g in layout.groups)
        self._largest = max(1, *(g.block_bytes for g in layout.groups))
        self._has_disk = any(row["capacity_slots"] for row in index.usage(IndexTier.DISK)["groups"])

    def offer(self, state: RequestState, computed: int, pages: Pages, deadline: float) -> Offer:
        """Store what is new of tokens [0, computed). REQUIRES: the chain has the keys of all full blocks of it."""
        assert state.chain is not None
        ends = [computed // size if size else 0 for size in self._sizes]
        if self._budget.bounded:
            self._index.set_direct_writes(self._budget.blocks(self._largest) > 0)
        begins, pages = self._tails.chosen(state, ends, pages)
        copies, cursors, resident, busy, refused = self._index.offer(
            state.segment, state.chain.keys, begins, ends, pages
        )
        state.cursors = cursors
        if resident or busy or refused:
            self._counters.add("dedup", resident)
            self._counters.add("in_flight_dedup", busy)
            self._counters.add("write_budget" if self._budget.spent else "refused", refused)
        blocked = cursors != ends
        cursor = min(c * s for c, s in zip(cursors, self._sizes, strict=True) if s) if blocked else computed
        if not len(copies):
            return Offer(0, 0, cursor, blocked)
        running = self._inflight.add(JobKind.STORE, copies, deadline, state.info.id)
        state.jobs.add(running.job.id)
        return Offer(running.job.id, len(copies), cursor, blocked)

    def plan_writes(self, now: float, deadline: float) -> None:
        """Start as many writes as pins and budget allow, oldest first."""
        if not self._has_disk:
            return
        self._budget.refill(now)
        while limit := self._budget.blocks(self._largest):
            copies = self._index.next_writes(limit)
            if not len(copies):
                return
            self._spend(copies)
            self._inflight.add(JobKind.WRITE, copies, deadline)

    def _spend(self, copies: Copies) -> None:
        self._budget.spend(self._layout.bytes_of(copies["group"]))

    def ended(
        self, running: Running, deadline: float, requests: Mapping[RequestId, RequestState]
    ) -> list[Finished]:
        """A store or write has ended on all ranks. Only stores are reported: nobody waits for a write."""
        copies, status = running.job.copies, running.status
        if running.job.kind is JobKind.WRITE:
            self._index.complete_write(copies, status)
            self._count_stored("disk", copies if status is None else copies[status == Status.OK])
            return []
        self._index.complete_store(copies, status)
        good = copies if status is None else copies[status == Status.OK]
        if np.count_nonzero(good["flags"]):
            transit = (good["flags"] & _TRANSIT) != 0
            onward, good = good[transit], good[~transit]
            if running.forgotten:
                self._give_up(onward)
            elif len(onward):
                self._spend(onward)
                self._inflight.add(JobKind.WRITE, onward, deadline)
        self._count_stored("host", good)
        if status is not None and running.failed:
            self._counters.add("store_failed", running.failed)
            for state in requests.values():
                self._rewind(state, copies[status != Status.OK])
        owner = requests.get(running.owner) if running.owner is not None else None
        if owner is None or running.job.id not in owner.jobs:  # gone, or a later request of the same id
            return [self._finished(running, None)]
        owner.jobs.discard(running.job.id)
        return [self._finished(running, owner)]

    def forget_writes(self) -> None:
        """Disk is about to be reset on every rank, after the writes that the movers have and before those that they
        get: neither the unsent ones nor those that running stores would bring about may follow."""
        for running in self._inflight:
            running.forgotten = True
        for running in self._inflight.drop_unsent(JobKind.WRITE):
            self._give_up(running.copies)

    def _give_up(self, copies: Copies) -> None:
        self._index.complete_write(copies, np.full(len(copies), Status.NOT_DONE, np.uint8))

    def _count_stored(self, tier: str, copies: Copies) -> None:
        stored, size = _STORED[tier]
        self._counters.add(stored, len(copies))
        self._counters.add(size, self._ranks * self._layout.bytes_of(copies["group"]))

    @staticmethod
    def _finished(running: Running, owner: RequestState | None) -> Finished:
        name = owner.info.id if owner else None
        errors = "; ".join(running.errors)
        return Finished(running.job.id, JobKind.STORE, name, 0, running.failed, running.overdue, errors)

    def _rewind(self, state: RequestState, failed: Copies) -> None:
        """Whoever offered one of these blocks, or was told that it was in flight, offers it again."""
        if state.chain is None:
            return
        keys = state.chain.keys
        for group, multiple in enumerate(self._layout.multiples):
            rows = failed[failed["group"] == group]
            ends = (rows["depth"] + 1) * multiple - 1
            inside = ends < len(keys)
            mine = rows["depth"][inside][(keys[ends[inside]] == rows["key"][inside]).all(axis=1)]
            if len(mine):
                state.cursors[group] = min(state.cursors[group], int(mine.min()))
