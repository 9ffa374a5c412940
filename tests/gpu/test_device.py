"""The device copier on a real device: the copy suite in every mode, order, and the whole path from HBM to disk."""

from __future__ import annotations

import numpy as np
import pytest
from gpu_world import SMALL, DeviceWorld, EventedEngine, MirroredEngine, RealMemory, all_ok, shuffled

from kvoffload import native
from kvoffload.copying.base import Direction
from kvoffload.copying.gpu import GpuCopyEngine, StreamPoint
from kvoffload.copying.modes import calibrated
from kvoffload.testing import rig as rig_module
from kvoffload.testing.copy_suite import CopySuite
from kvoffload.testing.rig import Keys, Sizes

MODULE = native.device_module().module
MODES = ("staged", "dma", "kernel")


class TestStaged(CopySuite):
    mode = "staged"

    def make_engine(self):
        return EventedEngine(GpuCopyEngine(MODULE, 0, self.mode, SMALL), MODULE)

    def make_memory(self, nbytes):
        return RealMemory(MODULE, nbytes)


class TestDma(TestStaged):
    mode = "dma"


class TestKernel(TestStaged):
    mode = "kernel"


@pytest.mark.parametrize("mode", MODES)
def test_small_round_trip(device, mode):
    """A few blocks go out and come back exactly; small enough to run under a memory checker."""
    with DeviceWorld((4096, 656, 7), mode=mode, module=device, pages=16) as world:
        for page in range(8):
            world.paint(page, page)
        assert all_ok(world.store(range(8), range(8)))
        assert [world.slot(s) for s in range(8)] == [world.content(p) for p in range(8)]
        assert all_ok(world.load(range(8, 16), range(8)))
        assert [world.page(p) for p in range(8, 16)] == [world.content(p) for p in range(8)]


@pytest.mark.parametrize("mode", MODES)
def test_ORDER_01_on_the_device(device, mode):
    """ORDER-01: 200 times, pages painted by unsynchronised work of another stream are stored as painted, and what is
    written into them right behind the store never is."""
    with DeviceWorld((32 << 10,) * 4, mode=mode, module=device, pages=16) as world:
        stream, event = device.stream_create(), device.event_create()
        scratch = device.memory_allocate(1 << 30)
        for turn in range(200):
            device.fill(scratch, turn, 1 << 30, stream)
            for page in range(16):
                for region in world.regions:
                    device.fill(region.base + page * region.stride, turn % 251, region.page_bytes, stream)
            device.event_record(event, stream)
            copies = world.copies(shuffled(16, turn), range(16))
            handle = world.engine.submit(copies, Direction.TO_HOST, StreamPoint(event, world.stream))
            for page in range(16):
                world.overwrite(page, 0xFF)
            assert all_ok(world.finish(handle))
            for slot in range(16):
                assert (world.arena.view(0, slot) == turn % 251).all()
            device.stream_synchronize(world.stream)
        device.memory_free(scratch)


def test_layers_on_the_device(device):
    """A load by layers fills every layer, in order, before later work of the waiting stream."""
    with DeviceWorld((16 << 10,) * 8, mode="kernel", module=device) as world:
        for slot in range(16):
            world.set_slot(slot, slot)
        copies = world.copies(shuffled(16), range(16))
        handle = world.copier.submit_layers(copies, world.engine.point(), [n // 2 for n in range(8)])
        for layer in range(4):
            world.copier.wait_layer(handle, layer, world.stream)
        device.stream_synchronize(world.stream)
        assert [world.page(p) for p in shuffled(16)] == [world.content(s) for s in range(16)]
        assert all_ok(world.finish(handle))


@pytest.mark.parametrize("mode", ["auto", *MODES])
def test_from_hbm_to_disk_and_back(tmp_path, monkeypatch, mode):
    """Planner, mover, host and disk with the pool on the device: what is evicted comes back byte by byte."""
    monkeypatch.setattr(rig_module, "CpuCopyEngine", lambda: MirroredEngine(MODULE, mode, SMALL))
    with rig_module.Rig(Sizes(host=2, transit=1, disk=16, pages=64), path=tmp_path) as rig:
        chains = [Keys.of(range(100 * n, 100 * n + 24)) for n in range(4)]
        for chain in chains:
            rig.store(chain)
        loaded = 0
        for chain in chains:
            _, finished, wrong = rig.load(chain)
            assert wrong == 0
            loaded += sum(f.boundary for f in finished)
        assert loaded > 0
        rig.check()


def test_calibration_is_short(tmp_path):
    """The modes of this device are measured, kept, and cover the sizes that engines use."""
    modes = calibrated(MODULE, 0, tmp_path)
    assert len(modes.loads) == 5
    assert calibrated(MODULE, 0, tmp_path).loads == modes.loads


def test_cupy_engine(device):
    """The engine over cupy moves blocks exactly, with the kernel compiled here."""
    copying = pytest.importorskip(
        "kvoffload.copying.cupy", reason="cupy is not installed", exc_type=ImportError
    )
    with DeviceWorld((4096, 656, 33), module=device) as world:
        engine = copying.CupyCopyEngine()
        engine.register(world.layout, (world.regions,), world.arena)
        world.engine.close()
        world.engine = EventedEngine(engine, device)
        for page in range(32):
            world.paint(page, page)
        assert all_ok(world.store(shuffled(32), range(32)))
        assert [world.slot(s) for s in range(32)] == [world.content(p) for p in shuffled(32)]
        for slot in range(32):
            world.set_slot(slot, 100 + slot)
        assert all_ok(world.load(range(63, 31, -1), range(32)))
        assert [world.page(63 - n) for n in range(32)] == [world.content(100 + n) for n in range(32)]
        assert np.array_equal(world.arena.view(0, 3), np.frombuffer(world.content(103), np.uint8))
