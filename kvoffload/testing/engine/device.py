"""The device of the reference engine: by group a pool of pages with a prefix cache, on every rank their bytes.

To compute a block is to paint its page with the bytes its key stands for; to attend to it is to compare them. All
groups are of kind full.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from kvoffload.errors import ConfigError
from kvoffload.layout import GroupKind, Layout
from kvoffload.requests import Pages
from kvoffload.testing.engine.sequence import Sequence
from kvoffload.testing.paint import paint, verify
from kvoffload.testing.pool import PageMemory, PagePool

SAMPLES = 5
"""Wrong blocks that are described; all are counted."""


class Device:
    """Pages and block tables. `memories`: one per rank, or none to count only. Thread: one."""

    def __init__(
        self, layout: Layout, pages: Seq[int], memories: Seq[PageMemory] = (), *, cached: bool = True
    ) -> None:
        if any(g.kind is not GroupKind.FULL for g in layout.groups):
            raise ConfigError("the reference engine has full groups only; give it a layout of these")
        self.layout = layout
        self.pools = [PagePool(count, cached=cached) for count in pages]
        self.memories = memories
        self.mismatches = 0
        self.samples: list[str] = []

    @property
    def free(self) -> int:
        """Pages that nobody holds, all groups."""
        return sum(pool.free for pool in self.pools)

    def fits(self, tokens: int) -> bool:
        """Whether a sequence of so many tokens can be here at all."""
        return all(need <= pool.pages for need, pool in zip(self._needs(tokens), self.pools, strict=True))

    def match(self, seq: Sequence) -> tuple[Pages, int]:
        """(pages by group, tokens) of the prefix that the caches hold; one token at least is left over."""
        stamp = sum(pool.stamp for pool in self.pools)
        if seq.seen is not None and seq.seen[0] == stamp:
            return seq.seen[1]
        step = self.layout.alignment
        limit = (seq.tokens - 1) // step * step
        found = []
        for pool, multiple in zip(self.pools, self.layout.multiples, strict=True):
            keys = seq.chain.keys[: limit // self.layout.base_tokens][multiple - 1 :: multiple]
            found.append(pool.match(keys))
            limit = min(limit, len(found[-1]) * multiple * self.layout.base_tokens)
        limit = limit // step * step
        pages = [p[:n] for p, n in zip(found, self._needs(limit), strict=True)]
        seq.seen = (stamp, (pages, limit))
        return seq.seen[1]

    def admit(self, seq: Sequence, hits: Pages) -> bool:
        """Pages for all confirmed tokens, the first ones `hits`; False, with nothing taken, where they are short."""
        tables: list[NDArray[np.int32]] = []
        for pool, need, mine in zip(self.pools, self._needs(seq.tokens), hits, strict=True):
            fresh = pool.allocate(need - len(mine), mine)
            if fresh is None:
                for other, taken in zip(self.pools, tables, strict=False):
                    other.release(taken)
                return False
            tables.append(np.concatenate((mine, fresh)))
        seq.table = tables
        return True

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
            pool.release(pages)

    def compute(self, seq: Sequence, end: int) -> None:
        """The forward made tokens [seq.computed, end): paint the blocks that they complete, and let them be found."""
        self.paint(seq, seq.computed, end)
        self.publish(seq, seq.computed, end)

    def paint(self, seq: Sequence, begin: int, end: int) -> None:
        """Write the right bytes of the blocks that tokens [begin, end) complete."""
        self._blocks(seq, begin, end, painting=True)

    def publish(self, seq: Sequence, begin: int, end: int) -> None:
        """Let the caches find the blocks that tokens [begin, end) complete."""
        for group, (pool, multiple) in enumerate(zip(self.pools, self.layout.multiples, strict=True)):
            first, last = self._span(seq, group, begin, end)
            if first < last:
                pool.publish(
                    seq.table[group][first:last], seq.chain.keys[multiple - 1 :: multiple][first:last]
                )

    def attend(self, seq: Sequence, begin: int, end: int, where: str) -> None:
        """Compare the blocks that tokens [begin, end) complete with what their keys stand for."""
        self._blocks(seq, begin, end, painting=False, where=where)

    def forget(self) -> None:
        """Empty the prefix caches."""
        for pool in self.pools:
            pool.forget()

    def check_integrity(self) -> None:
        """Raises RuntimeError naming the first invariant of a pool that does not hold."""
        for pool in self.pools:
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
            if first == last:
                continue
            keys, pages = (
                seq.chain.keys[multiple - 1 :: multiple][first:last],
                seq.table[group][first:last],
            )
            for memory in self.memories:
                if painting:
                    paint(memory, group, pages, keys)
                    continue
                for position in verify(memory, group, pages, keys).tolist():
                    self._wrong(f"request {seq.info.id} group {group} block {first + position} {where}")

    def _wrong(self, text: str) -> None:
        self.mismatches += 1
        if len(self.samples) < SAMPLES:
            self.samples.append(text)
