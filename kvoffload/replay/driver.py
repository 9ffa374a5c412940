"""What sequential and concurrent replays share: one request on the device, and the tiers below it.

The engine here computes nothing: a "computed" block is painted with the bytes its key stands for, and
whatever comes back from a tier is compared with them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvoffload.errors import ConfigError, KVOffloadError
from kvoffload.messages import JobKind
from kvoffload.replay.base import ReplayRequest, Tiers, TraceChain
from kvoffload.replay.report import RequestCount, Tally
from kvoffload.requests import Finished, Match, RequestInfo
from kvoffload.testing.paint import paint, verify
from kvoffload.testing.pool import PageMemory, PagePool, Pages

STALL_S = 60.0
"""Seconds without any progress after which a replay gives up with an error."""

IDLE_S = 0.0002
"""Seconds slept between two looks at running jobs that have not moved."""


class StandstillError(KVOffloadError, TimeoutError):
    """Jobs run or wait and none of them moves: a defect of the tiers, not of the arguments."""


@dataclass(slots=True, eq=False)
class Turn:
    """One request on its way. Tokens: computed, settled. Blocks: hbm, host, disk, produced, stored, arrived.

    pages: of the whole prompt, HBM hits first; empty until it is admitted. load: id of the running load, 0 =
    none. stores: running store jobs; failed: blocks that store jobs did not store. patience: when to stop
    waiting.
    """

    request: ReplayRequest
    info: RequestInfo
    chain: TraceChain
    pages: Pages = field(default_factory=lambda: np.empty(0, np.int32))
    computed: int = 0
    hbm: int = 0
    host: int = 0
    disk: int = 0
    produced: int = 0
    stored: int = 0
    load: int = 0
    arrived: int = 0
    settled: int = 0
    stores: set[int] = field(default_factory=set)
    failed: int = 0
    moved_at: float = 0.0


class Engine:
    """Device pages and their content, above tiers. REQUIRES: one group of kind full.

    memories: one per rank, or none to count blocks only. Thread: one.
    """

    def __init__(
        self,
        tiers: Tiers,
        pool: PagePool,
        memories: Sequence[PageMemory],
        block_tokens: int,
        tally: Tally,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tiers = tiers
        self.pool = pool
        self.tally = tally
        self.block_tokens = block_tokens
        self.clock = clock
        self._memories = memories
        self._loading: dict[int, Turn] = {}
        self._storing: dict[int, Turn] = {}
        self._held: list[tuple[set[int], Pages]] = []
        self._moved_at = clock()

    def open(self, request: ReplayRequest) -> Turn:
        """A turn that holds nothing yet. Raises ConfigError if its prompt can never be on the device."""
        if len(request.ids) > self.pool.pages:
            raise ConfigError(
                f"request {request.index} has {len(request.ids)} blocks and the device {self.pool.pages}:"
                f" raise --device-blocks to at least {len(request.ids)}"
            )
        info = RequestInfo(request.index, request.session, request.agent)
        return Turn(request, info, request.chain(), moved_at=self.clock())

    def look(self, turn: Turn) -> tuple[Pages, Match]:
        """(pages of the HBM prefix, what the tiers have beyond it); takes nothing."""
        hits = self.pool.match(turn.chain.keys)
        return hits, self.tiers.match(turn.info, turn.chain, len(hits) * self.block_tokens)

    def admit(self, turn: Turn, hits: Pages, found: Match) -> bool:
        """Take pages for the whole prompt and begin the load; False, with nothing taken, where pages are
        short."""
        fresh = self.pool.allocate(len(turn.request.ids) - len(hits), hits)
        if fresh is None:
            return False
        turn.pages = np.concatenate((hits, fresh))
        turn.hbm = len(hits)
        turn.computed = len(hits) * self.block_tokens
        self._check(turn, 0, turn.hbm, "hbm")
        if found.boundary > turn.computed:
            plan = self.tiers.load(turn.info, turn.chain, found.boundary, [turn.pages])
            turn.host, turn.disk = found.host, found.disk
            turn.load = plan.id
            if plan.id:
                self._loading[plan.id] = turn
            else:
                turn.host = turn.disk = 0
        self._moved_at = self.clock()
        return True

    def compute(self, turn: Turn, tokens: int) -> int:
        """Produce up to `tokens` more, whole blocks at a time; the tokens really produced."""
        begin = turn.computed // self.block_tokens
        end = min(begin + tokens // self.block_tokens, len(turn.request.ids))
        if end > begin:
            part = slice(begin, end)
            for memory in self._memories:
                paint(memory, 0, turn.pages[part], turn.chain.keys[part])
            self.pool.publish(turn.pages[part], turn.chain.keys[part])
            turn.produced += end - begin
            turn.computed = end * self.block_tokens
            self._moved_at = turn.moved_at = self.clock()
        return (end - begin) * self.block_tokens

    def offer(self, turn: Turn) -> bool:
        """Offer what is not settled yet. True when nothing of it has to be offered again: all is settled, or
        the rest finds no room although no job runs that could give some back."""
        if turn.settled == turn.computed:
            return True
        offer = self.tiers.offer(turn.info, turn.chain, turn.computed, [turn.pages])
        progress = offer.blocks > 0 or offer.cursor > turn.settled
        if offer.job:
            turn.stores.add(offer.job)
            self._storing[offer.job] = turn
        if progress:
            self._moved_at = turn.moved_at = self.clock()
        turn.stored += offer.blocks
        turn.settled = offer.cursor
        return not offer.blocked or (not progress and self.tiers.backlog().idle)

    def finish(self, turn: Turn) -> None:
        """End a turn that has produced everything; its pages become free when no job touches them."""
        request = turn.request
        jobs = self.tiers.finish(turn.info, request.reason, self.clock())
        self._hold(set(jobs), turn.pages)
        self.tally.add(
            RequestCount(
                session=request.session,
                ids=request.ids,
                tokens=request.tokens,
                hits=(turn.hbm, turn.host, turn.disk),
                produced=turn.produced,
                arrived=turn.arrived,
                stored=turn.stored,
                block_tokens=self.block_tokens,
            )
        )
        self._moved_at = self.clock()

    def pump(self) -> None:
        """Let jobs move on; sleeps a little if they did not. Raises StandstillError after STALL_S of
        standstill."""
        now = self.clock()
        finished = self.tiers.step(now)
        for item in finished:
            self._take(item)
        if finished:
            self._moved_at = now
        elif now - self._moved_at > STALL_S:
            raise StandstillError(
                f"nothing has moved for {STALL_S:.0f} s: {len(self._loading)} loads, {len(self._storing)}"
                f" stores and the pages of {len(self._held)} requests still wait, {self.tiers.backlog()}"
            )
        elif not self.tiers.backlog().idle:
            time.sleep(IDLE_S)

    def drain(self) -> None:
        """Pump until every page is free and every disk write has ended."""
        while self._held or self._loading or not self.tiers.backlog().idle:
            self.pump()

    def _take(self, item: Finished) -> None:
        """Take in one job that has ended."""
        if item.kind is JobKind.LOAD and item.id in self._loading:
            self._loaded(self._loading.pop(item.id), item)
        if item.kind is JobKind.STORE and item.id in self._storing:
            turn = self._storing.pop(item.id)
            turn.stores.discard(item.id)
            turn.failed += item.failed
            turn.settled = 0 if item.failed else turn.settled
        for jobs, pages in self._held:
            jobs.discard(item.id)
            if not jobs:
                self.pool.release(pages)
        self._held = [held for held in self._held if held[0]]

    def _loaded(self, turn: Turn, item: Finished) -> None:
        """Take in a load: what came is compared, what did not is left to be computed."""
        begin, end = turn.computed // self.block_tokens, item.boundary // self.block_tokens
        turn.arrived = max(end - begin, 0)
        turn.host = min(turn.host, turn.arrived)
        turn.disk = min(turn.disk, turn.arrived - turn.host)
        self.tally.loads += 1
        self._check(turn, begin, begin + turn.arrived, "load")
        self.pool.publish(
            turn.pages[begin : begin + turn.arrived], turn.chain.keys[begin : begin + turn.arrived]
        )
        turn.computed = (begin + turn.arrived) * self.block_tokens
        turn.load = 0

    def _check(self, turn: Turn, begin: int, end: int, source: str) -> None:
        """Compare blocks [begin, end) with the oracle on every rank."""
        for memory in self._memories:
            wrong = verify(memory, 0, turn.pages[begin:end], turn.chain.keys[begin:end])
            for position in wrong.tolist():
                self.tally.mismatch(f"request {turn.request.index} block {begin + position} {source}")

    def _hold(self, jobs: set[int], pages: Pages) -> None:
        if jobs:
            self._held.append((jobs, pages))
        else:
            self.pool.release(pages)
