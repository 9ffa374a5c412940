"""REF, TIER and planner-level DISK and PROG rows of docs/cases.md, by id."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from kvoffload.config import Config
from kvoffload.local import Local
from kvoffload.messages import Inventory, Outcome
from kvoffload.null_mover import NullMover
from kvoffload.planner import ExactSlots, Planner
from kvoffload.requests import RequestInfo
from kvoffload.testing.faults import Counting, Failing, Fault, Gated, Op
from kvoffload.testing.rig import BLOCK_BYTES, Clock, Keys, Rig, Sizes, one_group


def ids(count: int, start: int = 0) -> list[int]:
    return list(range(start, start + count))


def test_REF_01_a_match_pins_nothing() -> None:
    """After a match of 10 blocks the engine loads 4: 4 are pinned while they are copied, 0 before and after."""
    gate = Gated(is_open=True)
    with Rig(copy_faults=[gate]) as rig:
        chain = Keys.of(ids(10))
        rig.store(chain)
        info, pages = rig.info(), rig.pages(chain, 64)
        assert rig.planner.match(info, chain).boundary == 160
        assert rig.planner.pinned() == 0
        gate.hold()
        rig.planner.load(info, chain, 64, pages)
        rig.local.step()
        assert rig.planner.pinned() == 4
        gate.release()
        rig.local.drain()
        rig.planner.finish(info.id, "end_turn", 0.0)
        rig.check()


def test_REF_02_nothing_leaks_over_a_hundred_thousand_operations() -> None:
    """A working set of 60 % of host under random requests: at idle nothing is pinned, and the late hit rate is high."""
    planner = Planner(one_group(), Config(), exact=ExactSlots(host=1000))
    planner.attach(0, Inventory((64,), 16, 1, 0))
    local = Local(planner, [NullMover(0)], lambda: 0.0)
    chance = random.Random(1)
    chains = [Keys.of([n, *ids(5)]) for n in range(100)]
    pages = [np.arange(6, dtype=np.int32)]
    hits = total = 0
    for turn in range(20_000):
        chain, info = chance.choice(chains), RequestInfo(turn)
        found = planner.match(info, chain)
        if found.boundary and chance.random() < 0.9:
            planner.load(info, chain, found.boundary, pages)
        if chance.random() < 0.1:
            planner.finish(info.id, "abort", 0.0)
            local.step()
            continue
        planner.offer(info, chain, 96, pages)
        local.step()
        planner.finish(info.id, "end_turn", 0.0)
        if turn >= 18_000:
            hits, total = hits + found.boundary, total + 96
    local.drain()
    planner.check_integrity()
    assert planner.pinned() == 0
    assert hits / total >= 0.95


def test_REF_04_an_outcome_counts_once() -> None:
    """The same report twice, and a report of an unknown job, release nothing a second time."""
    with Rig() as rig:
        chain = Keys.of(ids(4))
        rig.store(chain)
        info, pages = rig.info(), rig.pages(chain, 64)
        rig.planner.match(info, chain)
        rig.planner.load(info, chain, 64, pages)
        (job,) = rig.planner.tick(0.0).jobs
        assert len(rig.planner.complete([Outcome(job.id, 0)])) == 1
        assert rig.planner.complete([Outcome(job.id, 0), Outcome(999, 0), Outcome(job.id, 5)]) == []
        rig.planner.finish(info.id, "end_turn", 0.0)
        rig.check()


def test_REF_05_a_thousand_loads_leave_no_reference() -> None:
    """One chain loaded 1,000 times: afterwards nothing is pinned and everything can be evicted."""
    with Rig() as rig:
        chain = Keys.of(ids(4))
        rig.store(chain)
        assert all(rig.load(chain)[2] == 0 for _ in range(1000))
        rig.check()
        rig.store(Keys.of(ids(32, start=100)))
        assert rig.match(chain).boundary == 0


def test_REF_06_a_slot_with_a_reader_is_not_handed_out() -> None:
    """Twice the capacity is stored while a load is held: its slots stay, and its bytes arrive right."""
    gate = Gated(is_open=True)
    with Rig(copy_faults=[gate]) as rig:
        chain = Keys.of(ids(8))
        rig.store(chain)
        rig.wipe()
        info, pages = rig.info(), rig.pages(chain, 200)
        rig.planner.match(info, chain)
        plan = rig.planner.load(info, chain, 128, pages)
        gate.hold()
        rig.local.step()
        for start in range(1000, 1064, 16):
            other = Keys.of(ids(16, start))
            sister, theirs = rig.info(), rig.pages(other)
            rig.paint(other, theirs)
            rig.planner.offer(sister, other, 256, theirs)
            rig.local.step()
            rig.planner.finish(sister.id, "end_turn", 0.0)
        gate.release()
        finished = {f.id: f for f in rig.local.drain()}
        assert finished[plan.id].boundary == 128
        assert rig.mismatches(chain, pages, 0, 8) == 0
        rig.planner.finish(info.id, "end_turn", 0.0)
        rig.check()


def test_REF_08_and_10_a_pinned_full_tier_gives_back_pressure_and_recovers(tmp_path: Path) -> None:
    """With host pinned by running stores an offer is told to come again, at once; after they end it is served."""
    gate = Gated(is_open=True)
    with Rig(Sizes(host=2), copy_faults=[gate]) as rig:
        first, second = Keys.of(ids(16)), Keys.of(ids(8, start=100))
        info, pages = rig.info(), rig.pages(first)
        rig.paint(first, pages)
        gate.hold()
        rig.planner.offer(info, first, 256, pages)
        rig.local.step()
        late, theirs = rig.info(), rig.pages(second, 32)
        rig.paint(second, theirs)
        answer = rig.planner.offer(late, second, 128, theirs)
        assert (answer.blocks, answer.cursor, answer.blocked) == (0, 0, True)
        gate.release()
        rig.local.drain()
        assert rig.planner.offer(late, second, 128, theirs).blocks == 8
        rig.local.drain()
        assert rig.load(second, first=64)[2] == 0


def test_REF_11_a_newly_written_block_is_newer_than_a_read_one() -> None:
    """Write A, read A, write B, evict: A goes, B stays."""
    with Rig(Sizes(host=1)) as rig:
        a, b = Keys.of(ids(4)), Keys.of(ids(4, start=50))
        rig.store(a)
        rig.load(a)
        rig.store(b)
        rig.store(Keys.of(ids(4, start=90)))
        assert (rig.match(a).boundary, rig.match(b).boundary) == (0, 64)


def test_REF_13_only_the_shortfall_is_evicted() -> None:
    """Needing 10 slots with 7 free takes exactly 3 blocks away, the deepest of the oldest chain."""
    with Rig(Sizes(host=4)) as rig:
        old = Keys.of(ids(25))
        rig.store(old)
        assert rig.planner.stats().tiers["host"].free == 7 * BLOCK_BYTES
        rig.store(Keys.of(ids(10, start=100)))
        assert rig.match(old).boundary == 22 * 16


def test_REF_16_making_room_never_takes_what_a_load_is_about_to_read() -> None:
    """Host full: 8 blocks are being loaded while 8 others are stored; the 8 sources stay whole."""
    gate = Gated(is_open=True)
    with Rig(Sizes(host=2), copy_faults=[gate]) as rig:
        wanted, rest = Keys.of(ids(8)), Keys.of(ids(8, start=50))
        rig.store(wanted)
        rig.store(rest)
        rig.wipe()
        new, theirs = Keys.of(ids(8, start=100)), None
        info, pages = rig.info(), rig.pages(wanted, 64)
        rig.planner.match(info, wanted)
        gate.hold()
        plan = rig.planner.load(info, wanted, 128, pages)
        other, theirs = rig.info(), rig.pages(new)
        rig.paint(new, theirs)
        rig.planner.offer(other, new, 128, theirs)
        rig.local.step()
        gate.release()
        finished = {f.id: f for f in rig.local.drain()}
        assert finished[plan.id].boundary == 128
        assert rig.mismatches(wanted, pages, 0, 8) == 0
        assert rig.match(rest).boundary == 0


def test_REF_18_what_a_prefetch_brings_is_looked_at_anew(tmp_path: Path) -> None:
    """While blocks are being prefetched the blocks before them go away: no match crosses the hole."""
    gate = Gated(is_open=True)
    with Rig(Sizes(host=4, disk=2), path=tmp_path, tier_faults=[gate]) as rig:
        chain = Keys.of(ids(8))
        rig.store(chain)
        rig.store(Keys.of(ids(32, start=100)))
        info = rig.info()
        found = rig.planner.match(info, chain)
        assert found.boundary == 0 or found.disk > 0
        gate.hold()
        rig.planner.prefetch(info, chain, deadline=50.0)
        rig.local.step()
        rig.planner.reset(["disk"])
        gate.release()
        rig.local.drain()
        after = rig.match(chain)
        plan, _, wrong = rig.load(chain)
        assert wrong == 0
        assert plan.boundary == after.boundary
        rig.planner.finish(info.id, "abort", 0.0)
        rig.check()


def test_TIER_02_a_disk_hit_longer_than_host_is_served_whole(tmp_path: Path) -> None:
    """100 blocks on disk and 16 slots in host: all 100 arrive, byte for byte."""
    with Rig(Sizes(host=2, disk=16), path=tmp_path) as rig:
        chain = Keys.of(ids(100))
        rig.store(chain)
        rig.planner.reset(["host"])
        plan, finished, wrong = rig.load(chain, first=100)
        assert (plan.boundary, plan.shortfall, finished[-1].boundary, wrong) == (1600, 0, 1600, 0)
        rig.check()


def test_TIER_03_a_miss_below_evicts_nothing_above(tmp_path: Path) -> None:
    """A chain that no tier holds makes no room in a full host."""
    with Rig(Sizes(host=2, disk=4), path=tmp_path) as rig:
        full = Keys.of(ids(16))
        rig.store(full)
        unknown, info = Keys.of(ids(16, start=500)), rig.info()
        rig.planner.match(info, unknown)
        assert rig.planner.load(info, unknown, 256, rig.pages(unknown)).id == 0
        assert rig.planner.prefetch(info, unknown, 10.0) == 0
        rig.local.drain()
        assert rig.match(full).host == 16


def test_TIER_04_a_store_in_flight_is_pending_not_missing() -> None:
    """Turn 2 asks while turn 1 is being stored: pending, then a hit, and the block is stored once."""
    gate = Gated(is_open=True)
    with Rig(copy_faults=[gate]) as rig:
        chain, info = Keys.of(ids(5)), rig.info()
        pages = rig.pages(chain)
        rig.paint(chain, pages)
        gate.hold()
        rig.planner.offer(info, chain, 80, pages)
        rig.local.step()
        found = rig.match(chain)
        assert (found.boundary, found.pending, found.wait) == (0, 80, True)
        other = rig.info()
        assert rig.planner.offer(other, chain, 80, rig.pages(chain, 32)).blocks == 0
        gate.release()
        rig.local.drain()
        assert (rig.match(chain).boundary, rig.match(chain).wait) == (80, False)
        assert rig.planner.counters["stored_host"] == 5
        assert rig.planner.counters["in_flight_dedup"] == 5


@pytest.mark.parametrize("broken", [False, True])
def test_TIER_05_sixteen_askers_cause_one_read(tmp_path: Path, broken: bool) -> None:
    """Sixteen requests want the same block from a slow disk: one read; if it fails, one retry and nobody hangs."""
    count, fail = Counting(), Failing(times=2, ops={Op.READ})
    sizes = Sizes(host=2, disk=4, pages=512)
    with Rig(sizes, path=tmp_path, tier_faults=[count, fail]) as rig:
        chain = Keys.of(ids(1))
        rig.store(chain)
        rig.planner.reset(["host"])
        key = chain.keys[0].tobytes()
        if broken:
            fail.keys = {key}
        rig.wipe()
        infos = [rig.info() for _ in range(16)]
        pages = [rig.pages(chain, n) for n in range(16)]
        for info in infos:
            rig.planner.match(info, chain)
        plans = [rig.planner.load(i, chain, 16, p) for i, p in zip(infos, pages, strict=True)]
        finished = {f.id: f for f in rig.local.drain()}
        assert count.copies(Op.READ, key) == (2 if broken else 1)
        for plan, mine in zip(plans, pages, strict=True):
            assert finished[plan.id].boundary == (0 if broken else 16)
            assert broken or rig.mismatches(chain, mine, 0, 1) == 0
        for info in infos:
            rig.planner.finish(info.id, "end_turn", 0.0)
        rig.check()


def test_DISK_01_a_failed_write_is_not_visible_and_can_be_done_again(tmp_path: Path) -> None:
    """The second of three writes fails: two keys are on disk, the third is a miss there and counted; a later turn
    writes it."""
    fail = Failing(times=1, ops={Op.WRITE})
    with Rig(Sizes(host=4, disk=4), path=tmp_path, tier_faults=[fail]) as rig:
        chain = Keys.of(ids(3))
        fail.keys = {chain.keys[1].tobytes()}
        rig.store(chain)
        assert rig.planner.counters["stored_disk"] == 2
        assert rig.planner.stats().dropped["write_failed"] == 1
        rig.planner.reset(["host"])
        assert rig.match(chain).boundary == 16
        rig.store(chain)
        rig.planner.reset(["host"])
        assert rig.match(chain).boundary == 48
        assert rig.load(chain)[2] == 0


def test_PROG_04_a_bad_block_is_not_tried_for_ever(tmp_path: Path) -> None:
    """The slots file is cut: match, load (fails), match: a miss, after at most two attempts."""
    count = Counting()
    with Rig(Sizes(host=2, disk=4), path=tmp_path, tier_faults=[count]) as rig:
        chain = Keys.of(ids(4))
        rig.store(chain)
        rig.planner.reset(["host"])
        with (tmp_path / "rank0" / "slots").open("r+b") as slots:
            slots.truncate(0)
        plan, finished, _ = rig.load(chain)
        assert plan.boundary == 64
        assert finished[-1].boundary == 0
        assert count.copies(Op.READ, chain.keys[0].tobytes()) == 2
        assert rig.match(chain).boundary == 0
        rig.check()


def test_PROG_11_with_host_pinned_a_disk_hit_still_loads(tmp_path: Path) -> None:
    """Host full of pinned blocks: five disk blocks are served through transit, without an exception."""
    gate = Gated(is_open=True)
    with Rig(Sizes(host=1, disk=8), path=tmp_path, copy_faults=[gate]) as rig:
        wanted, hot = Keys.of(ids(5)), Keys.of(ids(8, start=50))
        rig.store(wanted)
        rig.store(hot)
        assert rig.match(wanted).disk == 5
        reader, theirs = rig.info(), rig.pages(hot, 64)
        rig.planner.match(reader, hot)
        gate.hold()
        rig.planner.load(reader, hot, 128, theirs)
        rig.local.step()
        info, pages = rig.info(), rig.pages(wanted, 100)
        rig.planner.match(info, wanted)
        plan = rig.planner.load(info, wanted, 80, pages)
        rig.local.step()
        gate.release()
        finished = {f.id: f for f in rig.local.drain()}
        assert finished[plan.id].boundary == 80
        assert rig.mismatches(wanted, pages, 0, 5) == 0


def test_DISK_the_tier_is_switched_off_after_failures_and_comes_back(tmp_path: Path) -> None:
    """A disk that fails every write is taken out of use, answers nothing, and returns once a probe succeeds."""
    fault = Fault()
    clock = Clock()
    with Rig(Sizes(host=4, disk=8), path=tmp_path, tier_faults=[fault], clock=clock) as rig:
        good = Keys.of(ids(4))
        rig.store(good)
        rig.planner.reset(["host"])
        fault.healthy = False
        rig.local.step()
        assert rig.match(good).boundary == 0
        assert rig.planner.counters["disk_lost"] == 1
        fault.healthy = True
        rig.local.step()
        assert rig.match(good).boundary == 64
        assert rig.load(good)[2] == 0


def test_DISK_15_a_block_is_written_at_its_second_use(tmp_path: Path) -> None:
    """With disk_admission 2 a first use writes nothing, the second writes each block once, a third nothing more."""
    config = Config(host_bytes=1, disk_admission=2, disk_path=tmp_path, disk_bytes=1, model_id="m")
    count = Counting()
    with Rig(Sizes(host=4, disk=4), path=tmp_path, config=config, tier_faults=[count]) as rig:
        chain = Keys.of(ids(6))
        written = []
        for _ in range(3):
            rig.store(chain)
            written.append(count.copies(Op.WRITE))
        assert written == [0, 6, 6]
        rig.store(Keys.of(ids(40, start=500)))
        assert count.copies(Op.WRITE) == 6
        rig.planner.reset(["host"])
        assert rig.load(chain)[2] == 0


def test_DISK_15_the_write_budget_holds(tmp_path: Path) -> None:
    """A budget of 10 blocks an hour: 10 at first, then one every six minutes, whatever waits."""
    config = Config(
        disk_write_budget=10 * BLOCK_BYTES, disk_path=tmp_path, disk_bytes=1, model_id="m", host_bytes=1
    )
    clock, count = Clock(), Counting()
    with Rig(Sizes(host=8, disk=8), path=tmp_path, config=config, clock=clock, tier_faults=[count]) as rig:
        rig.store(Keys.of(ids(40)))
        assert count.copies(Op.WRITE) == 10
        for minutes, expected in ((5, 10), (7, 11), (31, 15), (100_000, 25)):
            clock.now = 60.0 * minutes
            rig.local.drain()
            assert count.copies(Op.WRITE) == expected
