"""What tests of hybrid layouts and several ranks share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvoffload.layout import CacheGroup, GroupKind, Layout
from kvoffload.local import Local
from kvoffload.messages import Copies
from kvoffload.requests import RequestInfo
from kvoffload.testing.faults import ALL_OPS, Fault, Op
from kvoffload.testing.paint import paint, verify
from kvoffload.testing.pool import PageMemory
from kvoffload.testing.rig import Keys


def group(number: int, kind: GroupKind, tokens: int, size: int = 4096, **more: object) -> CacheGroup:
    return CacheGroup(number, kind, tokens, size, layers=("a", "b"), **more)  # type: ignore[arg-type]


class FailingBlocks(Fault):
    """Copies of these (group, depth) fail, and every copy is written down."""

    def __init__(self, *blocks: tuple[int, int], ops: Sequence[Op] = tuple(ALL_OPS)) -> None:
        self.blocks, self.ops = set(blocks), ops
        self.seen: dict[Op, list[tuple[int, int]]] = {op: [] for op in Op}

    def begin(self, op: Op, copies: Copies) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        names = list(zip(copies["group"].tolist(), copies["depth"].tolist(), strict=True))
        self.seen[op] += names
        return np.array([op in self.ops and name in self.blocks for name in names], np.bool_)


def mapped(local: Local) -> int:
    """Bytes of host memory, one piece counted once."""
    return sum({id(m.arena): m.arena.nbytes for m in local.movers}.values())  # type: ignore[attr-defined]


def page_numbers(layout: Layout, chain: Keys) -> list[NDArray[np.int32]]:
    """Pages 0, 1, 2, ... for the blocks of each group."""
    return [np.arange(chain.blocks // m, dtype=np.int32) for m in layout.multiples]


def compute(memories: Sequence[PageMemory], layouts: Sequence[Layout], chain: Keys) -> None:
    """Every rank has the chain's bytes in its pages."""
    for memory, layout in zip(memories, layouts, strict=True):
        for number, multiple in enumerate(layout.multiples):
            paint(memory, number, page_numbers(layout, chain)[number], chain.keys[multiple - 1 :: multiple])


def wipe(memories: Sequence[PageMemory]) -> None:
    """Device pages hold nothing."""
    for memory in memories:
        for arrays in memory.arrays:
            for array in arrays:
                array[:] = 0


def wrong_pages(memories: Sequence[PageMemory], layouts: Sequence[Layout], chain: Keys) -> int:
    """Pages with wrong bytes, of those that resuming at the chain's end takes, over all ranks."""
    wrong, tokens = 0, chain.blocks * layouts[0].base_tokens
    for memory, layout in zip(memories, layouts, strict=True):
        for number, multiple in enumerate(layout.multiples):
            rows = slice(*layout.groups[number].needs(0, tokens))
            keys = chain.keys[multiple - 1 :: multiple][rows]
            wrong += len(verify(memory, number, page_numbers(layout, chain)[number][rows], keys))
    return wrong


def store(local: Local, memories: Sequence[PageMemory], layouts: Sequence[Layout], chain: Keys) -> None:
    """A request that computes the chain and ends."""
    compute(memories, layouts, chain)
    tokens, pages = chain.blocks * layouts[0].base_tokens, page_numbers(layouts[0], chain)
    offer = local.planner.offer(RequestInfo("a"), chain, tokens, pages)
    for _ in range(1000):
        local.drain()
        if not offer.blocked:
            break
        offer = local.planner.offer(RequestInfo("a"), chain, tokens, pages)
    local.drain()
    local.planner.finish("a", "end_turn", 0.0)


def fetch(local: Local, memories: Sequence[PageMemory], layouts: Sequence[Layout], chain: Keys) -> int:
    """A request that loads the chain into wiped pages; the pages with wrong bytes."""
    wipe(memories)
    found = local.planner.match(RequestInfo("b"), chain)
    local.planner.load(RequestInfo("b"), chain, found.boundary, page_numbers(layouts[0], chain))
    assert [f.boundary for f in local.drain()] == [chain.blocks * layouts[0].base_tokens]
    local.planner.finish("b", "end_turn", 0.0)
    return wrong_pages(memories, layouts, chain)
