"""An engine of this process, driven step by step: requests come and go in the middle of everything."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

from runner import Engine, Prompt

from kvoffload.testing.faults import Counting, Fault, FaultyEngine, Gated, Op

STEPS = 100_000
"""After so many the engine counts as stuck."""


class Live:
    """Adds, aborts and steps; collects what comes out.

    answers: tokens of each request that ended by itself. cached: its prompt tokens that were not computed. asked: every
    answer of the connector to "how many tokens can be loaded", with the request's name.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.answers: dict[str, tuple[int, ...]] = {}
        self.cached: dict[str, int] = {}
        self.asked: list[tuple[str, tuple[int | None, bool]]] = []
        self.open: dict[str, int] = {}
        connector = engine.scheduler
        inner = connector.get_num_new_matched_tokens

        def watched(request: Any, computed: int) -> tuple[int | None, bool]:
            answer: tuple[int | None, bool] = inner(request, computed)
            self.asked.append((self._name(request.request_id), answer))
            return answer

        connector.get_num_new_matched_tokens = watched

    def _name(self, request_id: str) -> str:
        """vLLM adds a suffix of its own to the names that it is given."""
        return request_id.rsplit("-", 1)[0]

    @property
    def vllm(self) -> Any:
        return self.engine.llm.llm_engine

    def add(self, name: str, prompt: Prompt, tokens: int) -> None:
        from vllm import SamplingParams

        greedy = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        self.vllm.add_request(name, {"prompt_token_ids": list(prompt)}, greedy)
        self.open[name] = tokens

    def abort(self, name: str) -> None:
        self.vllm.abort_request([name])
        self.open.pop(name, None)

    def steps(self, count: int) -> None:
        for _ in range(count):
            for out in self.vllm.step():
                if out.finished and out.request_id in self.open:
                    del self.open[out.request_id]
                    self.answers[out.request_id] = tuple(out.outputs[0].token_ids)
                    self.cached[out.request_id] = int(out.num_cached_tokens or 0)

    def until(self, reached: Callable[[], bool]) -> None:
        for _ in range(STEPS):
            if reached():
                return
            self.steps(1)
        raise AssertionError(f"not reached; open are {sorted(self.open)}")

    def run(self) -> None:
        """Until every request has ended."""
        self.until(lambda: not self.open)

    def external(self, name: str) -> int:
        """Tokens that the connector offered last for the request."""
        return next((tokens or 0 for asked, (tokens, _) in reversed(self.asked) if asked == name), 0)

    def count(self, name: str) -> int:
        """A counter of kvoffload's planner, now."""
        return int(self.engine.scheduler._scheduler.core.planner.counters[name])

    def settle(self) -> None:
        """Until nothing is under way in the planner: short requests keep the engine stepping."""
        planner = self.engine.scheduler._scheduler.core.planner
        for number in range(STEPS):
            if planner.idle:
                return
            self.add(f"idle {number}", [5, 6, 7], 1)
            self.run()
        raise AssertionError(planner.describe())

    def until_written(self) -> None:
        """Until the disk has all that is to go there."""
        planner = self.engine.scheduler._scheduler.core.planner
        for number in range(STEPS):
            if planner.idle and planner.backlog() == (0, 0):
                return
            self.add(f"write {number}", [5, 6, 7], 1)
            self.run()
        raise AssertionError(planner.describe())


class Gate(Gated):
    """Holds the calls that arrive before a time (time.monotonic), by default all."""

    only_before = math.inf

    def released(self, op: Op, since: float) -> bool:
        return since > self.only_before or super().released(op, since)


def gate_loads(engine: Engine) -> tuple[Gate, Counting]:
    """Hold copies to the device, and count them, from now on."""
    gate, count = Gate([Op.TO_DEVICE]), Counting()
    wrap(engine.worker, [gate, count])
    return gate, count


def wrap(connector: Any, faults: Collection[Fault]) -> None:
    """Put faults around the copies of a worker's connector."""
    mover = connector._worker._mover
    mover._copier = FaultyEngine(mover._copier, *faults)
