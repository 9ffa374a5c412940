"""Planner and movers in one process over devices with streams: every copy behind the point of its own device."""

from __future__ import annotations

import numpy as np
import pytest
from gpu_world import PATIENCE, SMALL, SparseMemory

from kvoffload import native
from kvoffload.copying.gpu import GpuCopyEngine, StreamPoint
from kvoffload.testing.paint import oracle
from kvoffload.testing.rig import Keys, Rig, Sizes

MODES = ("staged", "dma", "kernel")
SLOW_US = 3000
SOURCE = 16 << 20
RANKS = 2


@pytest.fixture(autouse=True)
def sim():
    """The simulated runtime without plants of earlier tests."""
    module = native.simulation()
    module.clear_plants()
    yield module
    module.clear_plants()


class Devices:
    """A stream per rank that fills and reads pages, slowly; each rank's point lies behind what its stream was given."""

    def __init__(self, sim, mode):
        self.sim, self.mode = sim, mode
        self.streams = [sim.stream_create() for _ in range(RANKS)]
        self.events = [sim.event_create() for _ in range(RANKS)]
        self.made = []
        self.asked = []
        self._source = SparseMemory(SOURCE)
        assert sim.host_register(self._source.base, SOURCE, 0) == ""  # else each copy would be waited for
        self._used = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.synchronize()
        self.sim.host_unregister(self._source.base)

    def copier(self):
        self.made.append(GpuCopyEngine(self.sim, 0, self.mode, SMALL))
        return self.made[-1]

    def point(self, place):
        self.asked.append(place)
        self.sim.event_record(self.events[place], self.streams[place])
        return StreamPoint(self.events[place], self.streams[place])

    def put(self, rank, address, data):
        """The next work of the rank's stream writes this."""
        self._source.put(self._used, data.tobytes())
        self.sim.copy(address, self._source.base + self._used, len(data), True, self.streams[rank])
        self._used += len(data)

    def fill(self, rig, chain, first, value=None):
        """Forward passes of all ranks write the pages of a chain, or one value into them."""
        for rank, memory in enumerate(rig.memory):
            for layer, region in enumerate(memory.pools[0]):
                rows = oracle(chain.keys, 0, layer, rank, region.page_bytes)
                for block in range(chain.blocks):
                    data = rows[block] if value is None else np.full(region.page_bytes, value, np.uint8)
                    self.put(rank, region.base + (first + block) * region.stride, data)

    def synchronize(self):
        for stream in self.streams:
            self.sim.stream_synchronize(stream)


def rig_over(devices, disk=0, path=None):
    sizes = Sizes(host=4, disk=disk)
    return Rig(sizes, path=path, ranks=RANKS, copier=devices.copier, point=devices.point)


@pytest.mark.parametrize("mode", MODES)
def test_copies_of_each_rank_come_behind_its_own_stream(sim, mode):
    """Pages that slow forwards still write are stored as written, though the streams go on to overwrite them; loads
    come behind the last writer of their pages. Bytes are right on both ranks."""
    with Devices(sim, mode) as devices, rig_over(devices) as rig:
        assert all(copier.wait_pinned(PATIENCE) for copier in devices.made)
        sim.plant("copy_delay_us", SLOW_US)
        chain = Keys.of(range(6))
        info, pages = rig.info(), rig.pages(chain)
        devices.fill(rig, chain, 0)
        rig.planner.offer(info, chain, 96, pages)
        rig.local.step()
        devices.fill(rig, chain, 0, 0xEE)
        rig.local.drain()
        again, target = rig.info(), rig.pages(chain, 20)
        devices.fill(rig, chain, 20, 0x55)
        found = rig.planner.match(again, chain)
        assert found.boundary == 96
        rig.planner.load(again, chain, 96, target)
        (ended,) = rig.local.drain()
        assert ended.boundary == 96
        assert rig.mismatches(chain, target, 0, 6) == 0
        devices.synchronize()
        assert rig.mismatches(chain, target, 0, 6) == 0
        assert rig.mismatches(chain, pages, 0, 6) == 6 * RANKS
        rig.local.step()
    assert sorted(devices.asked) == [0, 0, 1, 1]


@pytest.mark.parametrize("mode", MODES)
def test_loads_from_disk_come_behind_the_last_writer(sim, mode, tmp_path):
    """The same for a load that a thread of the mover carries out: it reads from disk first."""
    with Devices(sim, mode) as devices, rig_over(devices, disk=8, path=tmp_path) as rig:
        assert all(copier.wait_pinned(PATIENCE) for copier in devices.made)
        chain = Keys.of(range(6))
        rig.store(chain)
        rig.planner.reset(["host"])
        sim.plant("copy_delay_us", SLOW_US)
        info, target = rig.info(), rig.pages(chain, 30)
        devices.fill(rig, chain, 30, 0x55)
        assert rig.planner.match(info, chain).disk == 6
        rig.planner.load(info, chain, 96, target)
        rig.local.drain()
        devices.synchronize()
        assert rig.mismatches(chain, target, 0, 6) == 0


def test_without_a_point_a_device_gets_no_copy(sim):
    """A Local that was given no point says what is missing, and nothing is put into a stream."""
    with Devices(sim, "staged") as devices, Rig(Sizes(host=4), copier=devices.copier) as rig:
        chain = Keys.of(range(2))
        rig.planner.offer(rig.info(), chain, 32, rig.pages(chain))
        sim.forget_operations()
        with pytest.raises(ValueError, match="no point behind which"):
            rig.local.step()
        assert [o for o in sim.operations() if o[0] in ("kernel", "copy_out", "batch", "wait")] == []
