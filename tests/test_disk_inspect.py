"""Listing, verifying and clearing a disk path."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from disk_world import BLOCK_BYTES, LAYOUT, SLAB_BYTES, SLABS, file_offset, make_arena, store

from kvoffload.errors import TierError
from kvoffload.tiers import DiskTier, rank_directory
from kvoffload.tiers.inspect import clear, list_ranks, verify


@pytest.fixture
def disk(tmp_path):
    """Two namespaces, one of them with two ranks; 10, 11 and 12 blocks."""
    arena = make_arena()
    for number, (namespace, rank) in enumerate(((b"a" * 16, 0), (b"a" * 16, 1), (b"b" * 16, 0))):
        tier = open_rank(tmp_path, namespace, rank)
        store(tier, arena, range(10 + number))
        tier.close()
    arena.close()
    return tmp_path


def open_rank(path, namespace, rank):
    return DiskTier(rank_directory(path, namespace, 0, rank), LAYOUT, SLAB_BYTES, SLABS, namespace)


def test_list(disk):
    """Every rank with its blocks, their bytes and the age of the last write, also while one is in use."""
    tier = open_rank(disk, b"b" * 16, 0)
    newest = max(f.stat().st_mtime for f in disk.rglob("*"))
    found = list_ranks(disk, newest + 100)
    assert [(u.namespace, u.directory.name, u.blocks) for u in found] == [
        ((b"a" * 16).hex(), "rank0", 10),
        ((b"a" * 16).hex(), "rank1", 11),
        ((b"b" * 16).hex(), "rank0", 12),
    ]
    for usage in found:
        assert usage.used == usage.blocks * BLOCK_BYTES
        assert usage.reserved > SLABS * SLAB_BYTES
        assert usage.readable
        assert 100 <= usage.age < 200
    tier.close()


def test_list_of_what_cannot_be_read(disk):
    """A directory with another manifest is shown with its reserved bytes and no blocks."""
    folder = rank_directory(disk, b"b" * 16, 0, 0)
    (folder / "manifest.msgpack").write_bytes(b"?")
    usage = list_ranks(disk, 0.0)[2]
    assert (usage.blocks, usage.readable) == (0, False)
    assert usage.reserved > SLABS * SLAB_BYTES
    assert list_ranks(Path(disk / "nothing"), 0.0) == []


def test_verify(disk):
    """Every payload is read: flipped bytes are counted per rank, and nothing is changed."""
    folder = rank_directory(disk, b"a" * 16, 0, 1)
    with (folder / "slots").open("r+b") as file:
        for number in (3, 7):
            os.pwrite(file.fileno(), b"!!!!", file_offset(number) + 5000)
    assert [(v.blocks, v.bad) for v in verify(disk)] == [(10, 0), (11, 2), (12, 0)]
    assert [u.blocks for u in list_ranks(disk, 0.0)] == [10, 11, 12]


def test_a_directory_in_use_is_left_alone(disk):
    """Verify and clear name the process that has it; clear then deletes nothing at all."""
    tier = open_rank(disk, b"b" * 16, 0)
    with pytest.raises(TierError, match=str(os.getpid())):
        list(verify(disk))
    with pytest.raises(TierError, match=str(os.getpid())):
        clear(disk)
    assert len(list_ranks(disk, 0.0)) == 3
    tier.close()


def test_clear(disk):
    """One namespace goes, then all; the path itself and files that are not ours stay."""
    (disk / "notes.txt").write_text("mine")
    assert clear(disk, (b"a" * 16).hex()) >= 2 * SLABS * SLAB_BYTES
    assert [u.namespace for u in list_ranks(disk, 0.0)] == [(b"b" * 16).hex()]
    assert clear(disk) >= SLABS * SLAB_BYTES
    assert os.listdir(disk) == ["notes.txt"]
    assert clear(disk) == 0
