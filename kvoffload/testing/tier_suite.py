"""What every tier must do. Subclass `TierSuite` in a test file as `TestMyTier` and supply the backdoor.

class TestMyTier(TierSuite):
    def make_tier(self, folder, layout): ...
    def poke(self, tier, group, slot): ...
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvoffload.arena import HostArena
from kvoffload.layout import Layout
from kvoffload.messages import COPY_DTYPE, Copies, Status
from kvoffload.testing.blocks import ODD_SIZES, make_copies, make_key, make_layout, payload
from kvoffload.tiers.base import Tier

SLAB_BYTES = 1 << 20
HOST_SLABS = 3
TIER_SLABS = 3
GUARD = 0xA5


class TierSuite(ABC):
    """REQUIRES: `make_tier` gives a tier of TIER_SLABS slabs of SLAB_BYTES, empty in a new folder."""

    @abstractmethod
    def make_tier(self, folder: Path, layout: Layout) -> Tier:
        """Open a tier; a second call with the same folder, after close, is a restart."""

    @abstractmethod
    def poke(self, tier: Tier, group: int, slot: int) -> None:
        """Backdoor: change one byte of the stored payload without the tier's knowledge."""

    keeps = False
    """True where blocks outlive `close`."""

    @pytest.fixture
    def layout(self) -> Layout:
        return make_layout(*ODD_SIZES)

    @pytest.fixture
    def arena(self, layout: Layout) -> Iterator[HostArena]:
        arena = HostArena(SLAB_BYTES, HOST_SLABS, layout)
        yield arena
        arena.close()

    @pytest.fixture
    def tier(self, tmp_path: Path, layout: Layout) -> Iterator[Tier]:
        tier = self.make_tier(tmp_path, layout)
        yield tier
        tier.close()

    @pytest.mark.parametrize("group", range(len(ODD_SIZES)))
    def test_round_trip(self, tier: Tier, arena: HostArena, group: int) -> None:
        """Blocks of any size come back byte for byte, from permuted slots into other host slots."""
        copies = blocks(arena, group, range(9), disk=[7, 3, 12, 0, 1, 2, 13, 14, 9])
        assert (tier.write(copies, arena) == Status.OK).all()

        back = moved(copies, [14, 0, 7, 3, 5, 4, 6, 2, 10])
        wipe(arena)
        assert (tier.read(back, arena) == Status.OK).all()
        check_content(arena, back, [Status.OK] * 9)

    def test_only_the_slots_named_are_touched(self, tier: Tier, arena: HostArena) -> None:
        """A read changes the host slots of its copies and nothing else."""
        copies = blocks(arena, 4, [1, 2, 3], disk=[5, 6, 7], host=[7, 3, 12])
        tier.write(copies, arena)
        wipe(arena)
        tier.read(copies, arena)

        check_content(arena, copies, [Status.OK] * 3)
        for slot in set(range(20)) - {7, 3, 12}:
            assert (arena.view(4, slot) == GUARD).all()

    def test_a_slot_never_written_is_a_miss(self, tier: Tier, arena: HostArena) -> None:
        """READ_FAILED, not bytes, where nothing was stored."""
        assert tier.read(make_copies(0, [make_key(1)], host=[0], disk=[0]), arena) == Status.READ_FAILED

    def test_another_key_is_a_miss(self, tier: Tier, arena: HostArena) -> None:
        """A slot answers only for the key it was written under."""
        copies = blocks(arena, 2, [1, 2])
        tier.write(copies, arena)
        copies["key"] = copies["key"][::-1].copy()

        assert (tier.read(copies, arena) == Status.READ_FAILED).all()

    def test_overwriting_replaces(self, tier: Tier, arena: HostArena) -> None:
        """After a slot is written again the old key misses and the new one hits."""
        old = blocks(arena, 3, [1], disk=[4])
        tier.write(old, arena)
        new = blocks(arena, 3, [2], disk=[4])
        tier.write(new, arena)
        wipe(arena)

        assert tier.read(old, arena) == Status.READ_FAILED
        assert tier.read(new, arena) == Status.OK
        check_content(arena, new, [Status.OK])

    def test_bad_copies_fail_alone(self, tier: Tier, arena: HostArena) -> None:
        """Slots and groups that do not exist fail in place; the others of the call are done."""
        copies = blocks(arena, 5, range(8), host=range(8), disk=range(8))
        copies["disk"][1], copies["disk"][2], copies["disk"][3] = -1, TIER_SLABS << 16, 60000
        copies["host"][4], copies["host"][5] = -1, HOST_SLABS << 16
        copies["group"][6] = len(ODD_SIZES)

        assert tier.write(copies, arena).tolist() == [Status.OK] + [Status.COPY_FAILED] * 6 + [Status.OK]
        want = [Status.OK] + [Status.READ_FAILED] * 6 + [Status.OK]
        wipe(arena)
        assert tier.read(copies, arena).tolist() == want
        check_content(arena, copies[[0, 7]], [Status.OK] * 2)

    def test_nothing_to_do(self, tier: Tier, arena: HostArena) -> None:
        """An empty call gives an empty answer."""
        assert len(tier.read(np.empty(0, COPY_DTYPE), arena)) == 0
        assert len(tier.write(np.empty(0, COPY_DTYPE), arena)) == 0

    def test_a_changed_payload_is_a_miss(self, tier: Tier, arena: HostArena) -> None:
        """Bytes that rotted under the tier are not served; neighbours are."""
        copies = blocks(arena, 9, [1, 2, 3])
        tier.write(copies, arena)
        self.poke(tier, 9, int(copies["disk"][1]))
        wipe(arena)

        want = [Status.OK, Status.READ_FAILED, Status.OK]
        assert tier.read(copies, arena).tolist() == want
        check_content(arena, copies, want)

    def test_a_slab_that_changes_its_group(self, tier: Tier, arena: HostArena) -> None:
        """The blocks of the group before are gone, those of other slabs stay."""
        before = blocks(arena, 7, range(6), disk=[0, 1, 2, 1 << 16, (1 << 16) + 1, (1 << 16) + 2])
        tier.write(before, arena)
        after = blocks(arena, 0, [50], host=[30], disk=[200])
        tier.write(after, arena)
        wipe(arena)

        assert tier.read(before, arena).tolist() == [Status.READ_FAILED] * 3 + [Status.OK] * 3
        assert tier.read(after, arena) == Status.OK

    def test_reset_forgets(self, tier: Tier, arena: HostArena, tmp_path: Path, layout: Layout) -> None:
        """After reset everything is a miss, also after a restart; slots can be written again."""
        copies = blocks(arena, 6, range(5))
        tier.write(copies, arena)
        tier.reset()
        assert (tier.read(copies, arena) == Status.READ_FAILED).all()
        tier.close()

        again = self.make_tier(tmp_path, layout)
        assert len(again.records()) == 0
        assert (again.read(copies, arena) == Status.READ_FAILED).all()
        again.write(blocks(arena, 6, [3]), arena)
        assert again.read(blocks(arena, 6, [3]), arena) == Status.OK
        again.close()

    def test_restart(self, tier: Tier, arena: HostArena, tmp_path: Path, layout: Layout) -> None:
        """A tier that keeps its blocks lists exactly them after a restart and gives their bytes."""
        copies = blocks(
            arena,
            8,
            range(20),
            disk=[n << 16 | 5 for n in range(3)] + [*range(6, 14)] + [15] + [*range(17, 25)],
        )
        tier.write(copies, arena)
        tier.close()
        again = self.make_tier(tmp_path, layout)
        wipe(arena)
        if self.keeps:
            want = {f: copies[f].tolist() for f in ("key", "seq", "depth", "parent", "group")}
            order = np.argsort(again.records()["depth"])
            found = again.records()[order]
            assert found["slot"].tolist() == copies["disk"].tolist()
            assert {f: found[f].tolist() for f in want} == want
            assert (again.read(copies, arena) == Status.OK).all()
            check_content(arena, copies, [Status.OK] * 20)
        else:
            assert len(again.records()) == 0
            assert (again.read(copies, arena) == Status.READ_FAILED).all()
        again.close()

    def test_several_threads(self, tier: Tier, arena: HostArena) -> None:
        """Calls on different slots from several threads do not disturb each other."""

        def work(worker: int) -> None:
            mine = range(worker * 8, worker * 8 + 8)
            for turn in range(5):
                copies = blocks(arena, 1, [turn * 100 + n for n in mine], host=mine, disk=mine)
                assert (tier.write(copies, arena) == Status.OK).all()
                wipe(arena, 1, mine)
                assert (tier.read(copies, arena) == Status.OK).all()
                check_content(arena, copies, [Status.OK] * 8)

        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(work, n) for n in range(4)]:
                done.result()

    def test_close_twice(self, tier: Tier) -> None:
        """Close is idempotent."""
        tier.close()
        tier.close()

    @settings(
        max_examples=25,
        derandomize=True,
        deadline=None,
        # one function runs in every subclass, on that class's fixture, which `reset` empties
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
    )
    @given(ops=st.lists(st.tuples(st.booleans(), st.integers(0, 11), st.integers(0, 3)), max_size=40))
    def test_model(self, tier: Tier, arena: HostArena, ops: list[tuple[bool, int, int]]) -> None:
        """Any sequence of reads and writes answers as a dictionary from slot to key does."""
        tier.reset()
        model: dict[int, int] = {}
        for write, slot, key in ops:
            if write:
                assert tier.write(blocks(arena, 4, [key], host=[0], disk=[slot]), arena) == Status.OK
                model[slot] = key
                continue
            wipe(arena, 4, [1])
            copies = make_copies(4, [make_key(key)], host=[1], disk=[slot])
            want = Status.OK if model.get(slot) == key else Status.READ_FAILED
            assert tier.read(copies, arena) == want
            check_content(arena, copies, [want])


def blocks(
    arena: HostArena,
    group: int,
    numbers: Sequence[int],
    host: Sequence[int] | None = None,
    disk: Sequence[int] | None = None,
) -> Copies:
    """Copies of blocks that lie, with their content, in host slots."""
    keys = [make_key(n) for n in numbers]
    host = list(range(len(keys)) if host is None else host)
    disk = list(range(len(keys)) if disk is None else disk)
    nbytes = arena.layout.groups[group].block_bytes
    for key, slot in zip(keys, host, strict=True):
        arena.view(group, slot)[:] = np.frombuffer(payload(key, group, nbytes), np.uint8)
    return make_copies(group, keys, host=host, disk=disk)


def moved(copies: Copies, host: Sequence[int]) -> Copies:
    """The same blocks with other host slots, in another order."""
    out = copies.copy()
    out["host"] = host
    order = random.Random(1).sample(range(len(out)), len(out))
    return out[order]


def wipe(arena: HostArena, group: int | None = None, slots: Sequence[int] = ()) -> None:
    """Overwrite host slots, or everything, with the guard byte."""
    if group is not None:
        for slot in slots:
            arena.view(group, slot)[:] = GUARD
        return
    for slab in range(arena.slabs):
        for index in range(arena.slab_bytes // 4096):
            arena.view(7, slab << 16 | index)[:] = GUARD


def check_content(arena: HostArena, copies: Copies, status: Sequence[int]) -> None:
    """Every copy that is OK has its key's bytes in its host slot."""
    for copy, outcome in zip(copies, status, strict=True):
        if outcome != Status.OK:
            continue
        group = int(copy["group"])
        want = payload(copy["key"].tobytes(), group, arena.layout.groups[group].block_bytes)
        assert arena.view(group, int(copy["host"])).tobytes() == want
