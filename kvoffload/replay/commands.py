"""`kvoffload replay`: a trace through the real planner and index, with or without bytes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvoffload.errors import ConfigError, KVOffloadError
from kvoffload.replay import compare
from kvoffload.replay.base import requests_of
from kvoffload.replay.cost import CostModel
from kvoffload.replay.driver import StandstillError
from kvoffload.replay.model_commands import play_model
from kvoffload.replay.plots import plot, plot_sessions, prepare
from kvoffload.replay.run import Options, distinct_blocks, run_replay
from kvoffload.replay.session_commands import play_sessions
from kvoffload.replay.session_run import SessionOptions
from kvoffload.replay.sessions import Schedule
from kvoffload.replay.show import table
from kvoffload.replay.tiers import (
    Capacity,
    Policies,
)
from kvoffload.traces.commands import BlockSize, Form, FormChoice, Json, Rekey, Source
from kvoffload.traces.load import open_trace
from kvoffload.traces.record import Trace
from kvoffload.units import parse_size

WRONG = 1
UNUSABLE = 2
"""Exit codes: wrong bytes or a broken identity (also a standstill); arguments or input that cannot be
used."""


def replay(  # noqa: PLR0913, PLR0917  typer reads the options from the parameters
    trace: Source,
    sequential: Annotated[
        bool, typer.Option("--sequential", help="One request at a time, exact numbers (the default).")
    ] = False,
    lanes: Annotated[int, typer.Option("--lanes", min=0, metavar="N", help="N requests in flight.")] = 0,
    index_only: Annotated[bool, typer.Option("--index-only", help="Count blocks, move no byte.")] = False,
    block_bytes: Annotated[
        str, typer.Option("--block-bytes", metavar="SIZE", help="Bytes of one block, like 16KiB.")
    ] = "16KiB",
    device_blocks: Annotated[
        int, typer.Option("--device-blocks", min=0, metavar="N", help="Pages; 0 = no prefix cache in HBM.")
    ] = 0,
    host_blocks: Annotated[
        int | None, typer.Option("--host-blocks", min=1, metavar="C", help="Host slots; no limit without it.")
    ] = None,
    disk_blocks: Annotated[
        int, typer.Option("--disk-blocks", min=0, metavar="D", help="Disk slots; 0 = no disk tier.")
    ] = 0,
    disk_path: Annotated[
        Path | None, typer.Option("--disk-path", metavar="DIR", help="Keep the disk tier here.")
    ] = None,
    block_size: BlockSize = None,
    form: Form = FormChoice.auto,
    rekey: Rekey = False,
    check: Annotated[
        bool, typer.Option("--check", help="Compare with a brute-force LRU, and check identities 1-4.")
    ] = False,
    host_policy: Annotated[
        str, typer.Option("--host-policy", metavar="P", help="lru, rri or rri-keep.")
    ] = "lru",
    disk_policy: Annotated[
        str, typer.Option("--disk-policy", metavar="P", help="lru, rri or rri-keep.")
    ] = "lru",
    side_by_side: Annotated[
        bool,
        typer.Option("--compare", help="LRU, the policies (or rri) and the optimum, sequential, no bytes."),
    ] = False,
    sweep: Annotated[
        str, typer.Option("--sweep", metavar="C,C,...", help="--compare at each of these --host-blocks.")
    ] = "",
    plot_into: Annotated[
        Path | None, typer.Option("--plot", metavar="DIR", help="Draw the figures into DIR as PNG.")
    ] = None,
    sessions: Annotated[
        int,
        typer.Option("--sessions", min=0, metavar="N", help="N live sessions on an engine, in virtual time."),
    ] = 0,
    window: Annotated[
        float,
        typer.Option("--window", min=0, metavar="S", help="Measured seconds; 0 = every session once, whole."),
    ] = 3600.0,
    think: Annotated[
        float, typer.Option("--think", min=0, metavar="X", help="Factor on the sessions' pauses.")
    ] = 1.0,
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", help="Of the points where sessions are joined.")
    ] = 42,
    cost: Annotated[
        str, typer.Option("--cost", metavar="NAME=X,..", help="Rates of the cost model, like link_in=25e9.")
    ] = "",
    controls: Annotated[
        bool, typer.Option("--controls/--no-controls", help="Beside it: no offload, infinite, rewrite all.")
    ] = True,
    model: Annotated[
        str,
        typer.Option("--model", metavar="NAME", help="Play the groups of a known model, like gemma-3-27b."),
    ] = "",
    scale_bytes: Annotated[
        int, typer.Option("--scale-bytes", min=1, metavar="F", help="Divide all bytes of --model by F.")
    ] = 1,
    retention: Annotated[
        str, typer.Option("--retention", metavar="RULE", help="Of --model: boundaries, dense or 'every N'.")
    ] = "boundaries",
    as_json: Json = False,
) -> None:
    """Replay a trace through HBM, host and disk: hits by tier, what was written, and whether a byte was
    wrong.

    Exit status: 0 all right, 1 wrong bytes or figures that contradict each other, 2 arguments that cannot be
    used.
    """
    try:
        _check_modes(sequential=sequential, lanes=lanes, sessions=sessions, check=check)
        if plot_into is not None:
            prepare(plot_into)
        options = Options(
            lanes, index_only, _size(block_bytes), device_blocks, host_blocks, disk_blocks, disk_path, check
        )
        options = replace(options, host_policy=host_policy, disk_policy=disk_policy)
        opened = open_trace(trace, block_size, form.value, rekey)
        if side_by_side or sweep:
            _compare(opened, replace(options, lanes=lanes or sessions), sweep, as_json=as_json)
            return
        if sessions:
            session_options = SessionOptions(
                Schedule(sessions, window, think, seed),
                index_only,
                options.block_bytes,
                device_blocks,
                host_blocks,
                disk_blocks,
                disk_path,
                CostModel.parse(cost),
                controls,
                (host_policy, disk_policy),
            )
            raise typer.Exit(_sessions(opened, session_options, plot_into, as_json=as_json))
        if model:
            right = play_model(opened, model, scale_bytes, retention, index_only=index_only, as_json=as_json)
            raise typer.Exit(0 if right else WRONG)
        report = run_replay(opened, options, progress=True)
        drawn = plot(report, plot_into) if plot_into is not None else []
    except KVOffloadError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(WRONG if isinstance(error, StandstillError) else UNUSABLE) from None
    if as_json:
        typer.echo(json.dumps(report.to_dict()))
    else:
        Console(width=80, highlight=False, markup=False).print(table(report))
    _say_drawn(drawn, as_json)
    if not report.ok:
        raise typer.Exit(WRONG)


def _compare(trace: Trace, options: Options, sweep: str, *, as_json: bool) -> None:
    """Print policies side by side, at one capacity or at each of a sweep."""
    requests = requests_of(trace)
    if options.lanes or options.check or options.disk_path or not requests:
        raise ConfigError(
            "--compare counts blocks of one request after the other: leave --lanes, --sessions, --check out"
        )
    try:
        sizes = (
            [int(c) for c in sweep.split(",")]
            if sweep
            else [options.host_blocks or distinct_blocks(requests)]
        )
    except ValueError:
        raise ConfigError(f"--sweep {sweep}: give numbers of blocks, like 2000,5000") from None
    if min(sizes) < 1:
        raise ConfigError(f"--sweep {sweep}: a host tier has at least 1 block")
    policies = Policies(options.host_policy, options.disk_policy)
    capacities = [Capacity(c, options.disk_blocks) for c in sizes]
    results = list(compare.compare(requests, trace.block_tokens, capacities, policies))
    if as_json:
        typer.echo(json.dumps([r.to_dict() for r in results]))
    else:
        console = Console(width=100, highlight=False, markup=False)
        console.print(compare.table(results))
        console.print(compare.times(results))


def _check_modes(*, sequential: bool, lanes: int, sessions: int, check: bool) -> None:
    """Raise ConfigError where two ways to replay are asked for at once."""
    if sequential and lanes:
        raise ConfigError(f"--sequential with --lanes {lanes}: leave one of them out")
    if sessions and (sequential or lanes or check):
        raise ConfigError("--sessions with --sequential, --lanes or --check: leave one of them out")


def _sessions(opened: Trace, options: SessionOptions, plot_into: Path | None, *, as_json: bool) -> int:
    """Play live sessions; the exit status."""
    played = play_sessions(opened, options, as_json=as_json)
    if plot_into is not None:
        _say_drawn(plot_sessions(played, plot_into), as_json)
    return 0 if played.ok else WRONG


def _say_drawn(paths: list[Path], as_json: bool) -> None:
    for path in paths:
        typer.echo(f"drawn: {path}", err=as_json)


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigError(f"--block-bytes: {error}") from None
