"""A slow model of the index, made to be read; index_state.py holds what it knows.

It follows the rules of csrc/index.h. It does not choose slot numbers: each call is handed the copies that the
index made, checks them row by row against what it expects, and takes their slots over after checking that these
were free. Any difference is an AssertionError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvoffload.index import EntryFlag as F
from kvoffload.messages import CopyFlag, Status
from kvoffload.testing.index_model_store import StoreModel, page_of
from kvoffload.testing.index_state import DISK, HOST, Block, Place, SlabModel

Keys = NDArray[np.uint8]
Copies = NDArray[np.void]


class IndexModel(StoreModel):
    """The oracle: stores, writes, loads."""

    def begin_load(
        self,
        segment: int,
        keys: Keys,
        spans: tuple[Sequence[int], Sequence[int]],  # begins, ends
        pages: Sequence[Sequence[int]],
        max_transit: int,
        given: Copies,
    ) -> list[int]:
        """By group the end of what is loaded."""
        begins, ends = spans
        asked = sum(b < e for b, e in zip(begins, ends, strict=True))
        per_group = max(max_transit // max(asked, 1), 1)
        items = self._walk(begins, ends, segment)
        actions = self._available(items, keys, lambda x, b: page_of(pages, x) < 0)
        self._hold(items, actions, keys)
        ring = _Ring(max_transit, per_group, len(begins))
        n = self._place_reads(items, actions, keys, ring)
        self._emit(items[:n], actions, keys, given, ring, lambda x: page_of(pages, x))
        whole = [max(b, e) for b, e in zip(begins, ends, strict=True)]
        if n == len(items):
            return whole
        reach = ((items[n].end - 1) // k for k in self.multiples)
        return [min(max(r, b), w) for r, b, w in zip(reach, begins, whole, strict=True)]

    def begin_read(
        self, segment: int, keys: Keys, spans: tuple[Sequence[int], Sequence[int]], given: Copies
    ) -> None:
        """Disk -> host only."""
        items = self._walk(*spans, segment)
        there = F.HOST_VALID | F.HOST_BUSY
        actions = self._available(items, keys, lambda x, b: b is not None and bool(b.flags & there))
        self._hold(items, actions, keys)
        n = self._place_reads(items, actions, keys, None)
        self._emit(items[:n], actions, keys, given, None, lambda x: -1)

    def _available(
        self, items: Sequence[Place], keys: Keys, skips: Callable[[Place, Block | None], bool]
    ) -> list[str]:
        """What each block needs, up to the position of the first that cannot be had."""
        actions = []
        for i, x in enumerate(items):
            block = self._find(keys, x)
            if skips(x, block):
                actions.append("skip")
            elif block and F.HOST_VALID in block.flags:
                actions.append("plain")
            elif block and F.HOST_BUSY | F.DISK_VALID | F.PENDING in block.flags:
                actions.append("wait")
            elif block and self._on_disk(block):
                actions.append("transit" if F.HOST_BUSY in block.flags else "read")
            else:
                return actions[: _rewind(items, i)]
        return actions

    def _hold(self, items: Sequence[Place], actions: Sequence[str], keys: Keys) -> None:
        """Touches and pins; the shorter list counts."""
        if actions:
            self._touch(items[0].segment)
        for x, action in zip(items, actions, strict=False):
            block = self._find(keys, x)
            if block:
                self._join(x.segment, block)
            if block and action != "skip":
                block.pins += 1

    def _place_reads(self, items: Sequence[Place], actions: list[str], keys: Keys, ring: _Ring | None) -> int:
        """Finds places, in `actions`; how many blocks stay."""
        for i, action in enumerate(actions):
            x = items[i]
            if action not in {"read", "transit"}:
                continue
            if action == "read" and self._make_room_for_load(x, keys):
                continue
            if ring is not None and ring.use(self.transit, x.group):
                actions[i] = "transit"
                continue
            return self._cut(items, actions, keys, i, ring)
        return len(actions)

    def _make_room_for_load(self, x: Place, keys: Keys) -> bool:
        """In host, and never by giving up a block that waits for its write."""
        self.spare_unwritten = self._disk_writable()
        room = self._make_room(HOST, x, keys)
        self.spare_unwritten = False
        return room

    def _cut(
        self, items: Sequence[Place], actions: Sequence[str], keys: Keys, failed: int, ring: _Ring | None
    ) -> int:
        kept = _rewind(items, failed)
        for i in range(kept, len(actions)):
            block = self._find(keys, items[i])
            if actions[i] == "skip" or block is None:
                continue
            block.pins -= 1
            if i < failed and actions[i] == "read":
                self.arena[HOST].promised[items[i].group] -= 1
            if i < failed and actions[i] == "transit" and ring is not None:
                ring.users[items[i].group] -= 1
        return kept

    def _emit(
        self,
        items: Sequence[Place],
        actions: Sequence[str],
        keys: Keys,
        given: Copies,
        ring: _Ring | None,
        page: Callable[[Place], int],
    ) -> None:
        if ring is not None:
            ring.trim(self.transit)
        copies = iter(given)
        for x, action in zip(items, actions, strict=False):
            block = self._find(keys, x)
            if action == "skip" or block is None:
                continue
            copy = self._adopt(copies, block.group, block.key)
            host, disk, flags = block.slot[HOST], -1, 0
            if action == "wait":
                flags = CopyFlag.WAIT
            elif action == "read":
                self._take_slot(block, HOST, int(copy["host"]), F.HOST_BUSY)
                block.flags |= F.PENDING
                host, disk, flags = block.slot[HOST], block.slot[DISK], CopyFlag.READ
            elif action == "transit" and ring is not None:
                host = ring.next(self.transit, block, int(copy["host"]))
                disk, flags = block.slot[DISK], CopyFlag.READ | CopyFlag.TRANSIT
            if ring is not None:
                block.flags |= F.LOADING
            self._check(copy, self._row(block, page(x), host, disk, flags))
        assert next(copies, None) is None, "the index loads more"

    def complete_load(self, copies: Copies, status: Sequence[int]) -> None:
        """Also of reads."""
        for copy, s in zip(copies, status, strict=True):
            block = self.by_entry[int(copy["entry"])]
            read, transit = bool(copy["flags"] & CopyFlag.READ), bool(copy["flags"] & CopyFlag.TRANSIT)
            if transit:
                self.transit.used.pop(int(copy["host"]), None)
            if F.DOOMED not in block.flags:
                self._end_load(block, promoted=read and not transit, loaded=copy["page"] >= 0, status=s)
            block.pins -= 1
            if read and s == Status.READ_FAILED and F.DISK_VALID in block.flags:
                if block.pins:
                    self._doom(block)
                else:
                    self._lose_slot(block, DISK)
            self._settle(block)

    def _end_load(self, block: Block, *, promoted: bool, loaded: bool, status: int) -> None:
        if loaded:
            block.flags &= ~F.LOADING
        if promoted:
            block.flags &= ~F.PENDING
            if status in {Status.OK, Status.COPY_FAILED}:
                block.flags = (block.flags & ~F.HOST_BUSY) | F.HOST_VALID
            else:
                self._lose_slot(block, HOST)

    def ready(self, before: Copies, given: Copies) -> bool:
        """`before` as the job had them, `given` as the index left them."""
        waits = False
        for old, new in zip(before, given, strict=True):
            if not old["flags"] & CopyFlag.WAIT:
                assert old == new
                continue
            block = self.by_entry[int(old["entry"])]
            host, disk, flags = self._settle_wait(block, old, new)
            assert (int(new["host"]), int(new["disk"]), int(new["flags"])) == (host, disk, flags)
            waits |= flags == CopyFlag.WAIT
        return not waits

    def _settle_wait(self, block: Block, old: np.void, new: np.void) -> tuple[int, int, int]:
        """(host, disk, flags) of the copy from now on."""
        if F.DOOMED in block.flags or not (
            block.flags & (F.HOST_VALID | F.HOST_BUSY) or self._on_disk(block)
        ):
            return -1, -1, 0
        if F.HOST_VALID in block.flags:
            return block.slot[HOST], -1, 0
        busy = F.HOST_BUSY in block.flags
        host = block.slot[HOST] if busy else int(old["host"])
        if busy and (F.PENDING in block.flags or not self._on_disk(block)):
            return host, -1, CopyFlag.WAIT
        assert block.segment is not None
        x = Place(block.segment, block.end, block.group, block.depth)
        if not busy and self._make_room_for_load(x, np.empty((0, 16), np.uint8)):
            self._take_slot(block, HOST, int(new["host"]), F.HOST_BUSY)
            block.flags |= F.PENDING
            return block.slot[HOST], block.slot[DISK], CopyFlag.READ
        if not self.transit.can_promise(block.group):
            return host, -1, CopyFlag.WAIT
        self.transit.promised[block.group] += 1
        self.transit.take(int(new["host"]), block)
        return int(new["host"]), block.slot[DISK], CopyFlag.READ | CopyFlag.TRANSIT

    def expire(self, copies: Copies) -> None:
        """Past the deadline."""
        for copy in copies:
            self.by_entry[int(copy["entry"])].flags &= ~(F.PENDING | F.LOADING)


class _Ring:
    """Transit slots of one load: how many each group takes, and who uses which."""

    def __init__(self, left: int, per_group: int, groups: int) -> None:
        self.left, self.per_group = left, per_group
        self.size, self.users = [0] * groups, [0] * groups
        self.slots: list[list[int]] = [[] for _ in range(groups)]

    def use(self, arena: SlabModel, group: int) -> bool:
        """One more copy of the group; False when it has no slot."""
        if self.left and self.size[group] < self.per_group and arena.can_promise(group):
            arena.promised[group] += 1
            self.size[group] += 1
            self.left -= 1
        self.users[group] += self.size[group] > 0
        return self.size[group] > 0

    def trim(self, arena: SlabModel) -> None:
        """Gives back what no copy uses."""
        for group, users in enumerate(self.users):
            arena.promised[group] -= max(0, self.size[group] - users)
            self.size[group], self.users[group] = min(self.size[group], users), 0

    def next(self, arena: SlabModel, block: Block, given: int) -> int:
        """The slot of the next copy: a fresh one, then the same ones in turn."""
        mine, turn = self.slots[block.group], self.users[block.group]
        self.users[block.group] += 1
        if turn < self.size[block.group]:
            arena.take(given, block)
            mine.append(given)
        return mine[turn % self.size[block.group]]


def _rewind(items: Sequence[Place], n: int) -> int:
    """The first item at the position of item n."""
    return next(i for i, x in enumerate(items) if x.end == items[n].end)
