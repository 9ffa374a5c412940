"""Waits for single layers of a load, through the mover: on a device for a stream, elsewhere for the caller."""

from __future__ import annotations

import pytest
from gpu_world import PATIENCE, SMALL, SparseMemory

from kvoffload import native
from kvoffload.arena import HostArena
from kvoffload.copying.cpu import CpuCopyEngine
from kvoffload.copying.gpu import GpuCopyEngine, StreamPoint
from kvoffload.layout import Region
from kvoffload.messages import CopyFlag, Job, JobKind, Plans, Status
from kvoffload.mover import Mover
from kvoffload.sizing import Slabs
from kvoffload.testing.blocks import make_copies, make_key, make_layout, payload
from kvoffload.testing.faults import FaultyEngine, FaultyTier, Gated, Op
from kvoffload.tiers.memory import MemoryTier

PART, LAYERS, PAGES, SLAB = 4096, 4, 16, 1 << 20
BLOCK = PART * LAYERS
SLOW_US = 10_000
MODES = ("staged", "dma", "kernel")


@pytest.fixture(autouse=True)
def sim():
    """The simulated runtime without plants of earlier tests."""
    module = native.simulation()
    module.clear_plants()
    yield module
    module.clear_plants()


def content(page):
    return payload(make_key(page), 0, BLOCK)


def job(pages, flags=0):
    copies = make_copies(0, [make_key(p) for p in pages], page=pages, host=pages, disk=pages)
    copies["flags"] = flags
    return Job(7, JobKind.LOAD, copies)


class World:
    """A mover with a region per layer. repeated: places of the pool that name an earlier region again."""

    def __init__(self, copier, tier=None, *, repeated=()):
        self.layout = make_layout(BLOCK)
        self.memory = SparseMemory(BLOCK * PAGES)
        places = list(range(LAYERS))
        for at, same in repeated:
            places.insert(at, same)
        regions = [Region(self.memory.base + n * PART * PAGES, PART, PART, PAGES) for n in range(LAYERS)]
        tier = tier or MemoryTier(self.layout, SLAB, 1)
        self.mover = Mover(0, self.layout, Slabs(SLAB, 1, 1, 1), copier, tier)
        self.mover.register((tuple(regions[n] for n in places),))
        for page in range(PAGES):
            self.mover.arena.view(0, page)[:] = list(content(page))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.mover.close()

    def part(self, layer, page):
        return self.memory.get((layer * PAGES + page) * PART, PART)

    def right(self, pages):
        return all(self.part(n, p) == content(p)[n * PART :][:PART] for p in pages for n in range(LAYERS))


class DeviceWorld(World):
    """The same over the simulated device, with the stream of a forward that reads layers into host memory."""

    def __init__(self, sim, mode="kernel", **options):
        self.sim = sim
        copier = GpuCopyEngine(sim, 0, mode, SMALL)
        super().__init__(copier, **options)
        assert copier.wait_pinned(PATIENCE)
        self.forward, self.event = sim.stream_create(), sim.event_create()
        self.scratch = HostArena(SLAB, 1, self.layout)
        assert sim.host_register(self.scratch.base, SLAB, 0) == ""

    def __exit__(self, *_):
        super().__exit__()
        self.sim.host_unregister(self.scratch.base)
        self.scratch.close()

    def point(self):
        self.sim.event_record(self.event, self.forward)
        return StreamPoint(self.event, self.forward)

    def read(self, layer, page):
        """What the forward's next work finds there."""
        there = self.scratch.base + page * BLOCK
        here = self.memory.base + (layer * PAGES + page) * PART
        self.sim.copy(there, here, PART, False, self.forward)

    def kernels_waited_for(self):
        """Behind how many kernels of the load the forward's last wait was put."""
        done, behind, kernels = 0, {}, 0
        for kind, stream, event, *_ in self.sim.operations():
            kernels += kind == "kernel"
            if kind == "record":
                behind[event] = kernels
            elif kind == "wait" and stream == self.sim.number(self.forward):
                done = behind[event]
        return done

    def found(self, page):
        self.sim.stream_synchronize(self.forward)
        return self.scratch.view(0, page)[:PART].tobytes()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layered", [(7,), ()])
def test_work_behind_a_wait_finds_the_layer(sim, mode, layered):
    """With slow copies: for each layer in turn, what the forward's stream reads behind its wait is the layer's bytes;
    a load that goes layer by layer is not waited for any further."""
    with DeviceWorld(sim, mode) as world:
        sim.plant("kernel_delay_us", SLOW_US)
        sim.plant("copy_delay_us", SLOW_US // 10)
        sim.forget_operations()
        world.mover.submit(Plans((job([3, 5, 1]),)), world.point(), layered)
        for layer in range(LAYERS):
            assert world.mover.wait_layer(7, layer, world.forward)
            world.read(layer, 5)
            assert world.found(5) == content(5)[layer * PART :][:PART]
            assert world.kernels_waited_for() == layer + 1 or not layered
        assert world.mover.wait([7], PATIENCE)
        assert [o.status for o in world.mover.poll()] == [None]
        assert world.mover.wait_layer(7, 0, world.forward)
        assert world.right([1, 3, 5])


def test_places_count_regions_that_layers_share(sim):
    """Of six layers two share the region of the one before: a wait for each place is one for its region, and for no
    later one."""
    with DeviceWorld(sim, repeated=[(1, 0), (3, 1)]) as world:
        regions = [0, 0, 1, 1, 2, 3]
        sim.plant("kernel_delay_us", SLOW_US)
        sim.forget_operations()
        world.mover.submit(Plans((job([4]),)), world.point(), [7])
        for place, region in enumerate(regions):
            assert world.mover.wait_layer(7, place, world.forward)
            world.read(region, 4)
            assert world.found(4) == content(4)[region * PART :][:PART]
            assert world.kernels_waited_for() == region + 1
        assert world.mover.wait([7], PATIENCE)
        assert [o.status for o in world.mover.poll()] == [None]


def test_where_the_device_refuses_a_wait_the_caller_waits(sim):
    """The wait cannot be put into the stream: the whole load is there when the call returns."""
    with DeviceWorld(sim) as world:
        sim.plant("kernel_delay_us", SLOW_US)
        world.mover.submit(Plans((job([2]),)), world.point(), [7])
        sim.plant("wait_at", 1)
        assert world.mover.wait_layer(7, 0, world.forward)
        assert world.right([2])


def test_without_streams_the_caller_waits_for_the_load(sim):
    """On a CPU: False while the copy is held, then True with all bytes there; so too for a load that reads."""
    gate = Gated([Op.TO_DEVICE, Op.READ])
    for flags in (0, CopyFlag.READ):
        layout = make_layout(BLOCK)
        tier = FaultyTier(MemoryTier(layout, SLAB, 1), gate)
        with World(FaultyEngine(CpuCopyEngine(), gate), tier) as world:
            gate.hold()
            copies = job([1, 6]).copies
            world.mover.submit(Plans((Job(6, JobKind.WRITE, copies),)))
            assert world.mover.wait([6], PATIENCE)
            world.mover.submit(Plans((job([1, 6], flags),)), None, [7])
            assert not world.mover.wait_layer(7, 0, timeout=0.02)
            gate.release()
            assert world.mover.wait_layer(7, 0, timeout=PATIENCE)
            assert world.right([1, 6])
            (outcome,) = [o for o in world.mover.poll() if o.job == 7]
            assert outcome.status is None or not outcome.status.any()
            assert world.mover.wait_layer(7, 0)


def test_a_failed_load_ends_the_wait_and_is_told_by_its_outcome(sim):
    """A launch fails in the middle of a load by layers: no wait hangs, and every copy counts as failed."""
    with DeviceWorld(sim) as world:
        sim.plant("launch_at", 3)
        world.mover.submit(Plans((job([2, 9]),)), world.point(), [7])
        for layer in range(LAYERS):
            assert world.mover.wait_layer(7, layer, world.forward)
        sim.stream_synchronize(world.forward)
        assert world.mover.wait([7], PATIENCE)
        (outcome,) = world.mover.poll()
        assert outcome.status.tolist() == [Status.COPY_FAILED] * 2


def test_a_load_by_layers_reads_no_later_than_its_point(sim):
    """The forward's stream still reads the pages when the load is asked for: it finds what was there before."""
    with DeviceWorld(sim) as world:
        world.memory.put(8 * PART, b"\x55" * PART)
        sim.plant("copy_delay_us", SLOW_US)
        world.read(0, 8)
        world.mover.submit(Plans((job([8]),)), world.point(), [7])
        assert world.mover.wait([7], PATIENCE)
        assert world.found(8) == b"\x55" * PART
        assert world.right([8])
