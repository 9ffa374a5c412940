"""Copies between device pages and host slots, beside one large copy of the same bytes in the same run.

Blocks are of many layers, each a region, and page ids are permuted: no two fragments continue each other on both sides.
Rows named "merged" have one region and pages in order. `kvoffload bench copy` runs this where there is a device;
scripts that want an exit status run `python -m kvoffload.bench.gpu_copy`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvoffload.arena import HostArena
from kvoffload.bench.copy_cases import DIRECTIONS, FRAGMENTS, permuted, plot, regions_of, rows_of
from kvoffload.bench.rows import CopyCase, Limit, Row, ratio_at_least
from kvoffload.bench.show import table
from kvoffload.console import show
from kvoffload.copying.base import Direction
from kvoffload.copying.modes import CopyMode
from kvoffload.errors import ConfigError
from kvoffload.layout import SLOT_ALIGN, CacheGroup, GroupKind, Layout
from kvoffload.messages import COPY_DTYPE, Copies, Status
from kvoffload.native import DeviceModule, device_module, simulation
from kvoffload.replay.plots import prepare
from kvoffload.units import format_size

LARGE = {"to host": 0.95, "to device": 0.95, "both": 0.9}
"""Least part of one large copy (or of two at once) that fragments of at least 4 KiB must reach."""

HALVES = dict(zip(DIRECTIONS, ((0,), (1,), (0, 1)), strict=True))
PATIENCE = 60.0


class Stage:
    """Pages on the device and page-locked slots for one fragment size; half of both for each direction."""

    def __init__(
        self, module: DeviceModule, device: int, fragment: int, nbytes: int, merged: bool = False
    ) -> None:
        """nbytes: moved in each direction by one measurement. merged: one region, pages in order."""
        self.module = module
        self.device = device
        self.fragment = fragment
        self.merged = merged
        self.regions = 1 if merged else regions_of(fragment)
        block = fragment * self.regions
        self.blocks = max(nbytes // block, 1)
        self.nbytes = self.blocks * block
        layout = Layout(16, (CacheGroup(0, GroupKind.FULL, 16, block),))
        self.slot_bytes = layout.groups[0].slot_bytes
        slab = max(32 << 20, self.slot_bytes) // self.slot_bytes * self.slot_bytes
        self.per_slab = slab // self.slot_bytes
        self.arena = HostArena(slab, -(-2 * self.blocks // self.per_slab), layout)
        try:
            self.pages = module.memory_allocate(2 * self.nbytes)
        except RuntimeError as error:
            self.arena.close()
            raise ConfigError(
                f"{format_size(2 * self.nbytes)} of device memory are needed ({error}): move fewer bytes, or end"
                " what holds the device"
            ) from None
        self.locked = module.host_register(self.arena.base, self.arena.nbytes, device)
        self.streams = module.stream_create(), module.stream_create()
        self.event = module.event_create()

    def close(self) -> None:
        """Give everything back. REQUIRES: nothing runs."""
        if not self.locked:
            self.module.host_unregister(self.arena.base)
        for stream in self.streams:
            self.module.stream_destroy(stream)
        self.module.event_destroy(self.event)
        self.module.memory_free(self.pages)
        self.arena.close()

    def copies(self, half: int) -> Copies:
        """Blocks of one half, to slots in order."""
        copies: NDArray[np.void] = np.zeros(self.blocks, COPY_DTYPE)
        order = list(range(self.blocks)) if self.merged else permuted(self.blocks, half)
        slots = np.arange(self.blocks) + half * self.blocks
        copies["page"] = np.array(order) + half * self.blocks
        copies["host"] = slots // self.per_slab << 16 | slots % self.per_slab
        return copies

    def copier(self, mode: CopyMode) -> Copier:
        """A copier over all pages in this mode."""
        return Copier(self, mode)

    def large(self, directions: Sequence[int]) -> float:
        """Seconds for one large copy in each of the directions at once."""
        begin = time.perf_counter()
        for direction in directions:
            host, device = self.arena.base + direction * self.nbytes, self.pages + direction * self.nbytes
            pair = (device, host) if direction else (host, device)
            self.module.copy(*pair, self.nbytes, bool(direction), self.streams[direction])
        for direction in directions:
            self.module.stream_synchronize(self.streams[direction])
        return time.perf_counter() - begin


class Copier:
    """One native copier and the jobs that a measurement submits."""

    def __init__(self, stage: Stage, mode: CopyMode) -> None:
        self.stage = stage
        total = 2 * stage.blocks * stage.fragment
        pool = [
            (stage.pages + n * total, stage.fragment, stage.fragment, 2 * stage.blocks)
            for n in range(stage.regions)
        ]
        space = (stage.arena.slab_bytes, stage.arena.slabs, [stage.slot_bytes])
        staging = stage.blocks * stage.slot_bytes + (32 << 20)
        modes = [(int(mode), int(mode))]
        self.native = stage.module.GpuCopier(
            stage.arena.base, space, [pool], modes, device=stage.device, store_staging=staging
        )
        if not stage.locked:
            self.native.add_pinned(stage.arena.base, stage.arena.nbytes)

    def seconds(self, directions: Sequence[int], jobs: Sequence[Copies]) -> float:
        """One job in each of the directions at once."""
        module, stage = self.stage.module, self.stage
        begin = time.perf_counter()
        module.event_record(stage.event, stage.streams[0])
        handles = [
            self.native.submit(jobs[d], d == Direction.TO_DEVICE, stage.event, stage.streams[0])
            for d in directions
        ]
        for handle in handles:
            self.native.wait(handle, PATIENCE)
        seconds = time.perf_counter() - begin
        for handle in handles:
            status = self.native.query(handle)
            if status is None or (status != Status.OK).any():
                raise RuntimeError(f"the benchmark's copies failed: {self.native.message()}")
        return seconds


def bench_device_copy(
    module: DeviceModule,
    device: int = 0,
    *,
    fragments: Sequence[int] = FRAGMENTS,
    modes: Sequence[CopyMode] = tuple(CopyMode),
    nbytes: int = 256 << 20,
    rounds: int = 5,
) -> Iterator[Row]:
    """Rows for each fragment size, mode and direction, and for pages in order."""
    for fragment in fragments:
        plans = [(False, modes)]
        if fragment % SLOT_ALIGN == 0 and CopyMode.DMA in modes:
            plans.append((True, (CopyMode.DMA,)))
        for merged, chosen in plans:
            stage = Stage(module, device, fragment, nbytes, merged)
            try:
                for mode in chosen:
                    yield from _rows(stage, mode, rounds)
            finally:
                stage.close()


def _rows(stage: Stage, mode: CopyMode, rounds: int) -> Iterator[Row]:
    copier = stage.copier(mode)
    jobs = [stage.copies(half) for half in (0, 1)]
    for direction, halves in HALVES.items():
        judged = stage.fragment >= 4096 and mode is CopyMode.STAGED
        beside = "large copies" if direction == "both" else "large copy"
        target = ratio_at_least(LARGE[direction]) if judged else None
        yield from rows_of(
            CopyCase(stage.fragment, direction, mode.name.lower(), stage.merged),
            len(halves) * stage.nbytes,
            partial(copier.seconds, halves, jobs),
            [Limit(beside, partial(stage.large, halves), target)],
            rounds,
        )
    copier.native.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 1 where a target is missed on a real device."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fragments", type=int, nargs="+", default=list(FRAGMENTS), help="bytes")
    parser.add_argument(
        "--bytes", type=int, default=256 << 20, help="moved in each direction per measurement"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file for the rows")
    parser.add_argument("--plot", type=Path, help="folder for a picture (needs matplotlib)")
    parser.add_argument(
        "--simulate", action="store_true", help="on the simulated runtime: shows nothing but that it runs"
    )
    given = parser.parse_args(arguments)
    found = device_module()
    module = simulation() if given.simulate else found.module
    if module is None:
        sys.stdout.write(f"no device ({found.reason}); `kvoffload bench copy` measures CPU copies\n")
        return 0
    name = module.device_info(0)[0]
    if given.plot:
        prepare(given.plot)
    rows = list(bench_device_copy(module, fragments=given.fragments, nbytes=given.bytes, rounds=given.rounds))
    show(table(f"copies of {name}", rows, given.rounds))
    if given.json:
        given.json.write_text(json.dumps([row.to_dict() for row in rows], indent=1))
    if given.plot:
        plot(rows, given.plot, name)
    return int(not given.simulate and any(row.met is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
