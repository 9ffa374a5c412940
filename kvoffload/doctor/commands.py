"""`kvoffload doctor`: everything that was looked at, with advice. It mends nothing and always ends with status 0."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group
from rich.table import Table

from kvoffload.console import WIDTH, Json, show
from kvoffload.doctor.build import look_at_build
from kvoffload.doctor.disk import look_at_disk
from kvoffload.doctor.finding import Finding
from kvoffload.doctor.machine import look_at_machine
from kvoffload.errors import ConfigError


def doctor(
    path: Annotated[
        Path, typer.Option("--path", metavar="DIR", help="Where the disk tier is to lie [this folder].")
    ] = Path(),
    as_json: Json = False,
) -> None:
    """What was built, what this machine gives, and what to do where something is off."""
    if not path.is_dir():
        raise ConfigError(f"--path {path}: no such folder; give an existing one on the drive you mean")
    findings = list(chain(look_at_build(), look_at_machine(), look_at_disk(path)))
    if as_json:
        rows = [{**asdict(f), "state": f.state} for f in findings]
        typer.echo(json.dumps({"findings": rows, "look": sum(f.state == "look" for f in findings)}))
    else:
        show(report(findings))


def report(findings: Sequence[Finding]) -> Group:
    """A line per finding, its advice below it, and a count at the end."""
    grid = Table(width=WIDTH, padding=(0, 1, 0, 0), box=None, show_header=False)
    grid.add_column(width=8)
    grid.add_column(width=17)
    grid.add_column(overflow="fold", ratio=1)
    area = ""
    for finding in findings:
        if finding.area != area:
            area = finding.area
            grid.add_row(area)
        mark = {"ok": "  ok", "optional": "  -", "look": "  LOOK"}[finding.state]
        grid.add_row(mark, finding.name, finding.value)
        if finding.advice:
            grid.add_row("", "", f"-> {finding.advice}")
    look = sum(f.state == "look" for f in findings)
    return Group(grid, "", f"{look} to look at" if look else "nothing is off")
