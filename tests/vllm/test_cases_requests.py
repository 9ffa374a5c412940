"""LIFE, ORDER and TOPO rows of docs/cases.md for the vLLM plug, over a small vLLM of symbols."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_engine import FULL, HYBRID, SIZE, FakeEngine, Request, settings_of
from fake_mover import Memory, ScriptedMover
from fake_parts import key_of
from kvoffload.connectors.vllm import compat
from kvoffload.connectors.vllm.scheduler import SchedulerPart
from kvoffload.connectors.vllm.wire import Ended, Handshake, StepPlans
from kvoffload.connectors.vllm.worker import WorkerPart
from scenes import (
    DISK,
    LOAD,
    STORE,
    WRITE,
    answered,
    kinds,
    let_go,
    loading,
    nothing,
    prompt,
    reports,
    told_from,
    warm,
)

from kvoffload.errors import ConfigError
from kvoffload.layout import Layout
from kvoffload.messages import Inventory
from kvoffload.tiers.disk import rank_directory


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
        told = engine.scheduler.step(nothing(engine))
        ends += told.ended
        engine.scheduler.update(reports(engine, told))
    assert ends == [Ended("second", True)]


def came_back() -> tuple[FakeEngine, Request]:
    """On two ranks a request lost its pages while its blocks were on their way to host, came back, and loads those that
    were there before it; the store and the load are held."""
    engine = FakeEngine(HYBRID, ranks=2, streams=True, deadline_s=5.0)
    engine.add(Request("first", prompt(20), 1))
    engine.run()
    engine.forget_pages()
    for mover in engine.movers:
        mover.held = {STORE, LOAD}
    second = engine.add(Request("second", prompt(40), 3))
    engine.step()
    for mover in engine.movers:
        mover.end(0)
    while second.num_computed_tokens < 36:
        engine.step()
    engine.preempt(second)
    engine.forget_pages()
    engine.step()
    engine.clock.now += 6.0
    engine.step()
    engine.step()
    assert second.state == "remote"
    for mover in engine.movers:
        assert {(r.job.kind, r.job.request) for r in mover.running} == {(LOAD, "second"), (STORE, "second")}
    return engine, second


@pytest.mark.parametrize("load_first", [True, False])
def test_LIFE_04_a_load_and_a_store_of_one_request_end_together(load_first):
    """By one report, in either order: workers hear of one end, with nothing lost."""
    engine, _ = came_back()
    for mover in engine.movers:
        mover.running.sort(key=lambda r: (r.job.kind is LOAD) is not load_first)
    told = told_from(engine)
    let_go(engine)
    engine.run()
    assert [end for step in told for end in step.ended] == [Ended("second", False)]
    engine.check()


def test_LIFE_04_the_end_of_a_store_is_not_that_of_a_load():
    """As above, and the store ends steps before the load does: the request goes on waiting for its load."""
    engine, second = came_back()
    told = told_from(engine)
    for mover in engine.movers:
        mover.held.discard(STORE)
    for _ in range(4):
        engine.step()
    assert all([r.job.kind for r in mover.running] == [LOAD] for mover in engine.movers)
    assert second.state == "remote"
    let_go(engine)
    engine.run()
    assert [end for step in told for end in step.ended] == [Ended("second", False)]
    engine.check()


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
    told = engine.scheduler.step(nothing(engine))
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


@pytest.mark.parametrize("layout", [FULL, HYBRID])
@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("streams", [True, False])
def test_ORDER_08_the_block_that_the_last_tokens_fill_is_stored(layout, depth, streams):
    """A request ends with the token behind its last full block, which no step knew to be full that was built ahead; its
    pages are another request's in the very next step. The block is stored, with what it held."""
    engine = FakeEngine(layout, depth=depth, streams=streams, pages=11 * len(layout.groups), ranks=2)
    for answer in (2, 3, 4, 5):
        engine.add(Request(f"ends after {answer}", prompt(32, answer), answer))
        engine.add(Request(f"takes its pages {answer}", prompt(43, 50 + answer), 1))
        engine.run()
        keys = {key_of(engine.namespace, tuple(text)) for text in _full(prompt(32, answer), answer)}
        assert keys <= {key for group, key in engine.visible() if group == 0}
    engine.check()


def _full(text: list[int], answer: int) -> list[list[int]]:
    """Up to the end of each full block of what a request has computed: all but the last token of its answer."""
    whole = [*text, *answered(text, answer)]
    return [whole[:end] for end in range(SIZE, len(whole), SIZE)]


@pytest.mark.parametrize(
    ("reason", "loads", "stored"),
    [("length", False, 1), ("stop", False, 1), ("abort", False, 0), ("error", False, 0), ("length", True, 0)],
)
def test_ORDER_08_only_what_has_been_computed_is_stored_at_the_end(reason, loads, stored):
    """Nobody vouches for the last pages of a request that did not end by itself, or whose load is under way. What is
    stored is told once."""
    engine = FakeEngine(FULL, depth=3)
    request = engine.add(Request("only", prompt(7), 3))
    while request.num_tokens < 9:
        engine.step()
    engine.scheduler._requests["only"].loading = loads
    engine.scheduler.finished(request, reason, request.table)
    told = engine.scheduler.step(nothing(engine))
    assert [[job.kind for job in told.plans.jobs], len(told.rest)] == [[STORE] * stored, stored]
    assert engine.scheduler.step(nothing(engine)).rest == ()


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
