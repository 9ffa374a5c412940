"""LIFE rows of docs/cases.md on the reference engine: whatever happens to a request, each job ends once."""

from __future__ import annotations

import numpy as np
import pytest
from engine_world import counting_engine, feed, forget, request, stored, until

from kvoffload.connector import PREEMPT, Scheduled
from kvoffload.layout import CacheGroup, GroupKind, Layout
from kvoffload.messages import JobKind, Outcome
from kvoffload.testing.engine import Limits, State
from kvoffload.testing.engine.drive import engine_over, settle, step
from kvoffload.testing.faults import Counting, Gated, Op
from kvoffload.testing.rig import Keys, Rig, Sizes


def test_LIFE_01_an_abort_during_a_load_loses_no_page():
    """10,000 times: the load is held, the request aborted, the gate opened. One end per hold, every page back."""
    engine, planner, mover = counting_engine(pages=12)
    stored(engine, 0, 160)
    for number in range(1, 10_001):
        seq = request(number, 160)
        engine.add(seq)
        mover.held = True
        engine.step()
        assert seq.state is State.LOADING
        engine.abort(seq)
        assert len(engine.held) == 1
        engine.step()
        assert engine.device.free == 12 - 10
        mover.held = False
        engine.step()
        assert (engine.held, engine.device.free) == ({}, 12)
    assert (planner.pinned(), planner.idle, len(planner.requests)) == (0, True, 0)


def test_LIFE_01_an_abort_during_a_load_with_bytes():
    """The copy of an aborted request still lands in its quarantined pages; then they serve another request right."""
    gate = Gated([Op.TO_DEVICE])
    with Rig(Sizes(pages=16), copy_faults=[gate]) as rig:
        engine = engine_over(rig)
        stored(engine, 1, 160)
        seq = request(2, 160)
        engine.add(seq)
        step(engine)
        assert gate.arrived()
        engine.abort(seq)
        other = request(3, 160, text=7)
        engine.add(other)
        for _ in range(20):
            step(engine)
        assert (engine.device.free, other.state) == (6, State.WAITING)
        gate.release()
        settle(engine)
        rig.check()
        assert (engine.device.free, engine.device.mismatches) == (16, 0)


@pytest.mark.parametrize("first", ["abort", "end_turn"])
def test_LIFE_03_abort_and_finish_in_one_step_release_once(first):
    """Both orders, with a store under way: one hold, one end of it, and no page is released twice."""
    engine, planner, mover = counting_engine(pages=12)
    free = engine.device.free
    seq = request(1, 160, 4)
    engine.add(seq)
    mover.held = True
    engine.step()
    holds = [
        engine.scheduler.release("request 1", reason)
        for reason in (first, "abort" if first != "abort" else "end_turn")
    ]
    assert holds[0] > 0
    assert holds[1] == 0
    mover.held = False
    freed = []
    for _ in range(5):
        metadata = engine.scheduler.step([], 0.0)
        for worker in engine.workers:
            worker.before_forward(metadata)
            freed += engine.scheduler.update(worker.poll()).freed
    assert freed == [holds[0]]
    assert (planner.pinned(), planner.idle) == (0, True)

    engine, planner, mover = counting_engine(pages=12)
    seq = request(1, 160, 1)
    engine.add(seq)
    if first == "abort":
        engine.abort(seq)
        assert engine.step() == []
    else:
        assert engine.step() == [seq]
        engine.abort(seq)
    settle(engine)
    engine.device.check_integrity()
    assert engine.device.free == free


@pytest.mark.parametrize("load_first", [True, False])
def test_LIFE_04_a_load_and_a_store_end_in_one_poll(load_first):
    """Both jobs of one request are reported in the same call, in either order: a Loaded, and the end of the hold."""
    engine, planner, _ = counting_engine(pages=20)
    scheduler, pages = engine.scheduler, [np.arange(11, dtype=np.int32)]
    feed(engine, Scheduled(request(1, 65, text=2), 64, pages))
    seq = request(2, 161, text=2)
    assert scheduler.match(seq, 0).tokens == 64
    scheduler.allocated(seq, pages, 0, 64)
    metadata = scheduler.step([Scheduled(seq, 160, pages)], 0.0)
    kinds = {job.kind: job.id for job in metadata.jobs}
    assert set(kinds) == {JobKind.LOAD, JobKind.STORE}
    order = [kinds[JobKind.LOAD], kinds[JobKind.STORE]]
    update = scheduler.update([Outcome(job, 0) for job in (order if load_first else order[::-1])])

    assert [(item.request, item.boundary) for item in update.loaded] == [("request 2", 64)]
    assert scheduler.release("request 2", "end_turn") == 0
    assert (planner.idle, planner.pinned()) == (True, 0)
    assert planner.counters["stored_host"] == 4 + 6


@pytest.mark.parametrize("load_first", [True, False])
def test_LIFE_04_the_pages_wait_for_both(load_first):
    """The request is gone when its load and its store end, in either order: its hold ends with the second one."""
    engine, planner, _ = counting_engine(pages=20)
    scheduler, pages = engine.scheduler, [np.arange(11, dtype=np.int32)]
    feed(engine, Scheduled(request(1, 65, text=2), 64, pages))
    seq = request(2, 161, text=2)
    scheduler.match(seq, 0)
    scheduler.allocated(seq, pages, 0, 64)
    scheduler.step([Scheduled(seq, 160, pages)], 0.0)
    jobs = [running.job.id for running in planner._inflight]
    assert len(jobs) == 2
    hold = scheduler.release("request 2", "abort")
    freed = [scheduler.update([Outcome(job, 0)]).freed for job in (jobs if load_first else jobs[::-1])]

    assert freed == [(), (hold,)]
    assert (planner.idle, planner.pinned()) == (True, 0)


def test_LIFE_06_pages_of_a_load_that_never_answers_stay_quarantined():
    """The gate never opens and the request is aborted: past the deadline the job counts as overdue, its pages stay
    with it until the copy engine confirms, and then they are free."""
    gate = Gated([Op.TO_DEVICE])
    with Rig(Sizes(pages=16), copy_faults=[gate]) as rig:
        engine = engine_over(rig)
        stored(engine, 1, 160)
        seq = request(2, 160)
        engine.add(seq)
        step(engine)
        engine.abort(seq)
        until(engine, lambda: rig.clock.now > 3 * rig.planner.config.deadline_s, idle_s=0.5)
        assert rig.planner.counters["overdue"] == 1
        assert (len(engine.held), engine.device.free) == (1, 6)
        gate.release()
        settle(engine)
        assert engine.device.free == 16
        rig.check()


def test_LIFE_07_a_step_without_compute_carries_a_store():
    """Blocks are offered in a step in which nothing is computed: their store is submitted and completed."""
    count = Counting()
    with Rig(Sizes(pages=16), copy_faults=[count]) as rig:
        engine = engine_over(rig)
        scheduler, seq = engine.scheduler, request(1, 64)
        engine.device.admit(seq, [np.empty(0, np.int32)])
        engine.device.compute(seq, 64)
        items, inner = [Scheduled(seq, 64, seq.table)], scheduler.step
        scheduler.step = lambda nothing, now: inner([items.pop()] if items else nothing, now)
        engine.step()
        assert not engine.worked
        until(engine, lambda: rig.planner.idle)
        assert (count.copies(Op.TO_HOST), rig.planner.counters["stored_host"]) == (4, 4)


def test_LIFE_07_disk_writes_go_on_without_work(tmp_path):
    """The only request has ended before its blocks are on their way to disk: idle steps write all of them."""
    with Rig(Sizes(host=4, disk=8, pages=16), path=tmp_path) as rig:
        engine = engine_over(rig)
        engine.add(request(1, 160))
        settle(engine)
        until(engine, lambda: rig.planner.counters["stored_disk"] == 10)
        assert rig.planner.idle


@pytest.mark.parametrize("computed", [48, 97])
def test_LIFE_09_a_preempted_request_offers_again(computed):
    """3 of 6 blocks, or all, are stored and lost again, the request is preempted and comes back with other pages: all
    6 are stored."""
    with Rig(Sizes(pages=64)) as rig:
        engine = engine_over(rig, limits=Limits(tokens=48), cached=False)
        seq = request(1, 97, 4)
        engine.add(seq)
        while seq.computed < computed:
            engine.step()
        rig.local.drain()
        assert rig.match(Keys(seq.all_keys)).boundary == computed // 16 * 16
        rig.store(Keys.of(range(40)), 20)
        assert rig.match(Keys(seq.all_keys)).boundary == 0
        engine.preempt(seq)
        taken = engine.device.pools[0].allocate(7)
        settle(engine)
        engine.device.release([taken])
        assert rig.match(Keys(seq.all_keys)).boundary == 96
        assert engine.device.mismatches == 0
        rig.check()


def test_LIFE_09_a_block_waits_for_its_key():
    """6 blocks are computed and 5 keys known: 5 are stored, and the sixth once its key has come."""
    engine, planner, _ = counting_engine(pages=16)
    seq = request(1, 96)
    keys, pages = seq.all_keys, [np.arange(6, dtype=np.int32)]
    seq.chain.keys = keys[:5]
    feed(engine, Scheduled(seq, 96, pages))
    assert planner.counters["stored_host"] == 5
    seq.chain.keys = keys
    feed(engine, Scheduled(seq, 96, pages))
    assert planner.counters["stored_host"] == 6
    assert engine.scheduler.release("request 1", PREEMPT) == 0


def test_LIFE_10_one_page_number_in_two_groups():
    """A job names page 5 in both groups: stored, loaded into the same numbers again, and nothing is left behind."""
    groups = tuple(CacheGroup(i, GroupKind.FULL, 16, 8192, layers=("a", "b")) for i in (0, 1))
    with Rig(Sizes(pages=16, host=8), layout=Layout(16, groups)) as rig:
        engine = engine_over(rig)
        first = request(1, 161)
        engine.add(first)
        engine._admit()
        assert [5 in table for table in first.table] == [True, True]
        settle(engine)
        forget(engine)
        again = request(2, 161)
        engine.add(again)
        settle(engine)
        assert (again.loaded, engine.device.mismatches, engine.device.free) == (160, 0, 32)
        assert engine.scheduler._holders == {}
        rig.check()


def test_LIFE_12_a_long_prompt_is_stored_as_it_is_computed():
    """10 blocks in 10 steps: block i can be found before block i + 2 is offered, and all 10 before the end."""
    with Rig(Sizes(pages=16)) as rig:
        engine = engine_over(rig, limits=Limits(tokens=16), cached=False)
        seq = request(1, 160, 2)
        engine.add(seq)
        for blocks in range(1, 11):
            engine.step()
            for mover in rig.movers:
                mover.wait(range(1000), 30.0)
            engine._listen()
            assert engine.scheduler.match(request(100 + blocks, 200), 0).tokens == 16 * blocks
        assert seq.state is State.RUNNING
        settle(engine)
