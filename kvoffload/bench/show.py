"""Benchmark rows as a table of 80 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table

from kvoffload.bench.planner import PROMPT, REQUEST_US
from kvoffload.bench.requests import PART, Requests
from kvoffload.bench.retention import BLOCK_BYTES, Grown, Growth
from kvoffload.bench.rows import Row

LEGEND = (
    "value: median of {rounds} rounds, +-: (highest - lowest) / median. Ours and what stands beside it run in turns"
    " in the same run. ratio: value / beside. 1x is a bound of the ratio."
)
CPU_LEGEND = " CPU: microseconds of this process's CPU time per fragment."


def table(title: str, rows: Sequence[Row], rounds: int) -> Group:
    """Rows, what the columns mean, and which targets are missed."""
    grid = Table(title=title, width=80, padding=(0, 1, 0, 0), box=None, header_style="")
    with_cpu = any(row.cpu for row in rows)
    for name, right in (
        ("what", False), ("value", True), ("unit", False), ("+-", True), ("beside", False), ("value", True),
        ("+-", True), ("ratio", True), ("target", True), ("met", False), *([("CPU", True)] if with_cpu else []),
    ):  # fmt: skip
        grid.add_column(name, justify="right" if right else "left", no_wrap=name not in ("what", "beside"))
    previous = ""
    for row in rows:
        again = row.name == previous
        cpu = number(row.cpu.median) if row.cpu and not again else ""
        grid.add_row(*_cells(row, again), *([cpu] if with_cpu else []))
        previous = row.name
    missed = [
        f"missed: {row.name}{f' beside {row.beside}' if row.beside else ''}: "
        f"{_by_how_much(row)}, the target is {row.target}"
        for row in rows
        if row.met is False
    ]
    return Group(grid, "", LEGEND.format(rounds=rounds) + CPU_LEGEND * with_cpu, *missed)


def _cells(row: Row, again: bool) -> list[str]:
    limit = row.limit
    met = {True: "yes", False: "NO", None: ""}[row.met]
    return [
        "" if again else row.name,
        number(row.figure.median),
        row.unit,
        f"{row.figure.spread:.0%}" if row.figure.spread else "",
        row.beside,
        number(limit.median) if limit else "",
        f"{limit.spread:.0%}" if limit else "",
        f"{row.ratio:.2f}" if limit else "",
        str(row.target or ""),
        met,
    ]


def _by_how_much(row: Row) -> str:
    assert row.target is not None
    return f"{row.ratio:.2f}x" if row.target.of_ratio else f"{number(row.figure.median)} {row.unit}"


def number(value: float) -> str:
    """Three digits that count, and no exponent."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def requests_text(found: Requests) -> str:
    """What a run of requests gave, in lines of 80 columns."""
    first, last, most = (n / 2**20 for n in found.resident)
    each = found.per_request
    return "\n".join(
        (
            f"bench requests: {found.count:,} requests of {PROMPT} blocks, planner and index, one core",
            f"  requests/s    {found.per_second:,.0f} of CPU time, all together"
            f" (target >= {1e6 / REQUEST_US:,.0f}: {'met' if found.met else 'MISSED'})",
            f"  us a request  {each.median:.1f}, {each.low:.1f} to {each.high:.1f}, by parts of {PART:,} requests",
            f"  blocks        {found.produced:,} new, {found.loaded:,} loaded from host",
            f"  memory        {first:.1f} MiB before, {last:.1f} after, {most:.1f} at most (resident)",
        )
    )


def retention_table(growth: Growth, found: Sequence[Grown]) -> Table:
    """One row per case."""
    title = (
        f"{growth.sessions} sessions to {growth.tokens:,} tokens, {found[0].turns:,} turns, a pool for two"
    )
    out = Table(title=title, width=80)
    names = ("case", "hits", "of full only", "KiB a turn", "if dense", "resident", "at most")
    for name in names:
        out.add_column(name, justify="left" if name == "case" else "right")
    first = found[0].hit_rate
    for g in found:
        stored, dense = (n * BLOCK_BYTES / 1024 / max(g.turns, 1) for n in (g.stored, g.dense))
        out.add_row(
            str(g.case),
            f"{g.hit_rate:.2%}",
            f"{g.hit_rate / first:.4f}" if first else "-",
            f"{stored:,.0f}",
            f"{dense:,.0f}",
            f"{g.resident:,}",
            f"{g.bound:,}",
        )
    return out
