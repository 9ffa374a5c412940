"""KV events: what became visible or went away in which tier, for routers that send a prompt where its blocks are.

Events are made after the fact: a block is visible when `Stored` says so. Whoever applies all that an EventStream hands
out, in order, has exactly the keys that are visible in each tier and group after every `take`, but for those that a
Cleared, or the start, has still to list.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvoffload.index import CHANGE_DTYPE, ChangeKind, Code, EntryFlag, Index, IndexTier
from kvoffload.keys import KEY_BYTES
from kvoffload.layout import Layout
from kvoffload.messages import Copies
from kvoffload.requests import ChainLike, RequestState

MEDIA = ("host", "disk")
"""By tier of the index."""

NAMED = 1 << 16
"""Blocks whose parent and tokens are remembered, the latest ones; of others a Stored does not say them."""

LISTED = 4096
"""Most blocks of a listing that one `take` hands out, so that a large index does not stop the engine."""

_EMPTY = np.empty(0, np.uint32)


@dataclass(frozen=True, slots=True)
class Stored:
    """Consecutive blocks of one sequence became visible in a tier.

    medium: "host" or "disk". first: number of keys[0] in its group. parent: the key of the block before it, None for
    block 0 and where it is not known. tokens: those of all blocks, () where they are not known.
    """

    medium: str
    group: int
    first: int
    keys: tuple[bytes, ...]
    parent: bytes | None
    tokens: tuple[int, ...]
    tokens_per_block: int


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks are no longer visible in a tier; one that was not known there is fine."""

    medium: str
    group: int
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Cleared:
    """Forget all blocks of all tiers: what is there follows, as if it were stored now, over several `take`s if need be.

    After a reset, when disk went off or came back, or when more had changed than can be listed.
    """


Event: TypeAlias = Stored | Removed | Cleared


@runtime_checkable
class TokenChain(Protocol):
    """A ChainLike that also knows the tokens: kvoffload.keys.Chain does, and an engine's own may."""

    @property
    def token_ids(self) -> NDArray[np.uint32]:
        """(n,) uint32, the tokens from the start of the sequence; fewer than the keys stand for where unknown."""


def tokens_of(chain: ChainLike) -> NDArray[np.uint32]:
    """The tokens of a chain, as far as it knows them."""
    return chain.token_ids if isinstance(chain, TokenChain) else _EMPTY


@dataclass(frozen=True, slots=True)
class _Name:
    """parent: None for block 0. tokens: little-endian uint32, empty where not known."""

    parent: bytes | None
    tokens: bytes


_UNKNOWN = _Name(None, b"")


class EventStream:
    """What the index changed since the last `take`. Costs nothing between calls: the index keeps its changes anyway.

    What is there when it is made is listed first. Thread: the planner's.
    """

    def __init__(self, layout: Layout, index: Index, listed: int = LISTED) -> None:
        self._index = index
        self._listed = listed
        self._stamp = index.changes(0)[0]
        self._multiples = layout.multiples
        self._sizes = tuple(g.tokens_per_block for g in layout.groups)
        self._spans = tuple(g.needs for g in layout.groups)
        self._names: OrderedDict[tuple[int, bytes], _Name] = OrderedDict()
        self._listing = _visible(index, disk_on=True)
        self._changed: set[tuple[int, int, bytes]] = set()

    @property
    def listing(self) -> bool:
        """Whether more of what was there at the start, or at the last Cleared, is to follow."""
        return len(self._listing) > 0

    # ---- who a block is ----

    def name_copies(self, chain: ChainLike, copies: Copies) -> None:
        """These blocks of the chain may become visible."""
        for group in np.unique(copies["group"]).tolist():
            self._name(chain, group, copies["depth"][copies["group"] == group])

    def name_load(self, state: RequestState, boundary: int) -> None:
        """Blocks that a load up to `boundary` will bring into host. REQUIRES: the request's matcher is up to date, and
        the load has not changed it yet."""
        if state.matcher is None or state.chain is None:
            return
        for group, needs in enumerate(self._spans):
            begin, end = needs(state.computed, boundary)
            codes = state.matcher.codes(group)[begin:end]
            self._name(state.chain, group, begin + np.flatnonzero((codes & int(Code.HOST)) == 0))

    def _name(self, chain: ChainLike, group: int, blocks: NDArray[Any]) -> None:
        size = self._sizes[group]
        keys = chain.keys[self._multiples[group] - 1 :: self._multiples[group]]
        tokens = tokens_of(chain)
        for block in blocks.tolist():
            key = (group, keys[block].tobytes())
            mine = tokens[block * size : (block + 1) * size]
            known = self._names.pop(key, None)
            data = mine.astype("<u4").tobytes() if len(mine) == size else known.tokens if known else b""
            self._names[key] = _Name(keys[block - 1].tobytes() if block else None, data)
        while len(self._names) > NAMED:
            self._names.popitem(last=False)

    # ---- what happened ----

    def take(self, disk_on: bool) -> list[Event]:
        """All events since the last call. disk_on: whether the disk tier is in use."""
        out: list[Event] = []
        self._stamp, changes = self._index.changes(self._stamp)
        if changes is None:
            out.append(Cleared())
            self._listing, self._changed = _visible(self._index, disk_on), set()
        else:
            told = changes["kind"] == ChangeKind.REMOVED
            for tier, code in ((IndexTier.HOST, Code.HOST), (IndexTier.DISK, Code.DISK)):
                stored = (changes["kind"] == ChangeKind.STORED) & (changes["tier"] == tier)
                told |= stored & ((changes["code"] & int(code)) != 0)
            changes = changes[told]
            if len(self._listing):
                self._changed.update(_ids(changes))
            out += self._events(changes)
        if len(self._listing):
            rows, self._listing = self._listing[: self._listed], self._listing[self._listed :]
            unchanged = [name not in self._changed for name in _ids(rows)]
            out += self._events(rows[np.array(unchanged, np.bool_)])
        return out

    def _events(self, rows: NDArray[np.void]) -> list[Event]:
        """Rows of CHANGE_DTYPE as events, neighbours that belong together as one."""
        out: list[Event] = []
        # Between tiers and groups order means nothing; in each of them it stays.
        rows = rows[np.argsort(rows["tier"].astype(np.int16) * 256 + rows["group"], kind="stable")]
        kinds, depths, ids = rows["kind"].tolist(), rows["depth"].tolist(), _ids(rows)
        begin = 0
        for end in range(1, len(ids) + 1):
            if (
                end < len(ids)
                and kinds[end] == kinds[begin]
                and self._follows(kinds[end], ids[end - 1 : end + 1])
            ):
                continue
            out.append(self._event(kinds[begin], depths[begin], ids[begin:end]))
            begin = end
        return out

    def _follows(self, kind: int, pair: list[tuple[int, int, bytes]]) -> bool:
        """Whether the second belongs into the event that the first is the last of."""
        before, after = pair
        if before[:2] != after[:2] or kind == ChangeKind.REMOVED:
            return before[:2] == after[:2]
        first, second = self._names.get(before[1:], _UNKNOWN), self._names.get(after[1:], _UNKNOWN)
        return second.parent == before[2] and bool(first.tokens) == bool(second.tokens)

    def _event(self, kind: int, first: int, ids: list[tuple[int, int, bytes]]) -> Event:
        tier, group, _ = ids[0]
        keys = tuple(key for _, _, key in ids)
        if kind == ChangeKind.REMOVED:
            return Removed(MEDIA[tier], group, keys)
        names = [self._names.get((group, key), _UNKNOWN) for key in keys]
        tokens = np.frombuffer(b"".join(name.tokens for name in names), "<u4")
        return Stored(
            medium=MEDIA[tier],
            group=group,
            first=first,
            keys=keys,
            parent=names[0].parent,
            tokens=tuple(tokens.tolist()),
            tokens_per_block=self._sizes[group],
        )


def _ids(rows: NDArray[np.void]) -> list[tuple[int, int, bytes]]:
    """(tier, group, key) of every row."""
    data = rows["key"].tobytes()
    keys = (data[at : at + KEY_BYTES] for at in range(0, len(data), KEY_BYTES))
    return list(zip(rows["tier"].tolist(), rows["group"].tolist(), keys, strict=True))


def _visible(index: Index, disk_on: bool) -> NDArray[np.void]:
    """Everything that is visible now, as stored: by tier, of each segment the head first."""
    entries = index.entries()[::-1]
    parts = []
    for tier, flag in ((IndexTier.HOST, EntryFlag.HOST_VALID), (IndexTier.DISK, EntryFlag.DISK_VALID)):
        there = entries[(entries["flags"] & int(flag)) != 0]
        if tier is IndexTier.DISK and not disk_on:
            there = there[:0]
        rows = np.zeros(len(there), CHANGE_DTYPE)
        for field in ("key", "depth", "group"):
            rows[field] = there[field]
        rows["kind"], rows["tier"] = ChangeKind.STORED, tier
        parts.append(rows)
    return np.concatenate(parts)
