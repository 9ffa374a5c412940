"""Which copies of a job are one rank's work: groups it lacks are passed over, replicated blocks are written by one."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvoffload.layout import Layout
from kvoffload.messages import Job, JobKind, StatusArray

Rows = NDArray[np.intp]


class Share:
    """The part of one rank. Immutable but for the jobs it has cut; thread: that of the mover's caller.

    shared: host memory is one for all ranks, so that a block of a group with `replicas` is written once, by the rank
    that its slot names (slot modulo replicas), and read by all.
    """

    def __init__(self, layout: Layout, rank: int, *, shared: bool) -> None:
        self._has = np.array([g.block_bytes > 0 and not g.transient for g in layout.groups])
        self._replicas = np.array([g.replicas if shared else 1 for g in layout.groups])
        self._rank = rank
        self.plain = bool(self._has.all()) and not (self._replicas > 1).any()
        self._cut: dict[int, tuple[Rows, int]] = {}

    def of(self, job: Job) -> Job:
        """The job with this rank's copies only; the same job where these are all of them. See `whole`."""
        if self.plain:
            return job
        groups = job.copies["group"]
        mine = self._has[groups]
        if job.kind is JobKind.STORE:
            replicas = self._replicas[groups]
            mine &= job.copies["host"] % replicas == self._rank % replicas
        if mine.all():
            return job
        rows = np.flatnonzero(mine)
        self._cut[job.id] = rows, len(groups)
        return Job(job.id, job.kind, job.copies[rows])

    def whole(self, job_id: int, status: StatusArray | None) -> StatusArray | None:
        """The status of all copies of a job, from that of this rank's: what is others' work is done as far as this rank
        can tell. Once per job."""
        cut = self._cut.pop(job_id, None)
        if cut is None or status is None:
            return status
        rows, count = cut
        out = np.zeros(count, np.uint8)
        out[rows] = status
        return out
