"""Deadlines count from when a job is sent: an engine that was idle for long does not start with jobs that are late."""

from __future__ import annotations

import pytest
from engine_world import request

from kvoffload.messages import JobKind
from kvoffload.scheduler_side import PlannerConnector
from kvoffload.testing.faults import Gated, Op
from kvoffload.testing.rig import Keys, Rig, Sizes

PAUSE = 1000.0


def test_a_store_after_a_pause_is_not_late():
    """Nothing ticks for 1,000 s; a store offered then is late a deadline after it was sent, and not before."""
    gate = Gated([Op.TO_HOST])
    with Rig(copy_faults=[gate]) as rig:
        chain = Keys.of(range(4))
        rig.local.step()
        rig.planner.offer(rig.info(), chain, 64, rig.pages(chain))
        rig.clock.now = PAUSE
        rig.local.step()
        assert rig.planner.counters["overdue"] == 0
        rig.clock.now = PAUSE + rig.planner.config.deadline_s - 0.1
        rig.local.step()
        assert rig.planner.counters["overdue"] == 0
        rig.clock.now += 0.2
        rig.local.step()
        assert rig.planner.counters["overdue"] == 1
        gate.release()
        rig.local.drain()


def test_a_load_after_a_pause_is_not_given_up(tmp_path):
    """The same for a load from disk that is longer than the transit slots: all of it comes."""
    with Rig(Sizes(host=2, transit=1, disk=16), path=tmp_path) as rig:
        chain = Keys.of(range(60))
        rig.store(chain)
        rig.wipe()
        info, pages = rig.info(), rig.pages(chain)
        found = rig.planner.match(info, chain)
        plan = rig.planner.load(info, chain, found.boundary, pages)
        rig.clock.now = PAUSE
        finished = {f.id: f for f in rig.local.drain()}
        assert (finished[plan.id].boundary, finished[plan.id].expired) == (960, False)
        assert rig.planner.counters["overdue"] == 0
        assert rig.mismatches(chain, pages, 0, 60) == 0


def test_a_prefetch_keeps_the_deadline_it_was_given(tmp_path):
    """A prefetch until 5 s that is sent at 1,000 s is late at once."""
    with Rig(Sizes(host=4, disk=4), path=tmp_path) as rig:
        chain = Keys.of(range(4))
        rig.store(chain)
        rig.planner.reset(["host"])
        rig.planner.prefetch(rig.info(), chain, 5.0)
        plans = rig.planner.tick(PAUSE)
        assert [job.kind for job in plans.jobs] == [JobKind.READ]
        assert rig.planner.counters["overdue"] == 1
        rig.movers[0].submit(plans)
        rig.local.drain()


@pytest.mark.parametrize("pause", [0.0, PAUSE])
def test_patience_begins_with_the_next_step(pause):
    """A request that is told to wait after a pause of the engine is told so for a whole deadline."""
    gate = Gated([Op.TO_HOST])
    with Rig(copy_faults=[gate]) as rig:
        scheduler = PlannerConnector(rig.planner)
        chain = Keys.of(range(12))
        scheduler.step([], 0.0)
        seq = request(2, 160)
        seq.all_keys = seq.chain.keys = chain.keys
        rig.planner.offer(rig.info(), chain, 160, rig.pages(chain))
        assert scheduler.match(seq, 0).wait
        for seconds, waits in ((0.0, True), (9.0, True), (11.0, False)):
            rig.movers[0].submit(scheduler.step([], pause + seconds))
            assert scheduler.match(seq, 0).wait is waits
        gate.release()
        rig.local.drain()


def test_late_jobs_are_named_at_a_bounded_rate(caplog):
    """13 stores that never end, one more every second: a line in ten seconds, which counts those between."""
    gate = Gated([Op.TO_HOST])
    with Rig(copy_faults=[gate]) as rig:
        for number in range(13):
            rig.clock.now = float(number)
            rig.local.step()
            chain = Keys.of([number])
            rig.planner.offer(rig.info(), chain, 16, rig.pages(chain, number))
        for seconds in range(13, 40):
            rig.clock.now = float(seconds)
            rig.local.step()
        assert rig.planner.counters["overdue"] == 13
        assert len(caplog.records) == 2
        assert "9 others since the last such line" in caplog.records[1].getMessage()
        gate.release()
        rig.local.drain()
