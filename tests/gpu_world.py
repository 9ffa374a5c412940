"""What tests of device copy engines share: pages, slots and streams on the simulated (or a real) device."""

from __future__ import annotations

import mmap
import random

import numpy as np

from kvoffload import native
from kvoffload.arena import HostArena
from kvoffload.copying.base import CopyEngine, Direction
from kvoffload.copying.gpu import DeviceOptions, GpuCopyEngine, StreamPoint
from kvoffload.layout import Region
from kvoffload.messages import Status
from kvoffload.testing.blocks import make_copies, make_key, make_layout, payload

PATIENCE = 60.0
DEFAULT = DeviceOptions()
SMALL = DeviceOptions(chunk=256 << 10, store_staging=8 << 20, load_staging=1 << 20)
"""Staging small enough that tests go round the rings."""


class SparseMemory:
    """Device pages of the simulation: ordinary memory of which only touched pages are backed."""

    def __init__(self, nbytes):
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._bytes = np.frombuffer(mapping, np.uint8)
        self.base = int(self._bytes.ctypes.data)

    def put(self, offset, data):
        self._bytes[offset : offset + len(data)] = np.frombuffer(data, np.uint8)

    def get(self, offset, nbytes):
        return self._bytes[offset : offset + nbytes].tobytes()


class RealMemory:
    """Device pages of a real device; put and get are plain copies on a stream of their own."""

    def __init__(self, module, nbytes):
        self._module, self._stream = module, module.stream_create()
        self.base = module.memory_allocate(nbytes)

    def put(self, offset, data):
        source = np.frombuffer(data, np.uint8)
        self._module.copy(self.base + offset, source.ctypes.data, len(data), True, self._stream)
        self._module.stream_synchronize(self._stream)

    def get(self, offset, nbytes):
        target = np.empty(nbytes, np.uint8)
        self._module.copy(target.ctypes.data, self.base + offset, nbytes, False, self._stream)
        self._module.stream_synchronize(self._stream)
        return target.tobytes()


class EventedEngine(CopyEngine):
    """An engine that is given a point of a stream of its own where a test gives none."""

    def __init__(self, inner, module):
        self.inner, self._module = inner, module
        self.stream, self._event = module.stream_create(), module.event_create()

    def register(self, layout, pools, arena):
        self.inner.register(layout, pools, arena)

    def submit(self, copies, direction, after):
        return self.inner.submit(copies, direction, after or self.point())

    def submit_layers(self, copies, after, layers):
        return self.inner.submit_layers(copies, after or self.point(), layers)

    def wait_layer(self, handle, layer, stream, timeout):
        """Without a stream that of its own, until it has come so far."""
        waited = self.inner.wait_layer(handle, layer, stream or self.stream, timeout)
        if not stream:
            self._module.stream_synchronize(self.stream)
        return waited

    def point(self):
        """Behind everything that was put into the stream."""
        self._module.event_record(self._event, self.stream)
        return StreamPoint(self._event, self.stream)

    def query(self, handle):
        return self.inner.query(handle)

    def wait(self, handle, timeout):
        return self.inner.wait(handle, timeout)

    def close(self):
        self.inner.close()


class DeviceWorld:
    """One group whose blocks are painted, an arena, and an evented engine, on the simulation unless told otherwise."""

    def __init__(
        self,
        page_bytes=(4096, 4096),
        mode="staged",
        *,
        pages=64,
        options=SMALL,
        slabs=2,
        gap=0,
        module=None,
        runtime=None,
    ):
        """runtime: what the engine is given in the place of the module; its locking is then not waited for."""
        self.module = module or native.simulation()
        self.sizes = tuple(page_bytes)
        self.pages = pages
        self.layout = make_layout(sum(page_bytes))
        self.arena = HostArena(4 << 20, slabs, self.layout)
        make = SparseMemory if module is None else lambda n: RealMemory(module, n)
        self.memory = [make((n + gap) * pages) for n in page_bytes]
        self.regions = tuple(
            Region(m.base, n + gap, n, pages) for m, n in zip(self.memory, page_bytes, strict=True)
        )
        self.copier = GpuCopyEngine(runtime or self.module, 0, mode, options)
        self.engine = EventedEngine(self.copier, self.module)
        self.engine.register(self.layout, (self.regions,), self.arena)
        assert runtime or self.copier.wait_pinned(PATIENCE)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.engine.close()
        self.arena.close()

    @property
    def stream(self):
        return self.engine.stream

    @property
    def block_bytes(self):
        return sum(self.sizes)

    def content(self, number):
        return payload(make_key(number), 0, self.block_bytes)

    def paint(self, page, number):
        """Page gets the content of a key, at once."""
        data = self.content(number)
        for region, memory in zip(self.regions, self.memory, strict=True):
            memory.put(page * region.stride, data[: region.page_bytes])
            data = data[region.page_bytes :]

    def page(self, page):
        pairs = zip(self.regions, self.memory, strict=True)
        return b"".join(m.get(page * r.stride, r.page_bytes) for r, m in pairs)

    def slot(self, slot):
        return self.arena.view(0, slot).tobytes()

    def set_slot(self, slot, number):
        self.arena.view(0, slot)[:] = np.frombuffer(self.content(number), np.uint8)

    def overwrite(self, page, value=0xEE):
        """Put a fill of the page into the engine's stream."""
        for region in self.regions:
            self.module.fill(region.base + page * region.stride, value, region.page_bytes, self.stream)

    def copies(self, pages, slots):
        return make_copies(0, [make_key(p) for p in pages], page=list(pages), host=list(slots))

    def finish(self, handle):
        assert self.engine.wait(handle, PATIENCE)
        status = self.engine.query(handle)
        assert status is not None
        return status

    def run(self, copies, direction, after=None):
        return self.finish(self.engine.submit(copies, direction, after))

    def store(self, pages, slots):
        return self.run(self.copies(pages, slots), Direction.TO_HOST)

    def load(self, pages, slots):
        return self.run(self.copies(pages, slots), Direction.TO_DEVICE)


def shuffled(count, seed=0):
    return random.Random(seed).sample(range(count), count)


def all_ok(status):
    return bool((status == Status.OK).all())


class MirroredEngine(CopyEngine):
    """Device pages behind an engine whose tests keep their pages in host memory: the pool lies on the device.

    A store first takes the pages that the test has painted to the device, as the forward pass would have written them
    there; a load's pages come back to the test's memory before its outcome is reported.
    """

    def __init__(self, module, mode="auto", options=DEFAULT):
        self._module = module
        self._inner = EventedEngine(GpuCopyEngine(module, 0, mode, options), module)
        self._mirrors, self._loads = [], {}

    def register(self, layout, pools, arena):
        mirrored = []
        for pool in pools:
            made = [
                Region(
                    self._module.memory_allocate(max(r.stride * r.pages, 1)), r.stride, r.page_bytes, r.pages
                )
                for r in pool
            ]
            mirrored.append(tuple(made))
        self._mirrors = list(zip(pools, mirrored, strict=True))
        self._inner.register(layout, tuple(mirrored), arena)

    def _move(self, copies, to_device):
        stream = self._inner.stream
        for copy in copies[copies["page"] >= 0]:
            for host, device in zip(*self._mirrors[copy["group"]], strict=True):
                here, there = (r.base + int(copy["page"]) * r.stride for r in (host, device))
                pair = (there, here) if to_device else (here, there)
                self._module.copy(*pair, host.page_bytes, to_device, stream)
        self._module.stream_synchronize(stream)

    def submit(self, copies, direction, after):
        if direction is Direction.TO_HOST:
            self._move(copies, True)
        handle = self._inner.submit(copies, direction, None)
        if direction is Direction.TO_DEVICE:
            self._loads[handle] = copies
        return handle

    def query(self, handle):
        status = self._inner.query(handle)
        copies = self._loads.pop(handle, None) if status is not None else None
        if copies is not None:
            self._move(copies[status == Status.OK], False)
        return status

    def wait(self, handle, timeout):
        return self._inner.wait(handle, timeout)

    def close(self):
        self._inner.close()
        for _, mirrored in self._mirrors:
            for region in mirrored:
                self._module.memory_free(region.base)
        self._mirrors = []
