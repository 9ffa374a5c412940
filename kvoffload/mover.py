"""The half that moves bytes: one per rank, in the worker process.

Stores, and loads that host holds whole, go straight to the copy engine; whatever touches disk runs on the mover's own
threads (tier_work.py), in chunks, so that a device copy of one chunk overlaps the read of the next. The engine's thread
calls `submit`, `poll` and `wait`; none of them does I/O.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, replace

import numpy as np

from kvoffload.arena import HostArena
from kvoffload.copying.base import CopyEngine, Direction
from kvoffload.errors import ConfigError
from kvoffload.layout import Layout, Pools, distinct
from kvoffload.messages import Inventory, Job, JobKind, Outcome, Plans, Status, StatusArray
from kvoffload.sharing import Share
from kvoffload.sizing import Slabs
from kvoffload.tier_work import READ, TierWork
from kvoffload.tiers.base import Tier
from kvoffload.tiers.disk_reader import DiskReader
from kvoffload.tiers.lent import LentTier
from kvoffload.workers import Workers

log = logging.getLogger(__name__)

CHUNK_BYTES = 8 << 20
"""Read or written in one native call; two chunks of a load are under way at once."""

LOAD_THREADS = 2
PROBE_SECONDS = 5.0
"""Between two tries of a disk that was switched off."""

CLOSE_SECONDS = 30.0
"""Given to running calls of the tier at the end, of each direction."""

_ON_DEVICE = (JobKind.STORE, JobKind.LOAD)


@dataclass(slots=True, eq=False)
class _Copying:
    """A job that is one copy-engine handle."""

    job: Job
    handle: int


@dataclass(slots=True, eq=False)
class _Task:
    """A job on one of the mover's threads, or queued for one."""

    job: Job
    future: Future[None]


class Mover:
    """Executes Plans of one rank and reports one Outcome per job."""

    def __init__(
        self,
        rank: int,
        layout: Layout,
        slabs: Slabs,
        copier: CopyEngine,
        tier: Tier | None = None,
        *,
        arena: HostArena | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """The mover owns `copier` and `tier` from here on and closes them; host memory is mapped now.

        arena: host memory that the ranks with equal bytes share, for layouts of replicated groups: slabs.host slabs,
        and with a tier slabs.transit for each of them; its owner closes it after all movers (between processes:
        shared.py). Raises ConfigError together with a tier that is not lent: a block is written to disk by one of
        them, and read by all.
        """
        if arena is not None and tier is not None and not isinstance(tier, LentTier | DiskReader):
            raise ConfigError(
                "host memory shared by ranks, with a disk tier of one rank: lend it to all of them"
            )
        self.rank = rank
        self.layout = layout
        self._owns_arena = arena is None
        try:
            self.arena = arena or HostArena(slabs.slab_bytes, slabs.host + slabs.transit, layout)
        except BaseException:
            copier.close()
            if tier is not None:
                tier.close()
            raise
        copies = 1 if arena is None else max(1, *(g.replicas for g in layout.groups if not g.transient))
        self._share = Share(layout, rank, copies=copies, transit=slabs.transit)
        self._slabs = slabs
        self._copier = copier
        self._tier = tier
        self._chunk = max(1, chunk_bytes // max(1, *(g.slot_bytes for g in layout.groups)))
        self._copying: list[_Copying] = []
        self._tasks: dict[int, _Task] = {}
        self._cancelled: set[int] = set()
        self._done: deque[Outcome] = deque()
        self._disk_ok = True
        self._told_hung = 0
        self._layers: tuple[tuple[int, ...], ...] = ()
        self._probed_at = 0.0
        self._probing: Future[None] | None = None
        self._closed = threading.Event()
        self._work = None if tier is None else TierWork(copier, tier, self.arena, self._chunk, self._stopped)
        self._loads = Workers(0 if tier is None else LOAD_THREADS, "kvoffload-load")
        # One thread: a reset of the tier must come after the writes before it and before those after it.
        self._writes = Workers(0 if tier is None else 1, "kvoffload-write")

    def register(self, pools: Pools) -> Inventory:
        """Fix the device pages, and say what this rank can give. Call once, before `submit`."""
        regions = tuple(distinct(pool) for pool in pools)
        self._layers = tuple(
            tuple(pool.index(r) for r in own) for pool, own in zip(pools, regions, strict=True)
        )
        self._copier.register(self.layout, regions, self.arena)
        records = {} if self._tier is None else {"records": self._tier.records()}
        return Inventory(
            self.layout.slots_per_slab(self._slabs.slab_bytes),
            self._slabs.host,
            self._slabs.transit,
            0 if self._tier is None else self._tier.slabs,
            lacks=tuple(g.id for g in self.layout.groups if not g.block_bytes),
            **records,
        )

    def submit(self, plans: Plans, after: object = None, layered: Collection[int] = ()) -> None:
        """Start every job of the plans. after: the point of a device's stream behind which their copies may start: the
        producer of what stores read, the last reader of the pages that loads write; None on a device without streams.
        A point must stay good until the jobs have ended; recorded anew on its stream it does. layered: loads, by job
        id, that `wait_layer` will be asked for.

        Raises ValueError, with nothing begun, for device copies without the point that the copy engine needs."""
        if after is None and self._copier.streams and any(job.kind in _ON_DEVICE for job in plans.jobs):
            raise ValueError(
                f"{len(plans.jobs)} jobs for a device with streams and no point behind which their copies may start:"
                " give `after` to before_forward and after_forward"
            )
        if plans.reset_disk and self._tier is not None:
            self._writes.submit(self._guard(None, self._reset))
        for job in plans.jobs:
            self._submit(job, after, job.id in layered)
        for job_id in plans.cancels:  # a job may be sent with its cancel: its deadline has passed already
            self._cancel(job_id)

    def _submit(self, job: Job, after: object, layered: bool) -> None:
        job = self._share.of(job)
        if not len(job.copies):
            self._done.append(Outcome(job.id, self.rank))
            return
        work = self._work
        if job.kind is JobKind.STORE or (job.kind is JobKind.LOAD and not _reads(job)):
            self._submit_copy(job, after, layered)
            return
        if work is None:
            self._done.append(Outcome(job.id, self.rank, _broken(job), "this rank has no disk tier"))
            return
        threads = self._writes if job.kind is JobKind.WRITE else self._loads
        self._tasks[job.id] = _Task(job, threads.submit(self._guard(job, lambda: work.run(job, after))))

    def _submit_copy(self, job: Job, after: object, layered: bool) -> None:
        direction = Direction.TO_HOST if job.kind is JobKind.STORE else Direction.TO_DEVICE
        try:
            if layered and direction is Direction.TO_DEVICE:
                layers = self._layers[int(job.copies["group"][0])]
                handle = self._copier.submit_layers(job.copies, after, layers)
            else:
                handle = self._copier.submit(job.copies, direction, after)
            self._copying.append(_Copying(job, handle))
        except Exception as failure:  # noqa: BLE001
            self._done.append(Outcome(job.id, self.rank, _broken(job), _described(failure)))

    def _cancel(self, job_id: int) -> None:
        """A task that has begun ends at its next chunk; one that has not ends now, whatever its thread waits for."""
        task = self._tasks.get(job_id)
        if task is None or job_id in self._cancelled:
            return
        self._cancelled.add(job_id)
        if task.future.cancel():
            status = np.full(len(task.job.copies), Status.NOT_DONE, np.uint8)
            self._done.append(Outcome(job_id, self.rank, status))

    def _guard(self, job: Job | None, work: Callable[[], StatusArray | None]) -> Callable[[], None]:
        """The outermost frame of a task: whatever happens in it, the job ends with an outcome."""

        def run() -> None:
            status, error = None, ""
            try:
                status = work()
            except Exception as failure:  # noqa: BLE001
                error = _described(failure)
                if job is None:
                    log.warning("rank %d: the disk tier: %s", self.rank, error)
                else:
                    status = _broken(job)
            if job is not None:
                self._done.append(Outcome(job.id, self.rank, status, error))

        return run

    def _stopped(self, job_id: int) -> bool:
        return job_id in self._cancelled or self._closed.is_set()

    def _reset(self) -> None:
        assert self._tier is not None
        self._tier.reset()

    # ---- on the engine's thread ----

    def poll(self) -> list[Outcome]:
        """What has ended since the last call. Never blocks."""
        outcomes = []
        still = []
        for running in self._copying:
            status = self._copier.query(running.handle)
            if status is None:
                still.append(running)
            else:
                outcomes.append(Outcome(running.job.id, self.rank, status if status.any() else None))
        self._copying = still
        while self._done:
            outcome = self._done.popleft()
            self._tasks.pop(outcome.job, None)
            self._cancelled.discard(outcome.job)
            outcomes.append(outcome)
        return self._with_health(outcomes)

    def _with_health(self, outcomes: list[Outcome]) -> list[Outcome]:
        """Outcomes over all copies asked for, with the state of the disk; one for itself when that changes."""
        if not self._share.plain:
            outcomes = [replace(o, status=self._share.whole(o.job, o.status)) for o in outcomes]
        if self._tier is None:
            return outcomes
        sound, hangs = self._tier.healthy, self._work is not None and self._work.hung()
        healthy = sound and not hangs
        if not sound and time.monotonic() - self._probed_at > PROBE_SECONDS:
            self._probed_at = time.monotonic()
            if self._probing is None or self._probing.done():
                self._probing = self._writes.submit(self._guard(None, self._probe))
        hung = self.hung_calls - self._told_hung
        if healthy is not self._disk_ok or hung:
            self._disk_ok = healthy
            self._told_hung += hung
            outcomes.append(Outcome(0, self.rank, disk_hung=hung))
        return outcomes if healthy else [replace(o, disk_ok=False) for o in outcomes]

    def _probe(self) -> None:
        assert self._tier is not None
        self._tier.probe()

    def wait(self, job_ids: Iterable[int], timeout: float) -> bool:
        """Block until these jobs have outcomes to `poll`; False after `timeout` seconds. Unknown ids have ended."""
        end = time.monotonic() + timeout
        wanted = set(job_ids)
        for running in [c for c in self._copying if c.job.id in wanted]:
            if not self._copier.wait(running.handle, max(0.0, end - time.monotonic())):
                return False
        tasks = [self._tasks[i].future for i in wanted & self._tasks.keys()]
        return not tasks or not wait_for(tasks, max(0.0, end - time.monotonic())).not_done

    def wait_layer(self, job_id: int, layer: int, stream: int = 0, timeout: float = 60.0) -> bool:
        """The bytes of this layer (a place in its group's pool) are there for what comes next: on a device with
        streams for later work of `stream`, while the caller goes on; elsewhere, and of a load that reads from disk, the
        caller waits for the job. False after `timeout` seconds of that. What failed is told by the outcome alone."""
        for running in self._copying:
            if running.job.id == job_id:
                return self._copier.wait_layer(running.handle, layer, stream, timeout)
        return self.wait([job_id], timeout)

    @property
    def hung_calls(self) -> int:
        """Calls of the disk tier that did not return in time; it is off while there is one."""
        return 0 if self._work is None else self._work.hung_total

    def drain(self, timeout: float) -> bool:
        """Block until everything submitted has an outcome; False after `timeout` seconds."""
        return self.wait([*self._tasks, *(c.job.id for c in self._copying)], timeout)

    def close(self) -> None:
        """End every job (what has not begun is NOT_DONE), then release files, threads and memory. Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        ended = self._loads.close(CLOSE_SECONDS) and self._writes.close(CLOSE_SECONDS)
        self._copier.close()
        if not ended:  # what it reads into stays mapped, what it reads from stays locked
            log.error(
                "rank %d: a call of the disk tier has not returned in %g s; its host memory and files are not released",
                self.rank,
                CLOSE_SECONDS,
            )
            return
        if self._tier is not None:
            self._tier.close()
        if self._owns_arena:
            self.arena.close()


def _described(failure: Exception) -> str:
    return f"{type(failure).__name__}: {failure}"


def _reads(job: Job) -> bool:
    return bool((job.copies["flags"] & READ).any())


def _broken(job: Job) -> StatusArray:
    """Of a job that was left in the middle: COPY_FAILED says of a read that host has its bytes, so a block that was
    to be read is NOT_DONE."""
    reads = (job.copies["flags"] & READ) != 0
    if job.kind is JobKind.READ:
        reads[:] = True
    return np.where(reads, Status.NOT_DONE, Status.COPY_FAILED).astype(np.uint8)
