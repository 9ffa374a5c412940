"""Rows COPY and QNT of the case list on the simulated runtime, and failures in the middle of a plan."""

from __future__ import annotations

import numpy as np
import pytest
from gpu_world import SMALL, DeviceWorld, all_ok, shuffled

from kvoffload import native
from kvoffload.arena import HostArena
from kvoffload.copying import modes
from kvoffload.copying.base import Direction
from kvoffload.copying.gpu import DeviceOptions, GpuCopyEngine
from kvoffload.errors import ConfigError, LayoutError
from kvoffload.layout import Region
from kvoffload.messages import Status
from kvoffload.testing.blocks import make_layout

MODES = ("staged", "dma", "kernel")


@pytest.fixture(autouse=True)
def sim():
    """The simulated runtime without plants and records of earlier tests."""
    module = native.simulation()
    module.clear_plants()
    module.forget_operations()
    yield module
    module.clear_plants()


def round_trip(world, blocks=24):
    """Random bytes out to scattered slots and back to other pages, compared byte by byte; the final pages."""
    pages, slots = shuffled(world.pages, 1)[:blocks], shuffled(30, 2)[:blocks]
    for page in pages:
        world.paint(page, page)
    assert all_ok(world.store(pages, slots))
    assert [world.slot(s) for s in slots] == [world.content(p) for p in pages]
    targets = shuffled(world.pages, 3)[:blocks]
    for page in range(world.pages):
        world.overwrite(page, 0xA5)
    assert all_ok(world.load(targets, slots))
    want = dict(zip(targets, pages, strict=True))
    for page in range(world.pages):
        expected = world.content(want[page]) if page in want else bytes([0xA5]) * world.block_bytes
        assert world.page(page) == expected


LAYOUTS = {
    "layer-major, K and V apart": ((2048, 2048) * 3, 0),
    "layer-major, K and V interleaved": ((4096,) * 3, 0),
    "block-major, all layers in a page": ((24 << 10,), 0),
    "latent attention, one region": ((1152 * 16,), 0),
    "padded pages": ((2000, 2000), 48),
    "head-major, small rows": ((256,) * 16, 256),
    "fp8 values with scales": ((4096, 4096, 32, 32), 0),
    "odd sizes": ((7, 656, 1, 65537), 3),
    "one byte": ((1,), 0),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_COPY_01_layouts(name, mode):
    """COPY-01: every kind of layout makes an exact round trip, and no byte outside the pages named changes."""
    sizes, gap = LAYOUTS[name]
    with DeviceWorld(page_bytes=sizes, gap=gap, mode=mode) as world:
        places = [
            (memory, page * region.stride + region.page_bytes)
            for region, memory in zip(world.regions, world.memory, strict=True)
            for page in range(world.pages)
        ]
        for memory, place in places:
            memory.put(place, b"\x5a" * gap)
        round_trip(world)
        assert all(memory.get(place, gap) == b"\x5a" * gap for memory, place in places)


def test_COPY_01_interleaved_regions_of_one_allocation():
    """COPY-01: K and V pages that lie in turn in one allocation are two strided regions and stay apart."""
    with DeviceWorld(page_bytes=(1024,), pages=48) as world:
        base = world.regions[0].base
        regions = (Region(base, 2048, 1024, 24), Region(base + 1024, 2048, 1024, 24))
        layout = make_layout(2048)
        arena = HostArena(4 << 20, 1, layout)
        world.engine.register(layout, (regions,), arena)
        for page in range(48):
            world.paint(page, page)
        assert all_ok(world.store([5, 2], [0, 1]))
        for slot, page in ((0, 5), (1, 2)):
            want = world.content(2 * page) + world.content(2 * page + 1)
            assert arena.view(0, slot).tobytes() == want
        world.engine.close()
        arena.close()


def test_COPY_01_regions_that_alias():
    """COPY-01: two groups over the same memory, pages of one being parts of the other's, keep their own bytes."""
    with DeviceWorld(page_bytes=(4096,), pages=32) as world:
        base = world.regions[0].base
        layout = make_layout(4096, 8192)
        arena = HostArena(4 << 20, 2, layout)
        world.engine.register(
            layout, ((Region(base, 4096, 4096, 32),), (Region(base, 8192, 8192, 16),)), arena
        )
        for page in range(32):
            world.paint(page, page)
        copies = world.copies([3, 2], [1, 0])
        copies["group"] = [0, 1]
        copies["host"][1] = 1 << 16
        assert all_ok(world.run(copies, Direction.TO_HOST))
        assert arena.view(0, 1).tobytes() == world.content(3)
        assert arena.view(1, 1 << 16).tobytes() == world.content(4) + world.content(5)
        world.engine.close()
        arena.close()


def test_COPY_02_ids_need_not_follow_each_other():
    """COPY-02: page ids [7, 3, 12] move exactly these, each to its own slot; no other slot changes."""
    with DeviceWorld() as world:
        for page in range(world.pages):
            world.paint(page, page)
        assert all_ok(world.store([7, 3, 12], [4, 9, 5]))
        assert [world.slot(s) for s in (4, 9, 5)] == [world.content(p) for p in (7, 3, 12)]
        assert not any(world.arena.view(0, s).any() for s in range(20) if s not in (4, 9, 5))


def test_COPY_04_pages_of_one_token():
    """COPY-04: sixteen one-token pages per block are sixteen regions; a layout that names only one is refused."""
    row = 96
    with DeviceWorld(page_bytes=(16 * row,), pages=8) as world:
        base = world.regions[0].base
        rows = tuple(Region(base + n * row, 16 * row, row, 8) for n in range(16))
        world.engine.register(world.layout, (rows,), world.arena)
        world.paint(6, 1)
        assert all_ok(world.store([6], [3]))
        assert world.slot(3) == world.content(1)
        with pytest.raises(LayoutError, match=r"96 bytes.*1536"):
            world.engine.register(world.layout, (rows[:1],), world.arena)


@pytest.mark.parametrize("number", [1, 2, 300])
def test_COPY_07_batch_attributes(sim, number):
    """COPY-07: batches of any size carry attributes that a runtime can read per copy, with sources read in order."""
    with DeviceWorld(page_bytes=(64, 64), mode="dma", pages=512) as world:
        pages = [2 * p for p in shuffled(256)] if number > 2 else [9, 4][:number]
        pages = pages[:number]
        for page in pages:
            world.paint(page, page)
        sim.forget_operations()
        assert all_ok(world.store(pages, range(len(pages))))
        assert [world.slot(s) for s in range(len(pages))] == [world.content(p) for p in pages]
        batches = [o for o in sim.operations() if o[0] == "batch"]
        assert sum(o[4] for o in batches) == 2 * len(pages)
        assert all(o[7] for o in batches)


def test_batches_keep_to_the_cap(sim):
    """No batch has more descriptors than the cap, whatever the pages; a driver with that cap takes them all."""
    options = DeviceOptions(chunk=256 << 10, store_staging=8 << 20, batch_limit=5)
    sim.plant("batch_limit", 5)
    with DeviceWorld(page_bytes=(64,) * 7, mode="dma", options=options) as world:
        round_trip(world)
        counts = [o[4] for o in sim.operations() if o[0] == "batch"]
        assert counts
        assert max(counts) <= 5
        assert world.copier.message == ""
        assert "failures" not in world.copier.stats()


def test_COPY_09_batch_refused(sim):
    """COPY-09: where the driver refuses batches (801) there is one warning, and single copies move the same bytes."""
    sim.plant("batch_error", 801)
    with DeviceWorld(mode="dma") as world:
        round_trip(world)
        assert len([o for o in sim.operations() if o[0] == "batch"]) == 1
        assert "batch copies are refused" in world.copier.message
        assert world.copier.stats()["failures"] == 1
        assert "batches" not in world.copier.stats()


def test_neighbours_are_merged(sim):
    """Pages and slots that continue each other on both sides go in one descriptor; staged, runs of slots in one DMA."""
    with DeviceWorld(page_bytes=(4096,), mode="dma") as world:
        for page in range(32):
            world.paint(page, page)
        assert all_ok(world.store(range(16), range(16)))
        assert world.copier.stats()["descriptors"] == 1
        assert all_ok(world.store(range(31, 15, -1), range(16, 32)))
        assert world.copier.stats()["descriptors"] == 17
        assert [world.slot(s) for s in range(16, 32)] == [world.content(p) for p in range(31, 15, -1)]
    with DeviceWorld(page_bytes=(4096,), mode="staged") as world:
        assert all_ok(world.store(shuffled(16), range(16)))
        assert world.copier.stats()["runs"] == 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [1, 2, 80, 576, 656, 1152, 65537])
def test_COPY_13_row_sizes(size, mode):
    """COPY-13: rows of any size are exact; those that 16-byte words do not fit are counted as narrow."""
    with DeviceWorld(page_bytes=(size, size), mode=mode) as world:
        round_trip(world)
        narrow = world.copier.stats().get("narrow", 0) > 0
        assert mode == "dma" or narrow is (size % 16 != 0)


@pytest.mark.parametrize("mode", ["auto", *MODES])
def test_COPY_14_a_hit_is_bytes(mode, tmp_path, monkeypatch):
    """COPY-14: in every mode, the one that is measured included, a load that ends OK has put its bytes in place."""
    monkeypatch.setattr("pathlib.Path.home", lambda: tmp_path)
    monkeypatch.setattr(modes, "MEASURED_BYTES", 1 << 20)
    with DeviceWorld(mode=mode) as world:
        round_trip(world)


def test_QNT_01_values_and_scales():
    """QNT-01: values and scales of a block come back into a fresh pool, both exact."""
    with DeviceWorld(page_bytes=(4096, 4096, 32, 32)) as world:
        world.paint(11, 5)
        assert all_ok(world.store([11], [0]))
        saved = world.slot(0)
    with DeviceWorld(page_bytes=(4096, 4096, 32, 32)) as fresh:
        fresh.arena.view(0, 3)[:] = np.frombuffer(saved, np.uint8)
        assert all_ok(fresh.load([2], [3]))
        assert fresh.page(2) == fresh.content(5)


def test_QNT_03_scales_are_part_of_the_block(sim):
    """QNT-03: when only the copy of a block's scales fails the block has failed."""
    options = DeviceOptions(store_staging=8 << 20, batch_limit=1)
    with DeviceWorld(page_bytes=(4096, 32), mode="dma", options=options) as world:
        sim.plant("copy_at", 4)  # block 1: values third, scales fourth
        assert world.store([8, 4, 2], [0, 1, 2]).tolist() == [Status.OK, Status.COPY_FAILED, Status.OK]


@pytest.mark.parametrize("mode", ["staged", "kernel"])
@pytest.mark.parametrize("direction", Direction)
def test_a_failing_launch_in_the_middle(sim, direction, mode):
    """A launch that fails fails its own copies only; the others are exact, and the next job is whole."""
    options = DeviceOptions(chunk=32 << 10, store_staging=8 << 20, load_staging=128 << 10)
    with DeviceWorld(mode=mode, options=options) as world:
        for block in range(12):
            world.paint(block, block)
            world.set_slot(block, 100 + block)
        sim.plant("launch_at", 2 if mode == "staged" else 1)
        status = world.run(world.copies(range(12), range(12)), direction)
        failed = range(4, 8) if mode == "staged" else range(12)
        assert [i for i, s in enumerate(status) if s == Status.COPY_FAILED] == list(failed)
        place, number = (world.slot, 0) if direction is Direction.TO_HOST else (world.page, 100)
        for block in set(range(12)) - set(failed):
            assert status[block] == Status.OK
            assert place(block) == world.content(block + number)
        assert "LaunchFailure" in world.copier.message
        assert all_ok(world.run(world.copies(range(12), range(12)), direction))


@pytest.mark.parametrize("mode", ["staged", "dma"])
@pytest.mark.parametrize("direction", Direction)
def test_a_failing_copy_in_the_middle(sim, direction, mode):
    """A DMA that fails fails the copies around it and no other job, and never the process."""
    with DeviceWorld(mode=mode) as world:
        sim.plant("copy_at", 1)
        sim.plant("batch_error", 719 if mode == "dma" else 0)
        status = world.run(world.copies(range(4), [0, 2, 4, 6]), direction)
        assert Status.COPY_FAILED in status.tolist()
        sim.clear_plants()
        for block in range(4):
            world.paint(block, block)
            world.set_slot(2 * block, block)
        assert all_ok(world.run(world.copies(range(4), [0, 2, 4, 6]), direction))
        place = world.slot if direction is Direction.TO_HOST else world.page
        step = 2 if direction is Direction.TO_HOST else 1
        assert [place(step * b) for b in range(4)] == [world.content(b) for b in range(4)]


@pytest.mark.parametrize("mode", MODES)
def test_equal_destinations(mode):
    """Of copies with one destination in a job the first is done, and the later ones fail."""
    with DeviceWorld(mode=mode) as world:
        for block in range(4):
            world.paint(block, block)
            world.set_slot(20 + block, 50 + block)
        assert world.store([0, 1, 2], [7, 8, 7]).tolist() == [Status.OK, Status.OK, Status.COPY_FAILED]
        assert world.slot(7) == world.content(0)
        assert world.load([9, 9, 8], [21, 20, 22]).tolist() == [Status.OK, Status.COPY_FAILED, Status.OK]
        assert world.page(9) == world.content(51)


def test_slots_over_the_border_of_pinned_chunks(sim):
    """A run of slots over several registrations is cut at their borders; the runtime refuses a copy over one."""
    options = DeviceOptions(chunk=8 << 20, store_staging=16 << 20, load_staging=16 << 20, pin_chunk=1)
    for mode in ("staged", "dma"):
        with DeviceWorld(page_bytes=(1 << 20,), mode=mode, options=options, pages=8) as world:
            for page in range(8):
                world.paint(page, page)
            slots = [n // 4 << 16 | n % 4 for n in range(8)]
            assert all_ok(world.store(range(8), slots))
            assert [world.slot(s) for s in slots] == [world.content(p) for p in range(8)]
            registered = [o[3] for o in sim.operations() if o[0] == "register"]
            assert registered[-2:] == [4 << 20, 4 << 20]


def test_what_does_not_fit_is_an_error():
    """A slot larger than the staging of stores is refused at registration, with both numbers."""
    layout = make_layout(1 << 20)
    arena = HostArena(4 << 20, 1, layout)
    engine = GpuCopyEngine(native.simulation(), 0, "staged", DeviceOptions(store_staging=64 << 10))
    with pytest.raises(LayoutError, match=r"1048576 bytes.*65536 bytes"):
        engine.register(layout, ((Region(arena.base, 1 << 20, 1 << 20, 1),),), arena)
    engine.close()
    arena.close()


def test_words_of_the_configuration():
    """A mode that does not exist is an error that lists those that do."""
    with pytest.raises(ConfigError, match="auto, staged, dma or kernel"):
        GpuCopyEngine(native.simulation(), 0, "fast", SMALL)
