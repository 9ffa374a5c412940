"""The content oracle: what block `key` of `group` must hold in `layer` on `rank`, byte by byte.

Word i (8 bytes, little-endian) of a page is `seed + i * STEP` modulo 2^64, where the seed mixes key, group,
layer and rank. Two pages of different seeds, and a page and itself shifted, agree nowhere but by a chance of
about 2^-64 per word; so swapped, shifted, torn, stale or missing bytes all show.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvoffload.testing.pool import KeyArray, PageMemory, Pages

STEP = 0x9E3779B97F4A7C15
"""Odd, so that the words of a page are all different."""

CHUNK_BYTES = 256 << 10
"""Bytes that one pass works on: about what a core's cache holds. A larger page is done alone."""

Words = NDArray[np.uint64]


def oracle(keys: KeyArray, group: int, layer: int, rank: int, size: int) -> NDArray[np.uint8]:
    """(n, size): the right bytes of one layer of the blocks `keys`."""
    words = _seeds(keys, group, layer, rank)[:, None] + _ramp(size)
    return words.view(np.uint8)[:, :size]


def paint(memory: PageMemory, group: int, pages: Pages, keys: KeyArray) -> None:
    """Write the right bytes of block keys[i] into page pages[i], in every layer of the group."""
    for layer, array in enumerate(memory.arrays[group]):
        seeds = _seeds(keys, group, layer, memory.rank)
        for part, words in _chunks(seeds, array.shape[1]):
            array[pages[part]] = words.view(np.uint8)[:, : array.shape[1]]


def verify(memory: PageMemory, group: int, pages: Pages, keys: KeyArray) -> NDArray[np.int64]:
    """The positions i, increasing, where page pages[i] is not exactly block keys[i]; empty = all is right."""
    wrong = np.zeros(len(pages), np.bool_)
    for layer, array in enumerate(memory.arrays[group]):
        size = array.shape[1]
        seeds = _seeds(keys, group, layer, memory.rank)
        for part, words in _chunks(seeds, size):
            found = array[pages[part]]
            if size % 8:
                wrong[part] |= (found != words.view(np.uint8)[:, :size]).any(axis=1)
            else:
                wrong[part] |= (found.view(np.uint64) != words).any(axis=1)
    return np.flatnonzero(wrong)


def _chunks(seeds: Words, size: int) -> Iterator[tuple[slice, Words]]:
    """(positions, their words) a few pages at a time. The array is reused: read it before the next step."""
    ramp = _ramp(size)
    rows = max(1, CHUNK_BYTES // size)
    buffer = np.empty((min(rows, len(seeds)), len(ramp)), np.uint64)
    for begin in range(0, len(seeds), rows):
        some = seeds[begin : begin + rows]
        yield slice(begin, begin + len(some)), np.add(some[:, None], ramp, out=buffer[: len(some)])


def _ramp(size: int) -> Words:
    return np.arange(-(-size // 8), dtype=np.uint64) * np.uint64(STEP)


def _seeds(keys: KeyArray, group: int, layer: int, rank: int) -> Words:
    halves = np.ascontiguousarray(keys).view("<u8").reshape(-1, 2)
    place = np.uint64((group << 48) | (rank << 32) | layer)
    return _mix(_mix(halves[:, 0] + place) ^ halves[:, 1])


def _mix(values: Words) -> Words:
    """A bijection in which every input bit reaches every output bit (the splitmix64 finaliser)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
