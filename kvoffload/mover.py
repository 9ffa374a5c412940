"""The half that moves bytes: one per rank, in the worker process.

Stores, and loads that host holds whole, go straight to the copy engine; whatever touches disk runs on the mover's own
threads, in chunks, so that a device copy of one chunk overlaps the read of the next. Python runs once per chunk, never
per block. The engine's thread calls `submit`, `poll` and `wait`; none of them does I/O.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, replace

import numpy as np

from kvoffload.arena import HostArena
from kvoffload.chunks import chunks, load_chunks, share_slots
from kvoffload.copying.base import CopyEngine, Direction
from kvoffload.errors import ConfigError
from kvoffload.layout import Layout, Pools, distinct
from kvoffload.messages import Copies, CopyFlag, Inventory, Job, JobKind, Outcome, Plans, Status, StatusArray
from kvoffload.sharing import Share
from kvoffload.sizing import Slabs
from kvoffload.tiers.base import Tier

log = logging.getLogger(__name__)

CHUNK_BYTES = 8 << 20
"""Read or written in one native call; two chunks of a load are under way at once."""

LOAD_THREADS = 2
PROBE_SECONDS = 5.0
"""Between two tries of a disk that was switched off."""


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

        arena: host memory that all ranks of this host share, for layouts of replicated groups; its owner closes it
        after all movers. Raises ConfigError together with a tier: its reads are not told to the other ranks.
        """
        if arena is not None and tier is not None:
            raise ConfigError("host memory shared by ranks with a disk tier: leave one of them out")
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
        self._share = Share(layout, rank, shared=arena is not None)
        self._slabs = slabs
        self._copier = copier
        self._tier = tier
        self._chunk = max(1, chunk_bytes // max(1, *(g.slot_bytes for g in layout.groups)))
        self._copying: list[_Copying] = []
        self._tasks: dict[int, _Task] = {}
        self._cancelled: set[int] = set()
        self._done: deque[Outcome] = deque()
        self._disk_ok = True
        self._probed_at = 0.0
        self._probing: Future[None] | None = None
        self._closed = threading.Event()
        self._loads = ThreadPoolExecutor(LOAD_THREADS, "kvoffload-load")
        # One thread: a reset of the tier must come after the writes before it and before those after it.
        self._writes = ThreadPoolExecutor(1, "kvoffload-write")

    def register(self, pools: Pools) -> Inventory:
        """Fix the device pages, and say what this rank can give. Call once, before `submit`."""
        self._copier.register(self.layout, tuple(distinct(pool) for pool in pools), self.arena)
        records = {} if self._tier is None else {"records": self._tier.records()}
        return Inventory(
            self.layout.slots_per_slab(self._slabs.slab_bytes),
            self._slabs.host,
            self._slabs.transit,
            0 if self._tier is None else self._tier.slabs,
            lacks=tuple(g.id for g in self.layout.groups if not g.block_bytes),
            **records,
        )

    def submit(self, plans: Plans, events: Mapping[int, object] | None = None) -> None:
        """Start every job of the plans. events: by job id, the device event after which its copies may start (a
        store: its producer; a load: the last reader of its pages); None on a device without streams."""
        if plans.reset_disk and self._tier is not None:
            self._writes.submit(self._guard(None, self._reset))
        for job in plans.jobs:
            self._submit(job, (events or {}).get(job.id))
        for job_id in plans.cancels:  # a job may be sent with its cancel: its deadline has passed already
            self._cancel(job_id)

    def _submit(self, job: Job, event: object) -> None:
        job = self._share.of(job)
        if not len(job.copies):
            self._done.append(Outcome(job.id, self.rank))
            return
        reads = job.kind is JobKind.LOAD and (job.copies["flags"] & CopyFlag.READ).any()
        if job.kind in (JobKind.STORE, JobKind.LOAD) and not reads:
            self._submit_copy(job, event)
            return
        pool = self._writes if job.kind is JobKind.WRITE else self._loads
        work = {JobKind.LOAD: self._load, JobKind.READ: self._read, JobKind.WRITE: self._write}[job.kind]
        self._tasks[job.id] = _Task(job, pool.submit(self._guard(job, lambda: work(job, event))))

    def _submit_copy(self, job: Job, event: object) -> None:
        direction = Direction.TO_HOST if job.kind is JobKind.STORE else Direction.TO_DEVICE
        try:
            self._copying.append(_Copying(job, self._copier.submit(job.copies, direction, event)))
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

    # ---- on the mover's threads ----

    def _reset(self) -> None:
        assert self._tier is not None
        self._tier.reset()

    def _parts(self, job: Job, chunks: Iterable[slice], status: StatusArray) -> Iterator[slice]:
        """The chunks; ends early, marking the rest NOT_DONE, when the job is cancelled."""
        for part in chunks:
            if job.id in self._cancelled or self._closed.is_set():
                status[part.start :] = Status.NOT_DONE
                return
            yield part

    def _write(self, job: Job, event: object) -> StatusArray:
        assert self._tier is not None
        status = np.zeros(len(job.copies), np.uint8)
        for part in self._parts(job, chunks(len(job.copies), self._chunk), status):
            status[part] = self._tier.write(job.copies[part], self.arena)
        return status

    def _read(self, job: Job, event: object) -> StatusArray:
        assert self._tier is not None
        status = np.zeros(len(job.copies), np.uint8)
        for part in self._parts(job, chunks(len(job.copies), self._chunk), status):
            status[part] = self._tier.read(job.copies[part], self.arena)
        return status

    def _load(self, job: Job, event: object) -> StatusArray:
        """Read a chunk while the one before it goes to the device. A transit slot is read into again only after the
        device copy that used it has ended."""
        assert self._tier is not None
        status = np.zeros(len(job.copies), np.uint8)
        before: list[tuple[slice, int, Copies]] = []
        try:
            for part in self._parts(job, load_chunks(job.copies, self._chunk), status):
                copies = job.copies[part]
                while before and (len(before) > 1 or share_slots(before[0][2], copies)):
                    self._finish_copy(before.pop(0), status)
                read = (copies["flags"] & CopyFlag.READ) != 0
                if read.any():
                    mine = status[part]
                    mine[read] = self._tier.read(copies[read], self.arena)
                good = status[part] == Status.OK
                if good.any():
                    chosen = copies[good]
                    handle = self._copier.submit(chosen, Direction.TO_DEVICE, event)
                    before.append((part, handle, chosen))
        finally:  # whatever failed: a job whose pages are still being written has not ended
            for rest in before:
                self._finish_copy(rest, status)
        return status

    def _finish_copy(self, running: tuple[slice, int, Copies], status: StatusArray) -> None:
        """Wait for a device copy, however long it takes: its pages are being written."""
        part, handle, _ = running
        while (result := self._copier.query(handle)) is None:
            self._copier.wait(handle, 1.0)
        mine = status[part]
        mine[mine == Status.OK] = result

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
        healthy = self._tier.healthy
        if not healthy and time.monotonic() - self._probed_at > PROBE_SECONDS:
            self._probed_at = time.monotonic()
            if self._probing is None or self._probing.done():
                self._probing = self._writes.submit(self._guard(None, self._probe))
        if healthy is not self._disk_ok:
            self._disk_ok = healthy
            outcomes.append(Outcome(0, self.rank))
        if healthy:
            return outcomes
        return [Outcome(o.job, o.rank, o.status, o.error, False) for o in outcomes]

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

    def drain(self, timeout: float) -> bool:
        """Block until everything submitted has an outcome; False after `timeout` seconds."""
        return self.wait([*self._tasks, *(c.job.id for c in self._copying)], timeout)

    def close(self) -> None:
        """End every job (what has not begun is NOT_DONE), then release files, threads and memory. Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._loads.shutdown(wait=True)
        self._writes.shutdown(wait=True)
        self._copier.close()
        if self._tier is not None:
            self._tier.close()
        if self._owns_arena:
            self.arena.close()


def _described(failure: Exception) -> str:
    return f"{type(failure).__name__}: {failure}"


def _broken(job: Job) -> StatusArray:
    """Of a job that was left in the middle: COPY_FAILED says of a read that host has its bytes, so a block that was
    to be read is NOT_DONE."""
    reads = (job.copies["flags"] & CopyFlag.READ) != 0
    if job.kind is JobKind.READ:
        reads[:] = True
    return np.where(reads, Status.NOT_DONE, Status.COPY_FAILED).astype(np.uint8)


class NullMover:
    """The twin of Mover without bytes: every job is done as soon as it is submitted. For index-only replays."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._done: list[Outcome] = []

    def submit(self, plans: Plans, events: Mapping[int, object] | None = None) -> None:
        self._done += [Outcome(job.id, self.rank) for job in plans.jobs]

    def poll(self) -> list[Outcome]:
        outcomes, self._done = self._done, []
        return outcomes

    def wait(self, job_ids: Iterable[int], timeout: float) -> bool:
        return True

    def close(self) -> None:
        self._done = []
