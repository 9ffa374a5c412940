"""The store half of the model of the index: offers, writes, reset."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvoffload.index import EntryFlag as F
from kvoffload.messages import CopyFlag, Status
from kvoffload.testing.index_room import RoomModel
from kvoffload.testing.index_state import DISK, HOST, SUPERSEDED, Block, Place

Keys = NDArray[np.uint8]
Copies = NDArray[np.void]


class StoreModel(RoomModel):
    """Offers, writes and whole-index calls. Methods mirror Index; `given` is what the index answered."""

    # Batches.

    def _walk(self, begins: Sequence[int], ends: Sequence[int], segment: int) -> list[Place]:
        return sorted(
            (
                Place(segment, (depth + 1) * self.multiples[group], group, depth)
                for group, (begin, end) in enumerate(zip(begins, ends, strict=True))
                for depth in range(begin, end)
            ),
            key=lambda x: (x.end, x.group),
        )

    def _find(self, keys: Keys, x: Place) -> Block | None:
        key = self._key(keys, x.group, x.depth)
        assert key is not None
        return self.table.get((x.group, key))

    def _row(self, block: Block, page: int, host: int, disk: int, flags: int) -> tuple[Any, ...]:
        assert block.segment is not None
        order = self.order[block.segment]
        return (block.key, order, page, host, disk, block.depth, block.parent, block.group, flags)

    def _adopt(self, given: Iterator[np.void], group: int, key: bytes) -> np.void:
        """The next copy the index made, which must be of this block."""
        copy = next(given, None)
        assert copy is not None, f"no copy for key {key.hex()} of group {group}"
        assert (int(copy["group"]), copy["key"].tobytes()) == (group, key)
        return copy

    def _check(self, copy: np.void, row: tuple[Any, ...]) -> None:
        names = ("seq", "page", "host", "disk", "depth", "parent", "group", "flags")
        assert (copy["key"].tobytes(), *(int(copy[n]) for n in names)) == row

    # Store.

    def offer(
        self,
        segment: int,
        keys: Keys,
        begins: Sequence[int],
        ends: Sequence[int],
        pages: Sequence[Sequence[int]],
        given: Copies,
    ) -> tuple[list[int], int, int, int]:
        """(cursors, resident, in flight, refused)."""
        items = self._walk(begins, ends, segment)
        cursors = [max(b, e) for b, e in zip(begins, ends, strict=True)]
        if not items:
            return cursors, 0, 0, 0
        if self._stuck(items[0], keys, pages):
            return self._stop(items[0], begins, cursors), 0, 0, 0 if self._disk_writable(new=True) else 1
        self._touch(segment)
        candidates, resident, in_flight = [], 0, 0
        for x in items:
            block = self._find(keys, x)
            if block:
                self._join(segment, block)
            if block and block.flags & (F.HOST_VALID | F.HOST_BUSY | F.DISK_BUSY):
                resident += F.HOST_VALID in block.flags
                in_flight += F.HOST_VALID not in block.flags
            elif page_of(pages, x) >= 0:
                candidates.append(x)
        chosen, refused, stop = self._choose(candidates, keys)
        copies = iter(given)
        for x, transit in chosen:
            self._store(x, keys, transit, page_of(pages, x), copies)
        assert next(copies, None) is None, "the index made more copies"
        return self._stop(stop, begins, cursors) if stop else cursors, resident, in_flight, refused

    def _stuck(self, x: Place, keys: Keys, pages: Sequence[Sequence[int]]) -> bool:
        if page_of(pages, x) < 0 or self._find(keys, x) is not None:
            return False
        below = self._disk_writable(new=True) and self.transit.can_promise(x.group)
        return not below and not self._could_make_room(HOST, x, keys)

    def _stop(self, x: Place, begins: Sequence[int], cursors: Sequence[int]) -> list[int]:
        """By group the first block of the span that ends at or beyond x."""
        firsts = (math.ceil(x.end / k) - 1 for k in self.multiples)
        return [min(max(f, b), c) for f, b, c in zip(firsts, begins, cursors, strict=True)]

    def _choose(
        self, candidates: Sequence[Place], keys: Keys
    ) -> tuple[list[tuple[Place, bool]], int, Place | None]:
        """(blocks with whether they go by transit, refused, the block that ended the walk)."""
        chosen, refused = [], 0
        for x in candidates:
            if self._make_room(HOST, x, keys):
                chosen.append((x, False))
                continue
            block = self._find(keys, x)
            if block and self._on_disk(block):
                continue
            if block or not self._disk_writable(new=True):
                return chosen, refused + 1, x
            if not self.transit.can_promise(x.group):
                return chosen, refused, x
            if self._make_room(DISK, x, keys):
                self.transit.promised[x.group] += 1
                chosen.append((x, True))
            else:
                refused += 1
        return chosen, refused, None

    def _store(self, x: Place, keys: Keys, transit: bool, page: int, copies: Iterator[np.void]) -> None:
        key, before = self._key(keys, x.group, x.depth), self._key(keys, x.group, x.depth - 1)
        assert key is not None
        copy = self._adopt(copies, x.group, key)
        block = self._find(keys, x)
        if block is None:
            parent = int.from_bytes(before[:4], "little") if x.depth and before else 0
            block = Block(x.group, key, x.depth, x.end, parent, int(copy["entry"]))
            self.table[x.group, key] = self.by_entry[block.entry] = block
            self._join(x.segment, block)
        host, disk = int(copy["host"]), int(copy["disk"]) if transit else -1
        if transit:
            self.transit.take(host, block)
            self._take_slot(block, DISK, disk, F.DISK_BUSY)
        else:
            self._take_slot(block, HOST, host, F.HOST_BUSY)
        block.flags |= F.PENDING
        block.pins += 1
        self._check(copy, self._row(block, page, host, disk, CopyFlag.TRANSIT if transit else 0))

    def complete_store(self, copies: Copies, status: Sequence[int]) -> None:
        """Transit copies that are OK go on as writes."""
        for copy, ok in zip(copies, (s == Status.OK for s in status), strict=True):
            block = self.by_entry[int(copy["entry"])]
            if copy["flags"] & CopyFlag.TRANSIT:
                if not ok:
                    self._end_write(copy, ok=False)
                continue
            if F.DOOMED not in block.flags:
                block.flags &= ~(F.PENDING | F.HOST_BUSY)
                if ok:
                    block.flags |= F.HOST_VALID
                    self._queue_write(block)
                else:
                    self._lose_slot(block, HOST)
            block.pins -= 1
            self._settle(block)

    # Retention.

    def retire(
        self, segment: int, keys: NDArray[np.uint8], begins: Sequence[int], ends: Sequence[int]
    ) -> int:
        """Blocks of the spans in the segment go for good; how many."""
        count = 0
        for x in self._walk(begins, ends, segment):
            block = self._find(keys, x)
            if block is None or block.segment != segment:
                continue
            count += 1
            if block.pins:
                self._doom(block)
            else:
                for tier in (HOST, DISK):
                    if block.slot[tier] >= 0:
                        self._lose_slot(block, tier)
                self._settle(block)
        return count

    def supersede(
        self, segment: int, keys: NDArray[np.uint8], begins: Sequence[int], ends: Sequence[int]
    ) -> int:
        """Blocks of the spans in this and in closed segments are the first to go; how many."""
        count = 0
        for x in self._walk(begins, ends, segment):
            block = self._find(keys, x)
            if block is None or (block.segment != segment and block.segment in {*self.open, SUPERSEDED}):
                continue
            count += 1
            self._leave(block)
            block.segment = SUPERSEDED
            self.segments[SUPERSEDED].append(block)
            self.segments[SUPERSEDED].sort(key=lambda b: (b.end, b.group, b.entry))
        return count

    # Writes.

    def _writing(self) -> int:
        return sum(F.DISK_BUSY in b.flags for b in self.arena[DISK].used.values())

    def next_writes(self, limit: int, given: Copies) -> None:
        """Oldest first; those that disk refuses leave the queue."""
        limit = min(limit, self.max_pending - self._writing())
        chosen: list[Block] = []
        while self._disk_writable() and self.queue and len(chosen) < limit:
            block = self.queue.pop(0)
            block.flags &= ~F.WANT_DISK
            assert block.segment is not None
            x = Place(block.segment, block.end, block.group, block.depth)
            if self._make_room(DISK, x, np.empty((0, 16), np.uint8)):
                chosen.append(block)
                block.pins += 1
        copies = iter(given)
        for block in chosen:
            copy = self._adopt(copies, block.group, block.key)
            self._take_slot(block, DISK, int(copy["disk"]), F.DISK_BUSY)
            self._check(copy, self._row(block, -1, block.slot[HOST], block.slot[DISK], 0))
        assert next(copies, None) is None, "the index began more writes"

    def complete_write(self, copies: Copies, status: Sequence[int]) -> None:
        """Also of stores by transit."""
        for copy, s in zip(copies, status, strict=True):
            self._end_write(copy, ok=s == Status.OK)

    def _end_write(self, copy: np.void, *, ok: bool) -> None:
        block = self.by_entry[int(copy["entry"])]
        if copy["flags"] & CopyFlag.TRANSIT:
            del self.transit.used[int(copy["host"])]
        if F.DOOMED not in block.flags:
            if copy["flags"] & CopyFlag.TRANSIT:
                block.flags &= ~F.PENDING
            block.flags &= ~F.DISK_BUSY
            if ok:
                block.flags |= F.DISK_VALID
            else:
                self._lose_slot(block, DISK)
        block.pins -= 1
        self._settle(block)

    # Whole index.

    def reset(self, tier: int) -> None:
        """Blocks that jobs hold go everywhere."""
        for block in list(self.arena[tier].used.values()):
            if block.pins:
                self._doom(block)
            else:
                self._lose_slot(block, tier)
                self._settle(block)

    def rows(self) -> list[tuple[Any, ...]]:
        """What Index.entries must say: (key, host, disk, segment, depth, group, pins, flags)."""
        return [
            (b.key, b.slot[HOST], b.slot[DISK], s, b.depth, b.group, b.pins, int(b.flags))
            for s in sorted(self.segments, key=self.order.__getitem__)
            for b in reversed(self.segments[s])
        ]


def page_of(pages: Sequence[Sequence[int]], x: Place) -> int:
    """The page of the block, -1 = none."""
    mine = pages[x.group]
    return mine[x.depth] if x.depth < len(mine) else -1
