"""The part of `kvoffload replay` that plays a known model, and its table."""

from __future__ import annotations

import json

import typer
from rich.console import Console
from rich.table import Table

from kvoffload.errors import ConfigError
from kvoffload.models import find_model
from kvoffload.replay.base import requests_of
from kvoffload.replay.hybrid import ModelReport, replay_model
from kvoffload.replay.show import as_bytes, as_percent
from kvoffload.traces.record import Trace


def play_model(
    trace: Trace, name: str, scale: int, retention: str, *, index_only: bool, as_json: bool
) -> bool:
    """Replay and show; whether everything was right. Raises ConfigError for arguments that do not go together."""
    requests = requests_of(trace)
    if not requests:
        raise ConfigError(f"{trace.source}: no requests to replay")
    report = replay_model(
        requests, find_model(name), trace.block_tokens, scale, retention=retention, index_only=index_only
    )
    if as_json:
        typer.echo(json.dumps(report.to_dict()))
    else:
        show(report, Console(width=100, highlight=False, markup=False))
    return report.ok


def show(report: ModelReport, console: Console) -> None:
    """The report for people."""
    grid = Table(title=f"{report.model}, bytes / {report.scale}, {report.retention}", show_header=False)
    for row in (
        ("requests", f"{report.requests:,}"),
        ("hits, % of tokens", as_percent(report.hit_tokens, report.tokens)),
        ("working set / budget", f"{as_bytes(report.working_set)} / {as_bytes(report.budget)}"),
        ("mapped, of the budget", f"{report.mapped / report.budget:.4f}"),
        (
            "payload, of the budget",
            f"{report.payload / report.budget:.4f}" + ("" if report.full else " (not full)"),
        ),
        ("padding, of the payload", f"{report.padding:.4f}"),
        ("slabs that changed owner", f"{report.slabs_moved:,}"),
        ("wrong blocks", f"{report.mismatches:,}"),
    ):
        grid.add_row(*row)
    console.print(grid)
    table = Table()
    for name in (
        "group",
        "tokens",
        "block",
        "stored B/token",
        "dense B/token",
        "stored",
        "resident",
        "free",
        "slabs",
    ):
        table.add_column(name, justify="left" if name == "group" else "right")
    for g in report.groups:
        table.add_row(
            g.name,
            f"{g.block_tokens}",
            as_bytes(g.block_bytes),
            f"{g.stored:,.1f}",
            f"{g.dense:,.1f}",
            f"{g.stored / g.dense:.2%}",
            f"{g.resident:,}",
            f"{g.free:,}",
            f"{g.slabs:,}",
        )
    console.print(table)
    for text in report.broken:
        console.print(f"broken: {text}")
