"""What every copy engine must do. Subclass `CopySuite` in a test file and supply the device's memory."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import pytest

from kvoffload.arena import HostArena
from kvoffload.copying.base import CopyEngine, Direction
from kvoffload.errors import LayoutError
from kvoffload.layout import CacheGroup, GroupKind, Layout, Pools, Region
from kvoffload.messages import COPY_DTYPE, Copies, CopyFlag, Status, StatusArray
from kvoffload.testing.blocks import make_copies, make_key, make_layout, payload

SLAB_BYTES = 4 << 20
HOST_SLABS = 2
PAGES = 24
GUARD = 0xA5
PATIENCE = 60.0
"""Seconds."""

SIZES = (1, 2, 80, 576, 656, 1152, 65537)
"""Page bytes: no power of two, no multiple of a vector, one odd number above 64 KiB."""


class DeviceMemory(Protocol):
    """Bytes on the device with a backdoor that uses no copy engine."""

    base: int

    def put(self, offset: int, data: bytes) -> None: ...
    def get(self, offset: int, nbytes: int) -> bytes: ...


class CopySuite(ABC):
    """REQUIRES: a subclass's memory is what its engine calls device pages."""

    @abstractmethod
    def make_engine(self) -> CopyEngine:
        """A new engine, not registered."""

    @abstractmethod
    def make_memory(self, nbytes: int) -> DeviceMemory:
        """Device memory; up to 5 GiB, of which few pages are touched. Content is undefined."""

    @pytest.fixture
    def engine(self) -> Iterator[CopyEngine]:
        engine = self.make_engine()
        yield engine
        engine.close()

    @pytest.mark.parametrize("size", SIZES)
    def test_round_trip(self, engine: CopyEngine, size: int) -> None:
        """Pages of any size go to host and to other pages exactly; guards between them stay."""
        with World(self, engine, [[size]], gap=64) as world:
            pages = random.Random(size).sample(range(PAGES), 12)
            world.fill(0, pages)
            before = world.everything()
            copies = make_copies(0, keys(12), page=pages, host=random.Random(7).sample(range(20), 12))
            assert (world.run(copies, Direction.TO_HOST) == Status.OK).all()
            assert before == world.everything()
            world.check_slots(copies)

            world.wipe(0)
            copies["page"] = random.Random(8).sample(range(PAGES), 12)
            assert (world.run(copies, Direction.TO_DEVICE) == Status.OK).all()
            world.check_pages(copies)

    def test_scattered_pages(self, engine: CopyEngine) -> None:
        """Page ids [7, 3, 12] move exactly these three, in this order."""
        with World(self, engine, [[512, 512]]) as world:
            world.fill(0, range(PAGES))
            copies = make_copies(0, keys(3), page=[7, 3, 12], host=[2, 0, 9])
            world.run(copies, Direction.TO_HOST)
            for page, slot in ((7, 2), (3, 0), (12, 9)):
                assert world.arena.view(0, slot).tobytes() == world.page(0, page)
            assert (world.arena.view(0, 1) == 0).all()

    def test_groups_and_regions(self, engine: CopyEngine) -> None:
        """Groups with several strided regions of unequal sizes move in one job, each into its own slots."""
        sizes = [[64, 1152, 3], [656], [4096, 4096, 4096, 80]]
        with World(self, engine, sizes, gap=48) as world:
            parts = []
            for group in range(3):
                world.fill(group, range(PAGES))
                pages = random.Random(group).sample(range(PAGES), 8)
                parts.append(make_copies(group, keys(8), page=pages, host=range(8)))
            for part, slab in zip(parts, (0, 1, 0), strict=True):
                part["host"] += slab << 16
            parts[2]["host"] += 100
            copies = np.concatenate(parts)[random.Random(3).sample(range(24), 24)]
            assert (world.run(copies, Direction.TO_HOST) == Status.OK).all()
            for copy in copies:
                want = world.page(int(copy["group"]), int(copy["page"]))
                assert world.arena.view(int(copy["group"]), int(copy["host"])).tobytes() == want

    @pytest.mark.parametrize("direction", Direction)
    def test_bad_copies_fail_alone(self, engine: CopyEngine, direction: Direction) -> None:
        """Ids outside every range, absent ones and waiting copies fail in place and write nothing."""
        with World(self, engine, [[100], [200]], gap=28) as world:
            world.fill(0, range(PAGES))
            copies = make_copies(0, keys(10), page=range(10), host=range(10))
            copies["page"][[1, 2, 3]] = -1, PAGES, 2**31 - 1
            copies["host"][[4, 5, 6]] = -1, HOST_SLABS << 16, SLAB_BYTES // 4096
            copies["group"][7] = 2
            copies["flags"][8] = CopyFlag.WAIT
            before = world.everything()
            status = world.run(copies, direction)

            assert status.tolist() == [Status.OK] + [Status.COPY_FAILED] * 8 + [Status.OK]
            if direction is Direction.TO_HOST:
                assert before == world.everything()
                written = {s for s in range(16) if world.arena.view(0, s).any()}
                assert written == {0, 9}
            else:
                changed = [p for p in range(PAGES) if world.page(0, p) == bytes(100)]
                assert changed == [0, 9]

    @pytest.mark.parametrize("border", [2**31, 2**32])
    def test_COPY_06_pages_above(self, engine: CopyEngine, border: int) -> None:
        """A page that begins above 2 or 4 GiB of its region moves exactly, both ways."""
        stride, block = border // 70_000 + 64, 70_000
        memory = self.make_memory(stride * (block + 1))
        with World(self, engine, [[96]], memory=[[Region(memory.base, stride, 96, block + 1)]]) as world:
            assert block * stride > border
            want = payload(make_key(1), 0, 96)
            memory.put(block * stride, want)
            copies = make_copies(0, [make_key(1)], page=[block], host=[5])
            assert world.run(copies, Direction.TO_HOST) == Status.OK
            assert world.arena.view(0, 5).tobytes() == want
            memory.put(block * stride, bytes(96))
            assert world.run(copies, Direction.TO_DEVICE) == Status.OK
            assert memory.get(block * stride, 96) == want

    def test_handles(self, engine: CopyEngine) -> None:
        """Many jobs run at once; each handle answers once and is then unknown."""
        with World(self, engine, [[4096]]) as world:
            world.fill(0, range(PAGES))
            jobs = [make_copies(0, keys(1), page=[n % PAGES], host=[n]) for n in range(60)]
            handles = [engine.submit(job, Direction.TO_HOST, None) for job in jobs]
            assert len(set(handles)) == 60
            for handle in reversed(handles):
                assert engine.wait(handle, PATIENCE)
                assert engine.query(handle) == Status.OK
                with pytest.raises(KeyError):
                    engine.query(handle)
                with pytest.raises(KeyError):
                    engine.wait(handle, 0.0)

    def wait_layer(self, engine: CopyEngine, handle: int, layer: int) -> None:
        """The layer's bytes are there for whoever reads pages next. For devices with streams: that of the test."""
        assert engine.wait_layer(handle, layer, 0, PATIENCE)

    @pytest.mark.parametrize("layers", [(0, 1, 2, 3), (0, 0, 1, 1), (2, 1, 0, 0)])
    def test_layers(self, engine: CopyEngine, layers: Sequence[int]) -> None:
        """Behind a wait for a layer its pages hold its bytes, in whatever order layers are asked for; a layer that does
        not exist is the whole load, and a handle answers once."""
        sizes = [512, 80, 1152, 4096]
        for asked in ([0, 1, 2, 3, 9], [9, 0], [1, 0, 0]):
            with World(self, engine, [sizes], gap=48) as world:
                world.fill(0, range(12))
                copies = make_copies(0, keys(12), page=range(12), host=random.Random(7).sample(range(20), 12))
                world.run(copies, Direction.TO_HOST)
                world.wipe(0)
                copies["page"] = random.Random(8).sample(range(PAGES), 12)
                handle = engine.submit_layers(copies, None, layers)
                for layer in asked:
                    self.wait_layer(engine, handle, layer)
                    there = [layer in (n, 9) for n in layers]
                    assert world.wrong_parts(copies, there) == 0
                assert engine.wait(handle, PATIENCE)
                status = engine.query(handle)
                assert status is not None
                assert (status == Status.OK).all()
                world.check_pages(copies)
                with pytest.raises(KeyError):
                    engine.wait_layer(handle, 0, 0, 0.0)

    def test_nothing_to_do(self, engine: CopyEngine) -> None:
        """An empty job ends with an empty outcome."""
        with World(self, engine, [[64]]) as world:
            assert len(world.run(np.empty(0, COPY_DTYPE), Direction.TO_HOST)) == 0

    def test_sizes_are_checked(self, engine: CopyEngine) -> None:
        """Pages that do not make one block raise LayoutError: 1 token of 16, a part left out, too much."""
        layout = make_layout(16 * 64)
        arena = HostArena(SLAB_BYTES, 1, layout)
        memory = self.make_memory(1 << 20)
        for regions in [(64,), (512,), (512, 256), (1024, 64), ()]:
            pools = (tuple(Region(memory.base, n, n, 4) for n in regions),)
            with pytest.raises(LayoutError):
                engine.register(layout, pools, arena)
        for bad in (Region(0, 1024, 1024, 4), Region(memory.base, 1000, 1024, 4)):
            with pytest.raises(LayoutError):
                engine.register(layout, ((bad,),), arena)
        with pytest.raises(LayoutError):
            engine.register(layout, (), arena)
        arena.close()

    def test_absent_groups(self, engine: CopyEngine) -> None:
        """A group that the rank lacks, or that is never stored, needs no regions; its copies fail."""
        groups = (
            CacheGroup(0, GroupKind.FULL, 16, 64),
            CacheGroup(1, GroupKind.FULL, 16, 0),
            CacheGroup(2, GroupKind.STATE, 16, 64, transient=True),
        )
        layout = Layout(16, groups)
        with World(self, engine, [[64], [], []], layout=layout) as world:
            world.fill(0, range(3))
            copies = make_copies(0, keys(3), page=[0, 1, 2], host=[0, 1, 2])
            copies["group"] = [0, 1, 2]
            want = [Status.OK, Status.COPY_FAILED, Status.COPY_FAILED]
            assert world.run(copies, Direction.TO_HOST).tolist() == want

    def test_close_twice(self, engine: CopyEngine) -> None:
        """Close is idempotent, also before registration."""
        engine.close()
        engine.close()


class World:
    """Pools with guards on the device, an arena, and an engine that knows both."""

    def __init__(
        self,
        suite: CopySuite,
        engine: CopyEngine,
        sizes: Sequence[Sequence[int]],
        *,
        gap: int = 0,
        memory: Sequence[Sequence[Region]] = (),
        layout: Layout | None = None,
    ) -> None:
        """sizes: page bytes per group and region; `gap` guard bytes lie after every page."""
        layout = layout or make_layout(*(sum(group) for group in sizes))
        self.arena = HostArena(SLAB_BYTES, HOST_SLABS, layout)
        self._engine = engine
        self._memory: list[list[DeviceMemory]] = []
        self._pools: list[tuple[Region, ...]] = [tuple(group) for group in memory]
        for group in sizes if not memory else ():
            self._memory.append([suite.make_memory((n + gap) * PAGES) for n in group])
            pairs = zip(self._memory[-1], group, strict=True)
            self._pools.append(tuple(Region(m.base, n + gap, n, PAGES) for m, n in pairs))
            for region, place in zip(self._pools[-1], self._memory[-1], strict=True):
                place.put(0, bytes([GUARD]) * region.stride * PAGES)
        pools: Pools = tuple(self._pools)
        engine.register(layout, pools, self.arena)

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()
        self.arena.close()

    def run(self, copies: Copies, direction: Direction) -> StatusArray:
        """Submit, wait, query."""
        handle = self._engine.submit(copies, direction, None)
        assert self._engine.wait(handle, PATIENCE)
        status = self._engine.query(handle)
        assert status is not None
        return status

    def fill(self, group: int, pages: Sequence[int] | range) -> None:
        """Page pages[i] gets the content of key i."""
        for number, page in enumerate(pages):
            data = payload(make_key(number), group, sum(r.page_bytes for r in self._pools[group]))
            for region, memory in zip(self._pools[group], self._memory[group], strict=True):
                memory.put(page * region.stride, data[: region.page_bytes])
                data = data[region.page_bytes :]

    def wipe(self, group: int) -> None:
        """All pages and gaps of a group become guard bytes."""
        for region, memory in zip(self._pools[group], self._memory[group], strict=True):
            memory.put(0, bytes([GUARD]) * region.stride * PAGES)

    def page(self, group: int, page: int) -> bytes:
        """A page's bytes over all regions, through the backdoor."""
        pairs = zip(self._pools[group], self._memory[group], strict=True)
        return b"".join(m.get(page * r.stride, r.page_bytes) for r, m in pairs)

    def wrong_parts(self, copies: Copies, there: Sequence[bool]) -> int:
        """Of the first group's regions that should be `there`, the pages that do not hold their key's content."""
        wrong = 0
        for copy in copies:
            want = payload(copy["key"].tobytes(), 0, sum(r.page_bytes for r in self._pools[0]))
            for region, memory, wanted in zip(self._pools[0], self._memory[0], there, strict=True):
                have = memory.get(int(copy["page"]) * region.stride, region.page_bytes)
                wrong += wanted and have != want[: region.page_bytes]
                want = want[region.page_bytes :]
        return wrong

    def everything(self) -> list[bytes]:
        """All device bytes, gaps included."""
        pools = zip(self._pools, self._memory, strict=True)
        return [m.get(0, r.stride * PAGES) for p, ms in pools for r, m in zip(p, ms, strict=True)]

    def check_slots(self, copies: Copies) -> None:
        """Every host slot holds its key's content."""
        for copy in copies:
            group = int(copy["group"])
            view = self.arena.view(group, int(copy["host"]))
            assert view.tobytes() == payload(copy["key"].tobytes(), group, len(view))

    def check_pages(self, copies: Copies) -> None:
        """Pages named hold their key's content; all other device bytes are guards."""
        wanted = {(int(c["group"]), int(c["page"])): c["key"].tobytes() for c in copies}
        for group, (regions, memories) in enumerate(zip(self._pools, self._memory, strict=True)):
            for page in range(PAGES):
                key = wanted.get((group, page))
                nbytes = sum(r.page_bytes for r in regions)
                want = bytes([GUARD]) * nbytes if key is None else payload(key, group, nbytes)
                assert self.page(group, page) == want
            for region, memory in zip(regions, memories, strict=True):
                rows = np.frombuffer(memory.get(0, region.stride * PAGES), np.uint8).reshape(PAGES, -1)
                assert (rows[:, region.page_bytes :] == GUARD).all()


def keys(count: int) -> list[bytes]:
    """The keys that `fill` gives to the first pages."""
    return [make_key(n) for n in range(count)]
