"""How blocks are copied, and the measurement that chooses for a device."""

from __future__ import annotations

import hashlib
import json
import logging
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import kvoffload
from kvoffload.arena import HostArena
from kvoffload.errors import ConfigError
from kvoffload.layout import CacheGroup, GroupKind, Layout, Region
from kvoffload.messages import COPY_DTYPE, Status
from kvoffload.native import DeviceModule

FRAGMENTS = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)
"""Bytes measured; a pool is treated like the largest of these that is not larger than its pages."""

MEASURED_BYTES = 32 << 20
BUDGET_SECONDS = 1.5
"""What is not measured by then is staged."""

_log = logging.getLogger("kvoffload")

MARGIN = 0.97
"""A mode that is simpler on the device wins from this part of the fastest one's rate on."""


class CopyMode(IntEnum):
    """csrc/gpu_copier.h says how each works."""

    STAGED = 0
    DMA = 1
    KERNEL = 2

    @classmethod
    def of(cls, name: str) -> CopyMode:
        """The mode of a configuration's word; ConfigError for any other."""
        try:
            return cls[name.upper()]
        except KeyError:
            raise ConfigError(f"copy_mode {name!r}: must be auto, staged, dma or kernel") from None


_PREFERENCE = (CopyMode.DMA, CopyMode.STAGED, CopyMode.KERNEL)
"""DMA leaves the multiprocessors alone; a kernel that reads host memory holds some for the whole copy."""


@dataclass(frozen=True, slots=True)
class Modes:
    """Which mode serves which page size. loads: by fragment bytes.

    Stores are staged unless fixed: only that frees the pages without holding back the engine's stream.
    """

    store: CopyMode = CopyMode.STAGED
    loads: Mapping[int, CopyMode] = field(default_factory=dict)

    @classmethod
    def fixed(cls, mode: CopyMode) -> Modes:
        """One mode for everything."""
        return cls(mode, {0: mode})

    def choose(self, pool: tuple[Region, ...]) -> tuple[int, int]:
        """(store, load) for a group with these regions, judged by the page that its average byte lies in."""
        total = sum(r.page_bytes for r in pool)
        fragment = sum(r.page_bytes**2 for r in pool) // total if total else 0
        fitting = [size for size in self.loads if size <= fragment]
        load = self.loads[max(fitting)] if fitting else CopyMode.STAGED
        return int(self.store), int(load)


def calibrated(module: DeviceModule, device: int, folder: Path | None = None) -> Modes:
    """The modes measured for this device and driver, from the user's cache directory or measured now (< 2 s).

    All staged, with a warning, where there is no memory to measure with.
    """
    name, _, driver, runtime = module.device_info(device)
    path = _cache_file(f"{name}|{driver}|{runtime}|{kvoffload.__version__}", folder)
    known = _read(path)
    if known is None:
        try:
            known = measure(module, device)
        except (RuntimeError, ConfigError) as error:
            _log.warning(
                "copies of device %d are staged, measuring the other modes failed: %s", device, error
            )
            return Modes()
        _write(path, known)
    return Modes(CopyMode.STAGED, known)


def measure(module: DeviceModule, device: int) -> dict[int, CopyMode]:
    """The best load mode for each fragment size."""
    end = time.monotonic() + BUDGET_SECONDS
    best = {}
    for fragment in FRAGMENTS:
        rates = {}
        for mode in _PREFERENCE:
            if time.monotonic() < end:
                rates[mode] = _rate(module, device, fragment, mode)
        best[fragment] = prefer(rates)
    return best


def prefer(rates: Mapping[CopyMode, float]) -> CopyMode:
    """The simplest mode whose rate is close to the fastest; STAGED unless all were measured."""
    if len(rates) < len(_PREFERENCE) or not any(rates.values()):
        return CopyMode.STAGED
    good = [m for m in _PREFERENCE if rates[m] >= MARGIN * max(rates.values())]
    return good[0]


def _rate(module: DeviceModule, device: int, fragment: int, mode: CopyMode) -> float:
    """Bytes/s of a load of permuted pages; 0 where a copy fails."""
    regions = max(1, (1 << 20) // fragment)
    blocks = MEASURED_BYTES // (fragment * regions)
    layout = Layout(16, (CacheGroup(0, GroupKind.FULL, 16, fragment * regions),))
    arena = HostArena(MEASURED_BYTES, 1, layout)
    pages = module.memory_allocate(MEASURED_BYTES)
    stream, event = module.stream_create(), module.event_create()
    pinned = not module.host_register(arena.base, arena.nbytes, device)
    try:
        pool = [(pages + n * blocks * fragment, fragment, fragment, blocks) for n in range(regions)]
        space = (arena.slab_bytes, 1, [layout.groups[0].slot_bytes])
        copier = module.GpuCopier(
            arena.base, space, [pool], [(int(mode),) * 2], device=device, store_staging=4 << 20
        )
        if pinned:
            copier.add_pinned(arena.base, arena.nbytes)
        copies: NDArray[np.void] = np.zeros(blocks, COPY_DTYPE)
        copies["page"] = random.Random(0).sample(range(blocks), blocks)
        copies["host"] = np.arange(blocks)
        fastest = float("inf")
        for _ in range(3):
            module.event_record(event, stream)
            begin = time.perf_counter()
            handle = copier.submit(copies, True, event, stream)
            copier.wait(handle, 10.0)
            fastest = min(fastest, time.perf_counter() - begin)
            status = copier.query(handle)
            if status is None or (status != Status.OK).any():
                fastest = float("inf")
                break
        copier.close()
    finally:
        if pinned:
            module.host_unregister(arena.base)
        module.event_destroy(event)
        module.stream_destroy(stream)
        module.memory_free(pages)
        arena.close()
    return MEASURED_BYTES / fastest


def _cache_file(key: str, folder: Path | None) -> Path | None:
    if folder is None:
        try:
            folder = Path.home() / ".cache" / "kvoffload"
        except RuntimeError:  # no home directory
            return None
    return folder / f"copy-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def _read(path: Path | None) -> dict[int, CopyMode] | None:
    """What was measured before; None where there is nothing that can be used."""
    if path is None:
        return None
    try:
        return {int(size): CopyMode[name] for size, name in json.loads(path.read_text()).items()}
    except (OSError, ValueError, KeyError, AttributeError):
        return None


def _write(path: Path | None, modes: Mapping[int, CopyMode]) -> None:
    """Keep what was measured; without a place for it the next start measures again."""
    if path is None:
        return
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        scratch = path.with_suffix(".new")
        scratch.write_text(json.dumps({str(size): mode.name for size, mode in modes.items()}))
        scratch.replace(path)
    except OSError:
        return
