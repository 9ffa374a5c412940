"""One rank's memory as symbols, and a mover whose jobs end when, and as well as, a test says.

A page or slot holds the text whose blocks' bytes would be in it, or GARBAGE. So content is checked without bytes: a
block is right if what lies there is the text that its key names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvoffload.layout import Layout
from kvoffload.messages import CopyFlag, Job, JobKind, Outcome, Plans, Status
from kvoffload.sharing import Share

GARBAGE: Any = "garbage"

Content = Any
"""(group, the tokens up to the last one in the block), or GARBAGE."""


@dataclass(slots=True)
class Memory:
    """What lies where. owner: serial number of each page's allocation, kept by the engine and shared by all ranks."""

    owner: dict[int, int]
    pages: dict[int, Content] = field(default_factory=dict)
    host: dict[tuple[int, int], Content] = field(default_factory=dict)
    disk: dict[tuple[int, int], Content] = field(default_factory=dict)


@dataclass(slots=True)
class _Running:
    """The part of a submitted job that is the rank's. owners: of a load, by copy, whose page it was then; read: what a
    store found there. A store may read a page that a later step's schedule has given back already: its bytes change
    with that step, not before."""

    job: Job
    owners: list[int | None]
    read: list[Content]


class ScriptedMover:
    """What WorkerPart needs of a Mover. Jobs of `held` kinds, and those in `stuck`, end in `end`, all others by the
    next poll or wait. A cancel ends reads and writes, never a job whose copies are all between host and pages.

    failing: by kind, how many of the next jobs fail; each fails one copy, chosen by `which`.
    """

    def __init__(self, rank: int, memory: Memory, share: Share | None = None) -> None:
        """share: of a rank that shares host and disk with others; their memories have the same dicts for these."""
        self.rank = rank
        self.share = share
        self.memory = memory
        self.held: set[JobKind] = set()
        self.stuck: set[int] = set()
        self.failing: dict[JobKind, int] = {}
        self.which = 0
        self.running: list[_Running] = []
        self.seen: list[Job] = []
        self._done: list[Outcome] = []

    def submit(self, plans: Plans, after: object = None, layered: Collection[int] = ()) -> None:
        if plans.reset_disk and (self.share is None or self.share.first):
            self.memory.disk.clear()
        for whole in plans.jobs:
            job = whole if self.share is None else self.share.of(whole)
            pages = [int(p) for p in job.copies["page"]]
            loads = job.kind is JobKind.LOAD
            owners = [self.memory.owner.get(p) if loads else None for p in pages]
            assert not loads or None not in owners, "a load into a free page"
            read = [self.memory.pages.get(p, GARBAGE) for p in pages] if job.kind is JobKind.STORE else []
            self.running.append(_Running(job, owners, read))
            self.seen.append(whole)
        for job_id in plans.cancels:
            for running in [r for r in self.running if r.job.id == job_id and _may_be_cancelled(r.job)]:
                self.running.remove(running)
                status = np.full(len(running.job.copies), Status.NOT_DONE, np.uint8)
                self._told(job_id, status)

    def poll(self) -> list[Outcome]:
        for running in list(self.running):
            if running.job.kind not in self.held and running.job.id not in self.stuck:
                self._end(running)
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: Iterable[int], timeout: float) -> bool:
        wanted = set(job_ids)
        for running in [r for r in self.running if r.job.id in wanted]:
            self._end(running)
        return True

    def end(self, number: int) -> None:
        """One of the running jobs ends, whether held or not."""
        if self.running:
            self._end(self.running[number % len(self.running)])

    def drain(self, timeout: float) -> bool:
        return True

    def close(self) -> None:
        self.running.clear()

    def _end(self, running: _Running) -> None:
        self.running.remove(running)
        job, status = running.job, np.zeros(len(running.job.copies), np.uint8)
        if self.failing.get(job.kind, 0) and len(status):
            self.failing[job.kind] -= 1
            at = self.which % len(status)
            reads = job.kind is JobKind.READ or job.copies["flags"][at] & CopyFlag.READ
            status[at] = Status.READ_FAILED if reads else Status.COPY_FAILED
        for number, copy in enumerate(job.copies):
            self._copy(running, number, copy, status[number] == Status.OK)
        self._told(job.id, status if status.any() else None)

    def _told(self, job_id: int, status: Any) -> None:
        whole = status if self.share is None else self.share.whole(job_id, status)
        self._done.append(Outcome(job_id, self.rank, whole))

    def _copy(self, running: _Running, number: int, copy: Any, good: bool) -> None:
        memory, kind = self.memory, running.job.kind
        group, page = int(copy["group"]), int(copy["page"])
        host, disk = (group, int(copy["host"])), (group, int(copy["disk"]))
        if running.owners[number] is not None:
            now = memory.owner.get(page)
            assert now == running.owners[number], "a load into a page that was given back meanwhile"
        if kind is JobKind.STORE:
            memory.host[host] = running.read[number] if good else GARBAGE
        elif kind is JobKind.WRITE:
            memory.disk[disk] = memory.host.get(host, GARBAGE) if good else GARBAGE
        else:
            if kind is JobKind.READ or copy["flags"] & CopyFlag.READ:
                memory.host[host] = memory.disk.get(disk, GARBAGE) if good else GARBAGE
            if kind is JobKind.LOAD:
                memory.pages[page] = memory.host.get(host, GARBAGE) if good else GARBAGE


def movers_of(layout: Layout, owner: dict[int, int], ranks: int, copies: int) -> list[ScriptedMover]:
    """One per rank; `copies` neighbours share host and disk."""
    tiers: list[tuple[dict[Any, Any], dict[Any, Any]]] = [({}, {}) for _ in range(ranks // copies)]
    movers = []
    for rank in range(ranks):
        share = Share(layout, rank, copies=copies, transit=1) if copies > 1 else None
        movers.append(ScriptedMover(rank, Memory(owner, {}, *tiers[rank // copies]), share))
    return movers


def _may_be_cancelled(job: Job) -> bool:
    reads = bool((job.copies["flags"] & CopyFlag.READ).any())
    return job.kind in (JobKind.READ, JobKind.WRITE) or (job.kind is JobKind.LOAD and reads)


def begins(have: Any, wanted: Any, block_end: int) -> bool:
    """Whether a page holds what is wanted, and maybe more of the same block: what is computed twice."""
    tokens = wanted[1]
    return bool(
        have != GARBAGE
        and have[0] == wanted[0]
        and len(have[1]) <= block_end
        and have[1][: len(tokens)] == tokens
    )
