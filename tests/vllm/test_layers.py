"""Loads that a forward waits for, on a device with streams: layer by layer where every layer's hook has been seen."""

import pytest
from fake_parts import settings_of
from gpu_world import PATIENCE, SMALL, SparseMemory
from kvoffload.connectors.vllm import compat
from kvoffload.connectors.vllm.layers import WHOLE, Hooks
from kvoffload.connectors.vllm.wire import StepPlans
from kvoffload.connectors.vllm.worker import WorkerPart

from kvoffload import native
from kvoffload.arena import HostArena
from kvoffload.copying.gpu import GpuCopyEngine, StreamPoint
from kvoffload.layout import CacheGroup, GroupKind, Layout, Region
from kvoffload.messages import Job, JobKind, Plans, Status
from kvoffload.testing.blocks import make_copies, make_key, payload

NAMES = ("first", "second", "third")
PART, PAGES = 4096, 16
BLOCK = PART * len(NAMES)
LAYOUT = Layout(4, (CacheGroup(0, GroupKind.FULL, 4, BLOCK, layers=NAMES),))
PLACES = {name: place for place, name in enumerate(NAMES)}
SLOW_US = 10_000


@pytest.fixture(autouse=True)
def sim():
    module = native.simulation()
    module.clear_plants()
    module.forget_operations()
    yield module
    module.clear_plants()


class SimDevice:
    """What device.StreamDevice is to a CUDA device."""

    streams = True

    def __init__(self, sim):
        self.sim = sim
        self.forward, self._event = sim.stream_create(), sim.event_create()

    def copier(self, mode):
        self.engine = GpuCopyEngine(self.sim, 0, "kernel", SMALL)
        return self.engine

    def point(self):
        self.sim.event_record(self._event, self.forward)
        return StreamPoint(self._event, self.forward)

    def stream(self):
        return self.forward


def content(page):
    return payload(make_key(page), 0, BLOCK)


class Engine:
    """A worker's part, and forwards that read every layer of a page into host memory, each behind its hook."""

    def __init__(self, sim, monkeypatch, places=PLACES):
        self.sim, self.device = sim, SimDevice(sim)
        monkeypatch.setattr("kvoffload.connectors.vllm.worker.device_of", lambda _: self.device)
        self.memory = SparseMemory(BLOCK * PAGES)
        regions = tuple(Region(self.memory.base + n * PART * PAGES, PART, PART, PAGES) for n in range(3))
        self.part = WorkerPart(settings_of(host_bytes=4 << 20), 0)
        self.part.register(LAYOUT, (regions,), "facts", None, places)
        assert self.device.engine.wait_pinned(PATIENCE)
        arena = self.part._mover.arena
        for slot in range(PAGES):
            arena.view(0, slot)[:] = list(content(slot))
        self.scratch = HostArena(1 << 20, 1, LAYOUT)
        assert sim.host_register(self.scratch.base, 1 << 20, 0) == ""
        self.last = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.part.close()
        self.sim.host_unregister(self.scratch.base)
        self.scratch.close()

    def step(self, pages, mode, hooks=NAMES, draft=False):
        """A forward over pages that its load fills; (what each of them held when it was read, the errors told)."""
        self.last += 1
        copies = make_copies(0, [make_key(p) for p in pages], page=pages, host=pages)
        job = Job(self.last, JobKind.LOAD, copies, "request", True)
        told = StepPlans(Plans((job,)), (job.id,)) if len(pages) else StepPlans()
        self.scratch.view(0, 0)[:] = 0
        self.part.start(told, mode)
        for layer, name in enumerate(NAMES):
            if name in hooks:
                self.part.layer(name)
            for page in pages:
                there = self.scratch.base + page * BLOCK + layer * PART
                here = self.memory.base + (layer * PAGES + page) * PART
                self.sim.copy(there, here, PART, False, self.device.forward)
        if not draft:
            self.part.save(told)
        self.part.ended()
        errors = self.part.errors()
        if draft:
            self.part.save(told)
        self.report = self.part.report()
        self.sim.stream_synchronize(self.device.forward)
        return [self.scratch.view(0, page).tobytes() for page in pages], errors

    def kinds(self):
        """What was put into streams since the last call, without the forward's own copies."""
        found = [o[0] for o in self.sim.operations() if o[0] in ("kernel", "wait")]
        self.sim.forget_operations()
        return found


@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize("mode", ["", "NONE", "PIECEWISE"])
def test_every_forward_reads_what_was_loaded(sim, monkeypatch, mode, draft):
    """Slow copies, and hooks or none: what each layer's attention finds are the loaded bytes. From the second forward
    with hooks on each layer waits by itself; before, and without hooks, the forward waits once."""
    with Engine(sim, monkeypatch) as engine:
        sim.plant("kernel_delay_us", SLOW_US)
        for number, pages in enumerate(([3, 1], [2], [7, 5, 4], [])):
            seen, errors = engine.step(pages, mode, NAMES if mode else (), draft)
            assert seen == [content(p) for p in pages]
            assert errors == set()
            by_layer = mode and number
            kernels = engine.kinds().count("kernel")
            assert kernels == (0 if not pages else 3 if by_layer else 1)


def test_a_layer_that_has_not_called_keeps_loads_whole(sim, monkeypatch):
    """One layer has no hook, as in a model that reads its cache elsewhere: the forward waits for all, always."""
    with Engine(sim, monkeypatch) as engine:
        sim.plant("kernel_delay_us", SLOW_US)
        for page in range(4):
            assert engine.step([page], "NONE", NAMES[:2])[0] == [content(page)]
        assert engine.step([5], "NONE")[0] == [content(5)]
        engine.kinds()
        assert engine.step([6], "NONE")[0] == [content(6)]
        assert engine.kinds().count("kernel") == 3


def test_each_mode_of_forward_is_seen_for_itself(sim, monkeypatch):
    """Hooks that ran in one mode say nothing of another."""
    hooks = Hooks(PLACES)
    assert [hooks.begin("NONE"), *map(hooks.called, NAMES)] == [False, 0, 1, 2]
    assert [hooks.begin("PIECEWISE"), hooks.called("elsewhere")] == [False, WHOLE]
    assert [hooks.begin("NONE"), hooks.begin(""), hooks.begin("PIECEWISE")] == [True, False, False]
    empty = Hooks({})
    assert [empty.begin("NONE"), empty.called("first"), empty.begin("NONE")] == [False, WHOLE, False]


@pytest.mark.parametrize("draft", [False, True])
def test_a_load_that_fails_on_the_device_is_told_with_its_step(sim, monkeypatch, draft):
    """A launch of the second layer fails: the pages are told as wrong before the step's end, and nothing is stored."""
    with Engine(sim, monkeypatch) as engine:
        engine.step([1], "NONE")
        sim.plant("kernel_delay_us", SLOW_US)
        sim.plant("launch_at", 2)
        _, errors = engine.step([4, 6], "NONE", draft=draft)
        assert errors == {4, 6}
        assert engine.report.gaps
        store = make_copies(0, [make_key(9)], page=[9], host=[9])
        told = StepPlans(Plans((Job(99, JobKind.STORE, store, "request"),)))
        engine.part.start(told, "NONE")
        engine.part.save(told)
        (outcome,) = [o for o in engine.part.report().outcomes if o.job == 99]
        assert outcome.status.tolist() == [Status.NOT_DONE]


def test_stores_go_behind_the_forward_and_its_loads(sim, monkeypatch):
    """A step that loads a page and stores it elsewhere: host gets the loaded bytes."""
    with Engine(sim, monkeypatch) as engine:
        engine.step([1], "NONE")
        sim.plant("kernel_delay_us", SLOW_US)
        load = make_copies(0, [make_key(3)], page=[3], host=[3])
        store = make_copies(0, [make_key(3)], page=[3], host=[12])
        jobs = Job(50, JobKind.LOAD, load, "r", True), Job(51, JobKind.STORE, store, "r")
        told = StepPlans(Plans(jobs), (50,))
        engine.part.start(told, "NONE")
        engine.part.save(told)
        assert engine.part._mover.wait([51], PATIENCE)
        assert engine.part._mover.arena.view(0, 12).tobytes() == content(3)


def test_the_mode_of_a_forward_is_asked_of_vllm():
    """Graphs of pieces, and none, run hooks; full graphs and what is not known do not count on them."""
    from types import SimpleNamespace as Of

    from vllm.config import CUDAGraphMode
    from vllm.forward_context import ForwardContext

    assert "cudagraph_runtime_mode" in ForwardContext.__dataclass_fields__
    modes = [compat.forward_mode(Of(cudagraph_runtime_mode=mode)) for mode in CUDAGraphMode]
    assert dict(zip((m.name for m in CUDAGraphMode), modes, strict=True)) == {
        **dict.fromkeys((m.name for m in CUDAGraphMode), ""),
        "NONE": "NONE",
        "PIECEWISE": "PIECEWISE",
    }
    assert compat.forward_mode(None) == compat.forward_mode(Of()) == ""
