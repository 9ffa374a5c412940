"""A brute-force tail-first LRU: what any number of inclusive tiers must answer, block by block.

Written from the replay rule alone (docs/replay.md) and from nothing of the index: one ordered dict per tier.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass


class TailFirstLRU:
    """The newest `capacity` blocks of one tier; None = no limit. A request touches its blocks last first."""

    def __init__(self, capacity: int | None) -> None:
        self._capacity = capacity
        self._order: OrderedDict[Hashable, None] = OrderedDict()

    def __contains__(self, block: Hashable) -> bool:
        return block in self._order

    def __len__(self) -> int:
        return len(self._order)

    def touch(self, blocks: Sequence[Hashable]) -> int:
        """Touch a whole request, evict afterwards until the capacity holds; the number of blocks not held
        before."""
        order = self._order
        before = len(order)
        for block in reversed(blocks):
            order[block] = None
            order.move_to_end(block)
        inserted = len(order) - before
        if self._capacity is not None:
            for _ in range(len(order) - self._capacity):
                order.popitem(last=False)
        return inserted


@dataclass(frozen=True, slots=True)
class OracleResult:
    """Blocks. hits[t]: served by tier t; produced: computed; inserted[t]: not held by tier t when touched."""

    requests: int
    total: int
    distinct: int
    hits: tuple[int, ...]
    produced: int
    inserted: tuple[int, ...]


def simulate(requests: Iterable[Sequence[Hashable]], capacities: Sequence[int | None]) -> OracleResult:
    """Replay block ids in order over inclusive tiers, the nearest first.

    A hit is the leading run of blocks that some tier holds, each served by the nearest one; then every tier
    sees every block of the request.
    """
    tiers = [TailFirstLRU(c) for c in capacities]
    hits = [0] * len(tiers)
    inserted = [0] * len(tiers)
    seen: set[Hashable] = set()
    count = total = 0
    for blocks in requests:
        count += 1
        total += len(blocks)
        seen.update(blocks)
        for block in blocks:
            tier = next((t for t, held in enumerate(tiers) if block in held), None)
            if tier is None:
                break
            hits[tier] += 1
        for t, held in enumerate(tiers):
            inserted[t] += held.touch(blocks)
    return OracleResult(count, total, len(seen), tuple(hits), total - sum(hits), tuple(inserted))


def victim_hits(requests: Iterable[Sequence[Hashable]], first: int, second: int) -> int:
    """Blocks that two tiers hit where the second holds only what the first has given up.

    A block found in the second one leaves it for the first. Each request's blocks are touched last first, then the
    first tier gives up what is too much, oldest first, and after it the second.
    """
    upper: OrderedDict[Hashable, None] = OrderedDict()
    lower: OrderedDict[Hashable, None] = OrderedDict()
    hits = 0
    for blocks in requests:
        hits += next((i for i, b in enumerate(blocks) if b not in upper and b not in lower), len(blocks))
        for block in reversed(blocks):
            lower.pop(block, None)
            upper[block] = None
            upper.move_to_end(block)
        for _ in range(len(upper) - first):
            lower[upper.popitem(last=False)[0]] = None
        for _ in range(len(lower) - second):
            lower.popitem(last=False)
    return hits
