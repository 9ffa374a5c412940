"""PROG and PROC rows of docs/cases.md for the vLLM plug, over a small vLLM of symbols."""

from __future__ import annotations

import logging

import pytest
from fake_engine import FULL, HYBRID, SIZE, FakeEngine, Request
from fake_mover import ScriptedMover
from kvoffload.connectors.vllm import worker
from scenes import DISK, LOAD, READ, STORE, WRITE, kinds, let_go, nothing, prompt, warm, without_cancels

from kvoffload.messages import CopyFlag


@pytest.mark.parametrize("kind", [LOAD, STORE])
def test_PROG_03_a_request_waits_for_a_stalled_transfer_until_its_deadline(kind):
    """A load, or a store of another request, never ends: who asks for the same blocks is told to ask again, in every
    step up to the deadline and in none after it, and runs alone."""
    engine = FakeEngine(HYBRID, deadline_s=5.0, streams=True)
    stalled = engine.movers[0].held
    stalled |= {STORE} if kind is STORE else set()
    engine.add(Request("first", prompt(40), 1))
    while engine.requests:
        engine.step()
    engine.forget_pages()
    if kind is LOAD:
        stalled.add(LOAD)
        engine.add(Request("second", prompt(40), 1))
        engine.step()
        engine.movers[0].stuck = {running.job.id for running in engine.movers[0].running}
        stalled.clear()
    engine.add(Request("third", prompt(40), 1))
    for number in range(1, 6):
        engine.step()
        assert engine.waits == number
        engine.clock.now += 1.0
    engine.clock.now += 0.5
    for _ in range(8):
        engine.step()
    assert "third" in engine.answers
    assert engine.waits <= 6
    assert ("second" in engine.requests) is (kind is LOAD)
    engine.movers[0].stuck.clear()
    let_go(engine)
    engine.run()
    engine.check()


@pytest.mark.parametrize("layout", [FULL, HYBRID])
def test_PROG_04_a_block_that_cannot_be_read_is_not_tried_for_ever(layout):
    """Every read from disk fails: the request is computed, and no block was tried more than twice."""
    engine = warm(layout, **DISK)
    engine.planner.reset(("host",))
    engine.movers[0].failing = {LOAD: 1000, READ: 1000}
    engine.movers[0].which = 0
    since = len(engine.movers[0].seen)
    engine.add(Request("second", prompt(40), 2))
    engine.run()
    jobs = [job for job in engine.movers[0].seen[since:] if job.kind in (LOAD, READ)]
    tried = [
        c["key"].tobytes()
        for job in jobs
        for c in job.copies
        if job.kind is READ or c["flags"] & CopyFlag.READ
    ]
    assert tried
    assert max(tried.count(key) for key in set(tried)) <= 2 * len(layout.groups)
    engine.check()


@pytest.mark.parametrize("rank", [0, 1])
def test_PROG_06_a_load_that_fails_on_one_rank_is_told_by_both(rank):
    """One of two ranks cannot copy, not even the second time: vLLM hears of one failed load, and computes."""
    engine = warm(ranks=2)
    engine.movers[rank].failing = {LOAD: 2}
    engine.add(Request("second", prompt(40), 1))
    engine.run()
    assert engine.planner.counters["retried"] == 1
    engine.check()


def test_PROG_06_a_load_whose_part_was_lost_is_not_called_whole():
    """Half of a prefix is on its way from disk for another request and does not come; what else there is arrives on
    every rank. The load has failed, and no rank may say otherwise before the scheduler knows."""
    engine = FakeEngine(HYBRID, ranks=2, **DISK)
    engine.add(Request("first", prompt(40), 1))
    engine.run()
    engine.planner.reset(("host",))
    for mover in engine.movers:
        mover.held.add(READ)
    engine.movers[0].failing = {READ: 2}
    engine.add(Request("second", prompt(40), 1))
    engine.step()
    engine.step()
    let_go(engine)
    engine.run()
    engine.check()


def test_PROG_11_loads_from_disk_while_host_is_full_and_pinned():
    """Host has 16 slots, all taken by copies that are held: requests end, from disk or computed, and nothing hangs."""
    engine = warm(FULL, host=16, **DISK)
    engine.planner.reset(("host",))
    engine.movers[0].held = {WRITE, LOAD}
    for number in range(4):
        engine.add(Request(str(number), prompt(60, number), 2))
    for _ in range(40):
        engine.clock.now += 1.0
        engine.step()
    let_go(engine)
    engine.run()
    engine.check()


def test_PROG_13_copies_that_the_engine_waits_for_are_named(caplog, monkeypatch):
    """A store that does not end is named with its rank every few seconds, and waited for: its pages are being read."""
    monkeypatch.setattr(worker, "PATIENCE_S", 0.01)

    class Stuck(ScriptedMover):
        patience = 3

        def wait(self, job_ids, timeout):
            assert timeout == 0.01
            self.patience -= 1
            return self.patience < 0 and super().wait(job_ids, timeout)

    engine = FakeEngine(FULL)
    mover = engine.movers[0] = Stuck(0, engine.memories[0])
    engine.workers[0]._mover = mover
    with caplog.at_level(logging.WARNING):
        engine.add(Request("only", prompt(8), 1))
        engine.run()
    lines = [record.message for record in caplog.records if "have not ended" in record.message]
    assert len(lines) == 3
    assert all("rank 0" in line for line in lines)


def test_PROC_03_vllm_hears_of_pages_that_were_not_filled_in_the_same_step():
    """Block 3 of a load that the forward waits for fails: that page is told with the step's results, not later, the
    request goes on with 3 blocks, and nothing that was computed over the gap is stored, for any request."""
    engine = warm(FULL)
    engine.movers[0].failing, engine.movers[0].which = {LOAD: 1}, 3
    for name in ("second", "shares its pages"):
        engine.add(Request(name, prompt(44), 1))
    output = engine._schedule()
    assert output.has_sync_kv_loads
    engine._process(output)
    assert [request.num_computed_tokens for request in engine.running] == [3 * SIZE] * 2
    engine.visible()
    engine.run()
    engine.check()


def test_PROC_03_a_load_shorter_than_promised_is_a_failure_on_every_rank():
    """Blocks vanish between the match and the pages: what is left arrives on both ranks, and neither calls that a
    success."""
    engine = FakeEngine(HYBRID, ranks=2)
    engine.add(Request("short", prompt(20), 1))
    engine.run()
    engine.forget_pages()
    second = Request("second", prompt(40), 1)
    part = engine.scheduler
    part.new(second)
    tokens, later = part.match(second, 0)
    assert (tokens, later) == (20, True)
    engine.owner.update(dict.fromkeys(range(1, 21), 1))
    part.allocated(second, lambda: (list(range(1, 11)), list(range(11, 21))), 40)
    received, failed = [], []
    for _ in range(3):
        told = part.step(nothing(engine))
        for one in engine.workers:
            one.start(told)
            ends = one.ended()
            received += ends[0]
            failed += ends[1]
        part.update([r for r in (one.report() for one in engine.workers) if r])
    assert received == failed == ["second", "second"]


def test_PROC_03_a_load_that_is_given_up_without_a_report_ends_the_wait():
    """A load waits for what another job reads; the disk never answers, and cannot even be told to stop. No worker has
    anything to say of the load: past the deadline vLLM is told that it is over, and the request computes."""
    engine = warm(HYBRID, ranks=2, **DISK, deadline_s=5.0)
    engine.planner.reset(("host",))
    for mover in engine.movers:
        mover.held = {READ}
        mover.submit = without_cancels(mover.submit)
    engine.add(Request("second", prompt(40), 1))
    for _ in range(3):
        engine.step()
    assert engine.requests["second"].state == "remote"
    engine.clock.now += 6.0
    for _ in range(8):
        engine.step()
    assert "second" in engine.answers
    assert all([r.job.kind for r in mover.running] == [READ] for mover in engine.movers)
    assert LOAD not in kinds(engine)
    let_go(engine)
    engine.run()
    engine.check()
