"""`kvoffload bench requests`: a long run of whole requests through planner and index, counted by the second.

Half of the requests are prompts that were never there, so that each of their blocks evicts one in the end; half ask for
one of the last prompts again and load all of it. What is measured is what a scheduler calls: match, load where
something was found, the steps until it has come, offer, a step, finish. Keys are drawn outside the measured time.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvoffload.bench.planner import PROMPT, REQUEST_US
from kvoffload.bench.timing import Measure
from kvoffload.bench.world import BLOCK, Prompt, World
from kvoffload.memory import resident_bytes

HOST_PROMPTS = 500
"""Prompts of PROMPT blocks that host has room for."""

ASKED_AGAIN = 250
"""The last prompts that are asked for again: so few that host still has them."""

PART = 5000
"""Requests that are measured together: each part is one value of the spread."""


@dataclass(frozen=True, slots=True)
class Requests:
    """What a run of requests gave. per_request: CPU microseconds of one, over the parts. per_second: requests, of all
    parts together. loaded, produced: blocks. resident: bytes of this process before the first part, after the last one,
    and the most after any."""

    count: int
    per_request: Measure
    per_second: float
    loaded: int
    produced: int
    resident: tuple[int, int, int]

    @property
    def met(self) -> bool:
        """Whether it is the rate asked for."""
        return self.per_second >= 1e6 / REQUEST_US


class _Stream:
    """Requests of one seeded run, one after the other."""

    def __init__(self) -> None:
        self.world = World(HOST_PROMPTS * PROMPT)
        self._chance = random.Random(0)
        self._last: deque[Prompt] = deque(maxlen=ASKED_AGAIN)

    def draw(self, count: int) -> list[Prompt]:
        """The next requests."""
        keys = self.world.new_keys(count * PROMPT)
        drawn = []
        for at in range(0, len(keys), PROMPT):
            again = self._last and self._chance.random() < 0.5
            known = self._chance.choice(self._last).keys if again else keys[at : at + PROMPT].copy()
            drawn.append(self.world.prompt(known))
            if not again:
                self._last.append(drawn[-1])
        return drawn

    def run(self, prompts: list[Prompt]) -> float:
        """CPU seconds of these requests. Raises RuntimeError where one came out otherwise than drawn."""
        planner, counters = self.world.planner, self.world.planner.counters
        before = counters["used"] + counters["produced"]
        begin = time.thread_time()
        for prompt in prompts:
            found = planner.match(prompt.info, prompt)
            if found.boundary:
                planner.load(prompt.info, prompt, found.boundary, [prompt.pages])
                while not planner.idle:
                    self.world.step()
            planner.offer(prompt.info, prompt, PROMPT * BLOCK, [prompt.pages])
            self.world.step()
            planner.finish(prompt.info.id, "end_turn", 0.0)
        seconds = time.thread_time() - begin
        done = counters["used"] + counters["produced"] - before
        if done != len(prompts) * PROMPT or planner.pinned() or not planner.idle:
            raise RuntimeError(f"{done} of {len(prompts) * PROMPT} blocks were loaded or produced")
        return seconds


def bench_requests(count: int, advance: Callable[[int], None] = lambda done: None) -> Requests:
    """Run `count` requests, in parts; the last part may be short. REQUIRES: count >= 1."""
    stream = _Stream()
    stream.run(stream.draw(PART))  # host is full then
    counters = stream.world.planner.counters
    start = {name: counters[name] for name in ("used", "produced")}
    first = most = resident_bytes()
    taken: list[tuple[int, float]] = []
    for at in range(0, count, PART):
        size = min(PART, count - at)
        taken.append((size, stream.run(stream.draw(size))))
        most = max(most, resident_bytes())
        advance(size)
    stream.world.planner.check_integrity()
    return Requests(
        count=count,
        per_request=Measure.of(seconds / size * 1e6 for size, seconds in taken),
        per_second=count / sum(seconds for _, seconds in taken),
        loaded=counters["used"] - start["used"],
        produced=counters["produced"] - start["produced"],
        resident=(first, resident_bytes(), most),
    )
