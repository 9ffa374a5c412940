"""How much memory this process may take: the machine's, or less where a cgroup (v1 or v2) says so."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

V2 = ("memory.max", "memory.current", "memory.stat", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat", "total_inactive_file")


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes. limit: what can ever be used here; available: what is free of that now, page cache included."""

    limit: int
    available: int


def read_memory(root: Path = Path("/")) -> Memory:
    """The smallest of the machine and of every cgroup that this process is in. `root` holds proc/ and sys/."""
    memory = _machine(root / "proc/meminfo")
    for folder, files in _cgroups(root):
        memory = _within(memory, folder, files)
    return memory


def resident_bytes(root: Path = Path("/")) -> int:
    """Memory of this process that is in use now, shared pages included."""
    return int((root / "proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cgroup_folders(root: Path = Path("/")) -> list[Path]:
    """Folders of this process's cgroups and of all above them, of every controller; they need not exist."""
    folders = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for mount in (
            [root / "sys/fs/cgroup"]
            if not controllers
            else [root / "sys/fs/cgroup" / c for c in controllers.split(",")]
        ):
            folder = mount / path.lstrip("/")
            folders += [f for f in (folder, *folder.parents) if f.is_relative_to(mount)]
    return folders


def _machine(meminfo: Path) -> Memory:
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    total, free = (int(lines[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
    return Memory(total, free)


def _cgroups(root: Path) -> list[tuple[Path, tuple[str, str, str, str]]]:
    """The folders of this process's memory cgroup and of all above it. Inside a container the path of the host
    may not exist; then the mount itself is the container's cgroup."""
    found = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        mount = root / "sys/fs/cgroup"
        if "memory" in controllers.split(","):
            mount, files = mount / "memory", V1
        elif hierarchy == "0":
            files = V2
        else:
            continue
        folder = mount / path.lstrip("/")
        found += [(f, files) for f in (folder, *folder.parents) if f.is_relative_to(mount)]
    return found


def _within(memory: Memory, folder: Path, files: tuple[str, str, str, str]) -> Memory:
    """`memory` cut to one cgroup. Its page cache that is not in use counts as available, as in MemAvailable."""
    limit_file, usage_file, stat_file, inactive = files
    limit, usage = _text(folder / limit_file), _text(folder / usage_file)
    if not limit.isdecimal() or not usage.isdecimal():
        return memory
    stat = dict(line.split(" ", 1) for line in _text(folder / stat_file).splitlines() if " " in line)
    used = max(int(usage) - int(stat.get(inactive, "0")), 0)
    return Memory(min(memory.limit, int(limit)), min(memory.available, max(int(limit) - used, 0)))


def _text(path: Path) -> str:
    """The file's text, "" where it cannot be read: a missing cgroup file limits nothing."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
