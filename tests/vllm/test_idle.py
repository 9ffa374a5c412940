"""What waits for the disk when the last request has ended: the engine goes on until it is there, and becomes quiet."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_engine import FULL, SIZE, FakeEngine, Request
from kvoffload.connectors.vllm import rank_tiers
from runner import LENGTHS, PATIENCE_S, Engine, prompts, restorable
from scenes import DISK, STORE, WRITE, prompt, without_cancels

from kvoffload.testing.faults import FaultyTier, Gated, Op
from kvoffload.tiers.disk import DiskTier
from kvoffload.tiers.inspect import list_ranks

DEADLINE_S = 5.0
SMALL = {"host_bytes": "4MiB", "disk_bytes": "64MiB"}
IDLE_S = 0.001
"""What vLLM sleeps after a step in which nothing ran."""


def idle(engine: FakeEngine, most: int = 20_000) -> int:
    """Go on as vLLM does when its last request has ended; the steps until the connector needs no more of them."""
    for number in range(most):
        if not engine.scheduler.going_on():
            return number
        engine.step()
        engine.clock.now += IDLE_S
    raise AssertionError(f"not quiet after {most} steps: {engine.planner.describe()}")


def asked_once(**sizes) -> FakeEngine:
    """Its only request, 40 blocks in one step, has just ended; 10 slots of host may wait for the disk at a time."""
    engine = FakeEngine(FULL, budget=40 * SIZE, host=40, deadline_s=DEADLINE_S, **DISK, **sizes)
    engine.clock.now += 1000.0
    engine.add(Request("only", prompt(40 * SIZE), 1))
    while engine.requests:
        engine.step()
    return engine


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("depth", [1, 3])
def test_an_idle_engine_writes_what_waits_and_becomes_quiet(ranks, depth):
    """Everything is on disk after a few steps without requests, and no further step is asked for."""
    engine = asked_once(ranks=ranks, depth=depth)
    assert engine.planner.counters["stored_disk"] <= 10
    assert 3 <= idle(engine) <= 100
    assert engine.planner.counters["stored_disk"] == 40
    assert engine.planner.backlog() == (0, 0)
    engine.run()
    engine.check()


def test_a_slow_disk_is_waited_for_as_long_as_blocks_arrive():
    """Each write takes most of the deadline, all of them several times as long: everything gets there."""
    engine = asked_once()
    mover, begun = engine.movers[0], engine.clock.now
    mover.held.add(WRITE)
    while engine.scheduler.going_on():
        engine.clock.now += 0.4 * DEADLINE_S
        engine.step()
        mover.end(0)
    assert engine.clock.now - begun > 2 * DEADLINE_S
    assert engine.planner.counters["stored_disk"] == 40
    engine.run()
    engine.check()


def test_a_store_that_no_step_waited_for_is_waited_for():
    """On a device with streams the stores of the very first request end after its last step."""
    engine = FakeEngine(FULL, streams=True, budget=40)
    engine.clock.now += 1000.0
    engine.movers[0].held.add(STORE)
    engine.add(Request("only", prompt(40), 1))
    while engine.requests:
        engine.step()
    for _ in range(10):
        assert engine.scheduler.going_on()
        engine.step()
    engine.movers[0].held.clear()
    assert idle(engine) <= 2
    assert len(engine.visible()) == 10
    engine.check()


def test_without_a_disk_no_step_is_asked_for():
    """Stores have ended with their step."""
    engine = FakeEngine(FULL)
    engine.add(Request("only", prompt(40), 1))
    while engine.requests:
        engine.step()
    assert idle(engine) == 0


@pytest.mark.parametrize("cancels", [True, False])
def test_a_disk_that_hangs_is_not_waited_for_beyond_the_deadline(cancels):
    """Writes never end on one of two ranks, whether or not they can be taken back: steps are asked for until the
    deadline, and none when vLLM asks again. When the disk answers, the next request's end brings the rest there:
    all but the 10 blocks whose write was taken back."""
    engine = FakeEngine(FULL, ranks=2, budget=40 * SIZE, host=40, deadline_s=DEADLINE_S, **DISK)
    mover = engine.movers[1]
    mover.held.add(WRITE)
    if not cancels:
        mover.submit = without_cancels(mover.submit)
    engine.add(Request("only", prompt(40 * SIZE), 1))
    while engine.requests:
        engine.step()
    begun = engine.clock.now
    idle(engine)
    assert engine.clock.now - begun == pytest.approx(DEADLINE_S, abs=10 * IDLE_S)
    for _ in range(3):
        engine.clock.now += DEADLINE_S
        assert not engine.scheduler.going_on()
    mover.held.clear()
    engine.add(Request("next", prompt(4), 1))
    while engine.requests:
        engine.step()
    assert idle(engine) <= 100
    assert engine.planner.counters["stored_disk"] == (30 if cancels else 40)
    engine.run()
    engine.check()


def on_disk(folder: Path) -> int:
    """Blocks that the tables of all ranks name."""
    return sum(usage.blocks for usage in list_ranks(folder, time.time()))


def until(reached: Callable[[], bool]) -> bool:
    """Look every few milliseconds; False where it never comes."""
    end = time.monotonic() + PATIENCE_S
    while not reached():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def test_blocks_reach_the_disk_without_further_requests(model, tmp_path):
    """One batch whose blocks are more than may be pinned for the disk at a time, with one token each; then nothing is
    asked any more. All blocks get to the disk while the engine's process stands idle, and a new engine opens them."""
    asked, wanted = prompts(), sum(length // 32 for length in LENGTHS)
    with Engine(model("llama"), {**SMALL, "disk_path": str(tmp_path)}, multiprocess=True) as engine:
        right = engine.generate(asked, 1).tokens
        assert until(lambda: on_disk(tmp_path) == wanted)
    with Engine(model("llama"), {**SMALL, "disk_path": str(tmp_path)}) as engine:
        fresh = engine.generate(asked, 1)
    assert (fresh.tokens, list(fresh.cached)) == (right, restorable())


def left_alone(engine: Engine) -> int:
    """Run an engine of this process as its loop does without any request; the steps until it waits for one."""
    core, count = engine.core, 0
    end = time.monotonic() + PATIENCE_S
    while core.scheduler.has_requests():
        assert time.monotonic() < end, "never quiet"
        _, executed = core.step()
        assert not executed
        count += 1
        time.sleep(IDLE_S)
    return count


def test_vllm_waits_for_a_request_when_all_is_on_disk(model, tmp_path):
    """vLLM's own question is yes while blocks wait, and no once the last one is on disk."""
    asked, wanted = prompts(), sum(length // 32 for length in LENGTHS)
    with Engine(model("llama"), {**SMALL, "disk_path": str(tmp_path)}) as engine:
        engine.generate(asked, 1)
        assert on_disk(tmp_path) < wanted
        assert left_alone(engine) > 1
        assert on_disk(tmp_path) == engine.counter("stored_disk") == wanted
        assert left_alone(engine) == 0


def test_vllm_waits_for_a_request_when_the_disk_hangs(model, tmp_path, monkeypatch):
    """Writes never end: vLLM's loop comes to rest with blocks still waiting, and the next answer is right. When the
    disk is there again, what the next requests store gets there."""
    gate = Gated([Op.WRITE])
    monkeypatch.setattr(
        rank_tiers, "DiskTier", lambda *args, **more: FaultyTier(DiskTier(*args, **more), gate)
    )
    asked = prompts()
    with Engine(model("llama"), {**SMALL, "disk_path": str(tmp_path), "deadline_s": 1.0}) as engine:
        right = engine.generate(asked, 1).tokens
        assert left_alone(engine) > 1
        assert gate.arrived()
        assert engine.counter("stored_disk") == 0
        assert not engine.core.scheduler.has_requests()
        engine.forget_pages()
        assert engine.generate(asked, 1).tokens == right
        gate.release()
        engine.settle()
        before = engine.counter("stored_disk")
        engine.generate(prompts(2), 1)
        left_alone(engine)
        assert engine.counter("stored_disk") > before
