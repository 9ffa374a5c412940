"""The namespace of one engine instance: what its configuration, its layout and its ranks make of a block."""

from __future__ import annotations

from collections.abc import Sequence

from kvoffload.config import Config
from kvoffload.keys import Namespace
from kvoffload.layout import CacheGroup, Layout


def namespace_of(
    config: Config, layout: Layout, ranks: Sequence[int] = (1,), *, dtype: str = "", hash_name: str = ""
) -> Namespace:
    """The namespace that blocks of `layout` belong to. Planner and movers must make it of equal arguments.

    ranks: the rank grid. dtype: the logical type of the cache. hash_name: the engine's own algorithm, where its
    hashes are used instead of config.hash.
    """
    return Namespace(
        model_id=config.model_id,
        weights_revision=config.weights_revision,
        tenant=config.tenant,
        hash=hash_name or config.hash,
        dtype=dtype,
        tokens_per_block=layout.base_tokens,
        groups=tuple(_row(g) for g in layout.groups),
        ranks=tuple(ranks),
    )


def _row(group: CacheGroup) -> tuple[int | str, ...]:
    """What of a group fixes the bytes of its blocks and which of them are stored."""
    return (
        group.kind.name.lower(),
        group.tokens_per_block,
        group.block_bytes,
        group.lookback,
        group.replicas,
        int(group.transient),
        *group.layers,
    )
