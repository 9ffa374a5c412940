"""The copy engine over cupy, for devices that no native module was built for: the same kernel, compiled at first use.

Staged only: stores gather on the engine's stream and go out by DMA on another, loads come in by DMA and are scattered.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from kvoffload import _C
from kvoffload.arena import HostArena
from kvoffload.copying.base import CopyEngine, Direction
from kvoffload.copying.gpu import StreamPoint, checked_point
from kvoffload.copying.pinned import PinnedArena
from kvoffload.copying.placing import Placed, check_pools, place
from kvoffload.errors import ConfigError
from kvoffload.layout import SLOT_ALIGN, CacheGroup, Layout, Pools, Region
from kvoffload.messages import Copies, Status, StatusArray

MAX_PIECE = 16 << 10
THREADS, BLOCKS = 512, 16
NAP_SECONDS = 0.0001
STAGING_BYTES = 256 << 20
CHUNK_BYTES = 16 << 20

PIECE = np.dtype([("base", "<u8"), ("stride", "<i8"), ("offset", "<i8"), ("bytes", "<i4"), ("word", "<i4")])
ITEM = np.dtype([("page", "<i4"), ("slot", "<u4")])

ENTRY = """
extern "C" __global__ void kvoffload_copy(const kvoffload::Piece* pieces, int count, int item_count, int to_pages,
                                          unsigned long long slot_base, const kvoffload::CopyItem* items) {
    const kvoffload::CopyTask task{pieces, 0, count, item_count, to_pages, slot_base};
    kvoffload::copy_body(kvoffload::DeviceIndex(), task, items);
}
"""


def kernel_text() -> str:
    """One source for the run-time compiler: the headers of the native modules, and an entry point."""
    text = _C.compat_text() + _C.kernels_text() + ENTRY
    return text.replace('#include "compat.h"', "").replace("#pragma once", "")


@dataclass(slots=True, eq=False)
class _Job:
    """keep: what the device still uses."""

    status: StatusArray
    ends: list[Any] = field(default_factory=list)
    keep: list[Any] = field(default_factory=list)
    staging: int = 0

    @property
    def done(self) -> bool:
        return all(e.done for e in self.ends)


class CupyCopyEngine(CopyEngine):
    """`after` is a StreamPoint. What does not fit the staging of stores ends with NOT_DONE."""

    def __init__(self, device: int = 0) -> None:
        try:
            self.device = cupy.cuda.Device(device)
            with self.device:
                module = cupy.RawModule(code=kernel_text(), options=("-std=c++17",))
                self._kernel = module.get_function("kvoffload_copy")
                self._streams = {d: cupy.cuda.Stream(non_blocking=True) for d in Direction}
        except runtime.CUDARuntimeError as error:
            raise ConfigError(
                f"cupy cannot use device {device} ({error}); use the CPU copy engine"
            ) from error
        self._world: tuple[Layout, Pools, HostArena] | None = None
        self._pieces: list[Any] = []
        self._buffer: Any = None
        self._pinned: PinnedArena | None = None
        self._jobs: dict[int, _Job] = {}
        self._next = 1
        self._staged = 0
        self._issuing = threading.Lock()
        """Held while copies are put into streams, and while host memory is unlocked."""

    # What PinnedArena asks of a runtime.

    def device_info(self, device: int) -> tuple[str, str, int, int]:
        name = runtime.getDeviceProperties(device)["name"].decode()
        return (
            name,
            runtime.deviceGetPCIBusId(device),
            runtime.driverGetVersion(),
            runtime.runtimeGetVersion(),
        )

    def host_register(self, base: int, nbytes: int, device: int) -> str:
        try:
            with self.device:
                runtime.hostRegister(base, nbytes, 0)
        except runtime.CUDARuntimeError as error:
            return str(error)
        return ""

    def host_unregister(self, base: int) -> None:
        runtime.hostUnregister(base)

    # What it tells its user.

    def add_pinned(self, base: int, bytes: int) -> None:
        """Every copy lies in one slab, and so in one registration."""

    def withdraw_pinned(self) -> None:
        self._issuing.acquire()
        with self.device:
            for stream in self._streams.values():
                stream.synchronize()

    def forget_pinned(self) -> None:
        self._issuing.release()

    # ---- CopyEngine ----

    @property
    def streams(self) -> bool:
        return True

    def register(self, layout: Layout, pools: Pools, arena: HostArena) -> None:
        check_pools(layout, pools)
        self.close()
        self._world = (layout, pools, arena)
        with self.device:
            self._pieces = [cupy.asarray(_pieces(p).view(np.uint8)) for p in pools]
            self._buffer = cupy.cuda.alloc(max(CHUNK_BYTES, *(g.slot_bytes for g in layout.groups)))
            cupy.cuda.Device().synchronize()
        self._pinned = PinnedArena(self, self.device.id, arena, self)

    def submit(self, copies: Copies, direction: Direction, after: object) -> int:
        point = checked_point(after)
        if self._world is None:
            raise RuntimeError("register() comes before copies")
        layout, pools, arena = self._world
        job = _Job(np.empty(len(copies), np.uint8))
        with self._issuing, self.device:
            waiting = point.stream if direction is Direction.TO_HOST else self._streams[direction].ptr
            runtime.streamWaitEvent(waiting, point.event)
            for placed in place(copies, direction, pools, arena, job.status):
                self._group(job, placed, direction, layout.groups[placed.group], point)
            end = cupy.cuda.Event(disable_timing=True)
            end.record(self._streams[direction])
        job.ends.append(end)
        self._jobs[self._next] = job
        self._next += 1
        return self._next - 1

    def query(self, handle: int) -> StatusArray | None:
        job = self._jobs[handle]
        if not job.done:
            return None
        del self._jobs[handle]
        self._staged -= job.staging
        return job.status

    def wait(self, handle: int, timeout: float) -> bool:
        end = time.monotonic() + timeout
        job = self._jobs[handle]
        while not job.done:
            if time.monotonic() >= end:
                return False
            time.sleep(NAP_SECONDS)
        return True

    def close(self) -> None:
        """Waits for what is under way; handles may still be queried."""
        with self.device:
            for job in self._jobs.values():
                for end in job.ends:
                    end.synchronize()
            for stream in self._streams.values():
                stream.synchronize()
        if self._pinned is not None:
            self._pinned.close()

    # ---- one group of a job ----

    def _group(
        self, job: _Job, placed: Placed, direction: Direction, group: CacheGroup, point: StreamPoint
    ) -> None:
        size = max(1, CHUNK_BYTES // group.slot_bytes)
        for begin in range(0, len(placed.index), size):
            part = slice(begin, begin + size)
            offsets, pages = placed.offset[part], placed.page[part]
            nbytes = len(offsets) * group.slot_bytes
            items = np.zeros(len(offsets), ITEM)
            items["page"], items["slot"] = pages, np.arange(len(offsets)) * (group.slot_bytes // SLOT_ALIGN)
            if direction is Direction.TO_HOST:
                if self._staged + nbytes > STAGING_BYTES:
                    job.status[placed.index[begin:]] = Status.NOT_DONE
                    return
                self._store(
                    job, placed.group, (offsets, items), group, cupy.cuda.ExternalStream(point.stream)
                )
            else:
                stream = self._streams[direction]
                self._copy_runs(offsets, group, self._buffer.ptr, direction)
                self._launch(job, placed.group, items, self._buffer.ptr, direction, stream)

    def _store(self, job: _Job, number: int, what: tuple[Any, Any], group: CacheGroup, stream: Any) -> None:
        offsets, items = what
        nbytes = len(offsets) * group.slot_bytes
        staging = cupy.cuda.alloc(nbytes)
        self._staged += nbytes
        job.staging += nbytes
        job.keep.append(staging)
        self._launch(job, number, items, staging.ptr, Direction.TO_HOST, stream)
        gathered = cupy.cuda.Event(disable_timing=True)
        gathered.record(stream)
        job.ends.append(gathered)
        self._streams[Direction.TO_HOST].wait_event(gathered)
        self._copy_runs(offsets, group, staging.ptr, Direction.TO_HOST)

    def _launch(
        self, job: _Job, number: int, items: Any, staging: int, direction: Direction, stream: Any
    ) -> None:
        pinned = cupy.cuda.alloc_pinned_memory(items.nbytes)
        np.frombuffer(pinned, np.uint8, items.nbytes)[:] = items.view(np.uint8)
        with stream:
            table = cupy.empty(items.nbytes, np.uint8)
            runtime.memcpyAsync(
                table.data.ptr, pinned.ptr, items.nbytes, runtime.memcpyHostToDevice, stream.ptr
            )
            pieces = self._pieces[number]
            count = len(pieces) // PIECE.itemsize
            blocks = min(BLOCKS, -(-len(items) * count * 32 // THREADS))
            arguments = (
                pieces,
                np.int32(count),
                np.int32(len(items)),
                np.int32(direction),
                np.uint64(staging),
                table,
            )
            self._kernel((blocks,), (THREADS,), arguments)
        job.keep += [pinned, table]

    def _copy_runs(self, offsets: Any, group: CacheGroup, staging: int, direction: Direction) -> None:
        """One DMA per run of slots that follow each other; slabs are cut apart, for pinned chunks end on them."""
        assert self._world is not None
        arena = self._world[2]
        breaks = (np.diff(offsets) != group.slot_bytes) | (np.diff(offsets // arena.slab_bytes) != 0)
        begins = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(offsets)]
        stream = self._streams[direction].ptr
        for first, last in pairwise(begins):
            nbytes = (last - first - 1) * group.slot_bytes + group.block_bytes
            host, device = arena.base + int(offsets[first]), staging + first * group.slot_bytes
            if direction is Direction.TO_HOST:
                runtime.memcpyAsync(host, device, nbytes, runtime.memcpyDeviceToHost, stream)
            else:
                runtime.memcpyAsync(device, host, nbytes, runtime.memcpyHostToDevice, stream)


def _pieces(pool: tuple[Region, ...]) -> Any:
    """The table of csrc/kernels.h for one group."""
    rows, slot = [], 0
    for region in pool:
        word = next(w for w in (16, 8, 4, 1) if (region.base | region.stride | slot) % w == 0)
        for at in range(0, region.page_bytes, MAX_PIECE):
            size = min(MAX_PIECE, region.page_bytes - at)
            rows.append((region.base + at, region.stride, slot + at, size, word))
        slot += region.page_bytes
    return np.array(rows, PIECE)
