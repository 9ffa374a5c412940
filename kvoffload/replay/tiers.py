"""The tiers of a replay: planner and mover of this process, sized in blocks instead of bytes.

This is the only place where the replay meets Local.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvoffload.config import Config
from kvoffload.copying.cpu import CpuCopyEngine
from kvoffload.errors import ConfigError
from kvoffload.layout import (
    DEFAULT_SLAB_BYTES,
    MAX_SLABS,
    MIN_SLOTS_PER_SLAB,
    CacheGroup,
    GroupKind,
    Layout,
    Pools,
)
from kvoffload.local import Local, MoverLike
from kvoffload.memory import read_memory
from kvoffload.messages import Inventory
from kvoffload.mover import Mover
from kvoffload.null_mover import NullMover
from kvoffload.planner import ExactSlots, Planner
from kvoffload.replay.base import Backlog, Stored, Tiers
from kvoffload.requests import ChainLike, Finished, LoadPlan, Match, Offer, RequestInfo
from kvoffload.sizing import Slabs
from kvoffload.testing.pool import PageMemory, Pages
from kvoffload.tiers.disk import DiskTier, rank_directory
from kvoffload.units import format_size

LAYERS = ("even", "odd")
"""Two regions per page, so that a block is gathered from more than one place."""

TRANSIT_SHARE = 16
MIN_TRANSIT = 16
MAX_TRANSIT = 1024
"""Transit slots, on top of the host slots: one in 16 of them within these limits."""

NEVER_S = 1e12
"""Seconds, longer than any trace."""

COUNTING_SLAB = 1024
"""Slots per slab where no byte is behind them; the size decides nothing in a layout of one group."""


@dataclass(frozen=True, slots=True)
class Policies:
    """Which policy each tier has, and the time it sees.

    times: when each request starts, by request id: policies that learn go by the trace's clock, however fast the
    replay is; jobs have no deadline then. Empty = the clock of the machine.
    """

    host: str = "lru"
    disk: str = "lru"
    times: Sequence[float] = ()


LRU = Policies()


@dataclass(frozen=True, slots=True)
class Capacity:
    """Slots of the index, exactly; disk 0 = no disk tier. REQUIRES: host >= 1."""

    host: int
    disk: int

    @property
    def transit(self) -> int:
        return min(max(self.host // TRANSIT_SHARE, MIN_TRANSIT), MAX_TRANSIT)


def replay_layout(block_tokens: int, block_bytes: int) -> Layout:
    """One full-attention group of two layers."""
    layers = LAYERS if block_bytes > 1 else LAYERS[:1]
    group = CacheGroup(0, GroupKind.FULL, block_tokens, block_bytes, layers=layers)
    return Layout(block_tokens, (group,))


class LocalTiers(Tiers):
    """The real thing. Thread: one. `close` ends all jobs and releases memory and files."""

    def __init__(self, planner: Planner, movers: Sequence[MoverLike], times: Sequence[float] = ()) -> None:
        self.local = Local(planner, movers, self._clock if times else time.monotonic)
        self._planner = planner
        self._times = times
        self._now = 0.0
        self._ended: list[Finished] = []  # seen while the time went on, not handed out yet

    def _clock(self) -> float:
        return self._now

    def _advance(self, request: RequestInfo) -> None:
        """It is at least as late as the request starts. REQUIRES: its id is its place in `times`."""
        started = self._times[int(request.id)]
        if started > self._now:
            self._now = started
            self._ended += self.local.step()

    def match(self, request: RequestInfo, chain: ChainLike, computed: int) -> Match:
        if self._times:
            self._advance(request)
        return self._planner.match(request, chain, computed=computed)

    def load(self, request: RequestInfo, chain: ChainLike, boundary: int, pages: Sequence[Pages]) -> LoadPlan:
        return self._planner.load(request, chain, boundary, pages)

    def offer(self, request: RequestInfo, chain: ChainLike, computed: int, pages: Sequence[Pages]) -> Offer:
        return self._planner.offer(request, chain, computed, pages)

    def finish(self, request: RequestInfo, reason: str, now: float) -> tuple[int, ...]:
        return self._planner.finish(request.id, reason, self._now if self._times else now)

    def step(self, now: float) -> Sequence[Finished]:
        ended, self._ended = [*self._ended, *self.local.step()], []
        return ended

    def backlog(self) -> Backlog:
        exposed, pinned = self._planner.backlog()
        return Backlog(exposed, self._planner.idle and not exposed and not pinned)

    def stored(self) -> Stored:
        stats = self._planner.stats()
        stored = stats.family("stored_blocks")
        dropped = {reason: blocks for reason, blocks in stats.dropped.items() if blocks}
        return Stored(stored["host"], stored["disk"], stats.totals["restored"], dropped)

    def close(self) -> None:
        self.local.close()


class CountedMover(NullMover):
    """The one rank of an index-only replay, with the tiers it claims to have."""

    def __init__(self, inventory: Inventory) -> None:
        super().__init__(0)
        self._inventory = inventory

    def register(self, pools: Pools) -> Inventory:
        """What was claimed; no page is looked at."""
        return self._inventory


def counting_parts(
    layout: Layout, capacity: Capacity, policies: Policies = LRU
) -> tuple[Planner, CountedMover]:
    """Planner and mover where every job is done as soon as it is sent; not attached yet."""
    slots = max(COUNTING_SLAB, -(-max(capacity.host, capacity.disk) // (MAX_SLABS // 2)))
    host, transit, disk = (-(-n // slots) for n in (capacity.host, capacity.transit, capacity.disk))
    return _planner(layout, capacity, policies), CountedMover(Inventory((slots,), host, transit, disk))


def moving_parts(
    layout: Layout,
    capacity: Capacity,
    memory: PageMemory,
    path: Path | None,
    namespace: bytes,
    policies: Policies = LRU,
) -> tuple[Planner, Mover]:
    """Planner and mover of real bytes, as open_moving says; not attached yet."""
    slot = layout.groups[0].slot_bytes
    most = max(capacity.host, capacity.disk, 1)
    per_slab = max(MIN_SLOTS_PER_SLAB, DEFAULT_SLAB_BYTES // slot // 8, -(-most // (MAX_SLABS // 2)))
    slabs = Slabs(
        per_slab * slot, *(-(-n // per_slab) for n in (capacity.host, capacity.transit, capacity.disk))
    )
    host_bytes, free = (slabs.host + slabs.transit) * slabs.slab_bytes, read_memory().available
    if host_bytes + memory.nbytes > free:
        raise ConfigError(
            f"host tier {format_size(host_bytes)} and device pages {format_size(memory.nbytes)} are more than"
            f" the {format_size(free)} of memory that are free: lower --host-blocks, --device-blocks or"
            " --block-bytes, or count only with --index-only"
        )
    planner = _planner(layout, capacity, policies)
    tier = None
    if path is not None and slabs.disk:
        tier = DiskTier(
            rank_directory(path, namespace, 0, 0), layout, slabs.slab_bytes, slabs.disk, namespace
        )
    return planner, Mover(0, layout, slabs, CpuCopyEngine(), tier)


def open_counting(layout: Layout, capacity: Capacity, policies: Policies = LRU) -> LocalTiers:
    """Planner and index only: every job is done as soon as it is sent, no byte moves."""
    planner, mover = counting_parts(layout, capacity, policies)
    planner.attach(0, mover.register(()))
    return LocalTiers(planner, [mover], policies.times)


def open_moving(
    layout: Layout,
    capacity: Capacity,
    memory: PageMemory,
    path: Path | None,
    namespace: bytes,
    policies: Policies = LRU,
) -> LocalTiers:
    """Real bytes between `memory`, host memory and a file under `path` (needed where capacity.disk > 0).

    Raises ConfigError where the memory of this machine is too small, TierError where the path cannot be used.
    """
    planner, mover = moving_parts(layout, capacity, memory, path, namespace, policies)
    try:
        planner.attach(0, mover.register(memory.pools))
    except BaseException:
        mover.close()
        raise
    return LocalTiers(planner, [mover], policies.times)


def _planner(layout: Layout, capacity: Capacity, policies: Policies) -> Planner:
    exact = ExactSlots(capacity.host, capacity.transit, capacity.disk)
    config = Config(host_bytes=0, host_policy=policies.host)
    if capacity.disk:
        config = replace(
            config,
            host_bytes=1,
            disk_path=Path(),
            disk_bytes=1,
            model_id="replay",
            disk_policy=policies.disk,
        )
    if policies.times:
        config = replace(config, deadline_s=NEVER_S)
    return Planner(layout, config, exact=exact)
