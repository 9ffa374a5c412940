"""The mover of index-only runs."""

from __future__ import annotations

from collections.abc import Iterable

from kvoffload.messages import Outcome, Plans


class NullMover:
    """The twin of Mover without bytes: every job is done as soon as it is submitted. For index-only replays."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._done: list[Outcome] = []

    def submit(self, plans: Plans, after: object = None) -> None:
        self._done += [Outcome(job.id, self.rank) for job in plans.jobs]

    def poll(self) -> list[Outcome]:
        outcomes, self._done = self._done, []
        return outcomes

    def wait(self, job_ids: Iterable[int], timeout: float) -> bool:
        return True

    def close(self) -> None:
        self._done = []
