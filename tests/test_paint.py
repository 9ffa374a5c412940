"""The content oracle finds every way in which a block can be wrong."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvoffload.layout import CacheGroup, GroupKind, Layout
from kvoffload.testing import paint as paint_module
from kvoffload.testing.paint import oracle, paint, verify
from kvoffload.testing.pool import PageMemory

SIZES = [24, 1001, 12288, 12288 + 6]


def random_keys(count, seed=1):
    return np.frombuffer(random.Random(seed).randbytes(16 * count), np.uint8).reshape(count, 16)


def make(block_bytes, pages=24, layers=3, rank=0, interleaved=False):
    names = tuple(f"l{i}" for i in range(layers))
    groups = tuple(CacheGroup(g, GroupKind.FULL, 16, block_bytes, layers=names) for g in range(2))
    return PageMemory(Layout(16, groups), [pages, pages], rank=rank, interleaved=interleaved)


def painted(block_bytes, **more):
    memory = make(block_bytes, **more)
    pages = np.array(random.Random(2).sample(range(24), 20), np.int32)
    keys = random_keys(20)
    paint(memory, 0, pages, keys)
    return memory, pages, keys


@pytest.mark.parametrize("block_bytes", SIZES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_what_is_painted_verifies_and_nothing_else_is_touched(block_bytes, interleaved):
    """Painted pages verify, other pages and the other group stay zero, and chunks do not show."""
    memory, pages, keys = painted(block_bytes, interleaved=interleaved)

    assert verify(memory, 0, pages, keys).tolist() == []
    others = np.setdiff1d(np.arange(24), pages)
    assert not any(array[others].any() for array in memory.arrays[0])
    assert not any(array.any() for array in memory.arrays[1])
    for layer, array in enumerate(memory.arrays[0]):
        assert (oracle(keys, 0, layer, 0, array.shape[1]) == array[pages]).all()


def test_chunks_of_one_page_paint_the_same(monkeypatch):
    """The bytes do not depend on how many pages are worked on at once."""
    memory, pages, keys = painted(1001)
    monkeypatch.setattr(paint_module, "CHUNK_BYTES", 1)

    assert verify(memory, 0, pages, keys).tolist() == []


def swap_blocks(memory, pages):
    for array in memory.arrays[0]:
        array[[pages[3], pages[7]]] = array[[pages[7], pages[3]]]
    return [3, 7]


def swap_layers(memory, pages):
    first, second = memory.arrays[0][:2]
    size = min(first.shape[1], second.shape[1])
    kept = first[pages[4]].copy()
    first[pages[4], :size] = second[pages[4], :size]
    second[pages[4], :size] = kept[:size]
    return [4]


def shift_by_one(memory, pages):
    row = memory.arrays[0][1][pages[5]]
    row[1:] = row[:-1].copy()
    return [5]


def shift_by_a_word(memory, pages):
    row = memory.arrays[0][2][pages[6]]
    row[8:] = row[:-8].copy()
    return [6]


def rotate_words(memory, pages):
    row = memory.arrays[0][0][pages[6]]
    row[:] = np.roll(row, 8)
    return [6]


def zero_fill(memory, pages):
    for array in memory.arrays[0]:
        array[pages[8]] = 0
    return [8]


def half_written(memory, pages):
    row = memory.arrays[0][2][pages[9]]
    row[len(row) // 2 :] = 0
    return [9]


def last_byte(memory, pages):
    memory.arrays[0][2][pages[19], -1] ^= 1
    return [19]


def stale_page(memory, pages):
    paint(memory, 0, pages[10:11], random_keys(1, seed=9))
    return [10]


def one_key_bit(memory, pages):
    keys = random_keys(20)[11:12].copy()
    keys[0, 15] ^= 1
    paint(memory, 0, pages[11:12], keys)
    return [11]


def other_rank(memory, pages):
    memory.rank = 1
    paint(memory, 0, pages[12:13], random_keys(20)[12:13])
    memory.rank = 0
    return [12]


def other_group(memory, pages):
    paint(memory, 1, pages[13:14], random_keys(20)[13:14])
    for mine, other in zip(memory.arrays[0], memory.arrays[1], strict=True):
        mine[pages[13]] = other[pages[13]]
    return [13]


FAULTS = [
    swap_blocks,
    swap_layers,
    shift_by_one,
    shift_by_a_word,
    rotate_words,
    zero_fill,
    half_written,
    last_byte,
    stale_page,
    one_key_bit,
    other_rank,
    other_group,
]


@pytest.mark.parametrize("block_bytes", SIZES[1:])
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault, block_bytes):
    """Exactly the blocks that were spoiled are reported, whatever the fault."""
    memory, pages, keys = painted(block_bytes)
    expected = fault(memory, pages)

    assert expected == verify(memory, 0, pages, keys).tolist()


def plain_mix(value):
    mask = (1 << 64) - 1
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & mask
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & mask
    return value ^ (value >> 31)


def test_pattern_equals_plain_integers():
    """The bytes are fixed by key, group, layer and rank alone: the same formula in Python's integers
    agrees."""
    key = bytes(range(200, 216))
    first, second = (int.from_bytes(half, "little") for half in (key[:8], key[8:]))
    place = (1 << 48) | (3 << 32) | 2
    seed = plain_mix(plain_mix((first + place) % 2**64) ^ second)
    words = [(seed + i * 0x9E3779B97F4A7C15) % 2**64 for i in range(3)]
    expected = b"".join(word.to_bytes(8, "little") for word in words)[:19]

    assert expected == oracle(np.frombuffer(key, np.uint8).reshape(1, 16), 1, 2, 3, 19).tobytes()


def test_nothing_to_paint_is_fine():
    """An empty batch changes nothing and reports nothing."""
    memory = make(64)
    none = np.empty(0, np.int32)
    paint(memory, 0, none, random_keys(0))

    assert len(verify(memory, 0, none, random_keys(0))) == 0
