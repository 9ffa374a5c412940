"""What lies under a disk path, without an engine: list, verify, clear (`kvoffload disk ls|verify|clear`)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
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
LOCKS = Path("/proc/locks")


@dataclass(frozen=True, slots=True)
class RankUsage:
    """One rank's directory. age: seconds since the last write; blocks, used: what its table lists.

    namespace is the digest in hex. A directory that this program cannot read has 0 blocks. holder: the process that
    has it open as far as this machine knows, 0 = none.
    """

    directory: Path
    namespace: str
    reserved: int
    blocks: int
    used: int
    age: float
    readable: bool
    holder: int = 0


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


def verify(
    disk_path: Path, namespace: str = "", checked: Callable[[int], None] = lambda blocks: None
) -> Iterator[Verification]:
    """Check every payload against its record, a rank at a time, of namespaces that begin with `namespace`.

    Raises TierError, checking nothing, where one of them is in use. checked: told of blocks as they are done.
    """
    directories = _within(disk_path, namespace)
    with _locked(directories):
        for directory in directories:
            manifest = load_manifest(directory)
            blocks, bad = (0, 0) if manifest is None else _verify(directory, manifest, checked)
            yield Verification(directory, blocks, bad)


def clear(disk_path: Path, namespace: str = "") -> int:
    """Delete the namespaces that begin with `namespace`; the bytes freed.

    Raises TierError, deleting nothing, where one is in use. Only directories that hold what the disk tier writes are
    touched.
    """
    directories = _within(disk_path, namespace)
    freed = 0
    with _locked(directories):
        for directory in directories:
            freed += sum(f.stat().st_blocks * 512 for f in directory.iterdir() if f.is_file())
            shutil.rmtree(directory)
            for parent in directory.parents[:2]:
                if not any(parent.iterdir()):
                    parent.rmdir()
    return freed


def _within(disk_path: Path, namespace: str) -> list[Path]:
    return [d for d in rank_directories(disk_path) if d.parents[1].name.startswith(namespace)]


@contextmanager
def _locked(directories: Sequence[Path]) -> Iterator[None]:
    """This process owns all of them, or none. Raises TierError naming the holder."""
    locks: list[int] = []
    try:
        locks.extend(lock_directory(directory) for directory in directories)
        yield
    finally:
        for lock in locks:
            os.close(lock)


def _holder(directory: Path) -> int:
    """The process in the lock file if the kernel lists a lock on that file: asking never disturbs an engine's start."""
    try:
        file = (directory / "lock").stat().st_ino
        locks = LOCKS.read_text().splitlines()
        holder = (directory / "lock").read_text().strip()
    except OSError:
        return 0
    held = any(
        words[1] == "FLOCK" and words[5].endswith(f":{file}")
        for words in map(str.split, locks)
        if len(words) > 5
    )
    return int(holder) if held and holder.isdecimal() else 0


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
        holder=_holder(directory),
    )


def _verify(directory: Path, manifest: Manifest, checked: Callable[[int], None]) -> tuple[int, int]:
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
                checked(len(some))
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
