"""HYB rows of docs/cases.md, and the rows of other areas that hybrid layouts decide, by id."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hybrid_world import FailingBlocks, fetch, group, mapped, store

from kvoffload.config import Config
from kvoffload.errors import LayoutError
from kvoffload.index import Index, Matcher
from kvoffload.layout import CacheGroup, GroupKind, Layout, joined, lifetime
from kvoffload.local import Local
from kvoffload.memory import Memory
from kvoffload.requests import RequestInfo
from kvoffload.sizing import size_ranks
from kvoffload.testing.faults import Op
from kvoffload.testing.paint import paint, verify
from kvoffload.testing.pool import PageMemory
from kvoffload.testing.rig import Keys, Rig, Sizes

FULL, SLIDING, STATE = GroupKind
GIB = 1 << 30


def test_HYB_01_groups_of_different_shapes_come_back_exactly() -> None:
    """Full with pages of 4 KiB beside a window with pages of 1 KiB: accepted, and every group's bytes are right."""
    layout = Layout(16, (group(0, FULL, 16, 4096), group(1, SLIDING, 16, 1024, lookback=63)))
    with Rig(Sizes(host=16), layout=layout) as rig:
        chain = Keys.of(range(24))
        rig.store(chain)
        plan, finished, wrong = rig.load(chain, first=100)
        assert (plan.boundary, plan.blocks, finished[-1].boundary, wrong) == (384, 28, 384, 0)
        rig.check()


def test_HYB_02_each_group_takes_room_for_its_own_bytes() -> None:
    """Nine groups and a budget of 1,000 slabs: the blocks of 97 % of the budget are all there and loadable."""
    units = (1, 1, 1, 1, 2, 2, 2, 3, 3)
    groups = tuple(group(i, FULL, 16, 4096 * n) for i, n in enumerate(units))
    slab, slabs = 8 * 3 * 4096, 1000
    chunks = slab * slabs * 97 // 100 // (4096 * sum(units))
    with Rig(Sizes(host=slabs, pages=chunks), layout=Layout(16, groups)) as rig:
        chain = Keys.of(range(chunks))
        assert rig.store(chain).blocks == 9 * chunks
        plan, _, wrong = rig.load(chain)
        assert (plan.blocks, plan.boundary, wrong) == (9 * chunks, 16 * chunks, 0)
        assert rig.planner.stats().totals["evicted_host"] == 0
        rig.check()


def test_HYB_04_chunked_attention_is_a_window_and_an_unknown_kind_an_error() -> None:
    """Chunks of 8,192 tokens count as a window of as many; a word that nobody knows is named."""
    assert lifetime("chunked", 8192) == lifetime("sliding", 8192) == (SLIDING, 8191)
    assert lifetime("full") == (FULL, 0)
    assert lifetime("state") == (STATE, 0)
    with pytest.raises(LayoutError, match=r"'strided'.*full, sliding, chunked and state"):
        lifetime("strided")


def test_HYB_05_a_hit_ends_where_every_group_can_resume() -> None:
    """Snapshots at 512 and 1,024, attention up to 900: the hit is 512."""
    index = Index([(FULL, 1, 0), (STATE, 128, 0)], 4, [1024, 8], 8, 0, 0)
    chain, segment = Keys.of(range(300)), index.open_segment(0.0)
    snapshots = np.zeros(2, np.int32)
    pages = [np.zeros(225, np.int32), snapshots]
    index.complete_store(index.offer(segment, chain.keys, [0, 0], [225, 2], pages)[0], None)
    assert Matcher(index).update(chain.keys, 0)[0] == 512


def test_HYB_07_a_failed_load_ends_at_the_last_boundary_of_all_groups() -> None:
    """Blocks of 16 and 24 tokens: with block 5 of group 1 lost 96 tokens are left (the multiple of 48 below 120); block
    5 of group 0 is right. With a window that cannot be refilled the load falls back to its start."""
    plain = (group(0, FULL, 16), group(1, FULL, 24))
    for groups, left in ((plain, 96), ((*plain, group(2, SLIDING, 16, lookback=20)), 0)):
        fault = FailingBlocks((1, 5), ops=[Op.TO_DEVICE])
        with Rig(Sizes(host=12), layout=Layout(8, groups), copy_faults=[fault]) as rig:
            chain = Keys.of(range(30))
            rig.store(chain)
            _, finished, wrong = rig.load(chain)
            assert (finished[-1].boundary, finished[-1].failed, wrong) == (left, 1, 0)
            assert verify(rig.memory[0], 0, np.array([5], np.int32), chain.keys[11:12]).size == 0
            rig.check()


def test_HYB_08_a_side_pool_that_is_shorter_shortens_the_prefix() -> None:
    """Ten blocks of the cache and seven of the side pool: the usable prefix is seven, whether seven were stored or the
    engine has room for seven."""
    layout = Layout(16, (group(0, FULL, 16), group(1, FULL, 16, 512)))
    chain = Keys.of(range(10))
    with Rig(Sizes(host=8), layout=layout) as rig:
        info, pages = rig.info(), rig.pages(chain)
        rig.paint(chain, pages)
        rig.planner.offer(info, chain, 160, [pages[0], pages[1][:7]])
        rig.local.drain()
        assert rig.match(chain).boundary == 112
    with Rig(Sizes(host=8), layout=layout) as rig:
        rig.store(chain)
        info, pages = rig.info(), rig.pages(chain)
        assert rig.planner.match(info, chain).boundary == 160
        plan = rig.planner.load(info, chain, 160, [pages[0], pages[1][:7]])
        assert (plan.boundary, plan.shortfall) == (112, 48)
        rig.local.drain()


def test_HYB_10_a_draft_window_that_leaves_the_last_block_out_still_hits() -> None:
    """Ten blocks with a draft layer's window beside them, asked for with the last one to be computed anew: nine."""
    draft = group(1, SLIDING, 16, 512, lookback=31 + 4)
    with Rig(Sizes(host=8), layout=Layout(16, (group(0, FULL, 16), draft))) as rig:
        chain, info = Keys.of(range(10)), rig.info()
        head, pages = Keys(chain.keys[:9]), rig.pages(chain)
        rig.paint(chain, pages)
        assert rig.planner.match(info, head).boundary == 0
        rig.planner.offer(info, chain, 160, pages)
        rig.local.drain()
        rig.planner.finish(info.id, "end_turn", 0.0)
        assert rig.match(head).boundary == 144


def test_HYB_11_block_sizes_of_32_64_128_and_256_go_together_over_any_base() -> None:
    """Groups of 32 and 128 tokens over a hash unit of 32, of 64 and 256 over 64; over 128 the error names the sizes."""
    for base, sizes in ((32, (32, 128)), (64, (64, 256))):
        layout = Layout(base, tuple(group(i, FULL, n) for i, n in enumerate(sizes)))
        with Rig(Sizes(host=8), layout=layout) as rig:
            chain = Keys.of(range(9))
            rig.store(chain)
            assert rig.match(chain).boundary == 8 * base
            assert rig.load(chain)[2] == 0
    with pytest.raises(LayoutError, match="32 tokens per block is not a multiple of the 128 base tokens"):
        Layout(128, (group(0, FULL, 32), group(1, FULL, 128)))


def test_HYB_13_a_transient_group_takes_no_slot_and_no_write(tmp_path: Path) -> None:
    """A draft model's group that is never stored: not in host, not on disk, and no boundary waits for it."""
    draft = group(1, FULL, 64, 65536, transient=True)
    with Rig(Sizes(host=8, disk=8), layout=Layout(16, (group(0, FULL, 16), draft)), path=tmp_path) as rig:
        chain = Keys.of(range(21))
        assert rig.store(chain).blocks == 21
        index = rig.planner._tiers.index  # type: ignore[union-attr]
        for tier in (0, 1):
            assert [row["used"] for row in index.usage(tier)["groups"]] == [21, 0]
        assert rig.match(chain).boundary == 336
        plan, _, _ = rig.load(chain)
        assert (plan.boundary, plan.blocks) == (336, 21)
        rig.check()


def test_INCR_01_a_load_writes_only_what_the_device_lacks() -> None:
    """The device holds 160 tokens, host 384, pages of 32: pages 0 to 4 keep their guard bytes, 5 to 11 are loaded."""
    layout = Layout(32, (group(0, FULL, 32),))
    with Rig(layout=layout) as rig:
        chain = Keys.of(range(12))
        rig.store(chain)
        info, pages = rig.info(), rig.pages(chain)
        for array in rig.memory[0].arrays[0]:
            array[:] = 0xA5
        rig.planner.match(info, chain, computed=160)
        plan = rig.planner.load(info, chain, 384, pages)
        rig.local.drain()
        assert plan.blocks == 7
        for array in rig.memory[0].arrays[0]:
            assert (array[:5] == 0xA5).all()
            assert (array[12:] == 0xA5).all()
        assert verify(rig.memory[0], 0, pages[0][5:], chain.keys[5:]).size == 0


def test_MEM_06_all_ranks_together_take_half_of_what_is_free() -> None:
    """Four ranks, sized by themselves on a node with 100 GiB free: 50 GiB in sum, less what slabs round off."""
    config = Config().resolve(Memory(limit=128 * GIB, available=100 * GIB))
    layouts = [Layout(16, (group(0, FULL, 16, 262144),))] * 4
    assert config.host_bytes is not None
    sizes = size_ranks(layouts, config.host_bytes, 0)
    total = sum(s.slab_bytes * (s.host + s.transit) for s in sizes)
    assert 0.99 * 50 * GIB < total <= 50 * GIB
    assert min(s.host for s in sizes) > 0


def test_MEM_07_no_more_is_mapped_than_was_asked_for() -> None:
    """Four groups on four ranks, sizes that are no multiple of a page: at most the budget is mapped, most of it."""
    groups = tuple(group(i, FULL, 16, size) for i, size in enumerate((4000, 9000, 1000, 20000)))
    layouts = [Layout(16, groups)] * 4
    memories = [PageMemory(layouts[0], [4] * 4, rank=r) for r in range(4)]
    budget = 64 << 20
    with Local.open(Config(host_bytes=budget), layouts, [m.pools for m in memories]) as local:
        assert 0.9 * budget < mapped(local) <= budget


def test_MEM_11_a_group_without_bytes_on_a_rank_is_passed_over(tmp_path: Path) -> None:
    """Two pipeline ranks, each without one of the groups and with another ratio of slots: stored, loaded right from
    host, and from disk after a restart."""
    layouts = [
        Layout(
            16, (group(0, FULL, 16, 8192), group(1, SLIDING, 16, 0, lookback=40), group(2, FULL, 32, 4096))
        ),
        Layout(
            16, (group(0, FULL, 16, 0), group(1, SLIDING, 16, 24576, lookback=40), group(2, FULL, 32, 12288))
        ),
    ]
    memories = [PageMemory(x, [32] * 3, rank=r) for r, x in enumerate(layouts)]
    pools = [m.pools for m in memories]
    assert [len(p) for p in pools[0]] == [2, 0, 2]
    config = Config(host_bytes=8 << 20, disk_path=tmp_path, disk_bytes=8 << 20, model_id="m")
    chain = Keys.of(range(20))
    with Local.open(config, layouts, pools) as local:
        store(local, memories, layouts, chain)
        assert fetch(local, memories, layouts, chain) == 0
        assert mapped(local) <= 8 << 20
    with Local.open(config, layouts, pools) as local:
        assert local.planner.counters["restored"] == 20 + 3 + 10
        assert fetch(local, memories, layouts, chain) == 0
        assert local.planner.counters["loaded_disk"] == 20 + 3 + 10


def test_TIER_08_a_window_reads_only_the_blocks_inside_it(tmp_path: Path) -> None:
    """Prefix 8,192 and lookback 127: from disk and to the device, the window group moves the 8 blocks of its last 127
    tokens, and guard bytes around their pages stay."""
    layout = Layout(16, (group(0, FULL, 16, 512), group(1, SLIDING, 16, 512, lookback=127)))
    fault = FailingBlocks()
    sizes = Sizes(host=140, disk=140, pages=512)
    with Rig(sizes, layout=layout, path=tmp_path, tier_faults=[fault], copy_faults=[fault]) as rig:
        chain = Keys.of(range(512))
        rig.store(chain)
        rig.planner.reset(["host"])
        for array in rig.memory[0].arrays[1]:
            array[:] = 0xA5
        info, pages = rig.info(), rig.pages(chain)
        found = rig.planner.match(info, chain)
        rig.planner.load(info, chain, found.boundary, pages)
        rig.local.drain()
        assert found.boundary == 8192
        want = [(1, b) for b in range(504, 512)]
        for op in (Op.READ, Op.TO_DEVICE):
            assert [name for name in fault.seen[op] if name[0] == 1] == want
        for array in rig.memory[0].arrays[1]:
            assert (array[:504] == 0xA5).all()
        assert verify(rig.memory[0], 1, pages[1][504:], chain.keys[504:]).size == 0


def test_regions_that_alias_are_registered_once() -> None:
    """Two layers that share their cache name one region: it is copied once per block. Two groups over the same pages
    keep to the pages that are theirs."""
    layout = Layout(16, (group(0, FULL, 16, 4096), group(1, SLIDING, 16, 4096, lookback=1000)))
    memory = PageMemory(Layout(16, (group(0, FULL, 16, 4096),)), [16])
    (regions,) = memory.pools
    pools = ((regions[0], *regions), (*regions, replace(regions[1])))
    with Local.open(Config(host_bytes=1 << 20), layout, [pools]) as local:
        chain = Keys.of(range(4))
        pages = [np.arange(4, dtype=np.int32), np.arange(8, 12, dtype=np.int32)]
        paint(memory, 0, pages[0], chain.keys)
        paint(memory, 0, pages[1], chain.keys[::-1].copy())
        local.planner.offer(RequestInfo("a"), chain, 64, pages)
        local.drain()
        for array in memory.arrays[0]:
            array[:] = 0xA5
        local.planner.match(RequestInfo("b"), chain)
        local.planner.load(RequestInfo("b"), chain, 64, pages)
        local.drain()
        assert verify(memory, 0, pages[0], chain.keys).size == 0
        assert verify(memory, 0, pages[1], chain.keys[::-1].copy()).size == 0
        for array in memory.arrays[0]:
            assert (array[4:8] == 0xA5).all()
            assert (array[12:] == 0xA5).all()


def test_ranks_that_differ_in_more_than_bytes_are_refused() -> None:
    """A group of another block size on rank 1 is an error that names both."""
    with pytest.raises(LayoutError, match="group 0 of rank 1"):
        joined([Layout(16, (group(0, FULL, n),)) for n in (16, 32)])


@pytest.mark.parametrize(
    "groups",
    [
        (group(0, SLIDING, 16, lookback=50),),
        (group(0, STATE, 64),),
        (group(0, FULL, 16), group(1, SLIDING, 16, lookback=5000)),
        (group(0, FULL, 16), group(1, SLIDING, 64, 8192, lookback=100), group(2, FULL, 256, 12288)),
        (group(0, FULL, 64), group(1, STATE, 256), group(2, SLIDING, 16, lookback=127)),
    ],
    ids=["sliding only", "state only", "lookback beyond the context", "16, 64 and 256", "state and window"],
)
def test_any_mix_of_groups_is_stored_and_resumed(groups: tuple[CacheGroup, ...]) -> None:
    """The last possible boundary comes back with the right bytes in every group, and the next turn resumes there."""
    with Rig(Sizes(host=40, pages=128), layout=Layout(16, groups)) as rig:
        step = rig.layout.alignment
        for blocks in (70, 100):
            chain = Keys.of(range(blocks))
            rig.store(chain)
            plan, _, wrong = rig.load(chain)
            assert (plan.boundary, wrong) == (blocks * 16 // step * step, 0)
        assert rig.match(Keys.of(range(71))).boundary >= 70 * 16 // step * step
        rig.check()
