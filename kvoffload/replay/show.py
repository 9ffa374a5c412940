"""A report as tables for people."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table

from kvoffload.replay.oracle_lru import OracleResult
from kvoffload.replay.report import TIERS, Report
from kvoffload.traces.synth_spec import shown
from kvoffload.units import UNITS


def table(report: Report) -> Group:
    """The report for people, within 80 columns."""
    parts = [_figures(report), _by_tier(report)]
    if report.oracle is not None:
        parts.append(_against(report.oracle, report))
    notes = ["identities 1 to 4 of docs/replay.md: hold"] if report.unequal == () else []
    notes += [f"broken: {text}" for text in report.broken()]
    notes += [f"wrong bytes: {text}" for text in report.samples]
    return Group(*parts, *notes)


def _figures(report: Report) -> Table:
    setup = report.setup
    grid = Table(title=f"replay of {shown(setup.trace)}", show_header=False, width=76)
    grid.add_column("figure")
    grid.add_column("value", justify="right")
    mode = f"{setup.lanes} lanes" if setup.lanes else "sequential"
    rows = [
        ("mode", mode + (", index only" if setup.index_only else "")),
        ("block", f"{setup.block_tokens} tokens, {as_bytes(setup.block_bytes)} ({setup.rule} rule)"),
        ("requests", _requests(report)),
        ("blocks", f"{report.total:,}, distinct {report.distinct:,}"),
        ("produced", f"{report.produced:,} ({as_percent(report.produced, report.total)})"),
        ("loads", f"{report.loads:,} of {report.arrived:,} blocks"),
        ("written per turn, p50 / p90", f"{as_bytes(report.turn_p50)} / {as_bytes(report.turn_p90)}"),
        ("wrong blocks", "not checked" if setup.index_only else f"{report.mismatches:,}"),
        ("seconds", f"{report.seconds:.1f}"),
    ]
    rows += [(f"dropped: {reason}", f"{count:,}") for reason, count in sorted(report.stored.dropped.items())]
    for name, value in rows:
        grid.add_row(name, value)
    return grid


def _by_tier(report: Report) -> Table:
    """A column per tier, so that large numbers have room."""
    setup = report.setup
    grid = Table(width=76)
    for name in ("", *TIERS, "all"):
        grid.add_column(name, justify="right" if name else "left")
    sizes = (setup.device_blocks, setup.host_blocks, setup.disk_blocks)
    stored = (report.stored.host, report.stored.disk)
    grid.add_row("blocks", *("no limit" if size is None else f"{size:,}" for size in sizes))
    grid.add_row("hits", *(f"{hits:,}" for hits in (*report.hits, sum(report.hits))))
    for name, hits, whole in (
        ("hits, % of blocks", report.hits, report.total),
        ("hits, % of tokens", report.hit_tokens, report.tokens),
    ):
        grid.add_row(name, *(as_percent(part, whole) for part in (*hits, sum(hits))))
    grid.add_row("stored", "", *(f"{blocks:,}" for blocks in stored))
    grid.add_row("write amplification", "", *(f"{x:.3f}" for x in report.amplification()))
    grid.add_row("rewrite factor", "", *(f"{x:.1f}" if x else "-" for x in report.rewrite_factor()))
    return grid


def _against(oracle: OracleResult, report: Report) -> Table:
    grid = Table(title="brute-force LRU beside it", width=76)
    for name in ("", *TIERS, "produced"):
        grid.add_column(name, justify="right")
    tiers = len(oracle.hits)
    grid.add_row("oracle", *(f"{h:,}" for h in oracle.hits), *["-"] * (3 - tiers), f"{oracle.produced:,}")
    grid.add_row("replay", *(f"{h:,}" for h in report.hits), f"{report.produced:,}")
    return grid


def as_percent(part: int, whole: int) -> str:
    return f"{100 * part / whole if whole else 0:.2f}%"


def as_bytes(count: int) -> str:
    """Rounded, in the largest binary unit of which there is one."""
    unit = next((u for u in ("TiB", "GiB", "MiB", "KiB") if count >= UNITS[u]), "B")
    return f"{count / UNITS[unit]:.4g} {unit}"


def _requests(report: Report) -> str:
    """How many, and in how many sessions where the trace names any."""
    if not report.sessions:
        return f"{report.requests:,}, no sessions named"
    return f"{report.requests:,}, in {report.sessions:,} session{'' if report.sessions == 1 else 's'}"
