"""The live requests of one planner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import xxhash

from kvoffload.index import Index, Matcher
from kvoffload.layout import GroupKind, Layout
from kvoffload.messages import RequestId
from kvoffload.requests import ChainLike, Pages, RequestInfo, RequestState


class LiveRequests(Mapping[RequestId, RequestState]):
    """States by request id, from the first call that names a request until `pop`."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._states: dict[RequestId, RequestState] = {}
        self._index: Index | None = None

    def __getitem__(self, request_id: RequestId) -> RequestState:
        return self._states[request_id]

    def __iter__(self) -> Iterator[RequestId]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)

    def open(self, index: Index) -> None:
        """There is an index from now on: give every request its segment."""
        self._index = index
        for state in self._states.values():
            _bind(state, index, 0.0)

    def get_or_make(self, request: RequestInfo, chain: ChainLike, now: float) -> RequestState:
        state = self._states.get(request.id)
        if state is None:
            state = RequestState(request, 0, None, self.cursors())
            state.prompt = len(chain.keys) * self._layout.base_tokens
            self._states[request.id] = state
            if self._index is not None:
                _bind(state, self._index, now)
        state.chain = chain
        return state

    def pop(self, request_id: RequestId) -> RequestState | None:
        return self._states.pop(request_id, None)

    def cursors(self) -> list[int]:
        """Cursors of a request that has stored nothing."""
        return [0] * len(self._layout.groups)

    def rewind_all(self) -> None:
        """Every request offers from block 0 again."""
        for state in self._states.values():
            state.cursors = self.cursors()


def _bind(state: RequestState, index: Index, now: float) -> None:
    state.segment = index.open_segment(now, stream_of(state.info))
    state.matcher = Matcher(index)


def stream_of(request: RequestInfo) -> int:
    """64 bits that name the agent of the session; 0 = not known."""
    if not request.session:
        return 0
    session, agent = request.session.encode(), request.agent.encode()
    return xxhash.xxh3_64_intdigest(len(session).to_bytes(4, "little") + session + agent) or 1


def restorable(state: RequestState, limit: int) -> int:
    """The longest boundary of the chain as things are now that is not above `limit` tokens, 0 = none."""
    if state.matcher is None or state.chain is None:
        return 0
    longest = state.matcher.update(state.chain.keys, state.computed)[0]
    if longest <= limit:
        return longest
    options = state.matcher.boundaries()
    fitting = int(np.searchsorted(options, limit, side="right"))
    return int(options[fitting - 1]) if fitting else 0


def covered(layout: Layout, span: tuple[int, int], pages: Pages) -> int:
    """Tokens of the span, from its end down, that the pages of all full groups can take."""
    start, limit = span
    for group, mine in zip(layout.groups, pages, strict=True):
        if group.kind is GroupKind.FULL and not group.transient:
            begin, end = group.needs(start, limit)
            rows = mine[begin:end]
            blocks = begin + (len(rows) if not np.count_nonzero(rows < 0) else int(np.argmin(rows >= 0)))
            if blocks < end:
                limit = min(limit, max(start, blocks * group.tokens_per_block))
    return limit


def fork_point(state: RequestState, layout: Layout) -> tuple[int, ...]:
    """The boundary up to which all full groups match although the windows there are gone: others came this far and
    went on differently, so more will come. () where there is none, or the device has it."""
    full = [g for g in layout.groups if g.kind is GroupKind.FULL and not g.transient]
    if state.matcher is None or state.chain is None or not full:
        return ()
    reached = max(state.matcher.update(state.chain.keys, state.computed)[0], state.had)
    furthest = len(state.chain.keys) * layout.base_tokens
    for group in full:
        codes = state.matcher.codes(group.id)
        blocks = len(codes) if codes.all() else int(np.argmin(codes != 0))
        furthest = min(furthest, blocks * group.tokens_per_block)
    furthest = furthest // layout.alignment * layout.alignment
    return (furthest,) if furthest > reached else ()


def newly_produced(state: RequestState, computed: int, base_tokens: int) -> int:
    """Base blocks of [0, computed) that the request computed itself and that no earlier offer showed."""
    if not state.offered:
        state.offered = True
        state.had = max(state.had, state.computed)
    known = state.seen if state.seen > state.had else state.had
    state.seen = max(state.seen, computed)
    return computed // base_tokens - known // base_tokens if computed > known else 0
