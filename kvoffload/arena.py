"""Host slabs: one mapping that copies, the disk tier and transit share."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvoffload import _C
from kvoffload.errors import ConfigError
from kvoffload.layout import SLOT_ALIGN, Layout

_UNLIMITED = 1 << 60
"""Bytes. A cgroup limit from here on is no limit (version 1 writes 2**63 less a page)."""


class HostArena:
    """One anonymous mapping of `slabs` slabs; slots lie in it as layout.py says.

    Thread: immutable after construction; who may touch which slot is the planner's business. Lifetime:
    addresses and views are good until `close`. A forked child shares the bytes only over a file.
    """

    def __init__(self, slab_bytes: int, slabs: int, layout: Layout, shared: Path | None = None) -> None:
        """shared: a file in memory (/dev/shm) over which processes share the bytes; made where it is missing, and its
        maker removes it when all have opened it."""
        if slab_bytes < SLOT_ALIGN or slab_bytes % SLOT_ALIGN:
            raise ConfigError(f"a slab of {slab_bytes} bytes: it must be a positive multiple of {SLOT_ALIGN}")
        if slabs < 1:
            raise ConfigError(f"{slabs} host slabs: at least 1 is needed, give host_bytes >= {slab_bytes}")
        self.slab_bytes = slab_bytes
        self.slabs = slabs
        self.layout = layout
        self.space = _C.SlotSpace(slab_bytes, slabs, [g.slot_bytes for g in layout.groups])
        nbytes = slab_bytes * slabs
        self._mapping: mmap.mmap | None = _map(nbytes) if shared is None else _map_file(shared, nbytes)
        self._bytes: NDArray[np.uint8] | None = np.frombuffer(self._mapping, np.uint8)
        self.base = int(self._bytes.ctypes.data)

    @property
    def nbytes(self) -> int:
        """Bytes mapped."""
        return self.slab_bytes * self.slabs

    def address(self, group: int, slot: int) -> int:
        """Where a slot begins. Raises IndexError for a slot that does not exist."""
        return self.base + self._offset(group, slot)

    def view(self, group: int, slot: int) -> NDArray[np.uint8]:
        """(block_bytes,): the payload of a slot."""
        if self._bytes is None:
            raise ValueError("the arena is closed")
        offset = self._offset(group, slot)
        return self._bytes[offset : offset + self.layout.groups[group].block_bytes]

    def prefault(self, threads: int = 2) -> None:
        """Back all slabs with memory now, without the GIL. Raises ConfigError where there is not enough."""
        if not _C.prefault(self.base, self.nbytes, threads):
            raise _too_large(self.nbytes)

    def prefault_slab(self, slab: int) -> bool:
        """Back one slab with memory now, without the GIL, whatever is in it; False where there is not enough.

        Thread: any; beside copies. REQUIRES: the arena is not closed meanwhile.
        """
        return _C.prefault(self.base + slab * self.slab_bytes, self.slab_bytes, 1)

    def close(self) -> None:
        """Give the memory back; the last `view` alive keeps it. Idempotent.

        REQUIRES: no copy and no I/O is running.
        """
        self._bytes = None
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            try:
                mapping.close()
            except BufferError:
                return

    def _offset(self, group: int, slot: int) -> int:
        offset = self.space.offset(group, slot)
        if offset < 0:
            raise IndexError(f"group {group} has no host slot {slot}")
        return offset


def available_host_bytes(root: Path = Path("/")) -> int:
    """What this process may still use: free memory of the machine, cut by every cgroup limit above it.

    `root` is where /proc and /sys are found.
    """
    available = _machine_available(root)
    for limit, usage in _cgroup_limits(root):
        available = min(available, limit - usage)
    return max(available, 0)


def _map(nbytes: int) -> mmap.mmap:
    """An anonymous private mapping, in huge pages where the kernel has them."""
    if nbytes > available_host_bytes():
        raise _too_large(nbytes)
    try:
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise _too_large(nbytes) from error
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        return mapping
    return mapping


def _map_file(path: Path, nbytes: int) -> mmap.mmap:
    """A file of exactly so many bytes, shared with everyone who maps it."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        room = os.fstatvfs(file)
        held = os.fstat(file).st_size
        if held not in (0, nbytes):
            raise ConfigError(f"{path} has {held} bytes, {nbytes} are to be shared: remove it")
        if not held and nbytes > room.f_bavail * room.f_frsize:
            raise ConfigError(
                f"{path}: {nbytes} bytes of host memory are to be shared and {room.f_bavail * room.f_frsize} are free"
                " there; lower host_bytes or enlarge that file system"
            )
        os.ftruncate(file, nbytes)
        return mmap.mmap(file, nbytes)
    finally:
        os.close(file)


def _too_large(nbytes: int) -> ConfigError:
    return ConfigError(
        f"host slabs of {nbytes} bytes are needed and {available_host_bytes()} bytes of memory are available "
        "(machine and cgroup limits counted); lower host_bytes or raise the limit"
    )


def _machine_available(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10
    return _UNLIMITED


def _cgroup_limits(root: Path) -> list[tuple[int, int]]:
    """(limit, bytes used that cannot be reclaimed) of the process's cgroup and those above it."""
    limits = []
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        names = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes")
            if controllers
            else ("memory.max", "memory.current")
        )
        group = base / path.strip("/")
        for folder in (group, *group.parents):
            limit, usage = (_number(folder / name) for name in names)
            if limit is not None and usage is not None and limit < _UNLIMITED:
                limits.append((limit, usage - _reclaimable(folder / "memory.stat")))
            if folder == base:
                break
    return limits


def _reclaimable(stat: Path) -> int:
    """Page cache that the kernel drops first."""
    for line in _lines(stat):
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
