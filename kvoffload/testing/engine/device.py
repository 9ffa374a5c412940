"""The device of the reference engine: by group a pool of pages with a prefix cache, on every rank their bytes.

To compute a block is to paint its page with the bytes its key stands for; to attend to it is to compare them. A group
of windows or states has pages only where the sequence still needs them; the others are -1 in its table.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from kvoffload.layout import GroupKind, Layout
from kvoffload.requests import Pages
from kvoffload.testing.engine.sequence import Sequence
from kvoffload.testing.paint import paint, verify
from kvoffload.testing.pool import PageMemory, PagePool

SAMPLES = 5
"""Wrong blocks that are described; all are counted."""


class Device:
    """Pages and block tables. `memories`: one per rank, or none to count only. Thread: one.

    shared: one pool of pages[0] pages under all groups, where a page belongs to one group at a time; else one per
    group.
    """

    def __init__(
        self,
        layout: Layout,
        pages: Seq[int],
        memories: Seq[PageMemory] = (),
        *,
        cached: bool = True,
        shared: bool = False,
    ) -> None:
        self.layout = layout
        self._shared = shared
        self.windows = any(g.kind is not GroupKind.FULL for g in layout.groups)
        """Whether some group gives pages back before the request ends."""
        if shared:
            self.pools = [PagePool(pages[0], cached=cached)] * len(layout.groups)
        else:
            self.pools = [PagePool(count, cached=cached) for count in pages]
        self._distinct = self.pools[:1] if shared else self.pools
        self.memories = memories
        self.mismatches = 0
        self.samples: list[str] = []

    @property
    def free(self) -> int:
        """Pages that nobody holds, all groups."""
        return sum(pool.free for pool in self._distinct)

    def fits(self, tokens: int) -> bool:
        """Whether a sequence of so many tokens can be here at all."""
        needs = self._needs(tokens)
        if self._shared:
            return sum(needs) <= self.pools[0].pages
        return all(need <= pool.pages for need, pool in zip(needs, self.pools, strict=True))

    def match(self, seq: Sequence) -> tuple[Pages, int]:
        """(pages by group, tokens) of what the caches hold to resume from; one token at least is left over."""
        stamp = sum(pool.stamp for pool in self._distinct)
        if seq.seen is not None and seq.seen[0] == stamp:
            return seq.seen[1]
        step = self.layout.alignment
        limit = (seq.tokens - 1) // step * step
        limit = min(limit, len(seq.chain.keys) * self.layout.base_tokens // step * step)
        found: list[NDArray[np.int32]] = []
        for group in self.layout.groups:
            keys = self._keys(seq, group.id)[: limit // group.tokens_per_block]
            if group.kind is GroupKind.FULL:
                found.append(self.pools[group.id].match(keys))
                limit = min(limit, len(found[-1]) * group.tokens_per_block)
            else:
                found.append(self.pools[group.id].lookup(keys))
        limit = self._resumable(found, limit // step * step)
        pages = []
        for group, mine in zip(self.layout.groups, found, strict=True):
            first, end = group.needs(0, limit)
            held = mine[:end].copy()
            held[: first if group.kind is not GroupKind.FULL else 0] = -1
            pages.append(held)
        seq.seen = (stamp, (pages, limit))
        return seq.seen[1]

    def _resumable(self, found: Seq[NDArray[np.int32]], limit: int) -> int:
        """The last boundary up to `limit` whose windows and states are all there."""
        step = self.layout.alignment
        for boundary in range(limit, 0, -step):
            spans = [(g, *g.needs(0, boundary)) for g in self.layout.groups if g.kind is not GroupKind.FULL]
            if all((found[g.id][first:end] >= 0).all() for g, first, end in spans):
                return boundary
        return 0

    def admit(self, seq: Sequence, hits: Pages, start: int = 0) -> bool:
        """Pages for all confirmed tokens, the first ones `hits`; False, with nothing taken, where they are short.

        start: tokens that will be there when it first computes; what no token from there on needs gets no page.
        """
        kept: list[NDArray[np.int32]] = []
        for group, mine in zip(self.layout.groups, hits, strict=True):
            first = 0 if group.kind is GroupKind.FULL else group.needs(0, start)[0]
            row = np.concatenate((mine, np.full(max(0, first - len(mine)), -1, np.int32)))
            row[:first] = -1
            self.pools[group.id].allocate(0, row[row >= 0])
            kept.append(row)
        tables: list[NDArray[np.int32]] = []
        for pool, need, row in zip(self.pools, self._needs(seq.tokens), kept, strict=True):
            fresh = pool.allocate(max(0, need - len(row)))
            if fresh is None:
                self.release(kept)
                for other, mine, held in zip(self.pools, tables, kept, strict=False):
                    other.release(mine[len(held) :])
                return False
            tables.append(np.concatenate((row, fresh)))
        seq.table = tables
        return True

    def slide(self, seq: Sequence) -> None:
        """Give back the pages of windows and states that no further token of the sequence needs."""
        if not self.windows:
            return
        tables = list(seq.table)
        for group in self.layout.groups:
            if group.kind is GroupKind.FULL:
                continue
            first, _ = group.needs(0, seq.computed)
            gone = tables[group.id][:first]
            if (gone >= 0).any():
                # A new array: a job may still look at the old one.
                tables[group.id] = tables[group.id].copy()
                tables[group.id][:first] = -1
                self.pools[group.id].release(gone[gone >= 0])
        seq.table = tables

    def grow(self, seq: Sequence, tokens: int) -> bool:
        """Pages for so many tokens; False where some group is short of them (others may have grown)."""
        tables = list(seq.table)
        for group, (pool, need) in enumerate(zip(self.pools, self._needs(tokens), strict=True)):
            missing = need - len(tables[group])
            if missing > 0:
                fresh = pool.allocate(missing)
                if fresh is None:
                    return False
                # A new array: a running load may still read the old one.
                tables[group] = np.concatenate((tables[group], fresh))
                seq.table = tables[:]
        return True

    def covers(self, seq: Sequence) -> bool:
        """Whether the sequence has pages for all its confirmed tokens, and for the rest of the last block."""
        return all(len(t) >= n for t, n in zip(seq.table, self._needs(seq.tokens), strict=True))

    def release(self, table: Pages) -> None:
        """Give the pages of a sequence back."""
        for pool, pages in zip(self.pools, table, strict=False):
            pool.release(pages[pages >= 0])

    def compute(self, seq: Sequence, end: int) -> None:
        """The forward made tokens [seq.computed, end): paint the blocks that they complete, and let them be found."""
        self.paint(seq, seq.computed, end)
        self.publish(seq, seq.computed, end)

    def paint(self, seq: Sequence, begin: int, end: int) -> None:
        """Write the right bytes of the blocks that tokens [begin, end) complete."""
        self._blocks(seq, begin, end, painting=True)

    def publish(self, seq: Sequence, begin: int, end: int) -> None:
        """Let the caches find the blocks that tokens [begin, end) complete."""
        for group, pool in enumerate(self.pools):
            first, last = self._span(seq, group, begin, end)
            pages = seq.table[group][first:last]
            if first < last:
                pool.publish(pages[pages >= 0], self._keys(seq, group)[first:last][pages >= 0])

    def attend(self, seq: Sequence, begin: int, end: int, where: str) -> None:
        """Compare the blocks that tokens [begin, end) complete with what their keys stand for; of windows and states
        those that the token at `end` needs."""
        self._blocks(seq, begin, end, painting=False, where=where)

    def forget(self) -> None:
        """Empty the prefix caches."""
        for pool in self._distinct:
            pool.forget()

    def check_integrity(self) -> None:
        """Raises RuntimeError naming the first invariant of a pool that does not hold."""
        for pool in self._distinct:
            pool.check_integrity()

    def _needs(self, tokens: int) -> list[int]:
        return [-(-tokens // group.tokens_per_block) for group in self.layout.groups]

    def _span(self, seq: Sequence, group: int, begin: int, end: int) -> tuple[int, int]:
        """Blocks of the group that tokens [begin, end) complete and that have a key."""
        size, multiple = self.layout.groups[group].tokens_per_block, self.layout.multiples[group]
        known = len(seq.chain.keys) // multiple
        return min(begin // size, known), min(end // size, known)

    def _blocks(self, seq: Sequence, begin: int, end: int, *, painting: bool, where: str = "") -> None:
        if not self.memories:
            return
        for group, multiple in enumerate(self.layout.multiples):
            first, last = self._span(seq, group, begin, end)
            if not painting and self.layout.groups[group].kind is not GroupKind.FULL:
                first = self.layout.groups[group].needs(0, end)[0]
            pages = seq.table[group][first:last]
            if not len(pages):
                continue
            held = pages >= 0
            keys = seq.chain.keys[multiple - 1 :: multiple][first:last][held]
            for position in np.flatnonzero(~held).tolist() if not painting else ():
                self._wrong(f"request {seq.info.id} group {group} block {first + position} {where}: no page")
            for memory in self.memories:
                if painting:
                    paint(memory, group, pages[held], keys)
                    continue
                for position in verify(memory, group, pages[held], keys).tolist():
                    self._wrong(f"request {seq.info.id} group {group} block {first + position} {where}")

    def _keys(self, seq: Sequence, group: int) -> NDArray[np.uint8]:
        """By block of the group the key under which its page is found: in a shared pool each group has its own."""
        keys = seq.chain.keys[self.layout.multiples[group] - 1 :: self.layout.multiples[group]]
        if self._shared and group:
            keys = keys.copy()
            keys[:, 0] ^= group
        return keys

    def _wrong(self, text: str) -> None:
        self.mismatches += 1
        if len(self.samples) < SAMPLES:
            self.samples.append(text)
