"""Groups over the same regions, as in an engine with one pool of page numbers: through both halves of a connector."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from kvoffload.config import Config
from kvoffload.connector import Scheduled
from kvoffload.copying.cpu import CpuCopyEngine
from kvoffload.layout import CacheGroup, GroupKind, Layout
from kvoffload.mover import Mover
from kvoffload.planner import Planner
from kvoffload.requests import RequestInfo
from kvoffload.scheduler_side import PlannerConnector
from kvoffload.sizing import Slabs
from kvoffload.testing.paint import paint, verify
from kvoffload.testing.pool import PageMemory
from kvoffload.testing.rig import Keys
from kvoffload.worker_side import MoverConnector

FULL, SLIDING, STATE = GroupKind
TOKENS, PAGE, LAYERS, PAGES = 16, 2048, 3, 400
GUARD, STALE = 0xA5, 0x5A

GROUPS = (
    CacheGroup(0, FULL, TOKENS, LAYERS * PAGE, layers=("a0", "a1", "a2")),
    CacheGroup(1, SLIDING, TOKENS, LAYERS * PAGE, 40, ("b0", "b1", "b2")),
    CacheGroup(2, SLIDING, TOKENS, LAYERS * PAGE, 100, ("c0", "c1", "c2")),
    CacheGroup(3, STATE, 2 * TOKENS, LAYERS * PAGE, layers=("d0", "d1", "d2")),
)
LAYOUT = Layout(TOKENS, GROUPS)


@dataclass
class Request:
    """As an engine's."""

    info: RequestInfo
    chain: Keys
    tokens: int
    prompt: int


@dataclass
class World:
    """A scheduler, a worker, and one tensor per layer whose pages go to whichever group asks; guard bytes between
    pages. Free pages hold other bytes than any block's."""

    chance: random.Random
    tensors: list[NDArray[np.uint8]] = field(init=False)
    free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.tensors = [np.full((PAGES, PAGE + 512), GUARD, np.uint8) for _ in range(LAYERS)]
        views = tuple(t[:, :PAGE] for t in self.tensors)
        for view in views:
            view[:] = STALE
        self.memory = PageMemory(LAYOUT, [1] * len(GROUPS))
        self.memory.arrays = (views,) * len(GROUPS)
        self.free = list(range(PAGES))
        self.chance.shuffle(self.free)
        self.planner = Planner(LAYOUT, Config(host_bytes=0))
        self.scheduler = PlannerConnector(self.planner)
        slabs = Slabs(8 * GROUPS[0].slot_bytes, 60, 1, 0)
        self.worker = MoverConnector(Mover(0, LAYOUT, slabs, CpuCopyEngine()), 10.0)
        pools = self.memory.pools
        assert len({pools[g] for g in range(len(GROUPS))}) == 1
        self.scheduler.attach(0, self.worker.register(pools))

    def blocks(self, tokens: int) -> list[NDArray[np.int32]]:
        """Pages for what resuming at `tokens` takes, of all groups from one pool; -1 elsewhere."""
        out = []
        for group in GROUPS:
            first, end = group.needs(0, tokens)
            pages = np.full(end, -1, np.int32)
            pages[first:] = [self.free.pop() for _ in range(end - first)]
            out.append(pages)
        return out

    def give_back(self, tables: Sequence[NDArray[np.int32]]) -> None:
        for pages in tables:
            held = pages[pages >= 0]
            for tensor in self.tensors:
                tensor[held, :PAGE] = STALE
            self.free += held.tolist()
        self.chance.shuffle(self.free)

    def forward(self, scheduled: Sequence[Scheduled] = ()) -> tuple[int, ...]:
        """One step of the engine; the boundaries of loads that have ended."""
        metadata = self.scheduler.step(scheduled, 0.0)
        self.worker.before_forward(metadata)
        self.worker.after_forward(metadata)
        return tuple(x.boundary for x in self.scheduler.update(self.worker.poll()).loaded)

    def until_loaded(self) -> tuple[int, ...]:
        """The boundaries of the first loads that end."""
        for _ in range(5000):
            if loaded := self.forward():
                return loaded
            time.sleep(0.001)
        return ()

    def rest(self) -> None:
        """Until no job runs."""
        while not self.planner.idle:
            self.forward()

    def untouched(self, but: Sequence[NDArray[np.int32]]) -> bool:
        """Guard bytes everywhere, and pages that are nobody's as they were."""
        mine = np.concatenate([p[p >= 0] for p in but])
        others = np.setdiff1d(np.arange(PAGES), mine)
        return all((t[:, PAGE:] == GUARD).all() and (t[others, :PAGE] == STALE).all() for t in self.tensors)

    def wrong(self, chain: Keys, tables: Sequence[NDArray[np.int32]]) -> int:
        count = 0
        for group, multiple in zip(GROUPS, LAYOUT.multiples, strict=True):
            held = np.flatnonzero(tables[group.id] >= 0)
            keys = chain.keys[multiple - 1 :: multiple][held]
            count += len(verify(self.memory, group.id, tables[group.id][held], keys))
        return count

    def compute(self, chain: Keys, tables: Sequence[NDArray[np.int32]]) -> None:
        for group, multiple in zip(GROUPS, LAYOUT.multiples, strict=True):
            held = np.flatnonzero(tables[group.id] >= 0)
            keys = chain.keys[multiple - 1 :: multiple][held]
            paint(self.memory, group.id, tables[group.id][held], keys)


@pytest.mark.parametrize("seed", range(6))
def test_four_groups_over_the_same_regions_keep_to_their_own_pages(seed: int) -> None:
    """Page numbers of one pool, each owned by one group at a time and by another one later: stored from some pages,
    loaded into others, exactly the bytes of its group's block in each, nothing anywhere else."""
    world = World(random.Random(seed))
    chains = {n: Keys.of(range(1000 * n, 1000 * n + world.chance.randrange(10, 40))) for n in range(6)}
    for turn in range(24):
        chain = chains[turn % 6] if turn < 6 else chains[world.chance.randrange(6)]
        size = chain.blocks * TOKENS
        request = Request(RequestInfo(turn), chain, size + 1, size + 1)
        hit = world.scheduler.match(request, 0)
        end = size // 32 * 32
        assert hit.tokens == (end if turn >= 6 else 0)
        tables = world.blocks(hit.tokens or end)
        assert world.untouched(tables)
        world.scheduler.allocated(request, tables, 0, hit.tokens)
        if hit.tokens:
            assert world.until_loaded() == (hit.tokens,)
        else:
            world.compute(chain, tables)
            world.forward([Scheduled(request, end, tables)])
        assert world.wrong(chain, tables) == 0
        assert world.untouched(tables)
        world.scheduler.release(request.info.id, "end_turn")
        world.rest()
        world.give_back(tables)
    world.planner.check_integrity()
    world.worker.close()
