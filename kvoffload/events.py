"""KV events: what became visible or went away in which tier, for routers that send a prompt where its blocks are.

An event is made after the fact: a block is visible when `Stored` says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from kvoffload.keys import Chain


@dataclass(frozen=True, slots=True)
class Stored:
    """One block became visible in a tier.

    medium: "host" or "disk". parent: the key of the block before it in its group, None for the first. tokens: the
    block's own, empty where the engine made the hashes and keeps its tokens.
    """

    medium: str
    group: int
    key: bytes
    parent: bytes | None
    tokens: tuple[int, ...]
    tokens_per_block: int

    @classmethod
    def of(cls, chain: Chain, block: int, *, medium: str, group: int, multiple: int = 1) -> Stored:
        """The event of block `block` of a group whose blocks are `multiple` base blocks of `chain`.

        Raises IndexError where the chain has no such block.
        """
        if block < 0:
            raise IndexError(f"block {block}; blocks count from 0")
        size = multiple * chain.namespace.tokens_per_block
        keys = chain.keys[multiple - 1 :: multiple]
        return cls(
            medium=medium,
            group=group,
            key=keys[block].tobytes(),
            parent=keys[block - 1].tobytes() if block else None,
            tokens=tuple(chain.token_ids[block * size : (block + 1) * size].tolist()),
            tokens_per_block=size,
        )


@dataclass(frozen=True, slots=True)
class Removed:
    """One block is no longer visible in a tier."""

    medium: str
    group: int
    key: bytes


Event: TypeAlias = Stored | Removed
