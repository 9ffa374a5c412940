"""The worker's part of a connector over a device with streams: points from the engine's adapter down to the copies."""

from __future__ import annotations

import random

import pytest
from gpu_world import PATIENCE, SMALL, SparseMemory

from kvoffload import native
from kvoffload.arena import HostArena
from kvoffload.copying.gpu import GpuCopyEngine, StreamPoint
from kvoffload.layout import Region
from kvoffload.messages import CopyFlag, Job, JobKind, Plans, Status
from kvoffload.mover import Mover
from kvoffload.requests import RequestInfo
from kvoffload.sizing import Slabs
from kvoffload.testing import rig as rig_module
from kvoffload.testing.blocks import make_copies, make_key, make_layout, payload
from kvoffload.testing.engine import Sequence
from kvoffload.testing.engine.drive import engine_over, settle
from kvoffload.testing.engine.sequence import random_keys
from kvoffload.testing.rig import Rig, Sizes
from kvoffload.tiers.memory import MemoryTier
from kvoffload.worker_side import MoverConnector

MODES = ("staged", "dma", "kernel")
BLOCK, PAGES, SLAB = 8192, 64, 1 << 20
SLOW_US = 10_000


@pytest.fixture(autouse=True)
def sim():
    """The simulated runtime without plants and records of earlier tests."""
    module = native.simulation()
    module.clear_plants()
    module.forget_operations()
    yield module
    module.clear_plants()


class Worker:
    """A worker's connector over the simulated device, and the stream of its engine's forward."""

    def __init__(self, module, mode):
        self.module = module
        self.layout = make_layout(BLOCK)
        self.memory = SparseMemory(BLOCK * PAGES)
        copier = GpuCopyEngine(module, 0, mode, SMALL)
        self.mover = Mover(0, self.layout, Slabs(SLAB, 1, 1, 1), copier, MemoryTier(self.layout, SLAB, 1))
        self.connector = MoverConnector(self.mover)
        self.connector.register(((Region(self.memory.base, BLOCK, BLOCK, PAGES),),))
        assert copier.wait_pinned(PATIENCE)
        self.scratch = HostArena(SLAB, 1, self.layout)
        assert module.host_register(self.scratch.base, SLAB, 0) == ""
        self.forward, self.event = module.stream_create(), module.event_create()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.connector.close()
        self.module.host_unregister(self.scratch.base)
        self.scratch.close()

    def point(self):
        """Behind all that the forward's stream was given."""
        self.module.event_record(self.event, self.forward)
        return StreamPoint(self.event, self.forward)

    def write(self, page, value, stream=None):
        """Work of the engine that fills a page."""
        self.module.fill(self.memory.base + page * BLOCK, value, BLOCK, stream or self.forward)

    def read(self, page, slot):
        """Work of the engine that reads a page, into a slot of the scratch memory."""
        place = self.scratch.base + slot * BLOCK
        self.module.copy(place, self.memory.base + page * BLOCK, BLOCK, False, self.forward)

    def job(self, kind, pages, slots, flags=0):
        copies = make_copies(0, [make_key(p) for p in pages], page=pages, host=slots, disk=slots)
        copies["flags"] = flags
        return Plans((Job(7, kind, copies),))

    def outcome(self):
        assert self.mover.wait([7], PATIENCE)
        (outcome,) = self.connector.poll()
        return [] if outcome.status is None else [s for s in outcome.status.tolist() if s != Status.OK]


@pytest.mark.parametrize("mode", MODES)
def test_ORDER_01_a_store_reads_after_the_forward_and_before_the_next(sim, mode):
    """ORDER-01: pages that slow work fills are stored as filled, though the forward's stream fills them again behind
    after_forward; the fill comes from another stream, so only the point orders it."""
    with Worker(sim, mode) as worker:
        producer = sim.stream_create()
        for turn in range(3):
            sim.plant("kernel_delay_us", SLOW_US)
            for page in range(4):
                worker.write(page, turn + 1, producer)
            sim.event_record(worker.event, producer)
            worker.connector.after_forward(
                worker.job(JobKind.STORE, range(4), range(4)), StreamPoint(worker.event, worker.forward)
            )
            for page in range(4):
                worker.write(page, 0xEE)
            assert worker.outcome() == []
            for slot in range(4):
                assert (worker.mover.arena.view(0, slot) == turn + 1).all()
            sim.stream_synchronize(worker.forward)


@pytest.mark.parametrize("flags", [0, CopyFlag.READ])
@pytest.mark.parametrize("mode", MODES)
def test_ORDER_04_a_load_writes_after_the_last_reader(sim, mode, flags):
    """ORDER-04: pages that slow work of the forward's stream still reads are read as they were; then they have the
    loaded bytes, which come from host or from disk."""
    with Worker(sim, mode) as worker:
        for page in range(4):
            data = payload(make_key(page), 0, BLOCK)
            worker.mover.arena.view(0, page)[:] = list(data)
        worker.connector.before_forward(worker.job(JobKind.WRITE, range(4), range(4)))
        assert worker.outcome() == []
        if flags:
            worker.mover.arena.view(0, 0)[:] = 0
        for page in range(4):
            worker.memory.put(page * BLOCK, bytes([0x55]) * BLOCK)
        sim.plant("copy_delay_us", SLOW_US)
        for page in range(4):
            worker.read(page, page)
        point = worker.point()
        worker.connector.before_forward(worker.job(JobKind.LOAD, range(4), range(4), flags), point)
        assert worker.outcome() == []
        for page in range(4):
            assert (worker.scratch.view(0, page) == 0x55).all()
            assert worker.memory.get(page * BLOCK, BLOCK) == payload(make_key(page), 0, BLOCK)


@pytest.mark.parametrize("kind", [JobKind.STORE, JobKind.LOAD])
def test_without_a_point_nothing_is_begun(sim, kind):
    """A device with streams gets no copy from an adapter that gives no point: a ValueError says what to give."""
    with Worker(sim, "staged") as worker:
        sim.forget_operations()
        call = worker.connector.after_forward if kind is JobKind.STORE else worker.connector.before_forward
        with pytest.raises(ValueError, match="`after` to before_forward and after_forward"):
            call(worker.job(kind, [1], [1]))
        assert sim.operations() == []
        assert worker.connector.poll() == []


def test_jobs_between_lower_tiers_need_no_point(sim):
    """A write to disk and a read from it run without one: they touch no page."""
    with Worker(sim, "staged") as worker:
        worker.mover.arena.view(0, 2)[:] = 9
        for kind in (JobKind.WRITE, JobKind.READ):
            worker.connector.before_forward(worker.job(kind, [2], [2]))
            assert worker.outcome() == []
        assert (worker.mover.arena.view(0, 2) == 9).all()


class Adapter(MoverConnector):
    """What the adapter of a CUDA engine does: a point of the stream of the forward with every call.

    The reference engine paints pages at once and not in that stream, so the stream is run empty before it goes on.
    """

    def __init__(self, mover):
        super().__init__(mover)
        self.module = native.simulation()
        self.stream, self.event = self.module.stream_create(), self.module.event_create()

    def point(self):
        self.module.event_record(self.event, self.stream)
        return StreamPoint(self.event, self.stream)

    def before_forward(self, metadata, after=None):
        super().before_forward(metadata, self.point())

    def after_forward(self, metadata, after=None):
        super().after_forward(metadata, self.point())
        self.module.stream_synchronize(self.stream)


@pytest.mark.parametrize("mode", MODES)
def test_ORDER_03_many_requests_over_a_device_with_streams(tmp_path, monkeypatch, mode):
    """ORDER-03: drawn prefixes come and go, many at once, through few pages, host and disk, with the pages behind the
    device copier: no page ever holds another prefix's bytes, and loads were used."""
    monkeypatch.setattr(
        rig_module, "CpuCopyEngine", lambda: GpuCopyEngine(native.simulation(), 0, mode, SMALL)
    )
    monkeypatch.setattr("kvoffload.testing.engine.drive.MoverConnector", lambda mover, _: Adapter(mover))
    draw = random.Random(3)
    with Rig(Sizes(host=2, transit=1, disk=16, pages=64), path=tmp_path) as rig:
        engine = engine_over(rig)
        for turn in range(6):
            for number in range(8):
                text = random_keys(20, seed=draw.randrange(10))
                prompt = draw.randrange(40, 300)
                engine.add(Sequence(RequestInfo(8 * turn + number), text, 16, prompt=prompt, output=5))
            settle(engine)
            engine.device.forget()
        assert engine.device.mismatches == 0
        assert rig.planner.stats().totals["used"] > 0
        rig.local.drain()
        rig.check()
