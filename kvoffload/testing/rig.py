"""Planner, movers and painted device pages in one object: what tests of the whole path share.

Content is checked by bytes: every page is painted from the oracle before it is offered and compared after a load.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvoffload.config import Config
from kvoffload.copying.base import CopyEngine
from kvoffload.copying.cpu import CpuCopyEngine
from kvoffload.layout import CacheGroup, GroupKind, Layout
from kvoffload.local import Local
from kvoffload.mover import Mover
from kvoffload.planner import Planner
from kvoffload.requests import Finished, LoadPlan, Match, Offer, RequestInfo
from kvoffload.sizing import Slabs
from kvoffload.testing.faults import Fault, FaultyEngine, FaultyTier
from kvoffload.testing.paint import paint, verify
from kvoffload.testing.pool import PageMemory
from kvoffload.tiers.base import Tier
from kvoffload.tiers.disk import DiskTier

BLOCK_BYTES = 8192
SLOTS_PER_SLAB = 8
NAMESPACE = b"kvoffload-test-1"


@dataclass(slots=True)
class Keys:
    """A chain with keys of its own making: block i is named by all ids up to and including ids[i]."""

    keys: NDArray[np.uint8]

    @classmethod
    def of(cls, ids: Sequence[int]) -> Keys:
        digest, rows = b"", []
        for number in ids:
            digest = hashlib.sha256(digest + number.to_bytes(8, "little")).digest()[:16]
            rows.append(np.frombuffer(digest, np.uint8))
        return cls(np.array(rows, np.uint8).reshape(len(rows), 16))

    @property
    def blocks(self) -> int:
        return len(self.keys)


@dataclass(slots=True)
class Clock:
    """Time that moves when a test says so. Seconds."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def one_group(tokens: int = 16, block_bytes: int = BLOCK_BYTES, layers: int = 2) -> Layout:
    """A full-attention layout of one group."""
    names = tuple(f"layer{i}" for i in range(layers))
    return Layout(tokens, (CacheGroup(0, GroupKind.FULL, tokens, block_bytes, layers=names),))


@dataclass(slots=True)
class Sizes:
    """Slabs of SLOTS_PER_SLAB largest slots in each tier, and device pages."""

    host: int = 4
    transit: int = 1
    disk: int = 0
    pages: int = 256
    overlaid: bool = False


@dataclass(slots=True)
class Rig:
    """One planner with `ranks` movers over painted pages.

    Faults lie around the disk tier and the copy engine of every rank, or of `fault_rank` only. copier, point: for pages
    of a device with streams (Local).
    """

    sizes: Sizes = field(default_factory=Sizes)
    layout: Layout = field(default_factory=one_group)
    path: Path | None = None
    ranks: int = 1
    config: Config = field(default_factory=Config)
    tier_faults: Sequence[Fault] = ()
    copy_faults: Sequence[Fault] = ()
    fault_rank: int | None = None
    clock: Clock = field(default_factory=Clock)
    events: bool = False
    copier: Callable[[], CopyEngine] | None = None
    point: Callable[[int], object] | None = None
    local: Local = field(init=False)
    movers: list[Mover] = field(init=False)
    memory: list[PageMemory] = field(init=False)
    _requests: int = 0

    def __post_init__(self) -> None:
        planner = Planner(self.layout, self.config, ranks=self.ranks, events=self.events)
        slab_bytes = SLOTS_PER_SLAB * max(g.slot_bytes for g in self.layout.groups)
        slabs = Slabs(slab_bytes, self.sizes.host, self.sizes.transit, self.sizes.disk)
        counts = [self.sizes.pages] * len(self.layout.groups)
        self.memory = [
            PageMemory(self.layout, counts, rank=rank, overlaid=self.sizes.overlaid)
            for rank in range(self.ranks)
        ]
        self.movers = []
        for rank, memory in enumerate(self.memory):
            tier: Tier | None = None
            if self.sizes.disk:
                assert self.path is not None
                folder = self.path / f"rank{rank}"
                tier = DiskTier(folder, self.layout, slab_bytes, self.sizes.disk, NAMESPACE)
            copier = CpuCopyEngine() if self.copier is None else self.copier()
            if self.fault_rank in (None, rank):
                tier = FaultyTier(tier, *self.tier_faults) if tier else None
                copier = FaultyEngine(copier, *self.copy_faults)
            self.movers.append(Mover(rank, self.layout, slabs, copier, tier, chunk_bytes=4 * BLOCK_BYTES))
            planner.attach(rank, self.movers[-1].register(memory.pools))
        self.local = Local(planner, self.movers, self.clock, point=self.point)

    @property
    def planner(self) -> Planner:
        return self.local.planner

    def info(self) -> RequestInfo:
        """A request of its own."""
        self._requests += 1
        return RequestInfo(self._requests)

    def paint(self, chain: Keys, pages: Sequence[NDArray[np.int32]], begin: int = 0) -> None:
        """Fill pages of blocks >= begin (base blocks) with what their keys must hold, on every rank."""
        self._each(chain, pages, begin, chain.blocks, paint)

    def mismatches(self, chain: Keys, pages: Sequence[NDArray[np.int32]], begin: int, end: int) -> int:
        """Pages of blocks [begin, end) (base blocks) that hold anything else than their key's bytes; of windows and
        states only those that resuming at the end takes."""
        wrong = 0

        def count(*args: object) -> None:
            nonlocal wrong
            wrong += len(verify(*args))  # type: ignore[arg-type]

        self._each(chain, pages, begin, end, count)
        return wrong

    def _each(
        self,
        chain: Keys,
        pages: Sequence[NDArray[np.int32]],
        begin: int,
        end: int,
        work: Callable[..., object],
    ) -> None:
        base = self.layout.base_tokens
        for group, multiple in enumerate(self.layout.multiples):
            keys = chain.keys[multiple - 1 :: multiple]
            span = slice(begin // multiple, end // multiple)
            if work is not paint:
                span = slice(*self.layout.groups[group].needs(begin * base, end * base))
            rows = pages[group][span]
            held = rows >= 0
            for memory in self.memory:
                work(memory, group, rows[held], keys[span][: len(rows)][held])

    def wipe(self) -> None:
        """Every device page holds nothing."""
        for memory in self.memory:
            for group in memory.arrays:
                for array in group:
                    array[:] = 0

    def pages(self, chain: Keys, first: int = 0) -> list[NDArray[np.int32]]:
        """Device pages for a whole chain: first, first + 1, ... in each group."""
        return [np.arange(first, first + chain.blocks // m, dtype=np.int32) for m in self.layout.multiples]

    # ---- whole requests ----

    def store(self, chain: Keys, first: int = 0) -> Offer:
        """A request that computes the whole chain and ends: painted, offered until settled, drained."""
        info, pages = self.info(), self.pages(chain, first)
        self.paint(chain, pages)
        tokens = chain.blocks * self.layout.base_tokens
        offer = self.planner.offer(info, chain, tokens, pages)
        for _ in range(1000):
            self.local.drain()
            if not offer.blocked:
                break
            again = self.planner.offer(info, chain, tokens, pages)
            if again.cursor == offer.cursor and not again.blocks:
                break
            offer = again
        self.local.drain()
        self.planner.finish(info.id, "end_turn", self.clock.now)
        return offer

    def match(self, chain: Keys, computed: int = 0) -> Match:
        """What a new request would be told; it is forgotten at once."""
        info = self.info()
        found = self.planner.match(info, chain, computed=computed)
        self.planner.finish(info.id, "abort", self.clock.now)
        return found

    def codes(self, chain: Keys, group: int = 0) -> NDArray[np.uint8]:
        """Per block of the chain, where it is: bits of kvoffload.index."""
        info = self.info()
        self.planner.match(info, chain)
        matcher = self.planner.requests[info.id].matcher
        assert matcher is not None
        codes = matcher.codes(group)
        self.planner.finish(info.id, "abort", self.clock.now)
        return codes

    def free_blocks(self, tier: str) -> int:
        """Slots of the first group that could be taken without an eviction."""
        slot = self.layout.groups[0].slot_bytes * self.ranks
        return self.planner.stats().tiers[tier].free // slot

    def load(self, chain: Keys, first: int = 0) -> tuple[LoadPlan, list[Finished], int]:
        """A request that loads all it can into wiped pages and ends: (plan, what finished, pages with wrong bytes)."""
        self.wipe()
        info, pages = self.info(), self.pages(chain, first)
        found = self.planner.match(info, chain)
        plan = self.planner.load(info, chain, found.boundary, pages)
        finished = self.local.drain()
        reached = max((f.boundary for f in finished if f.id == plan.id), default=0)
        wrong = self.mismatches(chain, pages, 0, reached // self.layout.base_tokens)
        self.planner.finish(info.id, "end_turn", self.clock.now)
        return plan, finished, wrong

    def check(self) -> None:
        """What must hold at idle: invariants of the index, nothing pinned, and every transit slot back."""
        self.planner.check_integrity()
        assert self.planner.idle, self.planner.describe()
        assert self.planner.pinned() == 0
        slots = self.layout.slots_per_slab(self.movers[0].arena.slab_bytes)
        least = min(n for n, g in zip(slots, self.layout.groups, strict=True) if not g.transient)
        tiers = self.planner._tiers
        assert tiers is None or tiers.index.transit_free() == self.sizes.transit * least

    def close(self) -> None:
        self.local.close()

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()
