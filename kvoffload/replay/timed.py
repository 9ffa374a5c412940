"""A mover whose jobs end when a cost model says so, and not before they have really ended."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol

from kvoffload.layout import Pools
from kvoffload.messages import Inventory, Outcome, Plans
from kvoffload.replay.cost import Channels
from kvoffload.replay.driver import STALL_S, StandstillError


class InnerMover(Protocol):
    """What is needed of the mover that does the work."""

    def register(self, pools: Pools) -> Inventory: ...
    def submit(self, plans: Plans, after: object = None) -> None: ...
    def poll(self) -> list[Outcome]: ...
    def wait(self, job_ids: Iterable[int], timeout: float) -> bool: ...
    def close(self) -> None: ...


class TimedMover:
    """Outcomes are reported in the order of their virtual ends, so a replay is the same on a slow machine and a fast
    one. Thread: one."""

    def __init__(self, inner: InnerMover, channels: Channels, clock: Callable[[], float]) -> None:
        self._inner = inner
        self.channels = channels
        self._clock = clock
        self._due: list[tuple[float, int]] = []
        self._done: dict[int, Outcome] = {}

    def register(self, pools: Pools) -> Inventory:
        return self._inner.register(pools)

    def submit(self, plans: Plans, after: object = None) -> None:
        # The model says when a job ends. Whether a cancel still meets it must not depend on this machine.
        self._inner.submit(replace(plans, cancels=()))
        for job in plans.jobs:
            heapq.heappush(self._due, (self.channels.ends(job, self._clock()), job.id))

    def next_end(self) -> float | None:
        """When the next running job ends, None where none runs."""
        return self._due[0][0] if self._due else None

    def poll(self) -> list[Outcome]:
        """What has ended by now; waits, in real time, for copies that the model has overtaken."""
        outcomes = self._collect()
        while self._due and self._due[0][0] <= self._clock():
            outcomes.append(self._await(heapq.heappop(self._due)[1]))
        return outcomes

    def wait(self, job_ids: Iterable[int], timeout: float) -> bool:
        """Until they have really ended; their virtual end is told by `poll`."""
        return self._inner.wait(job_ids, timeout)

    def close(self) -> None:
        self._inner.close()

    def _collect(self) -> list[Outcome]:
        """Keep what has really ended; news that belong to no job are returned."""
        news = []
        for outcome in self._inner.poll():
            if outcome.job:
                self._done[outcome.job] = outcome
            else:
                news.append(outcome)
        return news

    def _await(self, job: int) -> Outcome:
        end = time.monotonic() + STALL_S
        while job not in self._done:
            self._inner.wait([job], STALL_S)
            self._collect()
            if time.monotonic() > end:
                raise StandstillError(f"job {job} has not ended after {STALL_S:.0f} s")
        return self._done.pop(job)
