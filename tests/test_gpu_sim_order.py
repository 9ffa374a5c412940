"""Order on the device: who waits for whom, shown by bytes and by the simulated runtime's record of calls."""

from __future__ import annotations

import threading

import pytest
from gpu_world import PATIENCE, SMALL, DeviceWorld, all_ok, shuffled

from kvoffload import native
from kvoffload.copying.base import Direction
from kvoffload.copying.gpu import DeviceOptions, StreamPoint
from kvoffload.messages import Status

MODES = ("staged", "dma", "kernel")
HELD_US = 500_000
"""Longer than all submits of a test take, also on a busy machine."""

SLOW_US = 3000
SOURCE_READS = {"kernel", "copy_out", "batch"}


@pytest.fixture(autouse=True)
def sim():
    """The simulated runtime without plants and records of earlier tests."""
    module = native.simulation()
    module.clear_plants()
    module.forget_operations()
    yield module
    module.clear_plants()


def producer(world, pages, value):
    """(a point of another stream than the engine's, behind a slow overwrite of the pages; that stream)."""
    stream, event = world.module.stream_create(), world.module.event_create()
    for page in pages:
        for region in world.regions:
            address = region.base + page * region.stride
            world.module.fill(address, value, region.page_bytes, stream)
    world.module.event_record(event, stream)
    return StreamPoint(event, world.stream), stream


@pytest.mark.parametrize("mode", MODES)
def test_ORDER_01_store_reads_after_its_producer(sim, mode):
    """ORDER-01: pages painted by slow work of another stream are stored as painted, time after time, unsynchronised."""
    with DeviceWorld(mode=mode) as world:
        for turn in range(12):
            sim.plant("kernel_delay_us", SLOW_US if turn < 3 else 0)
            point, _ = producer(world, range(4), turn + 1)
            sim.plant("kernel_delay_us", SLOW_US if turn < 3 else 0)
            status = world.run(world.copies(range(4), range(4)), Direction.TO_HOST, point)
            assert all_ok(status)
            for slot in range(4):
                assert world.slot(slot) == bytes([turn + 1]) * world.block_bytes


@pytest.mark.parametrize("mode", MODES)
def test_ORDER_01_record_shows_the_wait_first(sim, mode):
    """ORDER-01: the producer's event is waited for before the first read of a source, and sources are read in order."""
    with DeviceWorld(mode=mode) as world:
        point, _ = producer(world, range(4), 1)
        number = sim.number(point.event)
        sim.forget_operations()
        world.run(world.copies(range(4), range(4)), Direction.TO_HOST, point)
        done = sim.operations()
        waits = [i for i, o in enumerate(done) if o[0] == "wait" and o[2] == number]
        reads = [i for i, o in enumerate(done) if o[0] in SOURCE_READS]
        assert waits
        assert reads
        assert waits[0] < reads[0]
        assert done[waits[0]][1] == done[reads[0]][1]
        assert all(o[7] for o in done if o[0] in ("copy_out", "batch"))


@pytest.mark.parametrize("mode", MODES)
def test_ORDER_01_load_writes_after_the_last_reader(sim, mode):
    """ORDER-01: a load into pages that slow work of another stream still uses comes after that work."""
    with DeviceWorld(mode=mode) as world:
        for slot in range(4):
            world.set_slot(slot, slot)
        sim.plant("kernel_delay_us", SLOW_US)
        point, last_reader = producer(world, range(4), 0xEE)
        assert all_ok(world.run(world.copies(range(4), range(4)), Direction.TO_DEVICE, point))
        world.module.stream_synchronize(last_reader)
        assert [world.page(p) for p in range(4)] == [world.content(p) for p in range(4)]


@pytest.mark.parametrize("mode", MODES)
def test_ORDER_04_pages_may_be_overwritten_right_after_submit(sim, mode):
    """ORDER-04: what the engine's stream writes into the pages after a submit is never what was stored."""
    with DeviceWorld(mode=mode) as world:
        sim.plant("copy_delay_us", SLOW_US)
        for turn in range(4):
            pages = shuffled(16, turn)
            for page in pages:
                world.paint(page, page + 100 * turn)
            handle = world.engine.submit(world.copies(pages, range(16)), Direction.TO_HOST, None)
            for page in pages:
                world.overwrite(page)
            assert all_ok(world.finish(handle))
            assert [world.slot(s) for s in range(16)] == [world.content(p + 100 * turn) for p in pages]
            world.module.stream_synchronize(world.stream)


def test_store_staging_is_reused_only_after_its_dma(sim):
    """A small ring with slow DMAs: blocks are stored exactly or reported NOT_DONE, and in the end all are stored."""
    options = DeviceOptions(chunk=32 << 10, store_staging=64 << 10, load_staging=64 << 10)
    with DeviceWorld(options=options) as world:
        sim.plant("copy_delay_us", 1000)
        for page in range(64):
            world.paint(page, page)
        left, refused = list(range(64)), 0
        while left:
            status = world.store(left, left)
            assert set(status.tolist()) <= {Status.OK, Status.NOT_DONE}
            for block in (b for b, s in zip(left, status, strict=True) if s == Status.OK):
                assert world.slot(block) == world.content(block)
            left = [b for b, s in zip(left, status, strict=True) if s == Status.NOT_DONE]
            refused += len(left)
        assert refused > 0
        assert world.copier.stats()["staging_full"] == refused


def test_staging_in_flight_is_not_given_out(sim):
    """Stores submitted while earlier ones are on their way never change what those store."""
    options = DeviceOptions(chunk=32 << 10, store_staging=64 << 10, load_staging=64 << 10)
    with DeviceWorld(options=options) as world:
        sim.plant("copy_delay_us", HELD_US)
        for page in range(48):
            world.paint(page, page)
        blocks = [range(n, n + 4) for n in range(0, 48, 4)]
        handles = [world.engine.submit(world.copies(b, b), Direction.TO_HOST, None) for b in blocks]
        sim.plant("copy_delay_us", 0)
        stored = 0
        for group, handle in zip(blocks, handles, strict=True):
            for block, status in zip(group, world.finish(handle), strict=True):
                stored += status == Status.OK
                assert status in (Status.OK, Status.NOT_DONE)
                assert status == Status.NOT_DONE or world.slot(block) == world.content(block)
        assert 8 <= stored < 48


def test_load_staging_is_reused_only_after_its_scatter(sim):
    """Loads of many times the staging, with slow scatters, give every page its own bytes."""
    options = DeviceOptions(chunk=32 << 10, store_staging=64 << 10, load_staging=64 << 10)
    with DeviceWorld(options=options) as world:
        for slot in range(48):
            world.set_slot(slot, slot)
        sim.plant("kernel_delay_us", SLOW_US)
        pages = shuffled(48)
        assert all_ok(world.load(pages, range(48)))
        assert [world.page(p) for p in pages] == [world.content(s) for s in range(48)]


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_no_call_of_the_engine_thread_waits(sim, mode, pinned):
    """Submits and queries of the calling thread neither synchronise nor block, whatever the mode and the memory."""
    sim.plant("register_call", 0 if pinned else 1)
    with DeviceWorld(mode=mode) as world:
        sim.forget_operations()
        blocks = range(32)
        store = world.engine.submit(world.copies(blocks, blocks), Direction.TO_HOST, None)
        load = world.engine.submit(world.copies(range(32, 64), blocks), Direction.TO_DEVICE, None)
        layers = world.copier.submit_layers(world.copies([1], [1]), world.engine.point(), [0, 1])
        world.copier.wait_layer(layers, 1, world.stream)
        for handle in (store, load, layers):
            world.engine.query(handle) if world.engine.wait(handle, PATIENCE) else pytest.fail("no outcome")
        mine = [o for o in sim.operations() if o[5] == threading.get_native_id()]
        assert mine
        assert not [o for o in mine if o[6] or o[0] == "synchronize"]
        if not pinned:
            assert any(o[6] for o in sim.operations()), (
                "memory that is not pinned blocks the copier's own threads"
            )


def test_a_layer_can_be_used_before_the_load_ends(sim):
    """After wait_layer the stream finds that layer's bytes while later layers are not there yet."""
    with DeviceWorld(page_bytes=(4096,) * 6, mode="kernel") as world:
        world.set_slot(5, 1)
        sim.plant("kernel_delay_us", SLOW_US)
        handle = world.copier.submit_layers(world.copies([3], [5]), world.engine.point(), [0, 0, 1, 1, 2, 2])
        event = world.module.event_create()
        for layer in range(3):
            world.copier.wait_layer(handle, layer, world.stream)
            world.module.event_record(event, world.stream)
            world.module.stream_synchronize(world.stream)
            assert world.page(3)[: (layer + 1) * 8192] == world.content(1)[: (layer + 1) * 8192]
            assert layer == 2 or world.copier.query(handle) is None
        assert all_ok(world.finish(handle))


def test_layers_of_memory_that_is_not_pinned(sim):
    """A load by layers falls back to staging where kernels cannot read the host memory; waits still hold."""
    sim.plant("register_call", 1)
    with DeviceWorld() as world:
        world.set_slot(2, 7)
        sim.plant("kernel_delay_us", SLOW_US)
        handle = world.copier.submit_layers(world.copies([9], [2]), world.engine.point(), [0, 1])
        world.copier.wait_layer(handle, 0, world.stream)
        world.module.stream_synchronize(world.stream)
        assert world.page(9) == world.content(7)
        assert all_ok(world.finish(handle))


@pytest.mark.parametrize("after", [None, 5, StreamPoint(0, 0), object()])
@pytest.mark.parametrize("direction", Direction)
def test_an_event_is_mandatory(after, direction):
    """A copy without an event to wait for is refused before anything is put into a stream."""
    with DeviceWorld() as world:
        native.simulation().forget_operations()
        with pytest.raises(ValueError, match="StreamPoint"):
            world.copier.submit(world.copies([1], [1]), direction, after)
        assert native.simulation().operations() == []


def test_a_host_slot_is_free_only_after_the_copy_that_reads_it(sim):
    """A load has no outcome while its DMA still reads the slot."""
    with DeviceWorld(options=SMALL) as world:
        world.set_slot(0, 3)
        sim.plant("copy_delay_us", 20_000)
        handle = world.engine.submit(world.copies([4], [0]), Direction.TO_DEVICE, None)
        assert world.engine.query(handle) is None
        assert all_ok(world.finish(handle))
        world.set_slot(0, 8)
        assert world.page(4) == world.content(3)


@pytest.mark.parametrize("direction", Direction)
def test_close_ends_every_copy(sim, direction):
    """Copies that run when the engine closes end OK with their bytes, or NOT_DONE; their handles still answer."""
    with DeviceWorld() as world:
        sim.plant("copy_delay_us", 500)
        for block in range(64):
            world.paint(block, block)
            world.set_slot(block, block)
        handles = [
            world.engine.submit(world.copies(range(n, n + 16), range(n, n + 16)), direction, None)
            for n in range(0, 64, 16)
        ]
        world.engine.close()
        for first, handle in zip(range(0, 64, 16), handles, strict=True):
            status = world.engine.query(handle)
            assert set(status.tolist()) <= {Status.OK, Status.NOT_DONE}
            for block, ended in zip(range(first, first + 16), status, strict=True):
                place = world.slot if direction is Direction.TO_HOST else world.page
                assert ended == Status.NOT_DONE or place(block) == world.content(block)


def test_copy_streams_have_the_lowest_priority(sim):
    """All streams of the copier have the device's lowest priority, and nothing but gathers runs elsewhere."""
    with DeviceWorld() as world:
        made = [o for o in sim.operations() if o[0] == "stream"]
        mine = {o[1] for o in made if o[4] == 0}
        assert len(mine) == 3
        assert [o[1] for o in made if o[4] != 0] == [sim.number(world.stream)]
        sim.forget_operations()
        world.store(range(8), range(8))
        world.load(range(8), range(8))
        moving = [o for o in sim.operations() if o[0] in ("kernel", "copy_in", "copy_out")]
        assert [o[0] for o in moving if o[1] not in mine] == ["kernel"]
