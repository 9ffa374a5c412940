"""What of kvoffload is here: native modules, Python, optional packages."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shutil
import sys
from collections.abc import Iterator

import kvoffload
from kvoffload.doctor.finding import Finding
from kvoffload.native import load

AREA = "built"

GPU_MODULES = {
    "_cuda": ("CUDA copies", "nvcc"),
    "_hip": ("HIP copies", "hipcc"),
    "_sim": ("GPU copies played on the CPU", "g++"),
}
"""Native modules beside _C: what each is for, and the compiler it needs."""

PACKAGES = {
    "prometheus_client": "metrics for Prometheus; pip install 'kvoffload[metrics]'",
    "matplotlib": "plots of a replay; pip install 'kvoffload[report]'",
    "torch": "the engine plugins; an engine brings its own",
}


def look_at_build() -> Iterator[Finding]:
    """Versions, native modules, packages."""
    yield Finding(AREA, "kvoffload", kvoffload.__version__)
    yield Finding(
        AREA, "Python", f"{platform.python_version()} ({platform.python_implementation()})", _python()
    )
    yield Finding(AREA, "_C", *_core())
    for name, (what, compiler) in GPU_MODULES.items():
        yield _gpu(name, what, compiler)
    for name, use in PACKAGES.items():
        yield _package(name, use)


def _python() -> str:
    threads = "free-threaded" if "free-threading" in sys.version else ""
    return "kvoffload is tested with the GIL only; take the usual build of Python" if threads else ""


def _core() -> tuple[str, str]:
    from kvoffload import _C

    if _C.checksum_has_instruction():
        return "index, CPU copies, disk I/O; CRC32C by instruction", ""
    return (
        "index, CPU copies, disk I/O; CRC32C by table",
        "this CPU has no CRC32C instruction: checksums limit the disk to about 1 GB/s a thread",
    )


def _gpu(name: str, what: str, compiler: str) -> Finding:
    if importlib.util.find_spec(f"kvoffload.{name}") is None:
        found = "is on this machine" if shutil.which(compiler) else "is not on PATH"
        return Finding(
            AREA, name, f"absent: only for {what}; not in this build, {compiler} {found}", optional=True
        )
    found_module = load(name)
    if found_module.module is None:
        advice = f"build again for this Python and driver, or go without {what}"
        return Finding(AREA, name, f"absent: {found_module.reason}", advice)
    if not found_module.devices:
        return Finding(AREA, name, f"built; no device: {found_module.reason}", optional=True)
    names = {found_module.module.device_info(n)[0] for n in range(found_module.devices)}
    return Finding(AREA, name, f"built; {found_module.devices} x {', '.join(sorted(names))}")


def _package(name: str, use: str) -> Finding:
    if importlib.util.find_spec(name) is None:
        return Finding(AREA, name, f"absent: only for {use}", optional=True)
    return Finding(AREA, name, importlib.metadata.version(name.replace("_", "-")))
