"""Driving the reference engine: from a Rig, until it is idle, with random traffic."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from kvoffload.requests import RequestInfo
from kvoffload.scheduler_side import PlannerConnector
from kvoffload.testing.engine.device import Device
from kvoffload.testing.engine.engine import Engine, Limits, StepCost
from kvoffload.testing.engine.sequence import Sequence, State, random_keys
from kvoffload.testing.rig import Rig
from kvoffload.worker_side import MoverConnector

PATIENCE_S = 60.0
PAUSE_S = 0.0002


def engine_over(
    rig: Rig,
    *,
    limits: Limits | None = None,
    cost: StepCost | None = None,
    cached: bool = True,
    shared: bool = False,
) -> Engine:
    """An engine whose pages are the rig's memory and whose connector drives its planner and movers. The rig closes."""
    pages = [rig.sizes.pages] * len(rig.layout.groups)
    device = Device(rig.layout, pages, rig.memory, cached=cached, shared=shared)
    workers = [MoverConnector(mover, PATIENCE_S if device.windows else 0.0) for mover in rig.movers]
    scheduler = PlannerConnector(rig.planner)
    return Engine(device, scheduler, workers, limits=limits, cost=cost, clock=rig.clock)


def settle(engine: Engine, *, idle_s: float = 0.0, steps: int = 1_000_000) -> list[Sequence]:
    """Step until no request is here and no page is held; the requests that ended. Where nothing can be computed, real
    time passes a little and virtual time by idle_s. Raises TimeoutError after `steps` or PATIENCE_S."""
    end = time.monotonic() + PATIENCE_S
    ended: list[Sequence] = []
    for _ in range(steps):
        if engine.idle:
            return ended
        ended += step(engine, idle_s)
        if time.monotonic() > end:
            break
    raise TimeoutError(
        f"{len(engine.waiting)} requests wait, {len(engine.loading)} load, {len(engine.running)} run,"
        f" {len(engine.held)} holds"
    )


def step(engine: Engine, idle_s: float = 0.0) -> list[Sequence]:
    """One step, with a little time passing where it could compute nothing."""
    ended = engine.step()
    if not engine.worked:
        time.sleep(PAUSE_S)
        engine.clock.now += idle_s
    return ended


@dataclass(frozen=True, slots=True)
class Traffic:
    """Random requests over a few texts. Blocks of prompt, tokens of answer: at most so many. Chances per request."""

    requests: int
    texts: int = 6
    blocks: int = 12
    output: int = 6
    abort: float = 0.1
    preempt: float = 0.05
    reset: float = 0.01
    seed: int = 1


def play(engine: Engine, traffic: Traffic) -> list[Sequence]:
    """Send the traffic while stepping, then settle; all requests. Invariants of the pools are checked on the way."""
    rng = random.Random(traffic.seed)
    size = engine.device.layout.base_tokens
    longest = traffic.blocks + -(-traffic.output // size) + 1
    texts = [random_keys(longest, traffic.seed * 1000 + n) for n in range(traffic.texts)]
    everything: list[Sequence] = []
    for number in range(traffic.requests):
        prompt = rng.randrange(1, traffic.blocks * size + 1)
        output = rng.randrange(1, traffic.output + 1)
        seq = Sequence(RequestInfo(number), rng.choice(texts), size, prompt, output)
        engine.add(seq)
        everything.append(seq)
        for _ in range(rng.randrange(4)):
            step(engine, 0.01)
        if rng.random() < traffic.abort:
            engine.abort(rng.choice(everything[-8:]))
        if rng.random() < traffic.preempt and engine.running:
            engine.preempt(rng.choice(engine.running))
        if rng.random() < traffic.reset:
            engine.reset()
        if number % 100 == 0:
            engine.device.check_integrity()
    settle(engine, idle_s=0.01)
    engine.device.check_integrity()
    return everything


def unfinished(requests: Seq[Sequence]) -> list[Sequence]:
    """Those that did not end."""
    return [seq for seq in requests if seq.state is not State.ENDED]
