"""The disk tier of another process, read beside it: its blocks and no wrong byte, whatever the owner does."""

from __future__ import annotations

import os
import shutil

import pytest
from disk_world import LAYOUT, SLAB_BYTES, SLABS, copies_of, file_offset, load, make_arena, open_tier, store

from kvoffload.errors import TierError
from kvoffload.messages import Status
from kvoffload.testing.blocks import make_layout
from kvoffload.tiers.disk_reader import DiskReader


@pytest.fixture
def arena():
    arena = make_arena()
    yield arena
    arena.close()


def reader_of(tier, **changes):
    options = {"layout": LAYOUT, "slab_bytes": SLAB_BYTES, "slabs": SLABS, **changes}
    return DiskReader(tier.directory, **options)


@pytest.fixture(params=[True, False], ids=["direct", "buffered"])
def pair(tmp_path, request):
    """An owner and a reader."""
    tier = open_tier(tmp_path)
    reader = reader_of(tier, direct=request.param)
    yield tier, reader
    reader.close()
    reader.close()
    tier.close()


def test_a_reader_reads_what_its_owner_writes_later(pair, arena):
    """Written after the reader was opened, overwritten, and of another key: right bytes or READ_FAILED."""
    tier, reader = pair
    assert len(reader.records()) == 0
    store(tier, arena, range(20))
    assert load(reader, arena, copies_of(range(20))) == [Status.OK] * 20
    store(tier, arena, [90, 91], first=3)
    status = load(reader, arena, copies_of(range(6)))
    assert status == [0, 0, 0, Status.READ_FAILED, Status.READ_FAILED, 0]
    assert load(reader, arena, copies_of([90, 91], first=3)) == [0, 0]


def test_a_reader_finds_what_its_owner_found(tmp_path, arena):
    """Both list the same records at start, so that what a planner takes from all ranks is what there is."""
    with_blocks = open_tier(tmp_path)
    store(with_blocks, arena, range(9))
    with_blocks.close()
    tier = open_tier(tmp_path)
    reader = reader_of(tier)
    assert len(tier.records()) == 9
    assert (reader.records() == tier.records()).all()
    assert reader.slabs == SLABS
    reader.close()
    tier.close()


def test_torn_payloads_are_a_miss_for_a_reader(pair, arena):
    """A bit on the medium has changed: the reader says so, as its owner does."""
    tier, reader = pair
    store(tier, arena, range(4))
    with (tier.directory / "slots").open("r+b", buffering=0) as file:
        byte = os.pread(file.fileno(), 1, file_offset(2) + 77)
        os.pwrite(file.fileno(), bytes([byte[0] ^ 4]), file_offset(2) + 77)
    assert load(reader, arena, copies_of(range(4))) == [0, 0, Status.READ_FAILED, 0]


def test_a_reader_follows_resets_in_any_order(pair, arena):
    """Told of a reset before or after its owner has made it, once or twice: nothing of before counts as of after, and
    what is written after it is found."""
    tier, reader = pair
    store(tier, arena, range(4))
    reader.reset()
    assert load(reader, arena, copies_of(range(4))) == [0] * 4, "the owner has not forgotten yet"
    tier.reset()
    assert load(reader, arena, copies_of(range(4))) == [Status.READ_FAILED] * 4
    store(tier, arena, range(2))
    assert load(reader, arena, copies_of(range(2))) == [0, 0]
    tier.reset()
    tier.reset()
    store(tier, arena, range(2))
    reader.reset()
    assert load(reader, arena, copies_of(range(2))) == [0, 0]
    reader.reset()
    assert load(reader, arena, copies_of(range(2))) == [0, 0]
    assert len(reader.records()) == 0


def test_a_reader_writes_nothing(pair, arena):
    """Writes fail, and the files stay as they are, also over a probe."""
    tier, reader = pair
    store(tier, arena, range(4))
    before = [(tier.directory / name).read_bytes() for name in ("slots", "table", "manifest.msgpack", "lock")]
    assert reader.write(copies_of([7, 8]), arena).tolist() == [Status.COPY_FAILED] * 2
    assert reader.probe()
    reader.reset()
    after = [(tier.directory / name).read_bytes() for name in ("slots", "table", "manifest.msgpack", "lock")]
    assert before == after


def test_a_reader_is_switched_off_and_comes_back(tmp_path, arena):
    """Reads that the medium refuses switch it off; once the table can be read a probe brings it back."""
    tier = open_tier(tmp_path)
    reader = reader_of(tier, direct=False)
    store(tier, arena, range(8))
    table = tier.directory / "table"
    content = table.read_bytes()
    os.truncate(table, 0)
    assert load(reader, arena, copies_of(range(8))) == [Status.READ_FAILED] * 8
    assert not reader.healthy
    assert not reader.probe()
    with table.open("r+b", buffering=0) as file:
        os.pwrite(file.fileno(), content, 0)
    assert reader.probe()
    assert reader.healthy
    assert load(reader, arena, copies_of(range(8))) == [0] * 8
    reader.close()
    tier.close()


def test_what_cannot_be_read_is_said_at_start(tmp_path):
    """No tier, a tier of other sizes, and one without its files."""
    with pytest.raises(TierError, match="has no disk tier: its owner opens it first"):
        DiskReader(tmp_path, LAYOUT, SLAB_BYTES, SLABS)
    tier = open_tier(tmp_path)
    for changes in ({"slabs": SLABS + 1}, {"slab_bytes": 2 * SLAB_BYTES}, {"layout": make_layout(4096)}):
        with pytest.raises(TierError, match="ranks with equal bytes need one layout"):
            reader_of(tier, **changes)
    copied = shutil.copytree(tier.directory, tmp_path / "other")
    (copied / "table").unlink()
    with pytest.raises(TierError, match="cannot read the disk tier of its owner"):
        DiskReader(copied, LAYOUT, SLAB_BYTES, SLABS)
    tier.close()


def test_without_checksums_a_reader_trusts_what_its_owner_wrote_in_this_life_only(tmp_path, arena):
    """Payloads are not verified, so nothing of an earlier life is found, and what is written now is."""
    first = open_tier(tmp_path, checksum=False)
    store(first, arena, range(3))
    first.close()
    tier = open_tier(tmp_path, checksum=False)
    reader = reader_of(tier)
    assert len(reader.records()) == 0
    assert load(reader, arena, copies_of(range(3))) == [Status.READ_FAILED] * 3
    store(tier, arena, range(3))
    assert load(reader, arena, copies_of(range(3))) == [0, 0, 0]
    reader.close()
    tier.close()


def test_many_threads_read_while_the_owner_writes(pair, arena):
    """Eight threads read slots that are written once and never again, while others are written: all is right."""
    from concurrent.futures import ThreadPoolExecutor

    tier, reader = pair
    store(tier, arena, range(20))

    def read(_):
        mine = make_arena(1)
        try:
            return load(reader, mine, copies_of(range(20)))
        finally:
            mine.close()

    with ThreadPoolExecutor(8) as pool:
        reads = [pool.submit(read, n) for n in range(40)]
        for _ in range(10):
            store(tier, arena, range(40, 60), first=40)
        assert all(r.result() == [0] * 20 for r in reads)
    assert load(reader, arena, copies_of(range(40, 60), first=40)) == [0] * 20
