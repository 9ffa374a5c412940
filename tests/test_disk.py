"""The disk tier: integrity, restart, ownership, bounds (docs/block-format.md)."""

from __future__ import annotations

import os
import pickle
import random
import re
import stat

import numpy as np
import pytest
from disk_world import (
    BLOCK_BYTES,
    NAMESPACE,
    PER_SLAB,
    ROOT,
    SLAB_BYTES,
    SLABS,
    SLOT_BYTES,
    copies_of,
    file_offset,
    load,
    make_arena,
    open_tier,
    slot,
    store,
)

from kvoffload import _C
from kvoffload.arena import HostArena
from kvoffload.copying import CpuCopyEngine, Direction
from kvoffload.errors import ConfigError, TierError
from kvoffload.layout import CacheGroup, GroupKind, Layout, Region
from kvoffload.testing.blocks import make_layout
from kvoffload.tiers import DiskTier, rank_directory
from kvoffload.tiers.table import RECORD_BYTES


@pytest.fixture
def arena():
    arena = make_arena()
    yield arena
    arena.close()


@pytest.fixture
def tier(tmp_path):
    tier = open_tier(tmp_path)
    yield tier
    tier.close()


def patch(path, offset, change):
    """Change bytes of a file: change(old bytes of 64) -> new."""
    with path.open("r+b", buffering=0) as file:
        old = os.pread(file.fileno(), 64, offset)
        os.pwrite(file.fileno(), change(old), offset)
        os.fsync(file.fileno())


def flip(byte, bit):
    return lambda old: old[:byte] + bytes([old[byte] ^ 1 << bit]) + old[byte + 1 :]


@pytest.mark.parametrize("running", [True, False])
def test_DISK_02_any_bit_of_a_record(tmp_path, arena, running):
    """One flipped bit anywhere in a record: a miss, before and after a restart; the neighbours hit."""
    tier = open_tier(tmp_path)
    copies, _ = store(tier, arena, range(RECORD_BYTES))
    chosen = random.Random(1)
    for byte in range(RECORD_BYTES):  # record n is damaged in byte n
        patch(tmp_path / "rank" / "table", record_offset(byte), flip(byte, chosen.randrange(8)))
    if not running:
        tier.close()
        tier = open_tier(tmp_path)
        assert len(tier.records()) == 0
    assert load(tier, arena, copies) == [1] * RECORD_BYTES
    tier.close()


def record_offset(number):
    return (number // PER_SLAB * PER_SLAB + number % PER_SLAB) * RECORD_BYTES


def test_DISK_02_any_bit_of_a_payload(tier, arena):
    """One flipped bit, first byte, last byte or between: a miss; padding behind it does not count."""
    copies, _ = store(tier, arena, range(6))
    for number, byte in enumerate((0, BLOCK_BYTES - 1, 12_345, 4096, BLOCK_BYTES)):
        patch(tier.directory / "slots", file_offset(number) + byte, flip(0, number))
    assert load(tier, arena, copies) == [1, 1, 1, 1, 0, 0]
    assert tier.counters()["mismatches"] == 4


def test_DISK_02_swapped_slots(tier, arena):
    """Two payloads change places, or two records: a miss for both, never the other's bytes."""
    copies, _ = store(tier, arena, range(6))
    for name, at, size in (("slots", file_offset, SLOT_BYTES), ("table", record_offset, RECORD_BYTES)):
        first = 0 if name == "slots" else 2
        with (tier.directory / name).open("r+b", buffering=0) as file:
            one, two = (os.pread(file.fileno(), size, at(first + n)) for n in range(2))
            os.pwrite(file.fileno(), two, at(first))
            os.pwrite(file.fileno(), one, at(first + 1))
            os.fsync(file.fileno())
    assert load(tier, arena, copies) == [1, 1, 1, 1, 0, 0]


def test_DISK_02_an_old_payload_under_a_new_record(tier, arena):
    """A payload that a power failure took back while its record stayed is a miss."""
    store(tier, arena, [1])
    with (tier.directory / "slots").open("rb") as file:
        before = os.pread(file.fileno(), SLOT_BYTES, 0)
    new, _ = store(tier, arena, [2])
    with (tier.directory / "slots").open("r+b") as file:
        os.pwrite(file.fileno(), before, 0)
        os.fsync(file.fileno())
    assert load(tier, arena, new) == [1]


@pytest.mark.parametrize("kept", [0, 1, PER_SLAB + 2])
@pytest.mark.parametrize("name", ["slots", "table"])
def test_DISK_02_truncated_before_the_start(tmp_path, arena, name, kept):
    """Files cut inside a block at start: what is whole hits, the rest misses and is not listed."""
    tier = open_tier(tmp_path)
    copies, _ = store(tier, arena, range(PER_SLAB + 10))
    tier.close()
    cut = file_offset(kept) + BLOCK_BYTES - 1 if name == "slots" else record_offset(kept) + RECORD_BYTES - 8
    os.truncate(tmp_path / "rank" / name, cut)

    tier = open_tier(tmp_path)
    assert load(tier, arena, copies) == [0] * kept + [1] * (PER_SLAB + 10 - kept)
    assert sorted(tier.records()["slot"].tolist()) == copies["disk"][:kept].tolist()
    assert store(tier, arena, range(5))[1] == [0] * 5
    tier.close()


def test_DISK_03_never_above_the_bound(tier, arena):
    """Writing five times what fits never makes files longer than the slabs plus the table say."""
    sizes = set()
    for turn in range(10):
        store(tier, arena, range(turn * 50, turn * 50 + 50), turn * 13 % 52)
        sizes.add(sum(f.stat().st_size for f in tier.directory.iterdir()))
    (size,) = sizes
    assert size < SLABS * SLAB_BYTES + 4096 + 64 * (SLABS * PER_SLAB + 1) + 1000


def test_DISK_05_few_files(tmp_path, arena):
    """A hundred thousand slots are four files, and moving blocks lists no directory."""
    tier = DiskTier(tmp_path / "many", make_layout(1), 1 << 20, 400, NAMESPACE)
    names = sorted(os.listdir(tier.directory))
    assert names == ["lock", "manifest.msgpack", "slots", "table"]
    tier.close()
    source = "".join(p.read_text() for p in (ROOT / "csrc").glob("disk_*.cpp"))
    assert "dirent" not in source
    assert "filesystem" not in source


@pytest.mark.parametrize("nbytes", [1, 511, 512, 4095, 4097, 20_001])
def test_DISK_06_everything_is_aligned(tmp_path, nbytes):
    """Host slots lie on 4096-byte borders whatever the payload size; files hold whole slots."""
    layout = make_layout(nbytes, 3 * nbytes)
    arena = HostArena(SLAB_BYTES, 3, layout)
    for group in range(2):
        for index in range(layout.slots_per_slab(SLAB_BYTES)[group]):
            assert arena.address(group, 2 << 16 | index) % 4096 == 0
    tier = DiskTier(tmp_path / "rank", layout, SLAB_BYTES, 2, NAMESPACE)
    assert (tmp_path / "rank" / "slots").stat().st_size == 2 * SLAB_BYTES + 4096
    tier.close()
    arena.close()


def test_DISK_15_one_write_per_block(tier, arena):
    """Counters say how much was written: payload bytes, once per block."""
    store(tier, arena, range(7))
    counters = tier.counters()
    assert (counters["blocks_written"], counters["bytes_written"]) == (7, 7 * BLOCK_BYTES)


def test_DISK_17_nothing_left_behind(tier, arena):
    """After everything was overwritten and forgotten the directory holds its four files."""
    store(tier, arena, range(100))
    tier.reset()
    assert sorted(os.listdir(tier.directory)) == ["lock", "manifest.msgpack", "slots", "table"]


class Boom:
    """Its pickle creates a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("name", ["manifest.msgpack", "table", "slots"])
def test_DISK_18_pickles_are_only_bytes(tmp_path, arena, name):
    """A pickle in place of any file is rejected and never executed; no module of the tier can load one."""
    tier = open_tier(tmp_path)
    copies, _ = store(tier, arena, range(3))
    tier.close()
    bomb = pickle.dumps(Boom(tmp_path / "executed"))
    (tmp_path / "rank" / name).write_bytes(bomb)
    tier = open_tier(tmp_path)
    assert load(tier, arena, copies) == [1] * 3
    assert not (tmp_path / "executed").exists()
    tier.close()
    source = "".join(p.read_text() for p in (ROOT / "kvoffload" / "tiers").glob("*.py"))
    assert not re.search(r"pickle|marshal|\beval\b|\bexec\b|shelve", source)


def test_DISK_18_private_files(tmp_path):
    """Files are 0600 and directories 0700 under any umask; a symbolic link in a file's place is refused."""
    old = os.umask(0)
    try:
        tier = DiskTier(rank_directory(tmp_path, NAMESPACE, 0, 0), make_layout(1), 1 << 20, 1, NAMESPACE)
    finally:
        os.umask(old)
    for file in tier.directory.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    for folder in (tier.directory, *tier.directory.parents[:2]):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    tier.close()
    (tier.directory / "slots").unlink()
    (tmp_path / "elsewhere").write_bytes(b"precious")
    (tier.directory / "slots").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TierError):
        DiskTier(tier.directory, make_layout(1), 1 << 20, 1, NAMESPACE)
    assert (tmp_path / "elsewhere").read_bytes() == b"precious"


@pytest.mark.parametrize("shape", [(16, 576), (2, 16, 8, 64), (16, 2, 4, 2, 32)])
def test_QNT_04_values_and_scales_of_any_shape(tmp_path, shape):
    """3-D latent, 4-D and 5-D values with their scales: device -> host -> disk -> a new pool, exact."""
    rng = random.Random(str(shape))
    values = np.frombuffer(rng.randbytes(4 * int(np.prod(shape))), np.uint8).reshape(4, *shape)
    scales = np.frombuffer(rng.randbytes(4 * 16 * 4), np.float32).reshape(4, 16)
    nbytes = values[0].nbytes + scales[0].nbytes
    layout = Layout(16, (CacheGroup(0, GroupKind.FULL, 16, nbytes),))
    arena, fresh = HostArena(SLAB_BYTES, 1, layout), (np.zeros_like(values), np.zeros_like(scales))
    copies = copies_of(range(4))
    copies["page"] = [2, 0, 3, 1]
    tier = DiskTier(tmp_path / "rank", layout, SLAB_BYTES, 1, NAMESPACE)
    for pools, direction in (((values, scales), Direction.TO_HOST), (fresh, Direction.TO_DEVICE)):
        engine = CpuCopyEngine()
        regions = tuple(Region(a.ctypes.data, a[0].nbytes, a[0].nbytes, 4) for a in pools)
        engine.register(layout, (regions,), arena)
        if direction is Direction.TO_DEVICE:
            assert tier.write(copies, arena).tolist() == [0] * 4
            for n in range(4):
                arena.view(0, n)[:] = 0
            assert tier.read(copies, arena).tolist() == [0] * 4
        handle = engine.submit(copies, direction, None)
        assert engine.wait(handle, 60)
        assert engine.query(handle).tolist() == [0] * 4
        engine.close()
    assert fresh[0].tobytes() == values.tobytes()
    assert fresh[1].tobytes() == scales.tobytes()
    tier.close()
    arena.close()


@pytest.mark.parametrize("sizes", [(0, 1), (100, 1), (4096, 0), (4096, 1 << 15 | 1)])
def test_impossible_slabs(tmp_path, sizes):
    """Slab sizes and counts that cannot be are errors that name the value."""
    with pytest.raises(ConfigError, match=str(sizes[0] if sizes[0] % 4096 or not sizes[0] else sizes[1])):
        open_tier(tmp_path, slab_bytes=sizes[0], slabs=sizes[1])
    assert not (tmp_path / "rank").exists()


def test_checksum_lanes_agree():
    """The instruction and the table give the same lanes, for every tail length and alignment."""
    data = random.Random(3).randbytes(70_000)
    for start in range(9):
        for size in (*range(100), 4095, 4096, 65_537):
            part = data[start : start + size]
            assert _C.checksum(part) == _C.checksum(part, portable=True)
    assert _C.checksum(b"123456789".ljust(32, b"\0"))[:4] == _C.checksum(b"12345678")[:4]


def test_slots_of_another_kind_of_array(tier, arena):
    """Arrays that are not COPY_DTYPE raise ValueError before anything moves."""
    copies = copies_of(range(4))
    for wrong in (copies[::2], copies.view("u1"), copies.reshape(2, 2), copies["disk"]):
        with pytest.raises(ValueError, match="COPY_DTYPE"):
            tier.write(wrong, arena)
    assert slot(PER_SLAB) == 1 << 16


def test_slots_on_both_sides_of_a_slab_border(tier, arena):
    """The last slots of a slab and the first of the next lie apart on disk: each is found alone."""
    copies, status = store(tier, arena, range(4), PER_SLAB - 2)
    assert status == [0] * 4
    assert file_offset(PER_SLAB) - file_offset(PER_SLAB - 1) > SLOT_BYTES
    for n in range(4):
        assert load(tier, arena, copies[n : n + 1]) == [0]
