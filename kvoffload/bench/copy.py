"""`kvoffload bench copy`: CPU gather and scatter of fragments beside memcpy of the same fragments."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvoffload import _C
from kvoffload.arena import HostArena
from kvoffload.bench.rows import Limit, Row, compare, rate, ratio_at_least
from kvoffload.bench.timing import ROUNDS
from kvoffload.copying import CpuCopyEngine, Direction
from kvoffload.layout import CacheGroup, GroupKind, Layout, Region
from kvoffload.messages import COPY_DTYPE, Copies, Status

FRAGMENTS = (16 << 10, 64 << 10, 256 << 10)
REGIONS = 32
"""Layers: fragments per block."""

NAMES = {Direction.TO_HOST: "gather", Direction.TO_DEVICE: "scatter"}


def bench_copy(
    fragments: Sequence[int] = FRAGMENTS,
    threads: Sequence[int] = (1, 2),
    nbytes: int = 256 << 20,
    rounds: int = ROUNDS,
) -> Iterator[Row]:
    """Rows for each fragment size, number of threads and direction. nbytes: moved per measurement."""
    for fragment in fragments:
        for count in threads:
            yield from _bench(fragment, count, nbytes, rounds)


def _bench(fragment: int, threads: int, nbytes: int, rounds: int) -> Iterator[Row]:
    blocks = max(nbytes // (fragment * REGIONS), 1)
    moved = blocks * fragment * REGIONS
    layout = Layout(16, (CacheGroup(0, GroupKind.FULL, 16, fragment * REGIONS),))
    slab = max(fragment * REGIONS, 32 << 20)
    arena = HostArena(slab, -(-blocks // (slab // (fragment * REGIONS))), layout)
    arena.prefault(threads)
    pages = HostArena(moved, 1, layout)  # aligned and in huge pages, as engines allocate their pools
    pages.prefault(threads)
    engine = CpuCopyEngine(threads)
    pool = blocks * fragment
    regions = tuple(Region(pages.base + n * pool, fragment, fragment, blocks) for n in range(REGIONS))
    engine.register(layout, (regions,), arena)
    copies = _permuted(blocks, slab // (fragment * REGIONS))
    for direction in Direction:
        place = (arena.base, pages.base) if direction is Direction.TO_HOST else (pages.base, arena.base)
        yield from compare(
            f"{NAMES[direction]} of {fragment >> 10} KiB, {threads} {'thread' if threads == 1 else 'threads'}",
            rate(moved),
            partial(_seconds, engine, copies, direction),
            _limits(place, fragment, moved, threads),
            rounds,
        )
    engine.close()
    pages.close()
    arena.close()


def _limits(place: tuple[int, int], fragment: int, moved: int, threads: int) -> list[Limit]:
    """In-order fragments and one large copy per thread, of the same bytes."""
    large = 0.65 if threads == 1 else 0.75
    return [
        Limit(
            "memcpy in order",
            partial(_C.memcpy_loop, *place, fragment, moved // fragment, threads),
            ratio_at_least(0.9),
        ),
        Limit(
            "one large memcpy" if threads == 1 else f"{threads} large memcpy",
            partial(_C.memcpy_loop, *place, moved // threads, threads, threads),
            ratio_at_least(large),
        ),
    ]


def _permuted(blocks: int, per_slab: int) -> Copies:
    """Pages in random order to slots in order, as an engine's block table gives them."""
    copies: NDArray[np.void] = np.zeros(blocks, COPY_DTYPE)
    copies["page"] = random.Random(0).sample(range(blocks), blocks)
    copies["host"] = [n // per_slab << 16 | n % per_slab for n in range(blocks)]
    return copies


def _seconds(engine: CpuCopyEngine, copies: Copies, direction: Direction) -> float:
    begin = time.perf_counter()
    handle = engine.submit(copies, direction, None)
    engine.wait(handle, 600.0)
    seconds = time.perf_counter() - begin
    status = engine.query(handle)
    if status is None or (status != Status.OK).any():
        raise RuntimeError("the benchmark's copies failed")
    return seconds
