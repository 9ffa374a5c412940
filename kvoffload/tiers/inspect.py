"""What lies under a disk path, without an engine: list, verify, clear (`kvoffload disk ls|verify|clear`)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvoffload import _C
from kvoffload.arena import HostArena
from kvoffload.layout import MAX_SLOTS_PER_SLAB, CacheGroup, GroupKind, Layout
from kvoffload.messages import COPY_DTYPE, Status
from kvoffload.tiers.files import lock_directory
from kvoffload.tiers.table import MANIFEST, Manifest, load_manifest

SLOTS = "slots"
TABLE = "table"


@dataclass(frozen=True, slots=True)
class RankUsage:
    """One rank's directory. age: seconds since the last write; blocks, used: what its table lists.

    namespace is the digest in hex. A directory that this program cannot read has 0 blocks.
    """

    directory: Path
    namespace: str
    reserved: int
    blocks: int
    used: int
    age: float
    readable: bool


@dataclass(frozen=True, slots=True)
class Verification:
    """One rank's directory, every payload read: blocks listed, and those whose bytes are not their key's."""

    directory: Path
    blocks: int
    bad: int


def rank_directories(disk_path: Path) -> list[Path]:
    """Every directory of a rank under `disk_path`, sorted."""
    return sorted(p.parent for p in disk_path.glob(f"*/dp*/rank*/{SLOTS}"))


def list_ranks(disk_path: Path, now: float) -> list[RankUsage]:
    """What each rank's directory holds, in use or not; reads tables only. now: seconds as time.time."""
    return [_usage(directory, now) for directory in rank_directories(disk_path)]


def verify(disk_path: Path) -> Iterator[Verification]:
    """Check every payload against its record, a rank at a time. Raises TierError for a directory in use."""
    for directory in rank_directories(disk_path):
        manifest = load_manifest(directory)
        if manifest is None:
            yield Verification(directory, 0, 0)
            continue
        lock = lock_directory(directory)
        try:
            blocks, bad = _verify(directory, manifest)
        finally:
            os.close(lock)
        yield Verification(directory, blocks, bad)


def clear(disk_path: Path, namespace: str | None = None) -> int:
    """Delete one namespace, or all; the bytes freed. Raises TierError, deleting nothing, where one is in use.

    Only directories that hold what the disk tier writes are touched.
    """
    directories = [d for d in rank_directories(disk_path) if namespace in (None, d.parents[1].name)]
    freed = 0
    locks: list[int] = []
    try:
        locks.extend(lock_directory(directory) for directory in directories)
        for directory in directories:
            freed += sum(f.stat().st_blocks * 512 for f in directory.iterdir() if f.is_file())
            shutil.rmtree(directory)
            for parent in directory.parents[:2]:
                if not any(parent.iterdir()):
                    parent.rmdir()
    finally:
        for lock in locks:
            os.close(lock)
    return freed


def _usage(directory: Path, now: float) -> RankUsage:
    manifest = load_manifest(directory)
    blocks = used = 0
    if manifest is not None:
        with _native(directory, manifest) as (_, records):
            sizes = np.array([block for block, _ in manifest.groups])
            blocks, used = len(records), int(sizes[records["group"]].sum())
    changed = max(
        (f.stat().st_mtime for f in directory.iterdir() if f.name in (SLOTS, TABLE, MANIFEST)), default=now
    )
    return RankUsage(
        directory=directory,
        namespace=directory.parents[1].name,
        reserved=sum(f.stat().st_size for f in directory.iterdir()),
        blocks=blocks,
        used=used,
        age=max(now - changed, 0.0),
        readable=manifest is not None,
    )


def _verify(directory: Path, manifest: Manifest) -> tuple[int, int]:
    groups = tuple(CacheGroup(i, GroupKind.FULL, 1, block) for i, (block, _) in enumerate(manifest.groups))
    arena = HostArena(manifest.slab_bytes, 1, Layout(1, groups))
    bad = 0
    try:
        with _native(directory, manifest) as (native, records):
            for slab in np.unique(records["slot"] >> 16):
                some = records[records["slot"] >> 16 == slab]
                copies = np.zeros(len(some), COPY_DTYPE)
                for name in ("key", "seq", "depth", "group"):
                    copies[name] = some[name]
                copies["disk"] = some["slot"]
                copies["host"] = some["slot"] & (MAX_SLOTS_PER_SLAB - 1)
                bad += int((native.read(copies, arena.base, arena.space) != Status.OK).sum())
    finally:
        arena.close()
    return len(records), bad


@contextmanager
def _native(directory: Path, manifest: Manifest) -> Iterator[tuple[_C.DiskIO, NDArray[np.void]]]:
    """The directory's I/O, read-only, and its records."""
    slots, table = (os.open(directory / name, os.O_RDONLY | os.O_CLOEXEC) for name in (SLOTS, TABLE))
    try:
        native = _C.DiskIO(
            slots,
            table,
            _C.SlotSpace(manifest.slab_bytes, manifest.slabs, [slot for _, slot in manifest.groups]),
            [block for block, _ in manifest.groups],
            manifest.epoch,
            checksum=manifest.checksum,
            threads=2,
            error_limit=1 << 30,
        )
        yield native, native.scan(os.fstat(slots).st_size)
        native.close()
    finally:
        os.close(slots)
        os.close(table)
