"""Engines of symbols in the states that the rows of docs/cases.md begin with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fake_engine import HYBRID, FakeEngine, Output, Request, next_token
from kvoffload.connectors.vllm.wire import Report, StepPlans

from kvoffload.layout import Layout
from kvoffload.messages import JobKind

DISK = {"disk": 128, "disk_path": Path("unused"), "disk_bytes": 1 << 20}
LOAD, STORE, READ, WRITE = JobKind.LOAD, JobKind.STORE, JobKind.READ, JobKind.WRITE


def prompt(length: int, family: int = 1) -> list[int]:
    return [10 * family + i % 7 for i in range(length)]


def answered(text: list[int], count: int) -> list[int]:
    """What the model says after a text."""
    whole = list(text)
    for _ in range(count):
        whole.append(next_token(whole))
    return whole[len(text) :]


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


def nothing(engine: FakeEngine) -> Output:
    """A step in which no request runs."""
    return Output(engine.number)


def reports(engine: FakeEngine, told: StepPlans) -> list[Report]:
    """What the workers say after a step without tokens."""
    found = []
    for part in engine.workers:
        part.begin(told)
        part.start(told)
        part.save(told)
        part.ended()
        report = part.report()
        found += [] if report is None else [report]
    return found


def told_from(engine) -> list[StepPlans]:
    """What the scheduler's part says from now on."""
    found, inner = [], engine.scheduler.step

    def step(output):
        found.append(inner(output))
        return found[-1]

    engine.scheduler.step = step
    return found


def without_cancels(submit):
    """Of a mover: a disk that cannot even be told to stop."""
    return lambda plans, *more: submit(replace(plans, cancels=()), *more)
