"""A replay as pictures: hits by tier over time, bytes written per turn, how long first tokens took.

Needs matplotlib (`pip install 'kvoffload[report]'`), which is imported only when a picture is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvoffload.errors import ConfigError
from kvoffload.replay.report import TIERS, Report, percentile
from kvoffload.replay.session_report import SessionReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"hbm": "#1b6ca8", "host": "#3a9d5d", "disk": "#e08e2b", "produced": "#c8c8c8"}
MIB = 1 << 20
TITLE = 80
"""Characters that fit above a picture."""

Series = Mapping[str, Sequence[float]]
"""Curves by name, for a legend."""


def need_matplotlib() -> None:
    """Raises ConfigError naming the extra where matplotlib is missing; before the long work, not after."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"plots need matplotlib ({error}): pip install 'kvoffload[report]', or leave --plot out"
        ) from None


def prepare(folder: Path) -> None:
    """Everything that can go wrong with pictures, before the long work and not after it.

    Raises ConfigError where matplotlib is missing, OSError where the folder cannot be made.
    """
    if folder.exists():
        folder.mkdir(exist_ok=True)  # raises for a file
    need_matplotlib()
    folder.mkdir(parents=True, exist_ok=True)


def plot(report: Report, folder: Path) -> list[Path]:
    """Hits and bytes per turn of a replay; the files. REQUIRES: `prepare`."""
    name = report.setup.trace
    return [
        hits_over_time(
            report.series, folder / "hits.png", f"where prompt blocks came from: {name}", "blocks"
        ),
        written_per_turn(report.written, report.setup.block_bytes, folder / "written.png", name),
    ]


def plot_sessions(report: SessionReport, folder: Path) -> list[Path]:
    """Hits of the replay itself and first tokens of all runs; the files. REQUIRES: `prepare`."""
    name, series = report.setup.trace, [row[1:] for row in report.runs[0].series]
    curves = {run.name: run.ttfts for run in report.runs if run.ttfts}
    return [
        hits_over_time(series, folder / "hits.png", f"where prompt tokens came from: {name}", "tokens"),
        distribution(curves, folder / "ttft.png", f"time to first token: {name}", "seconds"),
    ]


def hits_over_time(series: Sequence[Sequence[int]], path: Path, title: str, what: str) -> Path:
    """Stacked shares of blocks or tokens by where they came from. series: (hbm, host, disk, all) of each part."""
    figure, axes = _figure(title)
    parts = [100 * (i + 0.5) / len(series) for i in range(len(series))]
    below = [0.0] * len(series)
    for column, label in enumerate((*TIERS, "produced")):
        shares = [_share(row, column) for row in series]
        width = 100 / max(len(series), 1)
        axes.bar(parts, shares, width, bottom=below, label=label, color=COLOURS[label])
        below = [b + s for b, s in zip(below, shares, strict=True)]
    axes.set(xlabel="requests finished, %", ylabel=f"{what}, %", xlim=(0, 100), ylim=(0, 100))
    axes.legend(loc="lower left", ncols=4)
    return _save(figure, path)


def written_per_turn(blocks: Sequence[int], block_bytes: int, path: Path, name: str) -> Path:
    """What each turn wrote, in the order in which turns finished, with median and 90th percentile."""
    figure, axes = _figure(f"written per turn: {name}")
    sizes = [count * block_bytes / MIB for count in blocks]
    axes.plot(range(1, len(sizes) + 1), sizes, ".", markersize=3, color=COLOURS["host"])
    for percent, style in ((50, "-"), (90, "--")):
        at = percentile(blocks, percent) * block_bytes / MIB
        axes.axhline(at, linestyle=style, linewidth=1, color="black", label=f"p{percent}: {at:.3g} MiB")
    axes.set_yscale("symlog", linthresh=max(block_bytes / MIB, 1e-6))
    axes.set(xlabel="turn", ylabel="MiB", ylim=(0, None))
    axes.legend(loc="upper right")
    return _save(figure, path)


def distribution(curves: Series, path: Path, title: str, unit: str) -> Path:
    """The share of values at or below each value, a curve per series."""
    figure, axes = _figure(title)
    for label, values in curves.items():
        found = sorted(values)
        shares = [100 * (i + 1) / len(found) for i in range(len(found))]
        axes.step(found, shares, where="post", label=f"{label} ({len(found):,})")
    if all(v > 0 for values in curves.values() for v in values):
        axes.set_xscale("log")
    axes.set(xlabel=unit, ylabel="requests at or below, %", ylim=(0, 100))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    return _save(figure, path)


def _share(row: Sequence[int], column: int) -> float:
    """Percent of a part's blocks; the column after the tiers is what was computed."""
    whole = row[-1]
    count = row[column] if column < len(TIERS) else whole - sum(row[: len(TIERS)])
    return 100 * count / whole if whole else 0.0


def _figure(title: str) -> tuple[Figure, Axes]:
    """Drawn into memory: no display, no global state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title if len(title) <= TITLE else f"{title[: TITLE - 3]}...", fontsize=11)
    return figure, axes


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=120, metadata={"Software": None})
    return path
