"""What the mover's threads do: chunks of jobs between host slots, the disk tier and device pages."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from kvoffload.arena import HostArena
from kvoffload.chunks import chunks, load_chunks, share_slots
from kvoffload.copying.base import CopyEngine, Direction
from kvoffload.messages import Copies, CopyFlag, Job, JobKind, Status, StatusArray
from kvoffload.tiers.base import Tier

log = logging.getLogger(__name__)

HUNG_SECONDS = 10.0
"""A call of the tier that runs for longer hangs in the medium: a chunk takes a hundredth of it on a slow drive."""

READ = int(CopyFlag.READ)


class TierWork:
    """Python runs once per chunk, never per block. Thread: `run` on any of the mover's, the rest on the engine's."""

    def __init__(
        self, copier: CopyEngine, tier: Tier, arena: HostArena, chunk: int, stopped: Callable[[int], bool]
    ) -> None:
        """chunk: blocks in one call. stopped: whether a job (by id) is to end at its next chunk."""
        self._copier = copier
        self._tier = tier
        self._arena = arena
        self._chunk = chunk
        self._stopped = stopped
        self._calls: dict[int, float] = {}  # by thread: since when it is in a call of the tier
        self._seen: set[tuple[int, float]] = set()
        self.hung_total = 0
        """Calls of the tier that ran for longer than HUNG_SECONDS, ended since or not."""

    def run(self, job: Job, after: object) -> StatusArray:
        """Do a READ, a WRITE, or a LOAD that reads."""
        if job.kind is JobKind.LOAD:
            return self._load(job, after)
        status = np.zeros(len(job.copies), np.uint8)
        for part in self._parts(job, chunks(len(job.copies), self._chunk), status):
            move = self._tier.write if job.kind is JobKind.WRITE else self._tier.read
            status[part] = self._call(move, job.copies[part])
        return status

    def hung(self) -> bool:
        """Whether some call of the tier hangs now; each is counted and told once."""
        old = time.monotonic() - HUNG_SECONDS
        now = {call for call in tuple(self._calls.items()) if call[1] < old}
        for _ in now - self._seen:
            self.hung_total += 1
            log.warning(
                "a call of the disk tier has not returned in %g s; the tier is off meanwhile", HUNG_SECONDS
            )
        self._seen = now
        return bool(now)

    def _call(self, move: Callable[[Copies, HostArena], StatusArray], copies: Copies) -> StatusArray:
        thread = threading.get_ident()
        self._calls[thread] = time.monotonic()
        try:
            return move(copies, self._arena)
        finally:
            del self._calls[thread]

    def _parts(self, job: Job, parts: Iterable[slice], status: StatusArray) -> Iterator[slice]:
        """The chunks; ends early, marking the rest NOT_DONE, when the job is stopped."""
        for part in parts:
            if self._stopped(job.id):
                status[part.start :] = Status.NOT_DONE
                return
            yield part

    def _load(self, job: Job, after: object) -> StatusArray:
        """Read a chunk while the one before it goes to the device. A transit slot is read into again only after the
        device copy that used it has ended."""
        status = np.zeros(len(job.copies), np.uint8)
        before: list[tuple[slice, int, Copies]] = []
        try:
            for part in self._parts(job, load_chunks(job.copies, self._chunk), status):
                copies = job.copies[part]
                while before and (len(before) > 1 or share_slots(before[0][2], copies)):
                    self._finish_copy(before.pop(0), status)
                read = (copies["flags"] & READ) != 0
                if read.any():
                    mine = status[part]
                    mine[read] = self._call(self._tier.read, copies[read])
                good = status[part] == Status.OK
                if good.any():
                    chosen = copies[good]
                    handle = self._copier.submit(chosen, Direction.TO_DEVICE, after)
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
