"""Whose blocks go when there is no room, and what goes along with them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvoffload.index import EntryFlag as F
from kvoffload.testing.index_state import DISK, FULL, HOST, SUPERSEDED, Block, IndexState, Place


class RoomModel(IndexState):
    """Every decision from scratch, no scan positions."""

    def _own_prefix(self, block: Block, x: Place, keys: NDArray[np.uint8]) -> bool:
        return block.end <= x.end and self._key(keys, block.group, block.depth) == block.key

    def _kept(self, block: Block, tier: int) -> bool:
        """Pinned, or it waits for its write while a load makes room in host."""
        return block.pins > 0 or (tier == HOST and self.spare_unwritten and F.WANT_DISK in block.flags)

    def _victim(self, tier: int, x: Place, keys: NDArray[np.uint8]) -> Block | None:
        """Of what is superseded the deepest that may go; then from the least recent segment: its end, unless pinned or
        of x's prefix; x's own ends the search."""
        for segment in sorted(self.segments, key=self.order.__getitem__):
            here = [b for b in self.segments[segment] if b.slot[tier] >= 0]
            mine = [b for b in here if b.group == x.group]
            if segment == SUPERSEDED:  # these continue nothing: each stands for itself
                mine = [b for b in mine if not self._kept(b, tier) and not self._own_prefix(b, x, keys)]
            last = mine[-1] if mine else None
            if here and segment == x.segment:
                return last if last and not self._kept(last, tier) and last.end > x.end else None
            if last and not self._kept(last, tier) and not self._own_prefix(last, x, keys):
                return last
        return None

    def _idle_slab(self, tier: int, x: Place, keys: NDArray[np.uint8], victim: Block | None) -> int | None:
        """The other group's slab used longest ago, before the victim's segment, that may be emptied."""
        arena = self.arena[tier]
        segment = x.segment if victim is None else victim.segment
        assert segment is not None
        good = []
        for slab, owner in arena.owners().items():
            blocks = [b for slot, b in arena.used.items() if slot >> 16 == slab]
            mine = (b.segment == x.segment or self._own_prefix(b, x, keys) for b in blocks)
            kept = any(mine) or any(self._kept(b, tier) for b in blocks)
            old = arena.last_use[slab] < self.order[segment]
            if owner != x.group and old and not kept and arena.can_empty(slab) and arena.per_slab[x.group]:
                good.append((arena.last_use[slab], slab))
        return min(good)[1] if good else None

    def _could_make_room(self, tier: int, x: Place, keys: NDArray[np.uint8]) -> bool:
        victim = self._victim(tier, x, keys)
        slab = self._idle_slab(tier, x, keys, victim)
        return self.arena[tier].can_promise(x.group) or victim is not None or slab is not None

    def _make_room(self, tier: int, x: Place, keys: NDArray[np.uint8]) -> bool:
        arena = self.arena[tier]
        if not arena.can_promise(x.group):
            victim = self._victim(tier, x, keys)
            slab = self._idle_slab(tier, x, keys, victim)
            if slab is not None:
                for block in [b for slot, b in sorted(arena.used.items()) if slot >> 16 == slab]:
                    self._evict(block, tier, x, keys)
            elif victim is not None:
                self._evict(victim, tier, x, keys)
            if not arena.can_promise(x.group):
                return False
        arena.promised[x.group] += 1
        return True

    def _evict(self, block: Block, tier: int, x: Place, keys: NDArray[np.uint8]) -> None:
        """A full block that no tier holds then takes what lies beyond it along."""
        segment, start = block.segment, block.end - self.multiples[block.group]
        assert segment is not None
        self._lose_slot(block, tier)
        self._settle(block)
        if self.kinds[block.group] != FULL or block.slot != [-1, -1]:
            return
        for group, kind in enumerate(self.kinds):
            for t in (HOST, DISK):
                if kind != FULL:
                    self._drop_beyond(segment, start, (group, t), x, keys)

    def _drop_beyond(
        self, segment: int, start: int, where: tuple[int, int], x: Place, keys: NDArray[np.uint8]
    ) -> None:
        """Of one group, in one tier: from the deepest block up to the first that may not go."""
        group, tier = where
        for block in reversed(self.segments.get(segment, [])[:]):
            if block.group != group or block.slot[tier] < 0:
                continue
            waits = self.spare_unwritten and F.WANT_DISK in block.flags
            if block.end <= start or block.pins or waits or self._own_prefix(block, x, keys):
                return
            self._lose_slot(block, tier)
            self._settle(block)
