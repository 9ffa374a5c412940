"""The order of loads between the scheduler's part and several workers' parts, over a small vLLM of symbols.

What must hold, whatever fails, is aborted, preempted or late: every rank tells the end of each load exactly once, with
a failure whenever something is missing, and never while a copy touches pages that were given back (vLLM's own
assertions, kept by fake_engine, die of anything else); no token comes from a wrong context; nothing that was computed
over pages that a load did not fill is ever visible in a tier.
"""

from __future__ import annotations

from pathlib import Path

from fake_engine import FULL, HYBRID, FakeEngine, Request, next_token
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvoffload.messages import JobKind

KINDS = (JobKind.LOAD, JobKind.READ, JobKind.WRITE, JobKind.STORE)
DEADLINE_S = 5.0


def text(family: int, length: int) -> list[int]:
    """Prompts of one family are prefixes of each other; those of 0 and 1 share their first 12 tokens."""
    shared = 12 if family < 2 else 0
    return [(7 if i < shared else 10 + family) + i % 5 for i in range(length)]


def answer(prompt: list[int], count: int) -> list[int]:
    """What the model says."""
    whole = list(prompt)
    for _ in range(count):
        whole.append(next_token(whole))
    return whole[len(prompt) :]


class Protocol(RuleBasedStateMachine):
    """One engine; rules are what clients, the scheduler, the copies and the clock do to it."""

    @initialize(
        layout=st.sampled_from([FULL, HYBRID]),
        ranks=st.sampled_from([(1, 1), (2, 1), (3, 1), (2, 2), (4, 2)]),
        depth=st.integers(1, 3),
        pages=st.sampled_from([32, 64]),
        host=st.sampled_from([16, 64]),
        disk=st.sampled_from([0, 128]),
    )
    def start(self, layout, ranks, depth, pages, host, disk):
        options = {"disk_path": Path("unused"), "disk_bytes": 1 << 20} if disk else {}
        self.engine = FakeEngine(
            layout,
            ranks=ranks[0],
            copies=ranks[1],
            depth=depth,
            pages=pages,
            host=host,
            disk=disk,
            deadline_s=DEADLINE_S,
            **options,
        )
        self.asked: dict[str, tuple[list[int], int]] = {}

    @rule(family=st.integers(0, 2), length=st.integers(1, 40), count=st.integers(1, 6))
    def add(self, family, length, count):
        name = f"request {len(self.asked)}"
        self.asked[name] = (text(family, length), count)
        self.engine.add(Request(name, *self.asked[name]))

    @rule(
        family=st.integers(0, 2),
        lengths=st.lists(st.integers(8, 40), min_size=1, max_size=3),
        kind=st.sampled_from(KINDS[:2]),
        rank=st.integers(0, 2),
        times=st.integers(0, 1),
        held=st.booleans(),
        host=st.booleans(),
    )
    def come_back(self, family, lengths, kind, rank, times, held, host):
        """All that ran ends and is stored; then turns come together whose pages are gone, and copies may fail."""
        for mover in self.engine.movers:
            mover.held.clear()
            mover.failing.clear()
        self.engine.run(idle_s=0.5)
        self.engine.forget_pages()
        if not host:
            self.engine.planner.reset(("host",))
        self.mover(rank).failing[kind] = times
        if held:
            self.mover(rank).held.add(kind)
        for length in lengths:
            self.add(family, length, 2)
        self.engine.step()

    @rule(steps=st.integers(1, 6))
    def step(self, steps):
        for _ in range(steps):
            self.engine.step()

    @precondition(lambda self: self.engine.requests)
    @rule(number=st.integers(0, 9))
    def abort(self, number):
        names = list(self.engine.requests)
        self.engine.abort(names[number % len(names)])

    @precondition(lambda self: self.engine.running)
    @rule(number=st.integers(0, 9))
    def preempt(self, number):
        running = self.engine.running
        self.engine.preempt(running[number % len(running)])

    @rule(rank=st.integers(0, 2), kind=st.sampled_from(KINDS[:3]))
    def hold(self, rank, kind):
        self.mover(rank).held.add(kind)

    @rule(rank=st.integers(0, 2))
    def let_go(self, rank):
        self.mover(rank).held.clear()

    @rule(rank=st.integers(0, 2), number=st.integers(0, 9))
    def end(self, rank, number):
        self.mover(rank).end(number)

    @rule(
        rank=st.integers(0, 2), kind=st.sampled_from(KINDS), which=st.integers(0, 9), times=st.integers(1, 3)
    )
    def fail(self, rank, kind, which, times):
        mover = self.mover(rank)
        mover.failing[kind] = times
        mover.which = which

    @rule()
    def forget_pages(self):
        self.engine.forget_pages()

    @rule()
    def reset(self):
        assert self.engine.scheduler.reset()

    @rule(seconds=st.sampled_from([1.0, 6.0]))
    def wait(self, seconds):
        self.engine.clock.now += seconds

    def mover(self, rank):
        return self.engine.movers[rank % len(self.engine.movers)]

    @invariant()
    def only_right_blocks_are_visible(self):
        self.engine.visible()

    def teardown(self):
        """Nothing is held any more: all requests end, with the right answers, and nothing is left of them."""
        engine = self.engine
        for mover in engine.movers:
            mover.held.clear()
            mover.failing.clear()
        engine.run(idle_s=0.5)
        engine.check()
        for name, got in engine.answers.items():
            assert got == answer(*self.asked[name])


def examples(count: int, steps: int) -> settings:
    return settings(
        max_examples=count,
        stateful_step_count=steps,
        derandomize=True,
        deadline=None,
        report_multiple_bugs=False,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )


def test_ends_are_told_once_and_nothing_wrong_is_kept():
    """Random orders of everything that can happen to loads and stores, on 1 to 3 ranks, 1 to 3 steps deep."""
    run_state_machine_as_test(Protocol, settings=examples(100, 30))
