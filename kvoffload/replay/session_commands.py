"""The `--sessions` part of `kvoffload replay`: run, show, and the exit status."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvoffload.replay.session_report import SessionReport
from kvoffload.replay.session_run import SessionOptions, run_sessions
from kvoffload.replay.session_show import session_table
from kvoffload.traces.record import Trace


def play_sessions(trace: Trace, options: SessionOptions, *, as_json: bool) -> SessionReport:
    """Run, with progress on standard error where that is a terminal, and print the report."""
    with _late_jobs_unnamed(), _progress(shown=sys.stderr.isatty()) as step:
        report = run_sessions(trace, options, step)
    if as_json:
        typer.echo(json.dumps(report.to_dict()))
    else:
        Console(width=80, highlight=False, markup=False).print(session_table(report))
    return report


@contextmanager
def _late_jobs_unnamed() -> Iterator[None]:
    """A link too slow for its traffic makes jobs late in virtual time: a figure of the report, not a fault to log."""
    log = logging.getLogger("kvoffload.inflight")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


@contextmanager
def _progress(*, shown: bool) -> Iterator[Callable[[str], None]]:
    """A line that names the run and counts its measured requests."""
    if not shown:
        yield lambda name: None
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}: {task.completed} requests"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("replay", total=None)

        def step(name: str) -> None:
            if bar.tasks[0].description != name:
                bar.reset(task, description=name)
            bar.advance(task)

        yield step
