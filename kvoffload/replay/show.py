"""A report as tables for people."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table

from kvoffload.replay.oracle_lru import OracleResult
from kvoffload.replay.report import TIERS, Report
from kvoffload.units import UNITS


def table(report: Report) -> Group:
    """The report for people, within 80 columns."""
    parts = [_figures(report), _by_tier(report)]
    if report.oracle is not None:
        parts.append(_against(report.oracle, report))
    notes = [f"broken: {text}" for text in report.broken()]
    notes += [f"wrong bytes: {text}" for text in report.samples]
    return Group(*parts, *notes)


def _figures(report: Report) -> Table:
    setup = report.setup
    grid = Table(title=f"replay of {setup.trace}", show_header=False, width=76)
    grid.add_column("figure")
    grid.add_column("value", justify="right")
    mode = f"{setup.lanes} lanes" if setup.lanes else "sequential"
    rows = [
        ("mode", mode + (", index only" if setup.index_only else "")),
        ("block", f"{setup.block_tokens} tokens, {_bytes(setup.block_bytes)} ({setup.rule} rule)"),
        ("requests", f"{report.requests:,} of {report.sessions:,} sessions"),
        ("blocks", f"{report.total:,}, distinct {report.distinct:,}"),
        ("produced", f"{report.produced:,} ({_percent(report.produced, report.total)})"),
        ("loads", f"{report.loads:,} of {report.arrived:,} blocks"),
        ("written per turn, p50 / p90", f"{_bytes(report.turn_p50)} / {_bytes(report.turn_p90)}"),
        ("wrong blocks", "not checked" if setup.index_only else f"{report.mismatches:,}"),
        ("seconds", f"{report.seconds:.1f}"),
    ]
    rows += [(f"dropped: {reason}", f"{count:,}") for reason, count in sorted(report.stored.dropped.items())]
    for name, value in rows:
        grid.add_row(name, value)
    return grid


def _by_tier(report: Report) -> Table:
    setup = report.setup
    grid = Table(width=76)
    for name in ("tier", "size", "hits", "blocks", "tokens", "stored", "write ampl.", "rewrite"):
        grid.add_column(name, justify="left" if name == "tier" else "right")
    sizes = (setup.device_blocks, setup.host_blocks, setup.disk_blocks)
    written = ("-", f"{report.stored.host:,}", f"{report.stored.disk:,}")
    amplification = ("-", *(f"{x:.3f}" for x in report.amplification()))
    factors = ("-", *(f"{x:.1f}" if x else "-" for x in report.rewrite_factor()))
    for i, name in enumerate(TIERS):
        grid.add_row(
            name,
            "no limit" if sizes[i] is None else f"{sizes[i]:,}",
            f"{report.hits[i]:,}",
            _percent(report.hits[i], report.total),
            _percent(report.hit_tokens[i], report.tokens),
            written[i],
            amplification[i],
            factors[i],
        )
    grid.add_row(
        "all",
        "",
        f"{sum(report.hits):,}",
        _percent(sum(report.hits), report.total),
        _percent(sum(report.hit_tokens), report.tokens),
        *[""] * 3,
    )
    return grid


def _against(oracle: OracleResult, report: Report) -> Table:
    grid = Table(title="brute-force LRU beside it", width=76)
    for name in ("", *TIERS, "produced"):
        grid.add_column(name, justify="right")
    tiers = len(oracle.hits)
    grid.add_row("oracle", *(f"{h:,}" for h in oracle.hits), *["-"] * (3 - tiers), f"{oracle.produced:,}")
    grid.add_row("replay", *(f"{h:,}" for h in report.hits), f"{report.produced:,}")
    return grid


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole if whole else 0:.2f}%"


def _bytes(count: int) -> str:
    """Rounded, in the largest binary unit of which there is one."""
    unit = next((u for u in ("TiB", "GiB", "MiB", "KiB") if count >= UNITS[u]), "B")
    return f"{count / UNITS[unit]:.4g} {unit}"
