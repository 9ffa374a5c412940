"""`kvoffload bench disk`: writes and verified reads beside a raw loop over the same slots, and fio."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from kvoffload import _C
from kvoffload.arena import HostArena
from kvoffload.bench.rows import Limit, Row, compare, rate, ratio_at_least
from kvoffload.bench.timing import ROUNDS
from kvoffload.layout import CacheGroup, GroupKind, Layout
from kvoffload.messages import COPY_DTYPE, Copies, Status, StatusArray
from kvoffload.tiers import DiskTier
from kvoffload.tiers.disk import THREADS

SLAB_BYTES = 32 << 20
TARGET = 0.9
"""Least share of a raw loop with the same threads and slots."""


def bench_disk(
    folder: Path, block_bytes: int = 1 << 20, nbytes: int = 256 << 20, rounds: int = ROUNDS
) -> Iterator[Row]:
    """Write and read rows. folder: on the disk to measure; what is created there is removed again."""
    layout = Layout(16, (CacheGroup(0, GroupKind.FULL, 16, block_bytes),))
    per_slab = SLAB_BYTES // layout.groups[0].slot_bytes
    slabs = max(-(-nbytes // block_bytes // per_slab), 1)
    arena = HostArena(SLAB_BYTES, slabs, layout)
    copies = _shuffled(max(nbytes // block_bytes, 1), per_slab)
    for copy in copies:
        arena.view(0, int(copy["host"]))[:] = int(copy["disk"]) % 251
    with tempfile.TemporaryDirectory(dir=folder) as place:
        tier = DiskTier(Path(place) / "rank", layout, SLAB_BYTES, slabs, b"bench")
        try:
            yield from _rows(tier, arena, copies, rounds)
        finally:
            tier.close()
            arena.close()


def _rows(tier: DiskTier, arena: HostArena, copies: Copies, rounds: int) -> Iterator[Row]:
    group = arena.layout.groups[0]
    offsets = [int(c["disk"] >> 16) * SLAB_BYTES + int(c["disk"] & 0xFFFF) * group.slot_bytes for c in copies]
    moved = group.block_bytes * len(copies)
    how = "O_DIRECT" if tier.direct else "buffered"
    path = tier.directory / "slots"
    file = os.open(path, os.O_RDWR | (os.O_DIRECT if tier.direct else 0))
    try:
        for write, move in ((True, tier.write), (False, tier.read)):
            tier.write(copies, arena)
            raw = partial(_raw, file, write, arena.base, group.slot_bytes, offsets)
            limits = [Limit(f"raw {how} loop", raw, ratio_at_least(TARGET))]
            if shutil.which("fio") and not write:
                limits.append(Limit("fio", partial(_fio, path, tier, moved)))
            name = f"{'write' if write else 'read'} {group.block_bytes >> 10} KiB blocks, checksum, {THREADS} threads"
            yield from compare(name, rate(moved), partial(_seconds, move, copies, arena), limits, rounds)
    finally:
        os.close(file)


def _shuffled(blocks: int, per_slab: int) -> Copies:
    """Host slots in order to disk slots in random order, none adjacent by design."""
    copies: Copies = np.zeros(blocks, COPY_DTYPE)
    places = [n // per_slab << 16 | n % per_slab for n in range(blocks)]
    copies["host"] = places
    copies["disk"] = random.Random(0).sample(places, blocks)
    copies["key"][:, :4] = np.arange(blocks, dtype="<u4").view(np.uint8).reshape(-1, 4)
    return copies


def _seconds(move: Callable[[Copies, HostArena], StatusArray], copies: Copies, arena: HostArena) -> float:
    begin = time.perf_counter()
    status = move(copies, arena)
    seconds = time.perf_counter() - begin
    if (status != Status.OK).any():
        raise RuntimeError("the benchmark's transfers failed")
    return seconds


def _raw(file: int, write: bool, base: int, slot_bytes: int, offsets: Sequence[int]) -> float:
    seconds = _C.raw_file_loop(file, write, base, slot_bytes, offsets, THREADS)
    if seconds < 0:
        raise RuntimeError(f"the raw loop failed: {os.strerror(int(-seconds))}")
    return seconds


def _fio(path: Path, tier: DiskTier, nbytes: int) -> float:
    """fio's random reads of the slot file, as the seconds that `nbytes` take at its rate."""
    block = 1 << 20
    command = [
        "fio", "--name=slots", f"--filename={path}", "--rw=randread", f"--bs={block}", "--ioengine=psync",
        "--thread", f"--numjobs={THREADS}", f"--size={nbytes // THREADS // block * block}",
        f"--direct={int(tier.direct)}", "--group_reporting", "--output-format=json",
    ]  # fmt: skip
    report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return nbytes / float(report["jobs"][0]["read"]["bw_bytes"])
