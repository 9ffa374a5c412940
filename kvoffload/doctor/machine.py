"""What the machine gives: cores, memory, and the limits that a container or a login puts on them."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from kvoffload.config import AUTO_FRACTION
from kvoffload.doctor.finding import Finding
from kvoffload.memory import cgroup_folders, read_memory
from kvoffload.units import format_size

AREA = "machine"
SMALL_MEMORY = 4 << 30
"""Bytes. With less to spare, a host tier holds a few long prompts at most."""

FEW_FILES = 256
"""Open files. An engine, its workers and this use some tens each."""


def look_at_machine(root: Path = Path("/")) -> Iterator[Finding]:
    """CPU, memory, pinning, huge pages, limits. root: holds proc/ and sys/."""
    yield Finding(AREA, "CPU", _model(root))
    yield Finding(AREA, "cores", *_cores(root))
    memory = read_memory(root)
    yield Finding(
        AREA,
        "memory",
        f"{_size(memory.available)} of {_size(memory.limit)} available",
        "little for a host tier: free some, or raise the container's limit"
        if memory.available < SMALL_MEMORY
        else "",
    )
    yield Finding(AREA, "host_bytes=auto", f"{_size(memory.available // AUTO_FRACTION)} now")
    yield Finding(AREA, "cgroup memory", _cgroup_memory(root))
    yield Finding(AREA, "pinned memory", *_pinned(*resource.getrlimit(resource.RLIMIT_MEMLOCK)))
    yield Finding(AREA, "huge pages", *_huge_pages(root))
    yield Finding(AREA, "open files", *_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE)))
    yield Finding(AREA, "file size", *_file_size(*resource.getrlimit(resource.RLIMIT_FSIZE)))
    yield Finding(AREA, "cgroup I/O", *_io_limits(root))


def _model(root: Path) -> str:
    for line in _text(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model"):
            return " ".join(value.split())
    return os.uname().machine


def _cores(root: Path) -> tuple[str, str]:
    usable, there = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    quotas = [_quota(_text(folder / "cpu.max")) for folder in cgroup_folders(root)]
    quota = min((q for q in quotas if q), default=0.0)
    value = f"{usable} of {there}" + (f", cgroup quota {quota:g}" if quota else "")
    advice = ""
    if usable < 2 or 0 < quota < 2:
        advice = "one core for engine, copies and disk: they will take turns; give at least 2"
    return value, advice


def _quota(text: str) -> float:
    """Cores that "max 100000" or "200000 100000" allows; 0 = no bound."""
    words = text.split()
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0].isdecimal() else 0.0


def _cgroup_memory(root: Path) -> str:
    limits = [
        int(text)
        for folder in cgroup_folders(root)
        for name in ("memory.max", "memory.limit_in_bytes")
        if (text := _text(folder / name)).isdecimal() and int(text) < 1 << 60
    ]
    return f"limit {_size(min(limits))}" if limits else "no limit"


def _pinned(soft: int, hard: int) -> tuple[str, str]:
    if soft == resource.RLIM_INFINITY:
        return "no limit", ""
    raised = (
        "`ulimit -l unlimited`"
        if hard == resource.RLIM_INFINITY
        else "memlock in limits.conf or --ulimit memlock=-1"
    )
    return (
        f"limit {_size(soft)}",
        f"a GPU's host tier may fall back to pageable memory, about half as fast: raise it with {raised}",
    )


def _huge_pages(root: Path) -> tuple[str, str]:
    text = _text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    chosen = text.partition("[")[2].partition("]")[0]
    if chosen in ("always", "madvise"):
        return f"transparent, {chosen}", ""
    return (
        chosen or "unknown",
        "gathers of small fragments lose up to a quarter: write madvise to"
        " /sys/kernel/mm/transparent_hugepage/enabled",
    )


def _open_files(soft: int, hard: int) -> tuple[str, str]:
    value = "no limit" if soft == resource.RLIM_INFINITY else f"limit {soft:,}"
    few = soft != resource.RLIM_INFINITY and soft < FEW_FILES
    return value, f"few: `ulimit -n {min(hard, 4096) if hard > 0 else 4096}`" if few else ""


def _file_size(soft: int, hard: int) -> tuple[str, str]:
    if soft == resource.RLIM_INFINITY:
        return "no limit", ""
    return f"limit {_size(soft)}", f"disk_bytes above {_size(soft)} cannot be reserved: `ulimit -f unlimited`"


def _io_limits(root: Path) -> tuple[str, str]:
    """Bounds of reads and writes that this process's cgroups set, by device."""
    names = ("io.max", "blkio.throttle.read_bps_device", "blkio.throttle.write_bps_device")
    found = [
        " ".join(line.split())
        for folder in cgroup_folders(root)
        for name in names
        for line in _text(folder / name).splitlines()
    ]
    if not found:
        return "no limit", ""
    return "; ".join(
        found
    ), "the disk tier cannot be faster than this: lift it, or set disk_write_budget below it"


def _size(count: int) -> str:
    return format_size(count).partition(" ")[0]


def _text(path: Path) -> str:
    """The file's text, "" where it cannot be read: what the kernel does not say limits nothing."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
