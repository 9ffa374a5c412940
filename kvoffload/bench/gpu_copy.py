"""Copies between device pages and host slots, beside one large copy of the same bytes in the same run.

Blocks are of many layers, each a region, and page ids are permuted: no two fragments continue each other on both sides.
Rows named "merged" have one region and pages in order. Run as `python -m kvoffload.bench.gpu_copy`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvoffload.arena import HostArena
from kvoffload.copying.base import Direction
from kvoffload.copying.modes import CopyMode
from kvoffload.layout import SLOT_ALIGN, CacheGroup, GroupKind, Layout
from kvoffload.messages import COPY_DTYPE, Copies, Status
from kvoffload.native import DeviceModule, device_module, simulation

FRAGMENTS = (1 << 10, 4 << 10, 16 << 10, 32 << 10, 256 << 10, 1 << 20, 4 << 20)
BLOCK_BYTES = 4 << 20
MOST_REGIONS = 64
LARGE = {"to host": 0.95, "to device": 0.95, "both": 0.9}
"""Least part of one large copy (or of two at once) that fragments of at least 4 KiB must reach."""

DIRECTIONS = {"to host": (0,), "to device": (1,), "both": (0, 1)}
PATIENCE = 60.0


@dataclass(frozen=True, slots=True)
class CopyRow:
    """rate, large_rate: bytes/s, medians. cpu: seconds of this process per fragment. target 0 = shown only."""

    fragment: int
    direction: str
    mode: str
    rate: float
    large_rate: float
    cpu: float
    target: float

    @property
    def ratio(self) -> float:
        """How much of one large copy is reached."""
        return self.rate / self.large_rate

    @property
    def reached(self) -> bool:
        """True where the target is met."""
        return self.ratio >= self.target


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
        self.regions = 1 if merged else max(1, min(MOST_REGIONS, BLOCK_BYTES // fragment))
        block = fragment * self.regions
        self.blocks = max(nbytes // block, 1)
        self.nbytes = self.blocks * block
        layout = Layout(16, (CacheGroup(0, GroupKind.FULL, 16, block),))
        self.slot_bytes = layout.groups[0].slot_bytes
        slab = max(32 << 20, self.slot_bytes) // self.slot_bytes * self.slot_bytes
        self.per_slab = slab // self.slot_bytes
        self.arena = HostArena(slab, -(-2 * self.blocks // self.per_slab), layout)
        self.pages = module.memory_allocate(2 * self.nbytes)
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
        order = list(range(self.blocks))
        if not self.merged:
            random.Random(half).shuffle(order)
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
) -> Iterator[CopyRow]:
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


def _rows(stage: Stage, mode: CopyMode, rounds: int) -> Iterator[CopyRow]:
    copier = stage.copier(mode)
    jobs = [stage.copies(half) for half in (0, 1)]
    for name, directions in DIRECTIONS.items():
        ours, large, cpu = _medians(
            partial(copier.seconds, directions, jobs), partial(stage.large, directions), rounds
        )
        moved = len(directions) * stage.nbytes
        judged = stage.fragment >= 4096 and mode is CopyMode.STAGED
        yield CopyRow(
            stage.fragment,
            name + (" merged" if stage.merged else ""),
            mode.name.lower(),
            moved / ours,
            moved / large,
            cpu / (moved // stage.fragment),
            LARGE[name] if judged else 0.0,
        )
    copier.native.close()


def _medians(
    ours: Callable[[], float], large: Callable[[], float], rounds: int
) -> tuple[float, float, float]:
    """Seconds of both, taken in turn, and CPU seconds of ours."""
    ours()
    large()
    taken: list[tuple[float, float, float]] = []
    for _ in range(rounds):
        before = time.process_time()
        mine = ours()
        cpu = time.process_time() - before
        taken.append((mine, large(), cpu))
    columns = list(zip(*taken, strict=True))
    return statistics.median(columns[0]), statistics.median(columns[1]), statistics.median(columns[2])


def table(rows: Sequence[CopyRow]) -> str:
    """The rows as text."""
    lines = [
        f"{'fragment':>9} {'direction':<18} {'mode':<7} {'GB/s':>7} {'large':>7} {'ratio':>6} {'CPU/frag':>9}  target"
    ]
    for row in rows:
        size = f"{row.fragment >> 10} KiB" if row.fragment < 1 << 20 else f"{row.fragment >> 20} MiB"
        verdict = "" if not row.target else f"{row.target} {'reached' if row.reached else 'MISSED'}"
        lines.append(
            f"{size:>9} {row.direction:<18} {row.mode:<7} {row.rate / 1e9:>7.2f} {row.large_rate / 1e9:>7.2f}"
            f" {row.ratio:>6.3f} {row.cpu * 1e6:>6.2f} us  {verdict}"
        )
    return "\n".join(lines)


def plot(rows: Sequence[CopyRow], path: Path) -> None:
    """Rate over fragment size, a line per mode, a panel per direction. REQUIRES: matplotlib."""
    from matplotlib.figure import Figure

    directions = sorted({r.direction for r in rows if "merged" not in r.direction})
    figure = Figure(figsize=(4 * len(directions), 3.2), layout="constrained")
    for axis, direction in zip(
        figure.subplots(1, len(directions), squeeze=False)[0], directions, strict=True
    ):
        mine = [r for r in rows if r.direction == direction]
        for mode in sorted({r.mode for r in mine}):
            line = [(r.fragment, r.rate / 1e9) for r in mine if r.mode == mode]
            axis.plot(*zip(*line, strict=True), marker="o", label=mode)
        axis.axhline(max(r.large_rate for r in mine) / 1e9, linestyle="--", label="one large copy")
        axis.set(xscale="log", title=direction, xlabel="fragment, bytes", ylabel="GB/s")
        axis.legend(fontsize="small")
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 1 where a target is missed on a real device."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fragments", type=int, nargs="+", default=list(FRAGMENTS), help="bytes")
    parser.add_argument(
        "--bytes", type=int, default=256 << 20, help="moved in each direction per measurement"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file for the rows")
    parser.add_argument("--plot", type=Path, help="file for a picture (needs matplotlib)")
    parser.add_argument(
        "--simulate", action="store_true", help="on the simulated runtime: shows nothing but that it runs"
    )
    given = parser.parse_args(arguments)
    found = device_module()
    module = simulation() if given.simulate else found.module
    if module is None:
        sys.stdout.write(f"no device ({found.reason}); `kvoffload bench copy` measures CPU copies\n")
        return 0
    rows = list(bench_device_copy(module, fragments=given.fragments, nbytes=given.bytes, rounds=given.rounds))
    sys.stdout.write(f"{module.device_info(0)[0]}\n{table(rows)}\n")
    if given.json:
        given.json.write_text(json.dumps([{**asdict(r), "ratio": r.ratio} for r in rows], indent=1))
    if given.plot:
        plot(rows, given.plot)
    return int(not given.simulate and not all(r.reached for r in rows))


if __name__ == "__main__":
    sys.exit(main())
