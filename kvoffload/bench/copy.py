"""CPU gather and scatter of fragments beside one large memcpy of the same bytes, and memcpy of the same fragments.

This is what `kvoffload bench copy` measures where no device can be used.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvoffload import _C
from kvoffload.arena import HostArena
from kvoffload.bench.copy_cases import DIRECTIONS, FRAGMENTS, permuted, regions_of, rows_of
from kvoffload.bench.rows import CopyCase, Limit, Row, ratio_at_least
from kvoffload.bench.timing import ROUNDS
from kvoffload.copying import CpuCopyEngine, Direction
from kvoffload.layout import SLOT_ALIGN, CacheGroup, GroupKind, Layout, Region
from kvoffload.messages import COPY_DTYPE, Copies, Status

JUDGED = range(16 << 10, (256 << 10) + 1)
"""Fragment sizes that targets are for; these stand beside memcpy of the same fragments, too."""

Jobs = Sequence[tuple[Direction, Copies]]


def bench_copy(
    fragments: Sequence[int] = FRAGMENTS,
    threads: Sequence[int] = (1, 2),
    nbytes: int = 256 << 20,
    rounds: int = ROUNDS,
) -> Iterator[Row]:
    """Rows for each fragment size, number of threads and direction, and for pages in order.

    nbytes: moved per measurement; of "both", one half goes each way.
    """
    for fragment in fragments:
        for count in threads:
            yield from _bench(fragment, count, nbytes, rounds)
        if fragment % SLOT_ALIGN == 0:
            yield from _bench(fragment, max(threads), nbytes, rounds, merged=True)


def _bench(fragment: int, threads: int, nbytes: int, rounds: int, merged: bool = False) -> Iterator[Row]:
    regions = 1 if merged else regions_of(fragment)
    block = fragment * regions
    blocks = max(nbytes // block // 2, 1) * 2
    moved = blocks * block
    layout = Layout(16, (CacheGroup(0, GroupKind.FULL, 16, block),))
    per_slab = max((32 << 20) // block, 1)
    arena = HostArena(per_slab * block, -(-blocks // per_slab), layout)
    arena.prefault(threads)
    pages = HostArena(moved, 1, layout)  # aligned and in huge pages, as engines allocate their pools
    pages.prefault(threads)
    engine = CpuCopyEngine(threads)
    pool = blocks * fragment
    engine.register(
        layout,
        (tuple(Region(pages.base + n * pool, fragment, fragment, blocks) for n in range(regions)),),
        arena,
    )
    copies: NDArray[np.void] = np.zeros(blocks, COPY_DTYPE)
    copies["page"] = range(blocks) if merged else permuted(blocks)
    copies["host"] = [n // per_slab << 16 | n % per_slab for n in range(blocks)]
    for direction in DIRECTIONS:
        yield from rows_of(
            CopyCase(fragment, direction, "1 thread" if threads == 1 else f"{threads} threads", merged),
            moved,
            partial(_seconds, engine, _jobs(copies, direction)),
            _limits((arena.base, pages.base), direction, moved, threads, 0 if merged else fragment),
            rounds,
        )
    engine.close()
    pages.close()
    arena.close()


def _jobs(copies: Copies, direction: str) -> Jobs:
    half = len(copies) // 2
    return {
        "to host": ((Direction.TO_HOST, copies),),
        "to device": ((Direction.TO_DEVICE, copies),),
        "both": ((Direction.TO_HOST, copies[:half]), (Direction.TO_DEVICE, copies[half:])),
    }[direction]


def _limits(places: tuple[int, int], direction: str, moved: int, threads: int, fragment: int) -> list[Limit]:
    """Memcpy of the same bytes: fragments in order where those are judged, and one large piece per thread.

    places: of slots and of pages. direction "both": one half after the other. fragment: 0 = not judged.
    """
    slots, pages = places
    half = moved // 2
    if direction == "both":
        both = ((slots, pages), (pages + half, slots + half))
        return [Limit("large copies", partial(_large, both, half, threads))]
    place = (slots, pages) if direction == "to host" else (pages, slots)
    large = Limit(
        "large copy" if threads == 1 else "large copies",
        partial(_large, (place,), moved, threads),
    )
    if fragment not in JUDGED:
        return [large]
    in_order = partial(_C.memcpy_loop, *place, fragment, moved // fragment, threads)
    target = ratio_at_least(0.65 if threads == 1 else 0.75)
    return [Limit("memcpy in order", in_order, ratio_at_least(0.9)), replace(large, target=target)]


def _large(places: Sequence[tuple[int, int]], nbytes: int, threads: int) -> float:
    return sum(_C.memcpy_loop(*place, nbytes // threads, threads, threads) for place in places)


def _seconds(engine: CpuCopyEngine, jobs: Jobs) -> float:
    begin = time.perf_counter()
    handles = [engine.submit(copies, direction, None) for direction, copies in jobs]
    for handle in handles:
        engine.wait(handle, 600.0)
    seconds = time.perf_counter() - begin
    for handle in handles:
        status = engine.query(handle)
        if status is None or (status != Status.OK).any():
            raise RuntimeError("the benchmark's copies failed")
    return seconds
