"""The planner with real movers and real bytes: stores, loads, sharing, failures, deadlines, reset."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvoffload.config import Config
from kvoffload.errors import LayoutError
from kvoffload.messages import Inventory, JobKind
from kvoffload.planner import Planner
from kvoffload.requests import RequestInfo
from kvoffload.testing.faults import Counting, Failing, Gated, Op
from kvoffload.testing.rig import Clock, Keys, Rig, Sizes, one_group


def ids(count: int, start: int = 0) -> list[int]:
    return list(range(start, start + count))


def test_everything_is_a_miss_until_all_ranks_are_attached() -> None:
    """A planner with one of two ranks attached answers like an empty cache and plans nothing."""
    layout = one_group()
    planner = Planner(layout, Config(), ranks=2)
    planner.attach(0, Inventory((8,), 4, 1, 0))
    chain, request = Keys.of(ids(4)), RequestInfo("r")
    pages = [np.arange(4, dtype=np.int32)]

    assert not planner.ready
    assert planner.offer(request, chain, 64, pages).blocks == 0
    assert planner.match(request, chain).boundary == 0
    assert not planner.tick(0.0)

    planner.attach(1, Inventory((6,), 3, 1, 0))
    assert planner.ready
    plans = planner.tick(0.0)
    assert plans.geometry is not None
    assert (plans.geometry.slots_per_slab, plans.geometry.host_slabs) == ((6,), 3)


def test_a_rank_attaches_once_and_with_all_groups() -> None:
    """A second attach, a rank out of range and a wrong number of groups are errors that name the numbers."""
    planner = Planner(one_group(), Config(), ranks=2)
    with pytest.raises(LayoutError, match="2 groups, the planner 1"):
        planner.attach(0, Inventory((8, 8), 4, 1, 0))
    planner.attach(0, Inventory((8,), 4, 1, 0))
    with pytest.raises(LayoutError, match="rank 0 cannot attach: ranks 0 to 1"):
        planner.attach(0, Inventory((8,), 4, 1, 0))
    with pytest.raises(LayoutError, match="rank 2"):
        planner.attach(2, Inventory((8,), 4, 1, 0))


def test_what_was_stored_comes_back_byte_for_byte() -> None:
    """A chain stored by one request is matched by the next and loaded with exactly its bytes."""
    with Rig() as rig:
        chain = Keys.of(ids(20))
        assert rig.store(chain).blocks == 20
        assert rig.match(chain).boundary == 320

        plan, finished, wrong = rig.load(chain, first=100)
        assert (plan.boundary, plan.blocks, plan.shortfall) == (320, 20, 0)
        assert [(f.id, f.boundary, f.failed) for f in finished] == [(plan.id, 320, 0)]
        assert wrong == 0
        rig.check()


def test_two_ranks_make_a_key_visible_together() -> None:
    """With rank 1's copies held back nothing is visible; after both have reported all is, and loads on both."""
    gate = Gated(is_open=True)
    with Rig(ranks=2, copy_faults=[gate], fault_rank=1) as rig:
        chain, info = Keys.of(ids(6)), rig.info()
        pages = rig.pages(chain)
        rig.paint(chain, pages)
        gate.hold()
        rig.planner.offer(info, chain, 96, pages)
        for _ in range(20):
            rig.local.step()
        assert rig.match(chain).boundary == 0
        assert rig.match(chain).pending == 96
        gate.release()
        rig.local.drain()
        assert rig.match(chain).boundary == 96
        assert rig.load(chain, first=50)[2] == 0


def test_only_new_blocks_are_stored_each_turn() -> None:
    """A growing conversation stores each block once, and a repeated turn stores nothing."""
    with Rig(Sizes(host=16)) as rig:
        stored = [rig.store(Keys.of(ids(n))).blocks for n in (20, 25, 25, 40)]
        assert stored == [20, 5, 0, 15]
        assert rig.planner.counters["stored_host"] == 40


def test_a_chunked_prompt_is_stored_chunk_by_chunk() -> None:
    """Offers at a growing number of computed tokens store full blocks only, each once."""
    with Rig() as rig:
        chain, info = Keys.of(ids(8)), rig.info()
        pages = rig.pages(chain)
        rig.paint(chain, pages)
        blocks = [rig.planner.offer(info, chain, n, pages).blocks for n in (15, 16, 40, 40, 127, 128, 4000)]
        assert blocks == [0, 1, 1, 0, 5, 1, 0]
        rig.local.drain()
        assert rig.load(chain, first=50)[2] == 0


def test_what_does_not_fit_is_cut_from_the_tail() -> None:
    """A prompt longer than host without a disk keeps exactly its first blocks."""
    with Rig(Sizes(host=2)) as rig:
        chain = Keys.of(ids(30))
        offer = rig.store(chain)
        assert rig.match(chain).boundary == 16 * 16
        assert offer.blocked
        assert rig.load(chain, first=100)[2] == 0


def test_a_failed_store_is_offered_again_while_its_pages_live() -> None:
    """A block whose copy failed is invisible, and the request's next offer stores it."""
    fail = Failing(ops={Op.TO_HOST})
    with Rig(copy_faults=[fail]) as rig:
        chain, info = Keys.of(ids(6)), rig.info()
        pages = rig.pages(chain)
        rig.paint(chain, pages)
        fail.keys = {chain.keys[3].tobytes()}
        rig.planner.offer(info, chain, 96, pages)
        rig.local.drain()
        assert rig.match(chain).boundary == 48
        fail.keys = set()
        assert rig.planner.offer(info, chain, 96, pages).blocks == 1
        rig.local.drain()
        assert rig.match(chain).boundary == 96
        assert rig.load(chain, first=64)[2] == 0
        rig.planner.finish(info.id, "end_turn", 0.0)
        rig.check()


def test_a_prompt_longer_than_host_goes_to_disk_and_back_through_transit(tmp_path: Path) -> None:
    """Host of 8, transit of 8, disk of 80: all 60 blocks come back right, host keeps the first 8."""
    with Rig(Sizes(host=1, transit=1, disk=10), path=tmp_path) as rig:
        chain = Keys.of(ids(60))
        rig.store(chain)
        found = rig.match(chain)
        assert (found.boundary, found.host, found.disk) == (960, 8, 52)
        assert rig.planner.counters["stored_disk"] == 60

        plan, finished, wrong = rig.load(chain, first=100)
        assert (plan.boundary, plan.shortfall, wrong) == (960, 0, 0)
        assert finished[-1].boundary == 960
        rig.check()


def test_sixteen_requests_for_one_prefix_share_every_transfer(tmp_path: Path) -> None:
    """1,000 blocks: stored once; after eviction from host read once and copied to the device once; all are served."""
    count = Counting()
    sizes = Sizes(host=130, transit=2, disk=300, pages=2048)
    with Rig(sizes, path=tmp_path, tier_faults=[count]) as rig:
        chain = Keys.of(ids(1000))
        pages = rig.pages(chain)
        rig.paint(chain, pages)
        infos = [rig.info() for _ in range(16)]
        assert [rig.planner.offer(i, chain, 16000, pages).blocks for i in infos] == [1000] + [0] * 15
        rig.local.drain()
        for info in infos:
            rig.planner.finish(info.id, "end_turn", 0.0)
        rig.store(Keys.of(ids(1040, start=5000)))
        assert rig.match(chain).host == 0

        rig.wipe()
        infos = [rig.info() for _ in range(16)]
        first = rig.planner.match(infos[0], chain)
        assert (first.boundary, first.loading) == (16000, False)
        plan = rig.planner.load(infos[0], chain, 16000, pages)
        assert plan.boundary == 16000
        for info in infos[1:]:
            assert rig.planner.match(info, chain).loading
        rig.planner.finish(infos[0].id, "abort", 0.0)
        finished = rig.local.drain()
        assert [(f.id, f.boundary, f.request) for f in finished] == [(plan.id, 16000, None)]
        assert rig.mismatches(chain, pages, 0, 1000) == 0
        assert not any(rig.planner.match(i, chain).loading for i in infos[1:])
        assert count.copies(Op.READ) == 1000
        assert rig.planner.counters["loaded_disk"] + rig.planner.counters["loaded_host"] == 1000
        for info in infos[1:]:
            rig.planner.finish(info.id, "end_turn", 0.0)
        rig.check()


@pytest.mark.parametrize("failures", [1, 2])
def test_a_failing_read_is_tried_once_more_then_the_prefix_is_served(tmp_path: Path, failures: int) -> None:
    """One failure is hidden by the retry; two leave the blocks before the bad one, and the key is gone."""
    fail, count = Failing(ops={Op.READ}, times=failures), Counting()
    with Rig(Sizes(host=2, disk=10), path=tmp_path, tier_faults=[count, fail]) as rig:
        chain = Keys.of(ids(10))
        rig.store(chain)
        rig.store(Keys.of(ids(16, start=900)))
        assert rig.match(chain).disk == 10
        bad = chain.keys[6].tobytes()
        fail.keys = {bad}

        finished, wrong = rig.load(chain)[1:]
        assert wrong == 0
        assert finished[-1].boundary == (160 if failures == 1 else 96)
        assert count.copies(Op.READ, bad) == 2
        assert rig.match(chain).boundary == (160 if failures == 1 else 96)
        rig.check()


def test_a_pending_store_has_a_deadline() -> None:
    """A store that never ends is pending for others until its deadline and a miss afterwards; it still ends once."""
    gate = Gated(is_open=True)
    clock = Clock()
    with Rig(copy_faults=[gate], clock=clock, config=Config(deadline_s=5.0)) as rig:
        chain, info = Keys.of(ids(4)), rig.info()
        pages = rig.pages(chain)
        rig.paint(chain, pages)
        gate.hold()
        rig.planner.offer(info, chain, 64, pages)
        rig.local.step()
        clock.now = 4.9
        rig.local.step()
        assert (rig.match(chain).boundary, rig.match(chain).pending) == (0, 64)
        clock.now = 5.1
        assert rig.local.step() == []
        assert (rig.match(chain).boundary, rig.match(chain).pending) == (0, 0)
        gate.release()
        finished = rig.local.drain()
        assert [(f.kind, f.expired) for f in finished] == [(JobKind.STORE, True)]
        assert rig.match(chain).boundary == 64


def test_a_read_that_never_ends_expires_at_its_deadline(tmp_path: Path) -> None:
    """A load stuck in the disk read stops being waited for at the deadline and ends as expired once the read ends."""
    gate = Gated({Op.READ}, is_open=True)
    clock = Clock()
    config = Config(deadline_s=5.0)
    sizes = Sizes(host=4, disk=10)
    with Rig(sizes, path=tmp_path, tier_faults=[gate], clock=clock, config=config) as rig:
        chain = Keys.of(ids(20))
        rig.store(chain)
        rig.store(Keys.of(ids(32, start=900)))
        assert rig.match(chain).disk == 20
        info, pages = rig.info(), rig.pages(chain)
        rig.planner.match(info, chain)
        gate.hold()
        plan = rig.planner.load(info, chain, 320, pages)
        rig.local.step()
        assert gate.arrived()
        assert rig.match(chain).loading
        clock.now = 5.1
        rig.local.step()
        assert not rig.match(chain).loading
        gate.release()
        finished = rig.local.drain()
        assert [(f.id, f.expired) for f in finished] == [(plan.id, True)]
        assert finished[0].boundary < 320
        assert rig.mismatches(chain, pages, 0, finished[0].boundary // 16) == 0
        assert rig.match(chain).boundary == 320


def test_prefetch_brings_blocks_into_host_before_they_are_asked_for(tmp_path: Path) -> None:
    """After a prefetch has ended the same match comes from host, with one read per block, and loads right."""
    count = Counting()
    with Rig(Sizes(host=4, disk=10), path=tmp_path, tier_faults=[count]) as rig:
        chain = Keys.of(ids(20))
        rig.store(chain)
        rig.store(Keys.of(ids(32, start=900)))
        info = rig.info()
        rig.planner.match(info, chain)
        assert rig.planner.prefetch(info, chain, deadline=100.0) > 0
        assert rig.planner.prefetch(info, chain, deadline=100.0) == 0
        rig.local.drain()
        found = rig.match(chain)
        assert (found.host, found.disk) == (20, 0)
        assert rig.load(chain)[2] == 0
        assert count.copies(Op.READ) == 20


def test_a_load_joins_a_running_prefetch(tmp_path: Path) -> None:
    """Blocks that a prefetch is reading are waited for, not read again."""
    gate, count = Gated(is_open=True), Counting()

    with Rig(Sizes(host=4, disk=10), path=tmp_path, tier_faults=[count, gate]) as rig:
        chain = Keys.of(ids(20))
        rig.store(chain)
        rig.store(Keys.of(ids(32, start=900)))
        info, pages = rig.info(), rig.pages(chain)
        rig.wipe()
        rig.planner.match(info, chain)
        gate.hold()
        rig.planner.prefetch(info, chain, deadline=100.0)
        rig.local.step()
        plan = rig.planner.load(info, chain, 320, pages)
        rig.local.step()
        gate.release()
        finished = {f.id: f for f in rig.local.drain()}
        assert finished[plan.id].boundary == 320
        assert rig.mismatches(chain, pages, 0, 20) == 0
        assert count.copies(Op.READ) == 20


def test_reset_forgets_a_tier_and_leaves_the_other(tmp_path: Path) -> None:
    """After reset("host") the same blocks come from disk; after reset("disk") too nothing is left, also on restart."""
    with Rig(Sizes(host=4, disk=10), path=tmp_path) as rig:
        chain = Keys.of(ids(20))
        rig.store(chain)
        rig.planner.reset(["host"])
        found = rig.match(chain)
        assert (found.boundary, found.host, found.disk) == (320, 0, 20)
        assert rig.load(chain)[2] == 0
        rig.planner.reset(["host", "disk"])
        rig.local.drain()
        assert rig.match(chain).boundary == 0
        rig.check()
        with pytest.raises(ValueError, match="'gpu'"):
            rig.planner.reset(["gpu"])
    with Rig(Sizes(host=4, disk=10), path=tmp_path) as rig:
        assert rig.match(chain).boundary == 0


def test_a_reset_during_a_store_keeps_its_bytes_invisible() -> None:
    """A store that ends after the reset of host makes nothing visible and gives its slots back."""
    gate = Gated(is_open=True)
    with Rig(copy_faults=[gate]) as rig:
        chain, info = Keys.of(ids(8)), rig.info()
        pages = rig.pages(chain)
        rig.paint(chain, pages)
        gate.hold()
        rig.planner.offer(info, chain, 128, pages)
        rig.local.step()
        rig.planner.reset(["host"])
        gate.release()
        rig.local.drain()
        assert rig.match(chain).pending == 0
        rig.planner.finish(info.id, "end_turn", 0.0)
        rig.check()
        assert rig.store(chain).blocks == 8


def test_a_restart_finds_everything_on_disk(tmp_path: Path) -> None:
    """A second process on the same path serves from disk without a write, byte for byte."""
    chains = [Keys.of([n, *ids(9)]) for n in range(4)]
    with Rig(Sizes(host=4, disk=10), path=tmp_path, ranks=2) as rig:
        for chain in chains:
            rig.store(chain)
    with Rig(Sizes(host=4, disk=10), path=tmp_path, ranks=2) as rig:
        for chain in chains:
            assert rig.match(chain).disk == 10
            finished, wrong = rig.load(chain)[1:]
            assert (finished[-1].boundary, wrong) == (160, 0)
        assert rig.planner.counters["stored_disk"] == 0
        rig.check()


def test_preempt_starts_over_and_names_the_running_jobs() -> None:
    """ORDER-06 at this level: three gated stores of one request are all named, and a new offer walks from 0."""
    gate = Gated(is_open=True)
    with Rig(copy_faults=[gate]) as rig:
        chain, info = Keys.of(ids(6)), rig.info()
        pages = rig.pages(chain)
        rig.paint(chain, pages)
        gate.hold()
        jobs = [rig.planner.offer(info, chain, n * 32, pages).job for n in (1, 2, 3)]
        rig.local.step()
        assert rig.planner.preempt(info.id) == tuple(sorted(jobs))
        gate.release()
        assert sorted(f.id for f in rig.local.drain()) == sorted(jobs)
        assert rig.planner.preempt(info.id) == ()
        again = rig.planner.offer(info, chain, 96, rig.pages(chain, 50))
        assert (again.blocks, again.cursor) == (0, 96)
