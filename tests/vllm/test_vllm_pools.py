"""Where blocks lie: regions read from tensors of every shape that vLLM's backends make, checked byte by byte."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch
from kvoffload.connectors.vllm.pools import layer_places, layout_of, regions_of
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvoffload.errors import LayoutError
from kvoffload.layout import GroupKind

BLOCKS, SIZE, HEADS, DIM = 7, 4, 2, 8


def zeros(*shape):
    return torch.zeros(shape, dtype=torch.uint8)


def apart():
    """(2, blocks, tokens, heads, dim): keys, then values."""
    tensor = zeros(2, BLOCKS, SIZE, HEADS, DIM)
    return tensor, tensor.movedim(1, 0), 2


def joined():
    """(blocks, heads, tokens, 2 * dim): a block is one piece."""
    tensor = zeros(BLOCKS, HEADS, SIZE, 2 * DIM)
    return tensor, tensor, 1


def kernel_blocks():
    """A kernel that knows blocks of half the size: a block is two of its rows, side by side."""
    tensor = zeros(2 * BLOCKS, SIZE // 2, HEADS, DIM)
    return tensor, tensor.view(BLOCKS, -1), 1


def kernel_blocks_apart():
    """The same with keys and values apart."""
    tensor = zeros(2, 2 * BLOCKS, SIZE // 2, HEADS, DIM)
    return tensor, tensor.view(2, BLOCKS, -1).movedim(1, 0), 2


def packed():
    """One layer of blocks that hold several layers: a block is a piece of a wider row."""
    whole = zeros(BLOCKS, 3, SIZE, HEADS, DIM)
    return whole[:, 1], whole[:, 1], 1


def padded():
    """Pages that end with padding, which is no part of the block."""
    whole = zeros(BLOCKS, SIZE * HEADS * DIM + 24)
    return whole[:, : SIZE * HEADS * DIM].view(BLOCKS, SIZE, HEADS, DIM), whole[:, : SIZE * HEADS * DIM], 1


def permuted():
    """Named (blocks, tokens, heads, dim), stored (blocks, heads, tokens, dim)."""
    tensor = zeros(BLOCKS, HEADS, SIZE, DIM).permute(0, 2, 1, 3)
    return tensor, tensor, 1


def heads_outside():
    """Stored (heads, blocks, ...): a block is one piece per head."""
    tensor = zeros(HEADS, BLOCKS, SIZE, DIM).movedim(0, 1)
    return tensor, tensor, HEADS


def padded_kernel_blocks():
    """Kernel blocks with padding between them: two pieces a block."""
    whole = zeros(2 * BLOCKS, SIZE * DIM + 16)
    view = whole[:, : SIZE * DIM]
    return (
        view,
        view.view(BLOCKS, 2, SIZE * DIM) if view.is_contiguous() else view.unflatten(0, (BLOCKS, 2)),
        2,
    )


CASES = (
    apart,
    joined,
    kernel_blocks,
    kernel_blocks_apart,
    packed,
    padded,
    permuted,
    heads_outside,
    padded_kernel_blocks,
)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.__name__)
def test_regions_are_the_bytes_of_each_block(case):
    """Every byte of block p, and no other, lies in page p of the regions; there are no more regions than pieces."""
    tensor, by_block, pieces = case()
    for block in range(BLOCKS):
        by_block[block] = block + 1
    regions = regions_of("layer", tensor, BLOCKS)

    assert len(regions) == pieces
    seen = set()
    for region in regions:
        for page in range(BLOCKS):
            address = region.base + page * region.stride
            assert set(ctypes.string_at(address, region.page_bytes)) == {page + 1}
            seen.update(range(address, address + region.page_bytes))
    assert len(seen) == by_block.numel()
    assert all(r.pages == BLOCKS for r in regions)


def test_elements_wider_than_a_byte_count_as_such():
    """Strides are elements in torch and bytes in regions."""
    tensor = torch.zeros((2, BLOCKS, SIZE, DIM), dtype=torch.bfloat16)
    first, second = regions_of("layer", tensor, BLOCKS)

    assert second.base - first.base == BLOCKS * SIZE * DIM * 2
    assert first.stride == first.page_bytes == SIZE * DIM * 2


def test_a_shape_without_blocks_is_refused():
    """No dimension holds the blocks: the message names the layer, the shape and the number."""
    with pytest.raises(
        LayoutError, match=r"model\.layers\.3: a cache of shape \(5, 11\) has no dimension for 7 blocks"
    ):
        regions_of("model.layers.3", zeros(5, 11), BLOCKS)


def test_a_block_in_too_many_pieces_is_refused():
    """More than 256 pieces mean that another dimension was taken for the blocks."""

    def scattered(pieces):
        return torch.zeros((pieces, BLOCKS, 8), dtype=torch.uint8).movedim(0, 1)

    assert len(regions_of("layer", scattered(256), BLOCKS)) == 256
    with pytest.raises(LayoutError, match="too many pieces"):
        regions_of("layer", scattered(257), BLOCKS)


def test_blocks_are_the_first_dimension_that_can_be():
    """As many heads as blocks, or a multiple: dimension 0 is the blocks all the same."""
    (region,) = regions_of("layer", zeros(BLOCKS, 2 * BLOCKS, SIZE), BLOCKS)
    assert (region.stride, region.page_bytes) == (2 * BLOCKS * SIZE, 2 * BLOCKS * SIZE)


def test_a_dimension_of_one_says_nothing():
    """Its stride may be anything: the block is one piece."""
    tensor = zeros(BLOCKS, SIZE * DIM).as_strided((BLOCKS, 1, SIZE, DIM), (SIZE * DIM, 3, DIM, 1))
    (region,) = regions_of("layer", tensor, BLOCKS)
    assert (region.stride, region.page_bytes) == (SIZE * DIM, SIZE * DIM)


# ---- groups ----


def full(**more):
    return FullAttentionSpec(block_size=16, num_kv_heads=HEADS, head_size=DIM, dtype=torch.uint8, **more)


def sliding(window=64, **more):
    return SlidingWindowSpec(
        block_size=16, num_kv_heads=HEADS, head_size=DIM, dtype=torch.uint8, sliding_window=window, **more
    )


def config(*groups, hash_block_size=None):
    """A KVCacheConfig of (layer names, spec, further fields of the group)."""
    made = [KVCacheGroupSpec(list(names), spec, **(more[0] if more else {})) for names, spec, *more in groups]
    return SimpleNamespace(num_blocks=BLOCKS, kv_cache_groups=made, hash_block_size=hash_block_size)


def caches(*names):
    return {name: zeros(BLOCKS, 16, HEADS, 2 * DIM) for name in names}


BYTES = 16 * HEADS * 2 * DIM


def test_each_kind_of_layer_has_its_lifetime():
    """Full, sliding, chunked and latent attention: kind, lookback and bytes of a block."""
    chunked = ChunkedLocalAttentionSpec(
        block_size=16, num_kv_heads=HEADS, head_size=DIM, dtype=torch.uint8, attention_chunk_size=48
    )
    latent = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=DIM, dtype=torch.uint8)
    told = config((["a", "b"], full()), (["c"], sliding(64)), (["d"], chunked), (["e"], latent))
    layout, pools = layout_of(told, caches(*"abcde"))

    kinds = [(g.kind, g.lookback, g.block_bytes) for g in layout.groups]
    assert kinds == [
        (GroupKind.FULL, 0, 2 * BYTES),
        (GroupKind.SLIDING, 63, BYTES),
        (GroupKind.SLIDING, 47, BYTES),
        (GroupKind.FULL, 0, BYTES),
    ]
    assert [len(p) for p in pools] == [2, 1, 1, 1]
    assert layout.groups[0].layers == ("a", "b")


def test_tokens_retained_for_speculation_are_part_of_the_lookback():
    """A window that keeps more tokens than it attends to needs them all."""
    layout, _ = layout_of(config((["a"], sliding(64, extra_retained_tokens=5))), caches("a"))

    assert layout.groups[0].lookback == 68


def test_layers_that_share_memory_are_one_region():
    """Groups overlay each other: each registers its own; two layers of a group on one tensor count once."""
    shared = zeros(BLOCKS, 16, HEADS, 2 * DIM)
    told = config((["a", "b"], full()), (["c"], sliding()))
    layout, pools = layout_of(told, {"a": shared, "b": shared, "c": shared})

    assert [g.block_bytes for g in layout.groups] == [BYTES, BYTES]
    assert pools[0] == pools[1]


def test_a_layer_is_there_with_its_last_region():
    """Keys and values apart are two regions; a layer on another's tensor has its place; several groups have none."""
    shared = zeros(2, BLOCKS, 16, HEADS, DIM)
    told = config((["a", "b", "c"], full()))
    tensors = {"a": shared, "b": zeros(BLOCKS, 16, HEADS, 2 * DIM), "c": shared}
    _, pools = layout_of(told, tensors)

    assert layer_places(told, tensors, pools) == {"a": 1, "b": 2, "c": 1}
    for name, place in {"a": 1, "b": 2}.items():
        assert pools[0][place] == regions_of(name, tensors[name], BLOCKS)[-1]
    two = config((["a"], full()), (["c"], sliding()))
    assert layer_places(two, tensors, layout_of(two, tensors)[1]) == {}


def test_layers_of_other_ranks_are_left_out():
    """A pipeline rank registers its layers only: the group is as large as those."""
    layout, _ = layout_of(config((["a", "b"], full())), caches("b"))

    assert layout.groups[0].block_bytes == BYTES
    assert layout.groups[0].layers == ("b",)


def test_uniform_specs_are_read_by_their_first_layer():
    """Layers of one kind with sizes of their own: the kind is theirs, the bytes are the sum."""
    wide = FullAttentionSpec(block_size=16, num_kv_heads=HEADS, head_size=2 * DIM, dtype=torch.uint8)
    uniform = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": full(), "b": wide})
    tensors = {**caches("a"), "b": zeros(BLOCKS, 16, HEADS, 4 * DIM)}
    layout, _ = layout_of(config((["a", "b"], uniform)), tensors)

    assert layout.groups[0].kind is GroupKind.FULL
    assert layout.groups[0].block_bytes == 3 * BYTES


def test_the_hash_size_is_the_base():
    """Tokens per key are the engine's hash block, else the smallest block."""
    assert layout_of(config((["a"], full()), hash_block_size=8), caches("a"))[0].base_tokens == 8
    assert layout_of(config((["a"], full())), caches("a"))[0].base_tokens == 16
    wide = SlidingWindowSpec(
        block_size=32, num_kv_heads=HEADS, head_size=DIM, dtype=torch.uint8, sliding_window=64
    )
    assert layout_of(config((["b"], wide), (["a"], full())), caches("a", "b"))[0].base_tokens == 16


def test_states_without_snapshots_are_refused():
    """Mamba states that are kept for the end only: the message says what to start vLLM with."""
    state = MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.uint8,), mamba_cache_mode="none")

    with pytest.raises(LayoutError, match=r"group 1: mamba_cache_mode is 'none'.*--mamba-cache-mode align"):
        layout_of(config((["a"], full()), (["m"], state)), caches("a", "m"))


def test_states_with_snapshots_are_a_group():
    """Mamba states at block boundaries are one snapshot per boundary."""
    state = MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.uint8,), mamba_cache_mode="align")
    tensors = {**caches("a"), "m": [zeros(BLOCKS, 4, 4), zeros(BLOCKS, 2, 4)]}
    layout, pools = layout_of(config((["a"], full()), (["m"], state)), tensors)

    assert layout.groups[1].kind is GroupKind.STATE
    assert layout.groups[1].block_bytes == 16 + 8
    assert len(pools[1]) == 2


def test_unknown_layers_are_refused():
    """A spec that kvoffload does not know by kind: its name and the known kinds are in the message."""
    cross = CrossAttentionSpec(block_size=16, num_kv_heads=HEADS, head_size=DIM, dtype=torch.uint8)

    if cross.prefix_cacheable:
        with pytest.raises(LayoutError, match="group 0: CrossAttentionSpec is not handled; known are full"):
            layout_of(config((["a"], cross)), caches("a"))
    else:
        with pytest.raises(LayoutError, match="there is nothing to offload"):
            layout_of(config((["a"], cross)), caches("a"))


def test_attention_that_forgets_in_the_middle_is_refused():
    """R-SWA looks like full attention and keeps less."""
    partial = RSWASpec(block_size=16, num_kv_heads=HEADS, head_size=DIM, dtype=torch.uint8, rswa_window=64)

    with pytest.raises(LayoutError, match="group 0: RSWASpec is not handled"):
        layout_of(config((["a"], partial)), caches("a"))


def test_layers_that_no_prefix_names_are_left_out():
    """Beside a full group, a kind whose blocks depend on more than the prefix: there, and never stored."""
    told = config((["a"], full()), (["b"], full(), {}))
    told.kv_cache_groups[1].kv_cache_spec = SimpleNamespace(prefix_cacheable=False, block_size=16)
    layout, pools = layout_of(told, caches("a", "b"))

    assert [g.transient for g in layout.groups] == [False, True]
    assert pools[1] == ()


def test_groups_in_host_memory_are_refused():
    """What lives in host already is not offloaded."""
    with pytest.raises(LayoutError, match="group 0 lives in host memory already"):
        layout_of(config((["a"], full(), {"host_resident": True})), caches("a"))


def test_groups_that_are_not_transferred_are_never_stored():
    """A group that vLLM rebuilds itself is there and holds nothing; alone it leaves nothing to offload."""
    told = config((["a"], full()), (["b"], full(), {"enable_kv_transfer": False}))
    layout, pools = layout_of(told, caches("a", "b"))

    assert [g.transient for g in layout.groups] == [False, True]
    assert pools[1] == ()
    with pytest.raises(LayoutError, match="there is nothing to offload"):
        layout_of(config((["b"], full(), {"enable_kv_transfer": False})), caches("b"))
