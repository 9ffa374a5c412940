"""Where vLLM's blocks lie in memory: groups and strided regions from its KV cache configuration and its tensors.

A block is opaque bytes here. Addresses come from the tensors alone: vLLM may place layers in one allocation or in
several, apart or interleaved, and groups may overlay each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Protocol

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    RSWASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvoffload.errors import LayoutError
from kvoffload.layout import CacheGroup, GroupKind, Layout, Pools, Region, distinct, lifetime

from .compat import mamba_pages, retained_tokens, stored_group

MAX_PIECES = 256
"""Strided pieces of one layer's block. More are no layout of a KV cache, but a dimension that was taken for blocks."""


class TensorLike(Protocol):
    """What is asked of a tensor."""

    @property
    def shape(self) -> Sequence[int]: ...
    def stride(self) -> Sequence[int]: ...
    def data_ptr(self) -> int: ...
    def element_size(self) -> int: ...


def regions_of(layer: str, tensor: TensorLike, blocks: int) -> tuple[Region, ...]:
    """The regions of `blocks` pages that together hold the layer's part of each block.

    The blocks are dimension 0, or 1 where 0 tells keys from values; a kernel may have cut each block into several
    equal ones. Raises LayoutError for any other shape.
    """
    shape, strides, item = tuple(tensor.shape), tuple(tensor.stride()), tensor.element_size()
    axis = _block_axis(shape, blocks)
    if axis is None:
        raise LayoutError(f"{layer}: a cache of shape {shape} has no dimension for {blocks} blocks")
    parts = shape[axis] // blocks
    rest = sorted((strides[d], shape[d]) for d in range(len(shape)) if d != axis and shape[d] > 1)
    dense = 1
    outer: list[tuple[int, int]] = []
    for stride, size in rest:
        if stride == dense and not outer:
            dense *= size
        else:
            outer.append((stride, size))
    if parts > 1 and strides[axis] == dense:
        dense, parts, step = dense * parts, 1, strides[axis] * parts
    else:
        step = strides[axis] * parts
    if parts > 1:
        outer.append((strides[axis], parts))
    if prod(size for _, size in outer) > MAX_PIECES:
        raise LayoutError(f"{layer}: a block of shape {shape}, strides {strides} lies in too many pieces")
    offsets = [sum(o) for o in itertools.product(*([s * i for i in range(n)] for s, n in outer))]
    base = tensor.data_ptr()
    return tuple(Region(base + item * at, item * step, item * dense, blocks) for at in sorted(offsets))


def _block_axis(shape: tuple[int, ...], blocks: int) -> int | None:
    for axis in (0, 1):
        if axis < len(shape) and shape[axis] and shape[axis] % blocks == 0:
            return axis
    return None


def layout_of(config: KVCacheConfig, caches: Mapping[str, Any], copies: int = 1) -> tuple[Layout, Pools]:
    """The groups of this worker and their device pages. caches: by layer, a tensor or several. copies: ranks with the
    same bytes that share host memory.

    Raises LayoutError with the reason where a group cannot be handled.
    """
    groups: list[CacheGroup] = []
    pools: list[tuple[Region, ...]] = []
    for number, group in enumerate(config.kv_cache_groups):
        layers = tuple(name for name in group.layer_names if name in caches)
        found = [r for name in layers for r in _layer_regions(name, caches[name], config.num_blocks)]
        transient = not stored_group(group)
        pool = () if transient else distinct(found)
        kind, lookback = _lifetime(group.kv_cache_spec, number)
        groups.append(
            CacheGroup(
                number,
                kind,
                group.kv_cache_spec.block_size,
                sum(r.page_bytes for r in pool),
                lookback,
                layers,
                replicas=copies,
                transient=transient,
            )
        )
        pools.append(pool)
    _check(config, groups)
    return Layout(base_tokens(config), tuple(groups)), tuple(pools)


def layer_places(config: KVCacheConfig, caches: Mapping[str, Any], pools: Pools) -> dict[str, int]:
    """By layer, where its last region stands in the pool; {} where there are several groups: their loads never wait for
    single layers. pools: of `layout_of`."""
    if len(config.kv_cache_groups) > 1 or not pools[0]:
        return {}
    place = {region: number for number, region in enumerate(pools[0])}
    names = [name for name in config.kv_cache_groups[0].layer_names if name in caches]
    found = {name: _layer_regions(name, caches[name], config.num_blocks) for name in names}
    return {name: max(place[region] for region in regions) for name, regions in found.items()}


def base_tokens(config: KVCacheConfig) -> int:
    """Tokens per hash."""
    size = config.hash_block_size
    return size or min(group.kv_cache_spec.block_size for group in config.kv_cache_groups)


def _layer_regions(layer: str, cache: Any, blocks: int) -> list[Region]:
    tensors = cache if isinstance(cache, list | tuple) else [cache]
    return [region for tensor in tensors for region in regions_of(layer, tensor, blocks)]


def _lifetime(spec: KVCacheSpec, number: int) -> tuple[GroupKind, int]:
    """How long the blocks of a spec stay needed."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        spec = spec.first_spec
    if isinstance(spec, SlidingWindowSpec):
        return GroupKind.SLIDING, retained_tokens(spec)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return lifetime("chunked", spec.attention_chunk_size)
    if isinstance(spec, MambaSpec):
        reason = mamba_pages(spec)
        if reason:
            raise LayoutError(f"group {number}: {reason}")
        return lifetime("state")
    if isinstance(spec, FullAttentionSpec) and not isinstance(spec, RSWASpec):
        return lifetime("full")
    if not spec.prefix_cacheable:
        return lifetime("full")  # transient: never stored
    raise LayoutError(
        f"group {number}: {type(spec).__name__} is not handled; known are full, sliding, chunked and MLA attention and "
        "Mamba states. Leave the connector out for this model"
    )


def _check(config: KVCacheConfig, groups: Sequence[CacheGroup]) -> None:
    for group, theirs in zip(groups, config.kv_cache_groups, strict=True):
        spec: KVCacheGroupSpec = theirs
        if spec.host_resident:
            raise LayoutError(f"group {group.id} lives in host memory already; it cannot be offloaded")
    if all(g.transient for g in groups):
        raise LayoutError(
            "no group of this model has blocks that a prefix names; there is nothing to offload"
        )
