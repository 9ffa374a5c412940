"""LIFE, PROG, PROC, ORDER and TOPO rows of docs/cases.md for the vLLM plug, over a small vLLM of symbols."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from fake_engine import FULL, HYBRID, SIZE, FakeEngine, Request, settings_of
from fake_mover import Memory, ScriptedMover
from kvoffload.connectors.vllm import compat, worker
from kvoffload.connectors.vllm.scheduler import SchedulerPart
from kvoffload.connectors.vllm.wire import Ended, Handshake, StepPlans
from kvoffload.connectors.vllm.worker import WorkerPart

from kvoffload.errors import ConfigError
from kvoffload.layout import Layout
from kvoffload.messages import CopyFlag, Inventory, JobKind, Outcome
from kvoffload.tiers.disk import rank_directory

DISK = {"disk": 128, "disk_path": Path("unused"), "disk_bytes": 1 << 20}
LOAD, STORE, READ, WRITE = JobKind.LOAD, JobKind.STORE, JobKind.READ, JobKind.WRITE


def prompt(length: int, family: int = 1) -> list[int]:
    return [10 * family + i % 7 for i in range(length)]


def warm(layout: Layout = HYBRID, length: int = 40, **sizes) -> FakeEngine:
    """An engine that has stored a prompt of that length and whose pages have forgotten it."""
    engine = FakeEngine(layout, **sizes)
    engine.add(Request("first", prompt(length), 1))
    engine.run()
    engine.forget_pages()
    return engine


def loading(name: str = "second", **sizes) -> FakeEngine:
    """The same, with a second request whose load is held on every rank."""
    engine = warm(**sizes)
    for mover in engine.movers:
        mover.held.add(LOAD)
    engine.add(Request(name, prompt(40), 1))
    for _ in range(3):
        engine.step()
    assert engine.requests[name].state == "remote"
    return engine


def kinds(engine: FakeEngine, since: int = 0) -> list[JobKind]:
    return [job.kind for job in engine.movers[0].seen[since:]]


def let_go(engine: FakeEngine) -> None:
    for mover in engine.movers:
        mover.held.clear()


@pytest.mark.parametrize("ranks", [1, 2])
def test_LIFE_01_an_abort_during_a_load_gives_every_page_back(ranks):
    """200 times: the load is held, its request aborted, the copies end. One end per rank, all pages are free."""
    engine = warm(ranks=ranks)
    for number in range(200):
        for mover in engine.movers:
            mover.held.add(LOAD)
        engine.add(Request(str(number), prompt(40), 1))
        engine.step()
        engine.abort(str(number))
        engine.step()
        assert len(engine.free) < engine.pages
        let_go(engine)
        engine.run()
        assert len(engine.free) == engine.pages
    engine.check()


@pytest.mark.parametrize("reasons", [("abort", "length"), ("length", "abort")])
def test_LIFE_03_a_request_that_ends_twice_in_a_step_ends_once(reasons):
    """Both orders, with its load under way: workers hear one end."""
    engine = loading()
    request = engine.requests["second"]
    for reason in reasons:
        engine.scheduler.finished(request, reason)
    let_go(engine)
    ends = []
    for _ in range(4):
        told = engine.scheduler.step(_nothing(engine))
        ends += told.ended
        engine.scheduler.update(_reports(engine, told))
    assert ends == [Ended("second", True)]


def _nothing(engine):
    from fake_engine import Output

    return Output(engine.number)


def _reports(engine, told):
    found = []
    for part in engine.workers:
        part.start(told)
        part.save(told)
        part.ended()
        report = part.report()
        found += [] if report is None else [report]
    return found


@pytest.mark.parametrize("load_first", [True, False])
def test_LIFE_04_a_load_and_a_store_of_one_request_end_together(load_first):
    """In either order of the outcomes: one end of the load, and both jobs are gone."""
    engine = loading()
    load = next(job for job in engine.movers[0].seen if job.kind is LOAD)
    planner = engine.planner
    store = planner._inflight.add(STORE, load.copies[:0].copy(), 99.0, "second")
    planner._inflight.take_unsent(0.0)
    outcomes = [Outcome(load.id, 0), Outcome(store.job.id, 0)]
    from kvoffload.connectors.vllm.wire import Report

    engine.scheduler.update([Report(tuple(outcomes if load_first else outcomes[::-1]))])
    assert engine.scheduler._ended == [Ended("second", False)]
    assert planner.idle


def test_LIFE_06_pages_of_an_aborted_load_wait_for_the_copies():
    """The copies never end: past every deadline the pages stay with the load; they are free once it has ended."""
    engine = loading()
    engine.abort("second")
    for _ in range(50):
        engine.clock.now += 1.0
        engine.step()
    assert engine.planner.counters["overdue"] >= 1
    assert "second" in engine.requests
    assert len(engine.free) < engine.pages
    let_go(engine)
    engine.run()
    engine.check()


def test_LIFE_07_steps_without_tokens_carry_jobs():
    """All requests have ended while writes to disk were held: steps in which nothing is computed send the rest."""
    engine = FakeEngine(FULL, host=64, **DISK)
    engine.add(Request("only", prompt(40), 1))
    while engine.requests:
        engine.step()
    since = len(engine.movers[0].seen)
    for _ in range(4):
        engine.step()
    assert kinds(engine, since) == [WRITE]
    assert engine.planner.counters["stored_disk"] == 10


@pytest.mark.parametrize("depth", [1, 3])
def test_LIFE_09_a_preempted_request_is_stored_from_its_new_pages(depth):
    """It loses its pages after some blocks, all is evicted, and it comes back: all is stored, and right."""
    engine = FakeEngine(FULL, depth=depth)
    request = engine.add(Request("only", prompt(40), 4))
    engine.step()
    engine.step()
    engine.flush()
    engine.preempt(request)
    engine.planner._tiers.index.reset(0)  # as if all was evicted: nobody is told
    engine.forget_pages()
    engine.run()
    assert len(engine.visible()) == (40 + 3) // SIZE
    engine.check()


def test_LIFE_10_one_page_number_in_two_groups():
    """A load names pages 1 to 10 in both groups: one end, and nothing is left."""
    engine = warm()
    request = Request("second", prompt(41), 1)
    engine.scheduler.new(request)
    tokens, later = engine.scheduler.match(request, 0)
    assert (tokens, later) == (40, True)
    for page in range(1, 11):
        engine.owner[page] = 1
    engine.scheduler.allocated(request, lambda: (list(range(1, 11)), list(range(1, 11))), tokens)
    told = engine.scheduler.step(_nothing(engine))
    assert [job.kind for job in told.plans.jobs] == [LOAD]
    engine.workers[0].start(told)
    assert engine.workers[0].ended() == ({"second"}, set())
    engine.scheduler.update([engine.workers[0].report()])
    assert engine.planner.idle


def test_LIFE_12_a_long_prompt_can_be_found_as_it_is_computed():
    """16 tokens a step: the blocks of a step are visible when the next one is built."""
    engine = FakeEngine(FULL, budget=16)
    engine.add(Request("long", prompt(64), 2))
    for number in range(1, 4):
        engine.step()
        assert len(engine.visible()) == number * 16 // SIZE


def test_PROG_03_a_request_waits_for_a_stalled_load_until_its_deadline():
    """One load never ends: a second request is told to ask again, and runs alone once the deadline has passed."""
    engine = loading(deadline_s=5.0)
    engine.movers[0].stuck = {running.job.id for running in engine.movers[0].running}
    let_go(engine)
    engine.add(Request("third", prompt(40), 1))
    for _ in range(5):
        engine.step()
    assert engine.waits == 5
    engine.clock.now += 6.0
    for _ in range(8):
        engine.step()
    assert "third" in engine.answers
    assert "second" in engine.requests
    engine.movers[0].stuck.clear()
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
        told = part.step(_nothing(engine))
        for one in engine.workers:
            one.start(told)
            ends = one.ended()
            received += ends[0]
            failed += ends[1]
        part.update([r for r in (one.report() for one in engine.workers) if r])
    assert received == failed == ["second", "second"]


def test_PROC_03_a_load_that_is_given_up_without_a_report_ends_the_wait():
    """The disk never answers and the only worker has nothing to say: past the deadline the request goes on all the
    same."""
    engine = warm(HYBRID, **DISK, deadline_s=5.0)
    engine.planner.reset(("host",))
    engine.movers[0].held = {READ, LOAD}
    engine.movers[0].submit = _without_cancels(engine.movers[0].submit)
    engine.add(Request("second", prompt(40), 1))
    for _ in range(30):
        engine.clock.now += 1.0
        engine.step()
        if "second" in engine.answers:
            break
    assert "second" in engine.answers or engine.requests["second"].state == "remote"
    let_go(engine)
    engine.run()
    engine.check()


def _without_cancels(submit):
    """A disk that cannot even be told to stop."""
    from dataclasses import replace

    return lambda plans, *more: submit(replace(plans, cancels=()), *more)


@pytest.mark.parametrize("depth", [1, 3])
def test_ORDER_06_no_store_is_left_behind_by_a_preemption(depth):
    """Stores of several steps, then the request loses its pages: all of them have ended, with what was computed."""
    engine = FakeEngine(FULL, depth=depth, budget=8)
    request = engine.add(Request("only", prompt(40), 4))
    for _ in range(depth + 2):
        engine.step()
    assert kinds(engine).count(STORE) >= 2
    engine.preempt(request)
    engine.add(Request("other", prompt(40, 2), 4))
    engine.run()
    engine.check()


def test_ORDER_09_nothing_is_stored_of_a_request_whose_load_is_under_way():
    """While blocks are arriving, and before vLLM has heard of it, no store job names the request."""
    engine = loading()
    for _ in range(5):
        engine.step()
    assert not [j for j in engine.movers[0].seen if j.kind is STORE and j.request == "second"]
    let_go(engine)
    engine.run()
    engine.check()


# ---- ranks ----


def _hand(layout: Layout, records=None) -> Handshake:
    counts = tuple(8 for _ in layout.groups)
    more = {} if records is None else {"records": records}
    return Handshake(layout, settings_of().namespace(layout, "facts"), Inventory(counts, 4, 1, 16, **more))


def test_TOPO_01_only_what_every_rank_has_is_found():
    """Rank 0 found 10 blocks on its disk, rank 1 the first 8: 8 are offered to vLLM."""
    engine = FakeEngine(FULL, **DISK)
    engine.add(Request("first", prompt(41), 1))
    engine.run()
    index = engine.planner._tiers.index
    import numpy as np

    from kvoffload.messages import RECORD_DTYPE

    entries = index.entries()
    records = np.zeros(len(entries), RECORD_DTYPE)
    for field, source in (("key", "key"), ("slot", "disk"), ("depth", "depth"), ("group", "group")):
        records[field] = entries[source]
    records["seq"] = np.arange(len(entries)) + 1
    part = SchedulerPart(settings_of(2, disk_path=Path("unused"), disk_bytes=1 << 20))
    fewer = records[records["depth"] < 8]
    part.attach({(0, 0): _hand(FULL, records), (0, 1): _hand(FULL, fewer)})
    assert part.match(Request("second", prompt(41), 1), 0) == (8 * SIZE, True)


def test_TOPO_06_and_10_every_rank_and_instance_has_a_folder_of_its_own():
    """2 x 2 ranks of two data-parallel engines: 8 folders."""
    settings = settings_of(2)
    wide = type(settings)(settings.config, (2, 2), "", 0)
    ranks = [wide.rank(pipeline, tensor) for pipeline in (0, 1) for tensor in (0, 1)]
    assert sorted(ranks) == [0, 1, 2, 3]
    folders = {rank_directory(Path("/x"), b"n" * 16, instance, rank) for instance in (0, 1) for rank in ranks}
    assert len(folders) == 8


def test_TOPO_07_a_block_needs_every_stage():
    """Two pipeline stages: one that has not stored a block hides it; a missing stage is refused at start."""
    engine = FakeEngine(FULL, ranks=2)
    engine.movers[1].failing, engine.movers[1].which = {STORE: 1}, 0
    engine.add(Request("only", prompt(8), 1))
    engine.step()
    assert len(engine.visible()) == 1
    engine.run()
    with pytest.raises(ConfigError, match="ranks 0 to 1 must"):
        SchedulerPart(settings_of(2)).attach({(0, 0): _hand(FULL)})


def test_TOPO_09_pages_of_a_load_are_given_back_after_the_last_rank():
    """Three ranks end the load of an aborted request one by one."""
    engine = loading(ranks=3)
    engine.abort("second")
    for mover in engine.movers:
        engine.step()
        assert len(engine.free) < engine.pages
        mover.held.clear()
    engine.run()
    engine.check()


@pytest.mark.parametrize("axis", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_TOPO_12_context_parallel_ranks_are_refused(axis):
    """Which rank owns which positions is not known here: the engine is told what to change."""
    from types import SimpleNamespace as Of

    config = Of(parallel_config=Of(**{axis: 2}), model_config=Of(enable_sleep_mode=False))
    with pytest.raises(ConfigError, match=f"{axis} is 2"):
        compat.refuse_unknown(config)


def test_a_worker_without_plans_has_nothing_to_say():
    """Before the scheduler's part has its workers, steps are empty and harmless."""
    part = WorkerPart(settings_of(), 0)
    part._mover = ScriptedMover(0, Memory({}))
    part.start(StepPlans())
    part.save(StepPlans())
    assert (part.ended(), part.errors(), part.report()) == ((set(), set()), set(), None)
