"""A mover without bytes whose jobs end later, and in another order, than they were sent."""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np

from kvoffload.layout import Pools
from kvoffload.messages import Inventory, Outcome, Plans, Status


class LateMover:
    """Every poll ends some of the running jobs, drawn from a seed; a few of their copies fail. Thread: one.

    share: of the running jobs that end in a poll. failures: chance that a job has failed copies.
    """

    def __init__(
        self, rank: int, inventory: Inventory, *, share: float = 0.5, failures: float = 0.0, seed: int = 0
    ) -> None:
        self.rank = rank
        self.running: dict[int, int] = {}
        self._inventory = inventory
        self._share = share
        self._failures = failures
        self._random = random.Random(seed * 1000 + rank)

    def register(self, pools: Pools) -> Inventory:
        return self._inventory

    def submit(self, plans: Plans, after: object = None) -> None:
        for job in plans.jobs:
            self.running[job.id] = len(job.copies)

    def poll(self) -> list[Outcome]:
        ids = [job for job in self.running if self._random.random() < self._share]
        self._random.shuffle(ids)
        return [self._end(job) for job in ids]

    def wait(self, job_ids: Iterable[int], timeout: float) -> bool:
        return not self.running.keys() & set(job_ids)

    def close(self) -> None:
        self.running.clear()

    def _end(self, job: int) -> Outcome:
        count = self.running.pop(job)
        if self._random.random() >= self._failures:
            return Outcome(job, self.rank)
        status = np.zeros(count, np.uint8)
        status[self._random.randrange(count)] = Status.COPY_FAILED
        return Outcome(job, self.rank, status, "drawn to fail")
