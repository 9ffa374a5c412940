"""PROG rows of docs/cases.md on the reference engine: every request ends, whatever stalls."""

from __future__ import annotations

import logging

import pytest
from engine_world import counting_engine, forget, request, stored, until

from kvoffload.config import Config
from kvoffload.testing.engine import Limits, State
from kvoffload.testing.engine.drive import engine_over, settle, step
from kvoffload.testing.faults import Counting, Failing, Fault, Gated, Op
from kvoffload.testing.rig import Rig, Sizes


def test_PROG_01_two_loads_do_not_hold_what_the_other_needs():
    """1,000 pages; requests of 900 and 800 blocks, 400 of each loadable: both end within 200 steps."""
    engine, _, mover = counting_engine(pages=1000)
    for text in (1, 2):
        stored(engine, text, 6400, text=text)
    requests = [request(3, 14_400, text=1), request(4, 12_800, text=2)]
    mover.held = True
    for seq in requests:
        engine.add(seq)
    engine.step()
    engine.step()
    mover.held = False
    for _ in range(200):
        engine.step()

    assert [seq.state for seq in requests] == [State.ENDED, State.ENDED]
    assert [seq.hits for seq in requests] == [(0, 6400, 0), (0, 6400, 0)]
    assert engine.device.free == 1000


def test_PROG_03_a_pending_hit_has_a_deadline():
    """The store of a prompt is held for ever: another request for it is told to wait, until the deadline, then goes
    on without; it is answered while the store still stands."""
    gate = Gated([Op.TO_HOST])
    with Rig(Sizes(pages=32), copy_faults=[gate], config=Config(deadline_s=5.0)) as rig:
        engine = engine_over(rig, cached=False)
        engine.add(request(1, 160))
        until(engine, lambda: len(engine.held) == 1)
        seq = request(2, 160)
        engine.add(seq)
        begin = rig.clock.now
        until(engine, lambda: rig.clock.now > begin + 4.0, idle_s=0.25)
        assert engine.waiting == [seq]
        until(engine, lambda: seq.state is State.ENDED, idle_s=0.25, steps=100)
        assert (seq.loaded, seq.prompt_made) == (0, 160)
        gate.release()
        settle(engine, idle_s=0.25)
        rig.local.drain()
        rig.check()


def test_PROG_06_a_load_with_a_missing_block_says_so_once(tmp_path):
    """The disk has lost the fourth of 9 blocks: one report, of 3 blocks; the engine computes the rest, bytes are
    right."""
    fault = Failing(ops=[Op.READ])
    with Rig(Sizes(host=4, disk=8, pages=16), path=tmp_path, tier_faults=[fault]) as rig:
        engine = engine_over(rig)
        seq = stored(engine, 1, 160)
        rig.local.drain()
        rig.planner.reset(["host"])
        fault.keys = {seq.all_keys[3].tobytes()}
        reports = []
        inner = engine._loaded
        engine._loaded = lambda item: (reports.append((item.boundary, item.failed)), inner(item))
        again = request(2, 160)
        engine.add(again)
        settle(engine)
        assert reports == [(48, 1)]
        assert (again.disk, again.made, engine.device.mismatches) == (48, 112, 0)
        rig.local.drain()
        rig.check()


def test_PROG_08_room_is_found_beside_running_writes(tmp_path):
    """Host is full of blocks that may go and 4 that are being written to disk: 10 more are stored at once."""
    gate = Gated([Op.WRITE], is_open=True)
    with Rig(Sizes(host=4, disk=16, pages=64), path=tmp_path, tier_faults=[gate]) as rig:
        engine = engine_over(rig)
        stored(engine, 1, 449)
        rig.local.drain()
        gate.hold()
        stored(engine, 2, 65, text=2)
        assert rig.planner.backlog()[1] == 4
        before = rig.planner.counters["stored_host"]
        engine.add(request(3, 161, text=3))
        settle(engine)
        assert rig.planner.counters["stored_host"] == before + 10
        gate.release()
        rig.local.drain()
        rig.check()


class Broken(Fault):
    """A storage driver that raises."""

    def begin(self, op, copies):
        if op is Op.READ:
            raise OSError("no such device")
        return super().begin(op, copies)


def test_PROG_10_a_storage_driver_that_raises(tmp_path):
    """Reads raise: the load fails before the deadline, and the request is computed."""
    with Rig(Sizes(host=4, disk=8, pages=16), path=tmp_path, tier_faults=[Broken()]) as rig:
        engine = engine_over(rig)
        stored(engine, 1, 160)
        rig.local.drain()
        rig.planner.reset(["host"])
        again = request(2, 160)
        engine.add(again)
        settle(engine)
        assert rig.clock.now < rig.planner.config.deadline_s
        assert (again.loaded, again.made, engine.device.mismatches) == (0, 160, 0)
        rig.local.drain()
        rig.check()


def test_PROG_10_a_storage_driver_that_never_returns(tmp_path):
    """A read hangs: other requests run, its own can be aborted, and its pages are free when it returns."""
    gate = Gated([Op.READ])
    with Rig(Sizes(host=4, disk=8, pages=32), path=tmp_path, tier_faults=[gate]) as rig:
        engine = engine_over(rig)
        stored(engine, 1, 160)
        rig.local.drain()
        rig.planner.reset(["host"])
        stuck, other = request(2, 160), request(3, 160, 8, text=2)
        engine.add(stuck)
        engine.add(other)
        until(engine, lambda: other.state is State.ENDED)
        until(engine, lambda: rig.clock.now > 2 * rig.planner.config.deadline_s, idle_s=0.5)
        assert rig.planner.counters["overdue"] == 1
        assert stuck.state is State.LOADING
        engine.abort(stuck)
        assert engine.device.free == 22
        gate.release()
        settle(engine)
        assert engine.device.free == 32
        rig.local.drain()
        rig.check()


@pytest.mark.parametrize("op", [Op.TO_DEVICE, Op.TO_HOST])
def test_PROG_13_a_copy_that_never_ends_is_named(op, caplog):
    """Past the soft deadline a log line and a counter name the job, its phase, bytes and age; the engine goes on."""
    gate = Gated([op], is_open=True)
    with Rig(Sizes(pages=64), copy_faults=[gate]) as rig:
        engine = engine_over(rig)
        stored(engine, 1, 160)
        gate.hold()
        engine.add(request(2, 160, text=1 if op is Op.TO_DEVICE else 2))
        step(engine)
        with caplog.at_level(logging.WARNING, "kvoffload"):
            until(engine, lambda: rig.clock.now > 2 * rig.planner.config.deadline_s, idle_s=0.5)
        lines = [r.getMessage() for r in caplog.records]
        kind = "LOAD" if op is Op.TO_DEVICE else "STORE"
        blocks = 9 if op is Op.TO_DEVICE else 10
        assert len(lines) == 1
        assert f"{kind} of {blocks} blocks, {blocks * 8192} bytes" in lines[0]
        assert "has not ended after 10" in lines[0]
        assert rig.planner.counters["overdue"] == 1
        other = request(3, 100, 5, text=3)
        engine.add(other)
        until(engine, lambda: other.state is State.ENDED)
        gate.release()
        settle(engine)
        rig.check()


def test_PROG_04_on_the_engine_a_bad_block_is_read_at_most_twice(tmp_path):
    """A block that cannot be read: the request loads what is before it, the next one does not try it again."""
    fault, count = Failing(ops=[Op.READ]), Counting()
    with Rig(Sizes(host=4, disk=8, pages=16), path=tmp_path, tier_faults=[fault, count]) as rig:
        engine = engine_over(rig, limits=Limits(running=1))
        seq = stored(engine, 1, 160)
        rig.local.drain()
        rig.planner.reset(["host"])
        bad = seq.all_keys[0].tobytes()
        fault.keys = {bad}
        for number in (2, 3):
            forget(engine)
            engine.add(request(number, 160))
            settle(engine)
        assert count.copies(Op.READ, bad) <= 2
        assert engine.device.mismatches == 0
        rig.local.drain()
        rig.check()
