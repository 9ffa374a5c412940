"""TOPO-02 of docs/cases.md: ranks with equal bytes share host memory and disk."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from hybrid_world import (
    FailingBlocks,
    fetch,
    group,
    mapped,
    page_numbers,
    store,
    wipe,
    wrong_pages,
)

from kvoffload.arena import HostArena
from kvoffload.config import Config
from kvoffload.copying.cpu import CpuCopyEngine
from kvoffload.errors import ConfigError
from kvoffload.layout import GroupKind, Layout, joined
from kvoffload.local import Local
from kvoffload.messages import JobKind
from kvoffload.mover import Mover
from kvoffload.planner import Planner
from kvoffload.requests import RequestInfo
from kvoffload.sizing import Slabs, size_ranks
from kvoffload.testing.faults import FaultyEngine, Gated, Op
from kvoffload.testing.paint import oracle, paint
from kvoffload.testing.pool import PageMemory
from kvoffload.testing.rig import Keys, Rig, Sizes
from kvoffload.tiers.disk import DiskTier
from kvoffload.tiers.lent import LentTier

FULL, SLIDING, _ = GroupKind


def test_TOPO_02_replicated_blocks_are_stored_once_per_host() -> None:
    """Eight ranks with equal bytes: host holds 100 blocks for 100, one rank writes each, all read it right."""
    layout = Layout(16, (group(0, FULL, 16, 8192, replicas=8),))
    memories = [PageMemory(layout, [100]) for _ in range(8)]  # all of rank 0: the same bytes
    config = Config(host_bytes=120 * 8192)
    with Local.open(config, layout, [m.pools for m in memories]) as local:
        assert mapped(local) <= 120 * 8192
        store(local, memories, [layout] * 8, Keys.of(range(100)))
        assert fetch(local, memories, [layout] * 8, Keys.of(range(100))) == 0
        assert local.planner.counters["store_bytes_host"] == 100 * 8192
        assert local.planner.stats().tiers["host"].used == 100 * 8192


def replicated(ranks: int, copies: int, blocks: int = 100) -> tuple[Layout, list[PageMemory]]:
    """A layout of two groups, and device pages of which `copies` neighbouring ranks have the same."""
    groups = (
        group(0, FULL, 16, 8192, replicas=copies),
        group(1, SLIDING, 16, 4096, lookback=40, replicas=copies),
    )
    layout = Layout(16, groups)
    return layout, [PageMemory(layout, [blocks] * 2, rank=r // copies * copies) for r in range(ranks)]


@pytest.mark.parametrize(("ranks", "copies"), [(2, 2), (4, 2), (8, 8), (4, 4)])
def test_TOPO_02_equal_copies_lie_on_disk_once_and_come_back_after_a_restart(
    ranks: int, copies: int, tmp_path: Path
) -> None:
    """Each set of ranks with equal bytes has one place in host and on disk: stored, loaded, and loaded again by another
    process from disk alone, right on every rank."""
    layout, memories = replicated(ranks, copies)
    sets, chain = ranks // copies, Keys.of(range(60))
    config = Config(
        host_bytes=sets * (8 << 20), disk_path=tmp_path, disk_bytes=sets * (4 << 20), model_id="m"
    )
    with Local.open(config, layout, [m.pools for m in memories]) as local:
        assert len({id(m.arena) for m in local.movers}) == sets  # type: ignore[attr-defined]
        assert mapped(local) <= sets * (8 << 20)
        store(local, memories, [layout] * ranks, chain)
        assert fetch(local, memories, [layout] * ranks, chain) == 0
        want = sets * (60 * 8192 + 3 * 4096)
        assert local.planner.counters["store_bytes_host"] == want
        assert local.planner.counters["store_bytes_disk"] == want
    folders = sorted(p.parent.name for p in tmp_path.rglob("slots"))
    assert folders == [f"rank{n * copies}" for n in range(sets)]
    with Local.open(config, layout, [m.pools for m in memories]) as local:
        assert local.planner.counters["restored"] == 63
        assert fetch(local, memories, [layout] * ranks, chain) == 0
        assert local.planner.counters["loaded_disk"] == 63
        local.planner.reset()
        local.drain()
    with Local.open(config, layout, [m.pools for m in memories]) as local:
        assert local.planner.counters["restored"] == 0


@pytest.mark.parametrize(("ranks", "copies"), [(2, 2), (4, 2)])
def test_TOPO_02_transit_slots_are_each_ranks_own(ranks: int, copies: int, tmp_path: Path) -> None:
    """A prompt far longer than host goes to disk through transit and comes back through it, with ranks that load at
    their own pace: every rank's bytes are right."""
    layout, memories = replicated(ranks, copies, 400)
    size = Slabs(8 * 8192, 4, 2, 60)
    slow = Gated(ops=[Op.TO_DEVICE], is_open=True)
    planner = Planner(joined([layout] * ranks, copies=copies), Config(), ranks=ranks, joined=True)
    movers, tiers, arenas = [], [], []
    for rank, memory in enumerate(memories):
        if rank % copies == 0:
            arenas.append(HostArena(size.slab_bytes, size.host + copies * size.transit, layout))
            tiers.append(DiskTier(tmp_path / f"{rank}", layout, size.slab_bytes, size.disk, b"n"))
        copier = FaultyEngine(CpuCopyEngine(), *([slow] if rank == 1 else []))
        tier = LentTier(tiers[-1], writer=rank % copies == 0)
        movers.append(Mover(rank, layout, size, copier, tier, arena=arenas[-1], chunk_bytes=32768))
        planner.attach(rank, movers[-1].register(memory.pools))
    chain, layouts = Keys.of(range(300)), [layout] * ranks
    with Local(planner, movers, held=[*tiers, *arenas]) as local:
        store(local, memories, layouts, chain)
        wipe(memories)
        found = planner.match(RequestInfo("b"), chain)
        assert found.boundary == 4800
        assert found.disk > 200
        slow.hold()
        planner.load(RequestInfo("b"), chain, 4800, page_numbers(layout, chain))
        for _ in range(60):
            assert local.step() == []
            time.sleep(0.002)
        slow.release()
        assert [f.boundary for f in local.drain()] == [4800]
        assert wrong_pages(memories, layouts, chain) == 0


def test_TOPO_02_a_disk_that_is_not_lent_is_refused_beside_shared_memory(tmp_path: Path) -> None:
    """What one rank writes to a disk of its own the others could not read: an error that says what to do."""
    layout, _ = replicated(2, 2)
    size = Slabs(8 * 8192, 4, 2, 4)
    arena = HostArena(size.slab_bytes, 8, layout)
    tier = DiskTier(tmp_path / "d", layout, size.slab_bytes, size.disk, b"n")
    with pytest.raises(ConfigError, match="lend it to all of them"):
        Mover(0, layout, size, CpuCopyEngine(), tier, arena=arena)
    tier.close()
    arena.close()
    with pytest.raises(ConfigError, match="2 ranks that share them; one slab of 65536 bytes"):
        size_ranks([layout] * 2, 2 * 8 * 8192, 8 * 8192, 2)


def test_one_rank_writes_a_replicated_block_and_processes_share_the_file(tmp_path: Path) -> None:
    """Of a store of 16 blocks each of 8 ranks copies 2, those whose slot names it; two arenas over a file are one."""
    layout = Layout(16, (group(0, FULL, 16, 4096, replicas=8),))
    size = Slabs(16 * 4096, 2, 1, 0)
    arenas = [HostArena(size.slab_bytes, 3, layout, tmp_path / "arena") for _ in range(2)]
    memories = [PageMemory(layout, [16]) for _ in range(8)]
    faults = [FailingBlocks() for _ in range(8)]
    with Rig(Sizes(host=2), layout=layout) as rig:  # its planner makes the copies
        chain = Keys.of(range(16))
        rig.planner.offer(rig.info(), chain, 256, rig.pages(chain))
        plans = rig.planner.tick(0.0)
        assert [j.kind for j in plans.jobs] == [JobKind.STORE]
        for rank, memory in enumerate(memories):
            paint(memory, 0, np.arange(16, dtype=np.int32), chain.keys)
            mover = Mover(
                rank, layout, size, FaultyEngine(CpuCopyEngine(), faults[rank]), arena=arenas[rank % 2]
            )
            mover.register(memory.pools)
            mover.submit(plans)
            mover.wait([j.id for j in plans.jobs], 10.0)
            assert [o.status for o in mover.poll()] == [None]
            mover.close()
        rig.local.movers[0].submit(plans)
        rig.local.drain()
    written = [f.seen[Op.TO_HOST] for f in faults]
    assert [len(w) for w in written] == [2] * 8
    assert sorted(name for w in written for name in w) == [(0, b) for b in range(16)]
    slots = plans.jobs[0].copies["host"].tolist()
    for arena in arenas:
        want = [oracle(chain.keys, 0, layer, 0, 2048) for layer in range(2)]
        for i, slot in enumerate(slots):
            assert (arena.view(0, slot) == np.concatenate([w[i] for w in want])).all()
        arena.close()
