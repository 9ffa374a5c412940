"""What a block is: groups of layers, their sizes, and how slots lie in slabs.

A slot is named by one int32, `slab << 16 | index`, scoped to its group. Its byte offset in a tier is
`slab * slab_bytes + index * slot_bytes[group]`, so each rank can place a slot without knowing the others;
all ranks use the same slot numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvoffload.errors import LayoutError

SLOT_ALIGN = 4096
"""Bytes. Every slot starts and ends on this border, in memory and on disk (O_DIRECT)."""

SLOT_INDEX_BITS = 16
MAX_SLOTS_PER_SLAB = 1 << SLOT_INDEX_BITS
MAX_SLABS = 1 << (31 - SLOT_INDEX_BITS)
MIN_SLOTS_PER_SLAB = 8
DEFAULT_SLAB_BYTES = 32 << 20


class GroupKind(IntEnum):
    """How long the blocks of a group stay needed."""

    FULL = 0
    SLIDING = 1
    STATE = 2


def lifetime(kind: str, window: int = 0) -> tuple[GroupKind, int]:
    """(kind, lookback) of layers that an engine calls `full`, `sliding` (of `window` tokens, the current one counted),
    `chunked` (attention inside chunks of `window` tokens: a window that is sometimes longer than needed) or `state`.

    Raises LayoutError for any other word.
    """
    if kind in ("sliding", "chunked"):
        return GroupKind.SLIDING, window - 1
    if kind in ("full", "state"):
        return GroupKind.FULL if kind == "full" else GroupKind.STATE, 0
    raise LayoutError(f"layers of kind {kind!r}: known are full, sliding, chunked and state")


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share one layout and lifetime.

    tokens_per_block: tokens covered by one block of this group; a multiple of the layout's base tokens.
    block_bytes: payload bytes of one block on this rank, all layers; 0 where the rank lacks the group.
    lookback: tokens below a boundary that a sliding group needs; 0 for the other kinds.
    replicas: ranks that hold equal bytes (replicated latent attention); 1 where every rank differs.
    transient: never stored, and no boundary waits for it.
    """

    id: int
    kind: GroupKind
    tokens_per_block: int
    block_bytes: int
    lookback: int = 0
    layers: tuple[str, ...] = ()
    replicas: int = 1
    transient: bool = False

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot: the payload rounded up to SLOT_ALIGN."""
        return -(-self.block_bytes // SLOT_ALIGN) * SLOT_ALIGN

    def needs(self, start: int, boundary: int) -> tuple[int, int]:
        """The blocks [begin, end) that resuming at token `boundary` takes when [0, start) is on the device."""
        end = boundary // self.tokens_per_block
        if self.transient:
            begin = end
        elif self.kind is GroupKind.FULL:
            begin = start // self.tokens_per_block
        elif self.kind is GroupKind.SLIDING:
            begin = max(start, boundary - self.lookback, 0) // self.tokens_per_block
        else:
            begin = max(end - 1, 0)
        return min(begin, end), end


@dataclass(frozen=True, slots=True)
class Region:
    """One strided array of device pages: page p lies at `base + p * stride`, `page_bytes` long.

    Lifetime: the memory must outlive the mover it is registered with.
    """

    base: int
    stride: int
    page_bytes: int
    pages: int


def distinct(regions: Iterable[Region]) -> tuple[Region, ...]:
    """The regions, each once: layers that share their cache name the same memory."""
    return tuple(dict.fromkeys(regions))


Pools = tuple[tuple[Region, ...], ...]
"""Per group, the regions whose pages together make one block (layer order)."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The groups of one rank over one base hash.

    base_tokens: tokens per hashed block; every group's tokens_per_block is a multiple of it.
    """

    base_tokens: int
    groups: tuple[CacheGroup, ...]

    def __post_init__(self) -> None:
        if self.base_tokens < 1:
            raise LayoutError(f"base_tokens is {self.base_tokens}; it must be at least 1")
        if not self.groups:
            raise LayoutError("a layout needs at least one group")
        for position, group in enumerate(self.groups):
            _check_group(group, position, self.base_tokens)

    @property
    def multiples(self) -> tuple[int, ...]:
        """Base blocks per block, by group."""
        return tuple(g.tokens_per_block // self.base_tokens for g in self.groups)

    @property
    def alignment(self) -> int:
        """Tokens between two possible boundaries: the least common multiple over stored groups."""
        return math.lcm(*(g.tokens_per_block for g in self.groups if not g.transient), self.base_tokens)

    def bytes_of(self, groups: NDArray[np.integer[Any]]) -> int:
        """Payload bytes on this rank of one block of each of `groups`."""
        if len(self.groups) == 1:
            return len(groups) * self.groups[0].block_bytes
        counts = np.bincount(groups, minlength=len(self.groups)).tolist()
        return sum(count * g.block_bytes for count, g in zip(counts, self.groups, strict=True))

    def slots_per_slab(self, slab_bytes: int) -> tuple[int, ...]:
        """Slots of each group in one slab on this rank; MAX_SLOTS_PER_SLAB where the rank lacks the group."""
        return tuple(
            MAX_SLOTS_PER_SLAB if g.block_bytes == 0 else min(slab_bytes // g.slot_bytes, MAX_SLOTS_PER_SLAB)
            for g in self.groups
        )


def joined(ranks: Sequence[Layout], *, copies: int = 1) -> Layout:
    """The layout of all ranks together: block bytes are sums, each of `copies` equal ones counted once.

    Raises LayoutError where the ranks differ in more than block bytes and layers.
    """
    groups = []
    for mine in zip(*(r.groups for r in ranks), strict=True):
        first = mine[0]
        total = sum(g.block_bytes for g in mine) // copies
        groups.append(replace(first, block_bytes=total))
        for rank, group in enumerate(mine):
            if replace(group, block_bytes=total, layers=first.layers) != groups[-1]:
                raise LayoutError(f"group {first.id} of rank {rank} is {group}, that of rank 0 is {first}")
    return Layout(ranks[0].base_tokens, tuple(groups))


def _check_group(group: CacheGroup, position: int, base_tokens: int) -> None:
    """Raise LayoutError if the group cannot be part of a layout over base_tokens."""
    name = f"group {group.id}"
    if group.id != position:
        raise LayoutError(f"{name} stands at position {position}; ids must be 0, 1, 2, ... in order")
    if group.tokens_per_block < 1 or group.tokens_per_block % base_tokens:
        raise LayoutError(
            f"{name}: {group.tokens_per_block} tokens per block is not a multiple of the {base_tokens} base tokens"
        )
    if group.block_bytes < 0:
        raise LayoutError(f"{name}: block_bytes is {group.block_bytes}; it must not be negative")
    if (group.lookback > 0) != (group.kind is GroupKind.SLIDING):
        raise LayoutError(f"{name}: lookback {group.lookback} with kind {group.kind.name.lower()}")
    if group.replicas < 1:
        raise LayoutError(f"{name}: replicas is {group.replicas}; it must be at least 1")
