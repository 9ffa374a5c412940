"""A session report as tables for people."""

from __future__ import annotations

from collections.abc import Callable

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table

from kvoffload.replay.bracket import CONTROLS
from kvoffload.replay.session_report import PERCENTS, Figures, SessionReport
from kvoffload.replay.show import as_bytes, as_percent
from kvoffload.traces.synth_spec import shown


def session_table(report: SessionReport) -> Group:
    """The report for people, within 80 columns: the replay and its controls side by side."""
    setup = report.setup
    title = f"{setup.sessions} live sessions of {shown(setup.trace)}"
    grid = Table(
        title=title if len(title) <= 76 else f"{setup.sessions} live sessions",
        width=78,
        box=SIMPLE_HEAD,
        padding=0,
    )
    grid.add_column("virtual time")
    for run in report.runs:
        grid.add_column(run.name, justify="right")
    for name, value in _rows():
        grid.add_row(name, *(value(run) for run in report.runs))
    sizes = (
        f"blocks of {setup.block_tokens} tokens: HBM {setup.device_blocks or 'no limit'}, host"
        f" {'no limit' if setup.host_blocks is None else setup.host_blocks}, disk {setup.disk_blocks};"
        f" {'index only' if setup.index_only else as_bytes(setup.block_bytes) + ' each really moved'}"
    )
    spans = report.runs[0].working_set.items()
    sets = "working set, blocks: " + ", ".join(f"{blocks:,} in {span} s" for span, blocks in spans)
    parts: list[RenderableType] = [grid, sizes, sets]
    if report.alone:
        parts += [_outside(report), "", _alone(report)]
    notes = [f"broken: {text}" for text in report.broken()]
    notes += [f"wrong bytes: {text}" for run in report.runs for text in run.samples]
    return Group(*parts, *notes)


def _outside(report: SessionReport) -> str:
    """What of the closed loop is not between its controls, and why that may be."""
    names = report.outside()
    if not names:
        return "Every figure of this run lies between those of no offload and infinite."
    return (
        f"Not between no offload and infinite in this run: {', '.join(names)}. Who is answered sooner asks sooner: more"
        " users are then at work at once. Below, the same requests without that."
    )


def _alone(report: SessionReport) -> Table:
    """The bracket that must hold, of every request."""
    grid = Table(
        title="the same requests one by one, in the order of the trace", width=78, box=SIMPLE_HEAD, padding=0
    )
    grid.add_column("of each request")
    for name in CONTROLS:
        grid.add_column(name, justify="right")
    grid.add_column("outside", justify="right")
    for row in report.alone:
        digits = 0 if row.name == "computed tokens" else 1 if row.name == "tokens/s" else 3
        for place, which in enumerate(("p50", "p90", "p99", "sum")):
            if row.name == "tokens/s" and which == "sum":
                continue
            cells = [f"{values[place]:,.{digits}f}" for values in row.values]
            grid.add_row(f"{row.name}, {which}", *cells, "" if place else str(row.outside))
    return grid


def _rows() -> list[tuple[str, Callable[[Figures], str]]]:
    rows: list[tuple[str, Callable[[Figures], str]]] = [
        ("requests", lambda r: f"{r.requests:,}"),
        ("seconds", lambda r: f"{r.seconds:,.0f}"),
    ]
    for tier, name in enumerate(("HBM", "host", "disk")):
        rows.append((f"hits {name}, % of prompt", lambda r, tier=tier: as_percent(r.hits[tier], r.prompt)))  # type: ignore[misc]
    rows.append(
        ("hits, worst tenth of sessions", lambda r: "-" if r.worst is None else f"{100 * r.worst:.2f}%")
    )
    rows.append(("computed, % of prompt", lambda r: as_percent(r.made, r.prompt)))
    rows.append(("prefill, s", lambda r: f"{r.prefill_s:,.1f}"))
    rows.append(("prefill with loads, s", lambda r: f"{r.admitted_s:,.1f}"))
    for place, percent in enumerate(PERCENTS):
        rows.append((f"TTFT p{percent}, s", lambda r, place=place: f"{r.ttft[place]:.3f}"))  # type: ignore[misc]
    for place, percent in enumerate(PERCENTS):
        rows.append((f"tokens/s per user, p{percent}", lambda r, place=place: f"{r.speed[place]:.1f}"))  # type: ignore[misc]
    rows += [
        ("answer tokens/s", lambda r: f"{r.output_rate:,.0f}"),
        ("all tokens/s", lambda r: f"{r.total_rate:,.0f}"),
        ("stored from device", lambda r: as_bytes(r.moved["out"])),
        ("loaded to device", lambda r: as_bytes(r.moved["in"])),
        ("written to disk", lambda r: as_bytes(r.moved["write"])),
        ("read from disk", lambda r: as_bytes(r.moved["read"])),
        ("write amplification, host", lambda r: f"{r.amplification()['host']:.3f}"),
        ("write amplification, disk", lambda r: f"{r.amplification()['disk']:.3f}"),
        ("written per turn, p50", lambda r: as_bytes(r.per_turn[0])),
        ("written per turn, p90", lambda r: as_bytes(r.per_turn[1])),
        ("loaded and used", lambda r: as_percent(r.counts.get("used", 0), _loaded(r))),
        ("jobs past their deadline", lambda r: f"{r.counts.get('overdue', 0):,}"),
        ("preemptions", lambda r: f"{r.preemptions:,}"),
        ("wrong blocks", lambda r: f"{r.mismatches:,}"),
        ("real seconds", lambda r: f"{r.wall_s:.1f}"),
    ]
    return rows


def _loaded(run: Figures) -> int:
    return run.counts.get("loaded_host", 0) + run.counts.get("loaded_disk", 0)
