"""Retention at work: which blocks an offer shows to the index, and what a request that ends leaves behind."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kvoffload.index import Index
from kvoffload.keys import KeyArray
from kvoffload.layout import Layout
from kvoffload.requests import Pages, RequestState
from kvoffload.retention import Bounds, Retention, Span
from kvoffload.stats import Counters

MAX_SESSIONS = 16_384
"""Sessions whose last boundaries are remembered; a forgotten one's tails merely age as all blocks do."""


@dataclass(frozen=True, slots=True)
class _Left:
    """The boundaries that a session's last turn left: tokens, and the last key below each."""

    boundaries: tuple[tuple[int, bytes], ...]


class Tails:
    """The rule of retention over one index. Thread: that of the index."""

    def __init__(self, layout: Layout, index: Index, counters: Counters, rule: str) -> None:
        self._rule = Retention(layout, rule)
        self._base = layout.base_tokens
        self._groups = range(len(layout.groups))
        self._index = index
        self._counters = counters
        self._sessions: OrderedDict[str, _Left] = OrderedDict()
        self.by_boundary = self._rule.by_boundary

    def chosen(self, state: RequestState, ends: list[int], pages: Pages) -> tuple[list[int], Pages]:
        """By group where the offer begins, and the pages of the blocks that are kept."""
        if not self._rule.selects:
            return state.cursors, pages
        bounds = Bounds(state.prompt, state.forks)
        begins, shown = [], []
        for group in self._groups:
            end, mine = ends[group], pages[group]
            begin = min(self._rule.first(group, state.cursors[group], bounds), max(end, state.cursors[group]))
            mask = self._rule.mask(group, (begin, min(end, len(mine))), bounds)
            if mask is not None:
                mine = mine[:end].copy()
                mine[begin : begin + len(mask)][~mask] = -1
            begins.append(begin)
            shown.append(mine)
        return begins, shown

    def finish(self, state: RequestState) -> None:
        """Give up what the request stored and no boundary needs; let the session's earlier tails go first.

        REQUIRES: the request's segment is open.
        """
        if not self._rule.selects or state.chain is None:
            return
        keys, bounds = state.chain.keys, Bounds(state.prompt, state.forks)
        extra = [
            self._rule.superfluous(g, state.cursors[g], min(state.seen, len(keys) * self._base), bounds)
            for g in self._groups
        ]
        for spans in _rounds(extra):
            self._counters.add("pruned", self._index.retire(state.segment, keys, *_columns(spans)))
        if state.info.session and self.by_boundary:
            self._supersede(state, keys, bounds)

    def _supersede(self, state: RequestState, keys: KeyArray, bounds: Bounds) -> None:
        """The boundaries of the session's turn before this one, where this one went beyond them."""
        ends = {self._rule.align(t) for t in (state.prompt, min(state.seen, len(keys) * self._base))}
        now = sorted(end for end in ends if end)
        before = self._sessions.pop(state.info.session, None)
        for boundary, key in before.boundaries if before else ():
            if boundary in now or boundary in bounds.forks or not now or boundary > now[-1]:
                continue
            if keys[boundary // self._base - 1].tobytes() != key:
                continue
            spans = self._rule.tail(boundary)
            for kept in (*now, *bounds.forks):
                spans = [_without(a, b) for a, b in zip(spans, self._rule.tail(kept), strict=True)]
            count = self._index.supersede(state.segment, keys, *_columns(spans))
            self._counters.add("superseded", count)
        last = tuple((end, keys[end // self._base - 1].tobytes()) for end in now)
        self._sessions[state.info.session] = _Left(last)
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)


def _columns(spans: list[Span]) -> tuple[list[int], list[int]]:
    """Begins and ends."""
    return [begin for begin, _ in spans], [end for _, end in spans]


def _rounds(spans: list[list[Span]]) -> list[list[Span]]:
    """By call, one span per group: the index takes one of each."""
    count = max(len(mine) for mine in spans)
    return [[mine[i] if i < len(mine) else (0, 0) for mine in spans] for i in range(count)]


def _without(span: Span, kept: Span) -> Span:
    """What of a span another does not cover. REQUIRES: neither lies inside the other with room on both sides."""
    begin, end = span
    if kept[0] < end and begin < kept[1]:
        return (begin, min(end, kept[0])) if begin < kept[0] else (kept[1], max(end, kept[1]))
    return span
