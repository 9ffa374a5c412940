"""Which blocks of windows and states are worth storing. Pure: numbers in, spans out.

A sequence can be resumed at a boundary where its windows and snapshots are at hand, so what is stored of them are the
tails before boundaries: of a window the blocks that its lookback reaches, of a state the snapshot. Full groups are
kept whole and do not concern this module.

- `boundaries`: the tails at the end of the prompt, at fork points, and at the end of the turn. While the answer grows
  nobody knows where it will end, so its blocks are all stored, and pruned to the last boundary's tail at the end.
- `every N`: the tails at multiples of N tokens, rounded up to the layout's alignment.
- `dense`: everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvoffload.layout import CacheGroup, GroupKind, Layout

Span = tuple[int, int]
"""Blocks [begin, end) of one group."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What is known of a request, in tokens: the end of its prompt, and fork points below that."""

    prompt: int
    forks: tuple[int, ...] = ()


class Retention:
    """The rule of one layout. Spans are by group; those of full and transient groups are never cut."""

    def __init__(self, layout: Layout, rule: str) -> None:
        """rule: as Config.retention."""
        self._groups = layout.groups
        self._step = layout.alignment
        self._partial = tuple(g.kind is not GroupKind.FULL and not g.transient for g in layout.groups)
        name, _, number = rule.partition(" ")
        self._every = -(-int(number) // self._step) * self._step if name == "every" else 0
        self.selects = name != "dense" and any(self._partial)
        """Whether anything is ever left out."""
        self.by_boundary = name == "boundaries" and self.selects

    def align(self, tokens: int) -> int:
        """The last possible boundary at or below `tokens`."""
        return tokens // self._step * self._step

    def tail(self, boundary: int) -> list[Span]:
        """By group, the blocks of windows and states that are needed to resume at a boundary; none of full groups."""
        return [
            g.needs(0, boundary) if partial else (0, 0)
            for g, partial in zip(self._groups, self._partial, strict=True)
        ]

    def first(self, group: int, cursor: int, bounds: Bounds) -> int:
        """The first block from the cursor on that is kept; blocks before it are not even looked at."""
        if not (self.by_boundary and self._partial[group]):
            return cursor
        begins = [b for b, e in self._kept(group, bounds) if e > cursor]
        return max(cursor, min([self._answer(group, bounds), *begins]))

    def mask(self, group: int, span: Span, bounds: Bounds) -> NDArray[np.bool_] | None:
        """Which blocks of the span are kept while the request runs; None = all."""
        begin, end = span
        if begin >= end or not (self.selects and self._partial[group]):
            return None
        if self._every:
            kept = self._periodic(self._groups[group], begin, end)
        else:
            if begin >= self._answer(group, bounds):
                return None
            kept = np.zeros(end - begin, np.bool_)
            for first, last in [*self._kept(group, bounds), (self._answer(group, bounds), end)]:
                kept[max(first - begin, 0) : max(last - begin, 0)] = True
        return None if kept.all() else kept

    def superfluous(self, group: int, cursor: int, seen: int, bounds: Bounds) -> list[Span]:
        """At the end of a request that offered `seen` tokens: the stored blocks that no kept boundary needs."""
        if not (self.selects and self._partial[group]):
            return []
        if self._every:
            last = seen // self._every * self._every
            return _nonempty([(last // self._groups[group].tokens_per_block, cursor)])
        answer = self._answer(group, bounds)
        begin, end = self._groups[group].needs(0, max(self.align(seen), self.align(bounds.prompt)))
        return _nonempty([(answer, min(begin, cursor)), (max(end, answer), cursor)])

    def _answer(self, group: int, bounds: Bounds) -> int:
        """The first block that ends beyond the boundary at the end of the prompt: from here on all is stored."""
        return self.align(bounds.prompt) // self._groups[group].tokens_per_block

    def _kept(self, group: int, bounds: Bounds) -> Iterable[Span]:
        return [self._groups[group].needs(0, self.align(b)) for b in (*bounds.forks, bounds.prompt)]

    def _periodic(self, group: CacheGroup, begin: int, end: int) -> NDArray[np.bool_]:
        """Blocks that the next multiple at or after their end needs."""
        ends = (np.arange(begin, end, dtype=np.int64) + 1) * group.tokens_per_block
        boundaries = -(-ends // self._every) * self._every
        if group.kind is GroupKind.STATE:
            return np.equal(ends, boundaries)
        return np.greater(ends, np.maximum(boundaries - group.lookback, 0))


def _nonempty(spans: Iterable[Span]) -> list[Span]:
    return [(begin, end) for begin, end in spans if begin < end]


def last_boundary(layout: Layout, span: Span, begins: Sequence[int], good: Sequence[int]) -> int:
    """The last boundary of tokens (start, boundary] that a load which stopped short still makes restorable, else start.

    By group the blocks [begins, good) arrived of those that resuming at the boundary takes; [0, start) was there, with
    the windows and states that resuming at start takes.
    """
    start, boundary = span
    stored = [g for g in layout.groups if not g.transient]
    reached = min(
        boundary, *(good[g.id] * g.tokens_per_block for g in stored if g.kind is not GroupKind.STATE)
    )
    if any(good[g.id] < g.needs(start, boundary)[1] for g in stored if g.kind is GroupKind.STATE):
        reached = min(reached, boundary - 1)
    reached = reached // layout.alignment * layout.alignment
    # What an earlier boundary needs below the blocks that were loaded is there only where these begin at start.
    whole = reached == boundary or all(g.needs(start, reached)[0] >= begins[g.id] for g in stored)
    return reached if whole and reached > start else start
