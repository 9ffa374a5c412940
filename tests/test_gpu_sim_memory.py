"""Page-locked memory, device discovery and the choice of modes: rows MEM and COPY-11 of the case list."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from gpu_world import PATIENCE, SMALL, DeviceWorld, all_ok

import kvoffload
from kvoffload import native
from kvoffload.arena import HostArena
from kvoffload.copying import modes
from kvoffload.copying.base import Direction
from kvoffload.copying.gpu import DeviceOptions, GpuCopyEngine
from kvoffload.copying.modes import CopyMode, Modes, calibrated, prefer
from kvoffload.copying.pinned import PinnedArena, device_node, node_cpus
from kvoffload.errors import ConfigError
from kvoffload.layout import CacheGroup, GroupKind, Layout, Region
from kvoffload.testing.blocks import make_layout

MIB = 1 << 20
SLOW_US = 20_000


@pytest.fixture(autouse=True)
def sim():
    """The simulated runtime without plants and records of earlier tests."""
    module = native.simulation()
    module.clear_plants()
    module.forget_operations()
    yield module
    module.clear_plants()


class User:
    """What is told of locked memory, in order; `cpus` are those of the thread that tells."""

    def __init__(self):
        self.told, self.cpus = [], []

    def add_pinned(self, base, nbytes):
        self.told.append((base, nbytes))
        self.cpus.append(os.sched_getaffinity(0))

    def withdraw_pinned(self):
        self.told.append("withdraw")

    def forget_pinned(self):
        self.told.append("forget")


def lock(sim, arena, chunk=4 * MIB, root=Path("/")):
    """Lock an arena; (the object, what was told of it)."""
    user = User()
    locked = PinnedArena(sim, 0, arena, user, chunk_bytes=chunk, root=root)
    assert locked.wait(PATIENCE)
    return locked, user.told


def test_MEM_01_chunks_end_on_slab_borders(sim):
    """MEM-01: a driver that refuses large calls takes the arena in chunks of whole slabs, all of it, none over."""
    sim.plant("register_call", 8 * MIB)
    arena = HostArena(3 * MIB, 5, make_layout(4096))
    locked, ranges = lock(sim, arena, chunk=8 * MIB)
    assert ranges == [(arena.base + n * MIB, size * MIB) for n, size in ((0, 6), (6, 6), (12, 3))]
    assert locked.pinned_bytes == arena.nbytes
    assert locked.message == ""
    locked.close()
    locked.close()
    assert [o[0] for o in sim.operations()] == ["register"] * 3 + ["unregister"] * 3
    arena.close()


def test_MEM_01_a_failed_pin_undoes_those_before(sim):
    """MEM-01: when a later chunk is refused those before it are unlocked, between the user's two calls, and no error
    is left pending: the same memory can be locked by somebody else."""
    sim.plant("register_total", 8 * MIB)
    arena = HostArena(4 * MIB, 5, make_layout(4096))
    locked, told = lock(sim, arena)
    assert told == [(arena.base, 4 * MIB), (arena.base + 4 * MIB, 4 * MIB), "withdraw", "forget"]
    assert [o[0] for o in sim.operations()] == ["register"] * 3 + ["unregister"] * 2
    assert locked.pinned_bytes == 0
    sim.clear_plants()
    assert sim.host_register(arena.base, arena.nbytes, 0) == ""
    sim.host_unregister(arena.base)
    locked.close()
    assert [o[0] for o in sim.operations()].count("unregister") == 3
    arena.close()


class LatePins:
    """The simulation with pins from the second on that wait for a gate; `second` is set when there is one."""

    def __init__(self, sim):
        self.sim, self.gate, self.second, self.pins = sim, threading.Event(), threading.Event(), 0

    def __getattr__(self, name):
        return getattr(self.sim, name)

    def host_register(self, *arguments):
        self.pins += 1
        if self.pins > 1:
            self.second.set()
            assert self.gate.wait(PATIENCE)
        return self.sim.host_register(*arguments)


@pytest.mark.parametrize("mode", ["staged", "dma", "kernel"])
@pytest.mark.parametrize("direction", Direction)
def test_MEM_01_copies_run_on_while_pins_are_undone(sim, mode, direction):
    """MEM-01: memory is unlocked under no copy (the runtime refuses it), the engine's thread waits for nothing, and
    copies before, during and after are exact."""
    sim.plant("register_total", 4 * MIB)
    late = LatePins(sim)
    with DeviceWorld(
        mode=mode, options=DeviceOptions(pin_chunk=1, store_staging=16 * MIB), runtime=late
    ) as world:
        for block in range(48):
            world.paint(block, block)
            world.set_slot(block, 100 + block)
        assert late.second.wait(PATIENCE)
        assert world.copier.stats()["pinned_bytes"] == 4 * MIB
        sim.plant("copy_delay_us", SLOW_US)
        sim.plant("kernel_delay_us", SLOW_US)
        before = world.engine.submit(world.copies(range(16), range(16)), direction, None)
        late.gate.set()
        sim.forget_operations()
        during = world.engine.submit(world.copies(range(16, 32), range(16, 32)), direction, None)
        assert all_ok(world.finish(before))
        assert all_ok(world.finish(during))
        assert world.copier.wait_pinned(PATIENCE)
        mine = [o for o in sim.operations() if o[5] == threading.get_native_id()]
        assert not [o for o in mine if o[6] or o[0] == "synchronize"]
        sim.clear_plants()
        assert all_ok(world.run(world.copies(range(32, 48), range(32, 48)), direction))
        assert world.copier.stats()["pinned_bytes"] == 0
        assert "page-locking" in world.copier.message
        place, number = (world.slot, 0) if direction is Direction.TO_HOST else (world.page, 100)
        assert [place(b) for b in range(48)] == [world.content(b + number) for b in range(48)]
        assert sim.host_register(world.arena.base, world.arena.nbytes, 0) == ""
        sim.host_unregister(world.arena.base)


@pytest.mark.parametrize("mode", ["staged", "dma", "kernel"])
@pytest.mark.parametrize("direction", Direction)
def test_MEM_01_nothing_uses_withdrawn_memory(sim, mode, direction):
    """MEM-01: between withdrawing and forgetting locked memory no call touches it, submits are taken all the same, and
    their copies are done afterwards."""
    with DeviceWorld(mode=mode) as world:
        for block in range(8):
            world.paint(block, block)
            world.set_slot(block, 100 + block)
        copier = world.copier._native()
        copier.withdraw_pinned()
        sim.forget_operations()
        handle = world.engine.submit(world.copies(range(8), range(8)), direction, None)
        gathers = [o for o in sim.operations() if o[0] == "kernel"]
        assert {o[1] for o in gathers} <= {sim.number(world.stream)}
        assert not [o for o in sim.operations() if o[0] in ("copy_in", "copy_out", "batch")]
        assert not world.engine.wait(handle, 0.02)
        copier.forget_pinned()
        assert all_ok(world.finish(handle))
        place, number = (world.slot, 0) if direction is Direction.TO_HOST else (world.page, 100)
        assert [place(b) for b in range(8)] == [world.content(b + number) for b in range(8)]


def test_MEM_01_closing_between_withdrawing_and_forgetting():
    """MEM-01: an engine whose issuing threads are held back closes."""
    with DeviceWorld() as world:
        copier = world.copier._native()
        copier.withdraw_pinned()
        closing = threading.Thread(target=copier.close)
        closing.start()
        closing.join(PATIENCE / 6)
        ended = not closing.is_alive()
        copier.forget_pinned()
        closing.join()
        assert ended


def test_MEM_01_closing_while_pins_are_undone(sim):
    """MEM-01: an engine that is closed in the middle of unlocking ends, and nothing stays locked."""
    sim.plant("register_total", 4 * MIB)
    late = LatePins(sim)
    world = DeviceWorld(options=DeviceOptions(pin_chunk=1, store_staging=16 * MIB), runtime=late)
    sim.plant("copy_delay_us", SLOW_US)
    handle = world.engine.submit(world.copies(range(16), range(16)), Direction.TO_HOST, None)
    late.gate.set()
    world.engine.close()
    assert world.engine.query(handle) is not None
    sim.clear_plants()
    assert sim.host_register(world.arena.base, world.arena.nbytes, 0) == ""
    sim.host_unregister(world.arena.base)
    world.arena.close()


def test_MEM_09_a_refused_pin_is_explained_once(sim, caplog):
    """MEM-09: a refused pin says bytes asked, bytes locked, memory there is and the knob, and is final."""
    sim.plant("register_total", 8 * MIB)
    arena = HostArena(4 * MIB, 5, make_layout(4096))
    locked, ranges = lock(sim, arena)
    assert len(ranges) == 4
    assert len([o for o in sim.operations() if o[0] == "register"]) == 3
    for part in (
        f"{4 * MIB} bytes",
        f"{8 * MIB} of {20 * MIB} bytes",
        "available",
        "ulimit -l",
        "host_bytes",
    ):
        assert part in locked.message
    assert [r.message for r in caplog.records] == [locked.message]
    locked.close()
    arena.close()


def test_MEM_09_copies_go_on_and_later_pins_work(sim):
    """MEM-09: with an arena that is not locked all copies are exact; the refusal leaves nothing behind for others."""
    sim.plant("register_total", 4 * MIB)
    with DeviceWorld(
        page_bytes=(1 * MIB,), pages=8, options=DeviceOptions(pin_chunk=1, store_staging=16 * MIB)
    ) as world:
        assert world.copier.stats()["pinned_bytes"] == 0
        for page in range(8):
            world.paint(page, page)
        slots = [n // 4 << 16 | n % 4 for n in range(8)]
        assert all_ok(world.store(range(8), slots))
        assert [world.slot(s) for s in slots] == [world.content(p) for p in range(8)]
        assert all_ok(world.load(range(7, -1, -1), slots))
        assert [world.page(p) for p in range(8)] == [world.content(7 - p) for p in range(8)]
        assert "page-locking" in world.copier.message
    sim.clear_plants()
    with DeviceWorld() as world:
        assert world.copier.stats()["pinned_bytes"] == world.arena.nbytes


def test_copies_do_not_wait_for_pins(sim):
    """The engine copies from the first moment, while its memory is still being locked."""
    layout = make_layout(4096)
    arena = HostArena(4 * MIB, 2, layout)
    pages = HostArena(4 * MIB, 1, layout)
    gate = threading.Event()

    class Held:
        """The simulation, with pins that wait for the gate."""

        def __getattr__(self, name):
            return self.host_register_held if name == "host_register" else getattr(sim, name)

        def host_register_held(self, *arguments):
            gate.wait(PATIENCE)
            return sim.host_register(*arguments)

    engine = GpuCopyEngine(Held(), 0, "staged", SMALL)
    engine.register(layout, ((Region(pages.base, 4096, 4096, 64),),), arena)
    with DeviceWorld() as world:
        pages.view(0, 3)[:] = 7
        handle = engine.submit(world.copies([3], [2]), 0, world.engine.point())
        assert engine.wait(handle, PATIENCE)
        assert all_ok(engine.query(handle))
        assert (arena.view(0, 2) == 7).all()
        assert not engine.wait_pinned(0.0)
    gate.set()
    assert engine.wait_pinned(PATIENCE)
    engine.close()
    arena.close()
    pages.close()


def fake_machine(root, node, cpus):
    """A /sys in which the simulated device belongs to a node with these CPUs."""
    device = root / "sys/bus/pci/devices/0000:00:1f.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text(f"{node}\n")
    if cpus:
        folder = root / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")


def test_MEM_10_pages_are_locked_near_the_device(sim, tmp_path):
    """MEM-10: the thread that touches host memory first runs on the CPUs of the device's node, and no other does."""
    allowed = os.sched_getaffinity(0)
    mine = max(allowed)
    fake_machine(tmp_path, 1, f"{mine},{mine + 100}-{mine + 101}")
    assert device_node("0000:00:1F.0", tmp_path) == 1
    assert node_cpus(1, tmp_path) == {mine, mine + 100, mine + 101}
    arena = HostArena(4 * MIB, 1, make_layout(4096))
    user = User()
    locked = PinnedArena(sim, 0, arena, user, root=tmp_path)
    assert locked.wait(PATIENCE)
    locked.close()
    arena.close()
    assert user.cpus == [{mine}]
    assert os.sched_getaffinity(0) == allowed


@pytest.mark.parametrize("node", [-1, 3])
def test_MEM_10_no_topology_works(sim, tmp_path, caplog, node):
    """MEM-10: where the node or its CPUs are not known all memory is locked just the same; a known node warns."""
    fake_machine(tmp_path, node, "")
    arena = HostArena(4 * MIB, 1, make_layout(4096))
    locked, ranges = lock(sim, arena, root=tmp_path)
    assert len(ranges) == 1
    assert len(caplog.records) == (node >= 0)
    locked.close()
    arena.close()


def test_MEM_11_groups_without_bytes(sim):
    """MEM-11: a group with no bytes on this rank registers nothing and stops nothing."""
    layout = Layout(16, (CacheGroup(0, GroupKind.FULL, 16, 0), CacheGroup(1, GroupKind.FULL, 16, 4096)))
    with DeviceWorld(page_bytes=(4096,)) as world:
        arena = HostArena(4 * MIB, 1, layout)
        world.engine.register(layout, ((), world.regions), arena)
        world.paint(1, 1)
        copies = world.copies([1], [0])
        copies["group"] = 1
        assert all_ok(world.run(copies, 0))
        assert arena.view(1, 0).tobytes() == world.content(1)
        assert all(o[3] > 0 for o in sim.operations() if o[0] == "register")
        world.engine.close()
        arena.close()


KILLED = """
    import os, signal
    from kvoffload import native
    from kvoffload.arena import HostArena
    from kvoffload.copying.pinned import PinnedArena
    from kvoffload.testing.blocks import make_layout
    arena = HostArena(4 << 20, 4, make_layout(4096))
    class User:
        def add_pinned(self, base, nbytes):
            print("locked", flush=True)
    PinnedArena(native.simulation(), 0, arena, User()).wait(60)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_MEM_03_a_killed_process_leaves_nothing():
    """MEM-03: host memory is anonymous: after SIGKILL no file of it is left for the next start to trip over."""
    folders = [Path("/dev/shm"), Path("/tmp")]
    before = {p for f in folders if f.is_dir() for p in f.iterdir() if "kvoffload" in p.name}
    root = str(Path(kvoffload.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == "locked\n", done.stderr
    after = {p for f in folders if f.is_dir() for p in f.iterdir() if "kvoffload" in p.name}
    assert after <= before


@pytest.mark.parametrize("error", [35, 100, 999])
def test_any_failure_to_count_devices_is_no_device(sim, error):
    """Whatever counting devices answers but success is 0 devices with the reason, and nothing is left pending."""
    sim.plant("device_error", error)
    found = native.load("_sim")
    assert found.devices == 0
    assert found.reason
    sim.clear_plants()
    assert native.load("_sim").devices == 1


def test_COPY_11_modules_import_without_a_driver():
    """COPY-11: a device module that was built imports without a driver and counts its devices, or says why not."""
    found = {f.name: f for f in native.device_modules()}
    assert set(found) == {"_cuda", "_hip"}
    for one in found.values():
        assert (one.devices > 0) != bool(one.reason)
    assert native.load("_nothing").reason


def test_no_device_is_a_configuration_error(monkeypatch):
    """Without any device the engine says why for each runtime, and what to use."""
    reasons = (native.Found("_cuda", None, 0, "not built"), native.Found("_hip", None, 0, "no driver"))
    monkeypatch.setattr(native, "device_modules", lambda: reasons)
    with pytest.raises(ConfigError, match=r"_cuda: not built; _hip: no driver.*CPU copy engine"):
        GpuCopyEngine(mode="staged")


def test_modes_by_page_size():
    """A pool is served by the mode measured for pages like its own; one smaller than all measured is staged."""
    measured = Modes(loads={4096: CopyMode.KERNEL, 65536: CopyMode.STAGED, 1 << 20: CopyMode.DMA})

    def pool(*sizes):
        return tuple(Region(4096, n, n, 1) for n in sizes)

    assert measured.choose(pool(512)) == (CopyMode.STAGED, CopyMode.STAGED)
    assert measured.choose(pool(8192)) == (CopyMode.STAGED, CopyMode.KERNEL)
    assert measured.choose(pool(65536, 65536, 32)) == (CopyMode.STAGED, CopyMode.KERNEL)
    assert measured.choose(pool(65536, 65536)) == (CopyMode.STAGED, CopyMode.STAGED)
    assert measured.choose(pool(4 << 20)) == (CopyMode.STAGED, CopyMode.DMA)
    assert measured.choose(()) == (CopyMode.STAGED, CopyMode.STAGED)
    assert Modes.fixed(CopyMode.DMA).choose(pool(16)) == (CopyMode.DMA, CopyMode.DMA)


def test_the_simpler_mode_wins_a_draw():
    """DMA is taken when about as fast as the best, a kernel only when clearly faster; half a measurement is none."""
    dma, staged, kernel = CopyMode.DMA, CopyMode.STAGED, CopyMode.KERNEL
    assert prefer({dma: 98, staged: 100, kernel: 100}) is dma
    assert prefer({dma: 50, staged: 98, kernel: 100}) is staged
    assert prefer({dma: 50, staged: 60, kernel: 100}) is kernel
    assert prefer({dma: 50}) is staged
    assert prefer({dma: 0, staged: 0, kernel: 0}) is staged


def test_calibration_is_kept(sim, tmp_path, monkeypatch):
    """What was measured for a device and driver is read the next time; a damaged file is measured anew."""
    monkeypatch.setattr(modes, "MEASURED_BYTES", 1 << 20)
    first = calibrated(sim, 0, tmp_path)
    (path,) = tmp_path.iterdir()
    assert set(first.loads) == set(modes.FRAGMENTS)
    path.write_text(json.dumps({"4096": "KERNEL"}))
    assert calibrated(sim, 0, tmp_path).loads == {4096: CopyMode.KERNEL}
    path.write_text("{")
    assert set(calibrated(sim, 0, tmp_path).loads) == set(modes.FRAGMENTS)
    assert json.loads(path.read_text())


def test_calibration_ends_in_time(sim, tmp_path, monkeypatch):
    """Once the budget is spent nothing more is measured, and what was not measured is staged."""
    monkeypatch.setattr(modes, "BUDGET_SECONDS", 0.0)
    assert set(modes.measure(sim, 0).values()) == {CopyMode.STAGED}


def test_calibration_without_memory(sim, tmp_path, monkeypatch, caplog):
    """Where measuring fails everything is staged, one warning says why, and nothing is kept."""
    monkeypatch.setattr(modes, "MEASURED_BYTES", 1 << 50)
    assert calibrated(sim, 0, tmp_path) == Modes()
    assert len(caplog.records) == 1
    assert list(tmp_path.iterdir()) == []
