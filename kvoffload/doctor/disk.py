"""Whether a folder is a good place for a disk tier."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvoffload.doctor.finding import Finding
from kvoffload.units import format_size

AREA = "disk"
PAGE = 4096
LITTLE_ROOM = 10 << 30
"""Bytes. Less holds a few long prompts of a large model."""

IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
OVER_A_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "ceph", "lustre")


def look_at_disk(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> Iterator[Finding]:
    """File system, room, O_DIRECT. A file of one page is made there for a moment. REQUIRES: the folder exists."""
    yield Finding(AREA, "folder", str(folder.resolve()), _writable(folder))
    kind = _file_system(folder.resolve(), mounts)
    yield Finding(AREA, "file system", kind, _kind_advice(kind))
    room = os.statvfs(folder)
    free = room.f_bavail * room.f_frsize
    size = format_size(free).partition(" ")[0]
    yield Finding(
        AREA,
        "free",
        size,
        "little for a disk tier: give another folder with --path" if free < LITTLE_ROOM else "",
    )
    yield Finding(AREA, "O_DIRECT", *_direct(folder))


def _writable(folder: Path) -> str:
    if os.access(folder, os.W_OK | os.X_OK):
        return ""
    return "this user may not write there: give a folder of your own with --path"


def _file_system(folder: Path, mounts: Path) -> str:
    """The type of the mount that holds the folder: the longest mount point above it; the last one mounted wins."""
    best, kind = -1, "unknown"
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return kind
    for line in lines:
        left, _, right = line.partition(" - ")
        point = left.split()[4].encode().decode("unicode_escape")
        if folder.is_relative_to(point) and len(point) >= best:
            best, kind = len(point), right.split()[0]
    return kind


def _kind_advice(kind: str) -> str:
    if kind in IN_MEMORY:
        return "this is memory: a disk tier here takes from the host tier and survives no restart"
    if kind in OVER_A_NETWORK:
        return "this lies behind a network: put the disk tier on a local drive"
    if kind in ("btrfs", "zfs"):
        return "copy-on-write: each overwrite of a slot moves it; ext4 or xfs suits better (or `chattr +C`)"
    return ""


def _direct(folder: Path) -> tuple[str, str]:
    advice = "reads and writes go through the page cache, slower and out of host memory: ext4 and xfs have it"
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file, mmap.mmap(-1, PAGE) as page:
            direct = os.open(file.name, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
            try:
                os.pwritev(direct, [page], 0)
            finally:
                os.close(direct)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return f"refused ({error.strerror})", advice
        return (
            f"not tried ({error.strerror})",
            "a disk tier cannot be made there: give another folder with --path",
        )
    return "works", ""
