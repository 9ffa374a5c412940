"""Which copies of a job are one rank's work: groups it lacks are passed over, replicated blocks are moved by one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvoffload.layout import Layout
from kvoffload.messages import Copies, CopyFlag, Job, JobKind, StatusArray

Rows = NDArray[np.intp]


def equal_copies(layouts: Sequence[Layout]) -> int:
    """How many neighbouring ranks hold equal bytes in all stored groups; 1 where they do not, or not in all groups."""
    found = {g.replicas for x in layouts for g in x.groups if not g.transient}
    copies = found.pop()
    return copies if not found and len(set(layouts)) == 1 and len(layouts) % copies == 0 else 1


class Share:
    """The part of one rank. Immutable but for the jobs it has cut; thread: that of the mover's caller.

    copies: so many neighbouring ranks have equal bytes and share host memory and disk; 1 = nothing is shared. A block
    is stored by the one that its slot names (slot modulo copies) and brought ahead of a load by that one; the first of
    them writes to disk and resets it, so that both stay in order; all load. Transit slots are used at each rank's own
    pace, so each has its own, behind those of the ranks before it: `transit` slabs apart.
    """

    def __init__(self, layout: Layout, rank: int, *, copies: int = 1, transit: int = 0) -> None:
        self._has = np.array([g.block_bytes > 0 and not g.transient for g in layout.groups])
        self._copies, self._member = copies, rank % copies
        self._apart = transit << 16
        self.plain = bool(self._has.all()) and copies == 1
        self.first = self._member == 0
        self._cut: dict[int, tuple[Rows, int]] = {}

    def of(self, job: Job) -> Job:
        """The job with this rank's copies only; the same job where these are all of them. See `whole`."""
        if self.plain:
            return job
        groups = job.copies["group"]
        mine = self._has[groups]
        owner = job.copies["host"] % self._copies
        if job.kind in (JobKind.STORE, JobKind.READ):
            mine &= owner == self._member
        elif job.kind is JobKind.WRITE and not self.first:
            mine[:] = False
        copies = job.copies
        if not mine.all():
            rows = np.flatnonzero(mine)
            self._cut[job.id] = rows, len(groups)
            copies, owner = copies[rows], owner[rows]
        if self._copies > 1:
            copies = self._placed(copies, owner if job.kind is JobKind.WRITE else self._member)
        return job if copies is job.copies else Job(job.id, job.kind, copies)

    def _placed(self, copies: Copies, member: NDArray[np.int32] | int) -> Copies:
        """Transit slots where the member has them."""
        transit = (copies["flags"] & CopyFlag.TRANSIT) != 0
        if not transit.any():
            return copies
        placed = copies.copy()
        placed["host"] += np.where(transit, member * self._apart, 0).astype(np.int32)
        return placed

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
