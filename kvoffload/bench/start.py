"""How long a full disk tier takes to open. It reads the table and no payload: slots count, bytes do not."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from kvoffload.arena import HostArena
from kvoffload.bench.index import random_keys
from kvoffload.bench.rows import MILLISECONDS, Limit, Row, compare, constant
from kvoffload.bench.timing import ROUNDS, timed
from kvoffload.layout import SLOT_ALIGN, CacheGroup, GroupKind, Layout
from kvoffload.messages import COPY_DTYPE, Copies, Status
from kvoffload.tiers import DiskTier

SLAB_BYTES = 32 << 20
PER_SLAB = SLAB_BYTES // SLOT_ALIGN
NAMESPACE = b"kvoffload-bench1"


def bench_start(folder: Path, slots: int = 100_000, rounds: int = ROUNDS) -> Iterator[Row]:
    """Rows of opening a tier with `slots` blocks of one page each. What is created in `folder` is removed again."""
    layout = Layout(16, (CacheGroup(0, GroupKind.FULL, 16, SLOT_ALIGN),))
    with tempfile.TemporaryDirectory(prefix="kvoffload-bench-", dir=folder) as place:
        directory = Path(place) / "rank"
        slabs = -(-slots // PER_SLAB)
        _fill(directory, layout, slots, slabs)
        before = _bytes_read()
        _open(directory, layout, slots, slabs)
        after = _bytes_read()
        yield from compare(
            f"open with {slots:,} blocks",
            MILLISECONDS,
            partial(_open, directory, layout, slots, slabs),
            [Limit("reading the table", timed((directory / "table").read_bytes, time.perf_counter))],
            rounds,
        )
        if before is not None and after is not None:
            yield constant("read while opening", "B/slot", (after - before) / slots)


def _open(directory: Path, layout: Layout, slots: int, slabs: int) -> float:
    begin = time.perf_counter()
    tier = DiskTier(directory, layout, SLAB_BYTES, slabs, NAMESPACE)
    found = len(tier.records())
    seconds = time.perf_counter() - begin
    tier.close()
    if found != slots:
        raise RuntimeError(f"{found} of {slots} blocks were found again")
    return seconds


def _fill(directory: Path, layout: Layout, slots: int, slabs: int) -> None:
    """One block in every slot, a slab at a time."""
    tier = DiskTier(directory, layout, SLAB_BYTES, slabs, NAMESPACE)
    arena = HostArena(SLAB_BYTES, 1, layout)
    keys = random_keys(slots)
    try:
        for slab in range(slabs):
            part = keys[slab * PER_SLAB : (slab + 1) * PER_SLAB]
            copies: Copies = np.zeros(len(part), COPY_DTYPE)
            copies["key"] = part
            copies["host"] = np.arange(len(part))
            copies["disk"] = np.arange(len(part)) + (slab << 16)
            copies["seq"] = np.arange(len(part)) + 1 + slab * PER_SLAB
            if (tier.write(copies, arena) != Status.OK).any():
                raise RuntimeError(f"{directory}: the benchmark's blocks could not be written")
    finally:
        arena.close()
        tier.close()


def _bytes_read() -> int | None:
    """What this process has read so far with system calls; None where the kernel does not say."""
    try:
        first = Path("/proc/self/io").read_text().splitlines()[0]
    except OSError:
        return None
    return int(first.removeprefix("rchar: "))
