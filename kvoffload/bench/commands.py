"""`kvoffload bench`: this machine beside its own limits."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from kvoffload.arena import available_host_bytes
from kvoffload.bench.copy import bench_copy
from kvoffload.bench.copy_cases import FRAGMENTS, FULL_FRAGMENTS, plot
from kvoffload.bench.disk import bench_disk
from kvoffload.bench.gpu_copy import bench_device_copy
from kvoffload.bench.hash import bench_hash
from kvoffload.bench.index import SMALL, bench_match, bench_match_groups
from kvoffload.bench.planner import bench_planner
from kvoffload.bench.requests import bench_requests
from kvoffload.bench.retention import Case, Growth, bench_retention
from kvoffload.bench.rows import Row
from kvoffload.bench.show import requests_text, retention_table, table
from kvoffload.bench.start import bench_start
from kvoffload.bench.timing import ROUNDS
from kvoffload.console import Json, bar, show
from kvoffload.errors import ConfigError
from kvoffload.native import device_module
from kvoffload.replay.plots import prepare
from kvoffload.units import format_size

app = typer.Typer(
    no_args_is_help=True, help="Speed of this machine, each figure beside a limit of the same run."
)

QUICK_ROUNDS = 3
MOVED, QUICK_MOVED = 256 << 20, 32 << 20
"""Bytes moved per measurement."""

QUICK_REQUESTS = 20_000

Quick = Annotated[bool, typer.Option("--quick", help="Smaller and fewer rounds: a look, no result to quote.")]
Folder = Annotated[
    Path,
    typer.Option("--path", metavar="DIR", help="Folder on the disk to measure; 1 GiB is used for a while."),
]


@app.command()
def index(as_json: Json = False, quick: Quick = False) -> None:
    """Match, pins, memory and store bookkeeping of planner and index."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    sizes = {"sizes": (SMALL,)} if quick else {}
    others = {"others": (0,)} if quick else {}
    rows = chain(
        bench_match(rounds=rounds, **sizes),
        bench_match_groups(rounds=rounds, **others),
        bench_planner(rounds=rounds),
    )
    _report("index", rows, rounds, as_json)


@app.command()
def requests(
    count: Annotated[
        int, typer.Option("--count", min=1, metavar="N", help="Requests; 20,000 with --quick.")
    ] = 1_000_000,
    as_json: Json = False,
    quick: Quick = False,
) -> None:
    """Whole requests of 128 blocks through planner and index: how many a second, and in how much memory."""
    count = min(count, QUICK_REQUESTS) if quick else count
    with bar("bench requests", count) as advance:
        found = bench_requests(count, advance)
    if as_json:
        typer.echo(json.dumps({"bench": "requests", **asdict(found), "met": found.met}))
    else:
        show(requests_text(found))


@app.command("hash")
def hash_(as_json: Json = False, quick: Quick = False) -> None:
    """Naming a million tokens, beside a bare loop over the hash library."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    _report("hash", bench_hash(100_000 if quick else 1_000_000, rounds=rounds), rounds, as_json)


@app.command()
def copy(
    as_json: Json = False,
    quick: Quick = False,
    full: Annotated[bool, typer.Option("--full", help="Every power of two from 1 KiB to 16 MiB.")] = False,
    plot_into: Annotated[
        Path | None, typer.Option("--plot", metavar="DIR", help="Draw the rates into DIR as PNG.")
    ] = None,
) -> None:
    """Fragments of pages into slots and back, on the device or else on the CPU, beside one large copy."""
    rounds, moved = (QUICK_ROUNDS, QUICK_MOVED) if quick else (ROUNDS, MOVED)
    _need_memory(3 * moved)
    if plot_into is not None:
        prepare(plot_into)
    sizes = FULL_FRAGMENTS if full else FRAGMENTS
    found = device_module()
    if found.module is not None:
        where = found.module.device_info(0)[0]
        rows = bench_device_copy(found.module, fragments=sizes, nbytes=moved, rounds=rounds)
    else:
        where = f"the CPU, by _C: no device can be used ({found.reason})"
        threads = {"threads": (2,)} if quick else {}
        rows = bench_copy(sizes, nbytes=moved, rounds=rounds, **threads)
    measured = _report("copy", rows, rounds, as_json, where=where)
    if plot_into is not None:
        place = where if found.module is not None else "the CPU"
        typer.echo(f"drawn: {plot(measured, plot_into, f'bench copy on {place}')}", err=as_json)


@app.command()
def disk(path: Folder = Path(), as_json: Json = False, quick: Quick = False) -> None:
    """Verified reads and writes of the disk tier beside a raw loop, and how long it takes to open."""
    rounds, moved = (QUICK_ROUNDS, QUICK_MOVED) if quick else (ROUNDS, MOVED)
    slots = 10_000 if quick else 100_000
    _need_folder(path, moved + slots * 4096 + (64 << 20))
    _need_memory(2 * moved)
    rows = chain(bench_disk(path, nbytes=moved, rounds=rounds), bench_start(path, slots, rounds))
    _report(f"disk at {path}", rows, rounds, as_json)


@app.command()
def retention(
    sessions: Annotated[int, typer.Option("--sessions", min=2, metavar="N", help="Sessions in all.")] = 14,
    tokens: Annotated[
        int, typer.Option("--tokens", min=40_960, metavar="T", help="Tokens that each grows to.")
    ] = 1_000_000,
    as_json: Json = False,
    quick: Quick = False,
) -> None:
    """Long sessions over full and window groups in a pool for two: what retention keeps, and what its lack costs."""
    growth = Growth(sessions, tokens, trunk=tokens // 5)
    windows = (128,) if quick else (128, 512, 1024)
    cases = (
        Case(0),
        *(Case(w, rule) for w in windows for rule in ("boundaries", "dense")),
        Case(128, forks=False),
        Case(128, stored=False),
    )
    found = []
    with bar("bench retention", len(cases)) as advance:
        for grown in bench_retention(growth, cases):
            found.append(grown)
            advance(1)
    if as_json:
        typer.echo(json.dumps([{**asdict(g), "hit_rate": g.hit_rate, "bound": g.bound} for g in found]))
    else:
        show(retention_table(growth, found))


def _need_folder(path: Path, nbytes: int) -> None:
    if not path.is_dir():
        raise ConfigError(f"--path {path}: no such folder; give one on the disk to be measured")
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"--path {path}: this user may not write there; give a folder of your own")
    room = os.statvfs(path)
    free = room.f_bavail * room.f_frsize
    if free < nbytes:
        raise ConfigError(
            f"--path {path}: {format_size(nbytes)} are needed and {format_size(free)} are free;"
            " make room, give another folder, or take --quick"
        )


def _need_memory(nbytes: int) -> None:
    free = available_host_bytes()
    if free < nbytes:
        raise ConfigError(
            f"{format_size(nbytes)} of memory are needed and {format_size(free)} are free: take --quick"
        )


def _report(name: str, rows: Iterator[Row], rounds: int, as_json: bool, where: str = "") -> list[Row]:
    """Measure and print. where: what was measured, if it is not always the same."""
    found: list[Row] = []
    with bar(f"bench {name}", None) as advance:
        for row in rows:
            found.append(row)
            advance(1)
    if as_json:
        body = {"bench": name, "rounds": rounds, "rows": [row.to_dict() for row in found]}
        if where:
            body["where"] = where
        typer.echo(json.dumps({**body, "missed": [row.name for row in found if row.met is False]}))
    else:
        show(table(f"bench {name}", found, rounds))
        if where:
            show(f"measured on {where}")
    return found
