"""What the scheduler's and the workers' part of the vLLM plug say to each other, call by call."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace as Of

import numpy as np
import pytest
from fake_engine import FULL, HYBRID, SIZE, FakeEngine, Output, Request, Work, settings_of
from fake_mover import Memory, ScriptedMover
from kvoffload.connectors.vllm.scheduler import SchedulerPart
from kvoffload.connectors.vllm.wire import Ended, Handshake, Report, StepPlans
from kvoffload.connectors.vllm.worker import WorkerPart
from scenes import DISK, LOAD, READ, STORE, kinds, nothing, prompt, reports, told_from, warm

from kvoffload.errors import ConfigError
from kvoffload.messages import COPY_DTYPE, Inventory, Job, Outcome, Plans, Status

PAGES = list(range(1, 12))


def lose(engine: FakeEngine, depth: int) -> None:
    """Host loses a prompt's blocks from this one on: as if they were evicted, and nobody is told."""
    index = engine.planner._tiers.index
    kept = prompt(depth * SIZE)
    index.reset(0)
    if kept:
        for mover in engine.movers:
            mover.memory.host.clear()
        engine.add(Request("stored anew", kept, 1))
        engine.run()
        engine.forget_pages()


def offered(engine: FakeEngine, name: str = "second", length: int = 41) -> tuple[Request, int, bool]:
    """A new request and what vLLM is told can be loaded for it."""
    request = Request(name, prompt(length), 1)
    engine.scheduler.new(request)
    tokens, later = engine.scheduler.match(request, 0)
    return request, tokens, later


def take(engine: FakeEngine, request: Request, taken: int) -> None:
    """vLLM has given the request pages 1, 2, ... in every group, and takes so many tokens."""
    engine.owner.update(dict.fromkeys(PAGES, 1))
    engine.scheduler.allocated(request, lambda: tuple(list(PAGES) for _ in engine.layout.groups), taken)


# ---- start ----


def test_workers_whose_blocks_are_made_of_other_things_are_refused():
    """Two ranks, another dtype: both are named. With one alike all is well."""

    def hand(kind: str) -> Handshake:
        space = replace(settings_of(2).namespace(FULL, "facts"), dtype=kind)
        return Handshake(FULL, space, Inventory((8,), 4, 1, 0))

    with pytest.raises(ConfigError, match=r"differ in what their blocks are made of: \['bf16', 'fp8'\]"):
        SchedulerPart(settings_of(2)).attach({(0, 0): hand("fp8"), (0, 1): hand("bf16")})
    SchedulerPart(settings_of(2)).attach({(0, 0): hand("fp8"), (0, 1): hand("fp8")})


# ---- a load that the forward waits for ----


@pytest.mark.parametrize("left", [0, 7])
def test_pages_that_nothing_will_fill_are_named_once(left):
    """10 blocks were offered and `left` are still there when vLLM has pages: the others' pages are invalid, in this
    step only, the forward waits for what there is, and nothing is stored until the scheduler has heard of the gap."""
    engine = warm(FULL)
    request, tokens, later = offered(engine)
    assert (tokens, later) == (40, False)
    lose(engine, left)
    take(engine, request, 40)
    told = engine.scheduler.step(nothing(engine))
    assert told.invalid == tuple(PAGES[left:10])
    assert len(told.sync) == (1 if left else 0)
    worker = engine.workers[0]
    worker.start(told)
    assert worker.errors() == set(PAGES[left:10])
    assert worker.errors() == set()
    assert worker.ended() == (set(), set())
    report = worker.report()
    assert report.gaps == ((0, 1),)
    assert worker.report() is None
    worker.save(StepPlans(Plans((store(77),))))
    (refused,) = worker.report().outcomes
    assert (refused.job, refused.status.tolist()) == (77, [Status.NOT_DONE])
    engine.scheduler.update([report])
    told = engine.scheduler.step(nothing(engine))
    assert (told.invalid, told.settled) == ((), ((0, 1),))
    worker.begin(told)
    assert not worker._gaps
    assert engine.scheduler.step(nothing(engine)).settled == ()


def store(number: int) -> Job:
    """A job that stores page 1."""
    copies = np.zeros(1, COPY_DTYPE)
    copies["page"] = 1
    return Job(number, STORE, copies, "any")


def worker_of(rank: int) -> WorkerPart:
    part = WorkerPart(settings_of(2), rank)
    part._mover = ScriptedMover(rank, Memory({1: 1}))
    return part


def test_a_gap_that_is_settled_says_nothing_of_the_next_one():
    """Two steps in a row leave pages unfilled, and only the first gap is settled: still nothing is stored."""
    part = worker_of(1)
    part.start(StepPlans(invalid=(3,)))
    first = part.report().gaps
    part.start(StepPlans(invalid=(4,)))
    second = part.report().gaps
    assert (first, second) == (((1, 1),), ((1, 2),))
    part.begin(StepPlans(settled=first))
    part.save(StepPlans(Plans((store(5),))))
    assert part.report().outcomes[0].status.tolist() == [Status.NOT_DONE]
    part.begin(StepPlans(settled=((0, 2),)))
    part.save(StepPlans(Plans((store(6),))))
    assert part.report().outcomes[0].status.tolist() == [Status.NOT_DONE]
    part.begin(StepPlans(settled=second))
    part.save(StepPlans(Plans((store(7),))))
    part.ended()
    assert part.report().outcomes[0].status is None


def test_joined_reports_lose_nothing():
    """Three ranks, each with an outcome and a gap of its own."""
    said = [Report((Outcome(7, rank),), ((rank, 1),)) for rank in range(3)]
    joined = said[0].aggregate(said[1]).aggregate(said[2])
    assert [(o.job, o.rank) for o in joined.outcomes] == [(7, 0), (7, 1), (7, 2)]
    assert joined.gaps == ((0, 1), (1, 1), (2, 1))


def test_the_forward_waits_for_its_load():
    """Copies that take their time: the step's tokens are right all the same."""
    engine = warm(FULL)
    engine.movers[0].held.add(LOAD)
    engine.add(Request("second", prompt(41), 2))
    output = engine._schedule()
    assert output.has_sync_kv_loads
    engine._process(output)
    assert not engine.movers[0].running
    engine.run()
    engine.check()


# ---- an asynchronous load ----


@pytest.mark.parametrize("layout", [FULL, HYBRID])
def test_a_load_behind_pages_that_were_there_is_short_where_it_fails(layout):
    """4 blocks are in pages, 6 come from disk, and the fifth of these cannot be read: the load has failed, although it
    reaches further than the 6 blocks that were asked for."""
    engine = warm(layout, **DISK)
    engine.planner.reset(("host",))
    request = Request("second", prompt(41), 1)
    assert engine.scheduler.match(request, 4 * SIZE) == (6 * SIZE, True)
    engine.movers[0].failing, engine.movers[0].which = {LOAD: 2}, 4
    told = told_from(engine)
    take(engine, request, 6 * SIZE)
    for _ in range(6):
        step = engine.scheduler.step(nothing(engine))
        engine.scheduler.update(reports(engine, step))
    ends = [end for step in told for end in step.ended]
    assert ends == [Ended("second", True)]


def test_an_aborted_load_of_which_nothing_was_begun_ends():
    """All that was offered has gone when vLLM has pages, and the client goes away in the same step."""
    engine = warm()
    request, tokens, later = offered(engine)
    assert (tokens, later) == (40, True)
    engine.planner.reset()
    take(engine, request, 40)
    engine.scheduler.finished(request, "abort")
    assert engine.scheduler.step(nothing(engine)).ended == (Ended("second", True),)
    assert engine.scheduler.step(nothing(engine)).ended == ()


def test_vllm_is_told_again_after_a_load_and_takes_nothing_more():
    """After an asynchronous load vLLM says that the request has its pages once more: nothing was declined. A request
    that takes nothing of an offer has declined all of it, also when it had lost its pages before."""
    engine = warm()
    engine.add(Request("second", prompt(41), 3))
    engine.run()
    assert engine.planner.counters["declined"] == 0
    engine.forget_pages()
    third, tokens, _ = offered(engine, "third")
    take(engine, third, tokens)
    engine.scheduler.update(reports(engine, engine.scheduler.step(nothing(engine))))
    take(engine, third, 0)
    assert engine.planner.counters["declined"] == 0
    output = Output(engine.number, preempted_req_ids={"third"})
    engine.scheduler.step(output)
    assert engine.scheduler.match(third, 0) == (40, True)
    take(engine, third, 0)
    assert engine.planner.counters["declined"] == 10


def test_what_came_from_disk_is_at_most_what_was_taken():
    """vLLM takes 8 of 40 tokens that were offered from disk; all of host's are host's."""
    engine = warm(**DISK)
    request, _, _ = offered(engine)
    assert engine.scheduler.sources(request, 40) == (40, 0)
    engine.planner.reset(("host",))
    other, _, _ = offered(engine, "third")
    assert engine.scheduler.sources(other, 40) == (0, 40)
    assert engine.scheduler.sources(other, 8) == (0, 8)
    assert engine.scheduler.sources(Request("nobody", [1], 1), 8) == (8, 0)


# ---- pages that are taken away ----


@pytest.mark.parametrize("layout", [FULL, HYBRID])
def test_a_request_that_is_reset_and_comes_back_in_one_step_is_not_lost(layout):
    """vLLM forgets its pages under a running request, admits it again in the next schedule, and says in that step that
    it was preempted: it is matched as a new one, its load is its own, and all it computes is stored."""
    engine = FakeEngine(layout)
    request = engine.add(Request("only", prompt(40), 9))
    while request.num_tokens < 43:
        engine.step()
    engine.flush()
    since = len(engine.movers[0].seen)
    engine.preempt(request)
    engine.forget_pages()
    named, engine.preempted = engine.preempted, set()
    output = engine._schedule(also=named)
    assert request.table
    engine._process(output)
    engine.run()
    engine.check()
    assert LOAD in kinds(engine, since)
    assert len([key for group, key in engine.visible() if group == 0]) == 48 // SIZE


# ---- tokens that change ----


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("length", [4, 40])
def test_an_edited_request_is_another_one(length, ends):
    """A session's tokens change under blocks that have keys: what its new tokens name is offered, what runs or ends
    before it is matched again is not stored, and the planner knows it once."""
    engine = FakeEngine(FULL)
    engine.add(Request("other", prompt(length, 2), 1))
    engine.run()
    engine.forget_pages()
    request = Request("edited", prompt(length + 1, 3), 1)
    engine.scheduler.new(request)
    assert engine.scheduler.match(request, 0) == (0, False)
    request.all_token_ids[:] = [*prompt(length - SIZE, 2), *[90] * (SIZE + 1)]
    work = Work(request, 0, 0, length, False, tuple(list(PAGES) for _ in engine.layout.groups), [])
    assert engine.scheduler.step(Output(engine.number, [work])).plans.jobs == ()
    if ends:
        request.num_computed_tokens = length
        engine.scheduler.finished(request, "stop", work.table)
        assert engine.scheduler.step(nothing(engine)).plans.jobs == ()
        return
    ended = []
    finish, engine.planner.finish = (
        engine.planner.finish,
        lambda *more: (ended.append(more[0]), finish(*more))[1],
    )
    assert engine.scheduler.match(request, 0)[0] == length - SIZE
    assert ended == ["edited"]


def test_only_prompts_are_stored_where_that_is_asked_for():
    """store_generated off: 5 blocks of the prompt, none of the 20 tokens made."""
    engine = FakeEngine(FULL, store_generated=False)
    engine.add(Request("only", prompt(22), 20))
    engine.run()
    assert len(engine.visible()) == 22 // SIZE


# ---- what the planner is told ----


def test_the_planner_hears_who_asks_and_how_it_ended():
    """Session and agent of a client, and vLLM's reasons in the planner's words."""
    engine = FakeEngine(FULL)
    found = []
    finish = engine.planner.finish
    engine.planner.finish = lambda name, reason, now: (found.append(reason), finish(name, reason, now))[1]
    known = {"session": "s", "agent": "a"}
    for reason in ("stop", "length", "abort", "error"):
        request = Request(reason, prompt(8), 1, kv_transfer_params=known)
        engine.scheduler.new(request)
        engine.scheduler.match(request, 0)
        info = engine.planner.requests.get(reason).info
        assert (info.session, info.agent) == ("s", "a")
        engine.scheduler.finished(request, reason)
    assert found == ["end_turn", "length", "abort", "error"]


def test_what_a_waiting_request_needs_is_brought_nearer():
    """It has only arrived: its blocks on disk are read to host, for as long as a request may wait."""
    engine = warm(FULL, deadline_s=5.0, **DISK)
    engine.planner.reset(("host",))
    engine.movers[0].held.add(READ)
    since = len(engine.movers[0].seen)
    engine.scheduler.new(Request("second", prompt(41), 1))
    engine.step()
    engine.clock.now += 4.5
    engine.step()
    assert kinds(engine, since) == [READ]
    assert [r.job.kind for r in engine.movers[0].running] == [READ]
    engine.clock.now += 1.0
    engine.step()
    assert engine.movers[0].running == []


def test_a_reset_reaches_the_workers_disks():
    """Every rank's disk is empty after the next step."""
    engine = warm(ranks=2, **DISK)
    for mover in engine.movers:
        assert mover.memory.disk
    engine.scheduler.reset()
    engine.step()
    for mover in engine.movers:
        assert not mover.memory.disk


def test_a_worker_that_closes_lets_writes_end_first():
    """Then nothing works on its memory any more, and a second close does nothing."""
    part, calls = worker_of(0), []
    part._backing = Of(stop=lambda: calls.append("stop"))
    part._mover = Of(drain=calls.append, close=lambda: calls.append("close"))
    part.close()
    part.close()
    assert calls[:3] == ["stop", part._settings.config.deadline_s, "close"]
    assert calls.count("close") == 1
