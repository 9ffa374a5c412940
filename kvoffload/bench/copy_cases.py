"""What the sweeps of copies on the CPU and on devices have in common: their cases, their rows and their pictures."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from kvoffload.bench.rows import CopyCase, Limit, Row, compare, rate
from kvoffload.bench.timing import Measure, Metered, Timed
from kvoffload.units import format_size

KIB, MIB = 1 << 10, 1 << 20
FRAGMENTS = (KIB, 4 * KIB, 16 * KIB, 32 * KIB, 256 * KIB, MIB, 4 * MIB)
FULL_FRAGMENTS = tuple(KIB << n for n in range(15))
"""All powers of two from 1 KiB to 16 MiB."""

DIRECTIONS = ("to host", "to device", "both")

BLOCK_BYTES = 4 * MIB
MOST_REGIONS = 64


def regions_of(fragment: int) -> int:
    """Layers, so fragments, of a block: as many as make BLOCK_BYTES, within reason."""
    return max(1, min(MOST_REGIONS, BLOCK_BYTES // fragment))


def permuted(count: int, seed: int = 0) -> list[int]:
    """Page ids in random order, in runs of length 1: none is followed by its successor."""
    order = list(range(count))
    source = random.Random(seed)
    while any(b == a + 1 for a, b in pairwise(order)):
        source.shuffle(order)
    return order


def rows_of(case: CopyCase, moved: int, ours: Timed, limits: Sequence[Limit], rounds: int) -> list[Row]:
    """A row per limit, the one large copy last. moved: bytes per round."""
    metered = Metered(ours)
    name = f"{format_size(case.fragment)} {case.direction}{', merged' if case.merged else ''}, {case.mode}"
    rows = compare(name, rate(moved), metered, limits, rounds)
    fragments = moved // case.fragment
    cpu = Measure.of(
        seconds * 1e6 / fragments for seconds in metered.cpu[1:]
    )  # the first call is the warm-up
    return [replace(row, case=case, cpu=cpu) for row in rows]


def plot(rows: Sequence[Row], folder: Path, title: str) -> Path:
    """Rate over fragment size beside one large copy: a panel per direction, a line per mode. REQUIRES: matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), layout="constrained")
    figure.suptitle(title, fontsize=11)
    panels = figure.subplots(1, len(DIRECTIONS), sharey=True)
    for axes, direction in zip(panels, DIRECTIONS, strict=True):
        for label, line in _lines(rows, direction).items():
            sizes = sorted(line)
            (drawn,) = axes.plot(sizes, [line[s].figure.median for s in sizes], marker="o", label=label)
            large = [limit.median for s in sizes if (limit := line[s].limit)]
            axes.plot(
                sizes, large, linestyle=":", color=drawn.get_color(), label=f"large copy, beside {label}"
            )
        axes.set_xscale("log", base=2)
        axes.set(title=direction, xlabel="fragment, bytes")
        axes.legend(fontsize="x-small")
    panels[0].set(ylabel="GB/s", ylim=(0, None))
    path = folder / "copy.png"
    figure.savefig(path, dpi=120, metadata={"Software": None})
    return path


def _lines(rows: Sequence[Row], direction: str) -> Mapping[str, Mapping[int, Row]]:
    """By mode and fragment size: the last row of each case, which is the one beside the large copy."""
    lines: dict[str, dict[int, Row]] = {}
    for row in rows:
        case = row.case
        if case is not None and case.direction == direction:
            lines.setdefault(f"{case.mode}{', merged' if case.merged else ''}", {})[case.fragment] = row
    return lines
