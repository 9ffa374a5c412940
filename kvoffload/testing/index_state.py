"""What the model of the index knows: blocks, slots, segments, and whose block goes when there is no room."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvoffload.index import EntryFlag as F

HOST, DISK = 0, 1
FULL = 0
SUPERSEDED = 0
"""The segment of what goes first. Nobody opens or touches it."""
VALID = (F.HOST_VALID, F.DISK_VALID)
BUSY = (F.HOST_BUSY, F.DISK_BUSY)
NO_FLAGS = F(0)

Group = tuple[int, int, int]
"""(kind, base blocks per block, lookback in tokens)"""


@dataclass(eq=False, slots=True)
class Block:
    """One entry."""

    group: int
    key: bytes
    depth: int
    end: int
    parent: int
    entry: int  # the index's handle
    segment: int | None = None
    slot: list[int] = field(default_factory=lambda: [-1, -1])
    flags: F = NO_FLAGS
    pins: int = 0
    touches: int = 0  # requests that used it, at most 15


@dataclass(frozen=True, slots=True)
class Place:
    """A block of a batch call that asks for room."""

    segment: int
    end: int
    group: int
    depth: int


class SlabModel:
    """Slots of one tier. A slab belongs to the group of the slots in use in it."""

    def __init__(self, first: int, slabs: int, slots_per_slab: Sequence[int], cap: int = -1) -> None:
        self.first, self.slabs, self.per_slab, self.cap = first, slabs, tuple(slots_per_slab), cap
        self.used: dict[int, Block] = {}
        self.last_use: dict[int, int] = {}
        self.promised = [0] * len(slots_per_slab)

    def owners(self) -> dict[int, int]:
        """Slab -> group."""
        return {slot >> 16: block.group for slot, block in self.used.items()}

    def slots(self, slab: int, group: int) -> int:
        """Slots of the slab if the group owns it."""
        full = self.per_slab[group]
        return full if self.cap < 0 else max(0, min(full, self.cap - (slab - self.first) * full))

    def free_in(self, slab: int, group: int) -> int:
        """Free slots of a slab that the group owns."""
        return self.slots(slab, group) - sum(slot >> 16 == slab for slot in self.used)

    def free(self, group: int) -> int:
        """Free slots in the slabs of the group."""
        return sum(self.free_in(slab, group) for slab, owner in self.owners().items() if owner == group)

    def set_aside(self, group: int, more: int = 0) -> int:
        """Unowned slabs that the promises to the group need."""
        short = self.promised[group] + more - self.free(group)
        return math.ceil(short / self.per_slab[group]) if short > 0 else 0

    def can_promise(self, group: int) -> bool:
        """One more slot for the group, beside what is promised already."""
        if self.per_slab[group] == 0:
            return False
        if self.cap >= 0:
            return len(self.used) + self.promised[0] < self.cap
        needed = sum(self.set_aside(g, g == group) for g in range(len(self.per_slab)) if self.per_slab[g])
        return needed <= self.slabs - len(self.owners())

    def can_empty(self, slab: int) -> bool:
        """Emptying the slab keeps the promises to its group."""
        group = self.owners()[slab]
        spare = self.free(group) + self.set_aside(group) * self.per_slab[group] - self.free_in(slab, group)
        return spare >= self.promised[group]

    def take(self, slot: int, block: Block) -> None:
        """The block gets this very slot, out of a promise."""
        slab = slot >> 16
        assert self.first <= slab < self.first + self.slabs, f"slot {slot:#x} is out of range"
        assert slot & 0xFFFF < self.slots(slab, block.group), f"slot {slot:#x} is beyond its slab"
        assert slot not in self.used, f"slot {slot:#x} is in use"
        assert self.owners().get(slab, block.group) == block.group, f"slot {slot:#x} is another group's"
        if slab not in self.owners():
            self.last_use[slab] = 0
        self.promised[block.group] -= 1
        self.used[slot] = block

    def touch(self, slot: int, order: int) -> None:
        """The block in the slot was used."""
        self.last_use[slot >> 16] = max(self.last_use.get(slot >> 16, 0), order)


class IndexState:
    """Lists and dicts, every decision from scratch, no scan positions."""

    def __init__(
        self,
        groups: Sequence[Group],
        slots_per_slab: Sequence[int],
        slabs: tuple[int, int, int],  # host, transit, disk
        *,
        disk_admission: int = 1,
        max_pending: int,
    ) -> None:
        self.kinds = [g[0] for g in groups]
        self.multiples = [g[1] for g in groups]
        self.arena = [SlabModel(0, slabs[0], slots_per_slab), SlabModel(0, slabs[2], slots_per_slab)]
        self.transit = SlabModel(slabs[0], slabs[1], slots_per_slab)
        self.table: dict[tuple[int, bytes], Block] = {}
        self.segments: dict[int, list[Block]] = {SUPERSEDED: []}
        self.order: dict[int, int] = {SUPERSEDED: 0}
        self.open: set[int] = set()
        self.clock = 0
        self.queue: list[Block] = []
        self.by_entry: dict[int, Block] = {}
        self.disk_admission, self.max_pending = disk_admission, max_pending
        self.online = True
        self.spare_unwritten = False

    # Segments and order.

    def open_segment(self, segment: int) -> None:
        """The index opened it under this id."""
        assert segment not in self.segments, f"segment {segment} is still in use"
        self.clock += 1
        self.segments[segment], self.order[segment] = [], self.clock
        self.open.add(segment)

    def close_segment(self, segment: int) -> None:
        """The request has ended."""
        self.open.remove(segment)
        self._forget_if_done(segment)

    def _forget_if_done(self, segment: int) -> None:
        if segment not in {*self.open, SUPERSEDED} and not self.segments[segment]:
            del self.segments[segment], self.order[segment]

    def _touch(self, segment: int) -> None:
        self.clock += 1
        self.order[segment] = self.clock

    def _leave(self, block: Block) -> None:
        segment, block.segment = block.segment, None
        if segment is not None:
            self.segments[segment].remove(block)
            self._forget_if_done(segment)

    def _join(self, segment: int, block: Block) -> None:
        if block.segment != segment:
            self._leave(block)
            block.segment = segment
            self.segments[segment].append(block)
            self.segments[segment].sort(key=lambda b: (b.end, b.group, b.entry))
            block.touches = min(block.touches + 1, 15)
            if F.HOST_VALID in block.flags:
                self._queue_write(block)
        for tier in (HOST, DISK):
            if block.slot[tier] >= 0:
                self.arena[tier].touch(block.slot[tier], self.order[segment])

    def _key(self, keys: NDArray[np.uint8], group: int, depth: int) -> bytes | None:
        at = (depth + 1) * self.multiples[group] - 1
        return keys[at].tobytes() if at < len(keys) else None

    # Blocks.

    def _take_slot(self, block: Block, tier: int, slot: int, busy: F) -> None:
        self.arena[tier].take(slot, block)
        block.slot[tier] = slot
        block.flags |= busy
        if block.segment is not None:
            self.arena[tier].touch(slot, self.order[block.segment])

    def _lose_slot(self, block: Block, tier: int) -> None:
        del self.arena[tier].used[block.slot[tier]]
        block.slot[tier] = -1
        block.flags &= ~(VALID[tier] | BUSY[tier])

    def _settle(self, block: Block) -> None:
        doomed = F.DOOMED in block.flags
        if block.pins or (not doomed and block.slot != [-1, -1]):
            return
        for tier in (HOST, DISK):
            if block.slot[tier] >= 0:
                self._lose_slot(block, tier)
        if not doomed:
            del self.table[block.group, block.key]
        self._leave(block)
        if block in self.queue:
            self.queue.remove(block)

    def _doom(self, block: Block) -> None:
        if F.DOOMED in block.flags:
            return
        del self.table[block.group, block.key]
        self._leave(block)
        block.flags = (block.flags & (F.HOST_BUSY | F.DISK_BUSY)) | F.DOOMED
        if block in self.queue:
            self.queue.remove(block)

    def _on_disk(self, block: Block) -> bool:
        return self.online and F.DISK_VALID in block.flags

    def _disk_writable(self, *, new: bool = False) -> bool:
        """new: of a block that only its own request has used."""
        admitted = self.disk_admission == 1 if new else self.disk_admission > 0
        return self.online and admitted and self.arena[DISK].slabs > 0

    def _queue_write(self, block: Block) -> None:
        waits = block.flags & (F.DISK_VALID | F.DISK_BUSY | F.WANT_DISK)
        if self._disk_writable() and block.touches >= self.disk_admission and not waits:
            block.flags |= F.WANT_DISK
            self.queue.append(block)
