"""`kvoffload disk`: what lies under a disk path, whether it is right, and how to be rid of it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from kvoffload.console import FAILED, Json, bar, show
from kvoffload.errors import ConfigError
from kvoffload.tiers.inspect import RankUsage, Verification, clear, list_ranks, verify
from kvoffload.units import format_size

app = typer.Typer(no_args_is_help=True, help="Look at a disk tier's folder, check it, clear it.")

SHOWN = 12
"""Digits of a namespace in tables: enough to tell two apart, and a prefix for --namespace."""

BAD = (
    "They are never served: each is a miss when it is asked for, and its slot is used again. A torn write leaves some"
    " after a crash or power failure. Many, or new ones after a `kvoffload disk clear`: suspect the drive."
)

Place = Annotated[Path, typer.Argument(metavar="PATH", help="The disk_path of the engines.")]
Prefix = Annotated[
    str, typer.Option("--namespace", metavar="PREFIX", help="Only namespaces that begin like this.")
]


@app.command("ls")
def ls(path: Place, namespace: Prefix = "", as_json: Json = False) -> None:
    """Every namespace and rank: blocks, bytes, last write, who has it open. Reads tables only."""
    ranks = _find(path, namespace)
    if as_json:
        typer.echo(json.dumps({"path": str(path), "ranks": [_plain(usage) for usage in ranks]}))
    elif ranks:
        show(_listing(ranks))
        typer.echo(_total(ranks))
    else:
        typer.echo(f"{path}: nothing of kvoffload here")


@app.command("verify")
def verify_(path: Place, namespace: Prefix = "", as_json: Json = False) -> None:
    """Read every payload and compare it with its checksum. Status 1 where one is wrong; nothing is changed.

    A wrong block is never served: an engine finds the same and counts a miss.
    """
    ranks = _find(path, namespace)
    with bar("verify", sum(usage.blocks for usage in ranks)) as advance:
        found = list(verify(path, namespace, advance))
    blocks, bad = sum(v.blocks for v in found), sum(v.bad for v in found)
    if as_json:
        rows = [{"directory": str(v.directory), "blocks": v.blocks, "bad": v.bad} for v in found]
        typer.echo(json.dumps({"path": str(path), "ranks": rows, "blocks": blocks, "bad": bad}))
    else:
        if found:
            show(_verified(found))
        show(f"{blocks:,} blocks read, {bad:,} bad")
        if bad:
            show(BAD)
    if bad:
        raise typer.Exit(FAILED)


@app.command("clear")
def clear_(
    path: Place,
    namespace: Prefix = "",
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Delete what engines stored under PATH, all or one namespace. Refused while an engine has one of them open."""
    ranks = _find(path, namespace)
    if ranks and not yes:
        if as_json or not _can_ask():
            raise ConfigError(f"clearing {path} deletes {_total(ranks)}: say --yes, nobody can be asked here")
        show(_listing(ranks))
        if not typer.confirm(f"Delete {_total(ranks)}?", err=True):
            typer.echo("nothing deleted")
            return
    freed = clear(path, namespace)
    if as_json:
        typer.echo(json.dumps({"path": str(path), "ranks": len(ranks), "freed": freed}))
    else:
        typer.echo(
            f"{path}: {len(ranks)} director{'y' if len(ranks) == 1 else 'ies'} deleted, {format_size(freed)} freed"
        )


def _can_ask() -> bool:
    return sys.stdin.isatty()


def _find(path: Path, namespace: str) -> list[RankUsage]:
    """What is there. Raises ConfigError for a path or prefix that names nothing."""
    if not path.is_dir():
        what = "is not a folder" if path.exists() else "no such folder"
        raise ConfigError(f"{path}: {what}; give the disk_path that the engines were given")
    every = list_ranks(path, time.time())
    ranks = [usage for usage in every if usage.namespace.startswith(namespace)]
    if namespace and not ranks:
        known = sorted({usage.namespace[:SHOWN] for usage in every}) or ["none"]
        raise ConfigError(f"--namespace {namespace}: no namespace begins so; there are {', '.join(known)}")
    return ranks


def _listing(ranks: Sequence[RankUsage]) -> Table:
    grid = Table(width=80, padding=(0, 1, 0, 0), box=None)
    for name in ("namespace", "rank", "blocks", "used", "reserved", "last write", "state"):
        grid.add_column(name, justify="left" if name in ("namespace", "rank", "state") else "right")
    for usage in ranks:
        grid.add_row(
            usage.namespace[:SHOWN],
            _rank(usage.directory),
            f"{usage.blocks:,}",
            _size(usage.used),
            _size(usage.reserved),
            f"{_age(usage.age)} ago",
            _state(usage),
        )
    return grid


def _verified(found: Sequence[Verification]) -> Table:
    grid = Table(width=80, padding=(0, 1, 0, 0), box=None)
    for name in ("namespace", "rank", "blocks", "bad"):
        grid.add_column(name, justify="right" if name in ("blocks", "bad") else "left")
    for one in found:
        name = one.directory.parents[1].name[:SHOWN]
        grid.add_row(name, _rank(one.directory), f"{one.blocks:,}", f"{one.bad:,}")
    return grid


def _state(usage: RankUsage) -> str:
    if usage.holder:
        return f"process {usage.holder}"
    return "idle" if usage.readable else "unreadable"


def _rank(directory: Path) -> str:
    return f"{directory.parent.name}/{directory.name}"


def _total(ranks: Sequence[RankUsage]) -> str:
    names = len({usage.namespace for usage in ranks})
    return (
        f"{names} namespace{'s' * (names != 1)}, {sum(u.blocks for u in ranks):,} blocks,"
        f" {_size(sum(u.reserved for u in ranks))} reserved"
    )


def _size(count: int) -> str:
    return format_size(count).partition(" ")[0]


def _age(seconds: float) -> str:
    """In the largest unit of which there is one."""
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _plain(usage: RankUsage) -> dict[str, Any]:
    return {
        "namespace": usage.namespace,
        "directory": str(usage.directory),
        "blocks": usage.blocks,
        "used": usage.used,
        "reserved": usage.reserved,
        "age_s": usage.age,
        "readable": usage.readable,
        "holder": usage.holder or None,
    }
