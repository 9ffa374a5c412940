"""Jobs that have been sent and have not ended: outcomes of all ranks, and deadlines."""

from __future__ import annotations

import heapq
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from kvoffload.layout import Layout
from kvoffload.messages import Copies, Job, JobKind, Outcome, RequestId, Status, StatusArray

log = logging.getLogger(__name__)

LOG_EVERY_S = 10.0
"""Seconds between two lines about late jobs."""

_SEVERITY = np.zeros(len(Status), np.uint8)
_SEVERITY[[Status.OK, Status.COPY_FAILED, Status.NOT_DONE, Status.READ_FAILED]] = [0, 1, 2, 3]
"""A copy that failed on one rank has failed. COPY_FAILED of a read says that host has the bytes: not so where a rank
has not read them. Bad bytes on one rank make the key bad."""


def _worse(a: StatusArray, b: StatusArray) -> StatusArray:
    return np.where(_SEVERITY[b] > _SEVERITY[a], b, a)


@dataclass(slots=True, eq=False)
class Running:
    """One job on its way.

    status: worst status so far per copy over the ranks that have reported; None = all OK.
    owner: request whose pages the job touches, or None. load: id of the load it is a part of, or 0. since: when it was
    sent, None before.
    forgotten: disk was reset after the job began: its blocks must not get there.
    """

    job: Job
    waiting: set[int]
    owner: RequestId | None = None
    load: int = 0
    status: StatusArray | None = None
    errors: list[str] = field(default_factory=list)
    overdue: bool = False
    forgotten: bool = False
    deadline: float = 0.0
    since: float | None = None

    def late(self, layout: Layout, now: float) -> str:
        """What people are to know of a job that is past its deadline."""
        age = 0.0 if self.since is None else now - self.since
        size = sum(layout.groups[g].slot_bytes for g in self.copies["group"].tolist())
        return (
            f"job {self.job.id}: {self.job.kind.name} of {len(self.copies)} blocks, {size} bytes, has not ended"
            f" after {age:.1f} s; ranks {sorted(self.waiting)} owe a report"
        )

    @property
    def failed(self) -> int:
        """Copies that are not OK so far."""
        return 0 if self.status is None else int(np.count_nonzero(self.status))

    @property
    def copies(self) -> Copies:
        return self.job.copies


def _checked(outcome: Outcome, running: Running) -> StatusArray:
    """The status of a report that has one; where it does not fit its job it says nothing about any copy."""
    status, wanted = outcome.status, len(running.copies)
    assert status is not None
    if status.shape == (wanted,) and (not wanted or status.max() < len(Status)):
        return status
    running.errors.append(
        f"rank {outcome.rank}: a status of {status.shape} for {wanted} copies, or no status"
    )
    return np.full(wanted, Status.NOT_DONE, np.uint8)


class LateJobs:
    """Names jobs past their deadline in the log, one line per LOG_EVERY_S at most."""

    def __init__(self) -> None:
        self._silent_until = -math.inf
        self._unnamed = 0

    def name(self, running: Running, layout: Layout, now: float) -> None:
        """This job is late."""
        if now < self._silent_until:
            self._unnamed += 1
            return
        more = f"; {self._unnamed} others since the last such line" if self._unnamed else ""
        log.warning("%s%s", running.late(layout, now), more)
        self._silent_until, self._unnamed = now + LOG_EVERY_S, 0


class InFlight:
    """Table of running jobs, sent or about to be.

    A job ends once, when every rank has reported it; reports of unknown or unsent jobs, and second reports of one
    rank, change nothing.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = range(ranks)
        self._next = 1
        self._jobs: dict[int, Running] = {}
        self._unsent: list[Job] = []
        self._deadlines: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Running]:
        return iter(self._jobs.values())

    def get(self, job_id: int) -> Running | None:
        return self._jobs.get(job_id)

    def new_id(self) -> int:
        """Ids are unique over jobs and loads, and never 0."""
        self._next += 1
        return self._next - 1

    def add(
        self,
        kind: JobKind,
        copies: Copies,
        deadline: float,
        owner: RequestId | None = None,
        load: int = 0,
        whole: bool = False,
    ) -> Running:
        job = Job(self.new_id(), kind, copies, owner, whole)
        running = Running(job, set(self._ranks), owner, load, deadline=deadline)
        self._jobs[job.id] = running
        self._unsent.append(job)
        heapq.heappush(self._deadlines, (deadline, job.id))
        return running

    def take_unsent(self, now: float) -> tuple[Job, ...]:
        """Jobs added since the last call, in order; they count as sent now."""
        if not self._unsent:
            return ()
        jobs, self._unsent = tuple(self._unsent), []
        for job in jobs:
            self._jobs[job.id].since = now
        return jobs

    def postpone(self, seconds: float) -> None:
        """So long passed before jobs could be sent: it is not held against them. A READ has its caller's deadline."""
        if not seconds:
            return
        for job in self._unsent:
            if job.kind is not JobKind.READ:
                self._jobs[job.id].deadline += seconds

    def report(self, outcome: Outcome) -> Running | None:
        """The job, if this report ended it."""
        running = self._jobs.get(outcome.job)
        if running is None or running.since is None or outcome.rank not in running.waiting:
            return None
        running.waiting.discard(outcome.rank)
        if outcome.error:
            running.errors.append(f"rank {outcome.rank}: {outcome.error}")
        if outcome.status is not None:
            status = _checked(outcome, running)
            if status.any():
                running.status = status.copy() if running.status is None else _worse(running.status, status)
        if running.waiting:
            return None
        del self._jobs[outcome.job]
        return running

    def drop_unsent(self, kind: JobKind) -> list[Running]:
        """Take back the jobs of this kind that no mover has seen: they have ended."""
        dropped = [self._jobs.pop(job.id) for job in self._unsent if job.kind is kind]
        self._unsent = [job for job in self._unsent if job.kind is not kind]
        return dropped

    def expired(self, now: float) -> list[Running]:
        """Jobs whose deadline has passed and that still run; each is named once."""
        late = []
        while self._deadlines and self._deadlines[0][0] <= now:
            job_id = heapq.heappop(self._deadlines)[1]
            running = self._jobs.get(job_id)
            if running is None:
                continue
            if running.deadline > now:
                heapq.heappush(self._deadlines, (running.deadline, job_id))
                continue
            running.overdue = True
            late.append(running)
        if len(self._deadlines) > 2 * len(self._jobs) + 64:
            self._deadlines = [d for d in self._deadlines if d[1] in self._jobs]
            heapq.heapify(self._deadlines)
        return late
