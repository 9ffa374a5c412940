"""What all commands share: tables of 80 columns, a bar on standard error, errors that are one line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
)

WIDTH = 80

FAILED = 1
"""Exit status: what was checked is wrong."""

UNUSABLE = 2
"""Exit status: arguments or input that cannot be used; nothing was checked."""

Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")]
Advance = Callable[[int], None]


def show(content: RenderableType) -> None:
    """Print for people, the same wherever it goes."""
    Console(width=WIDTH, highlight=False, markup=False).print(content)


@contextmanager
def bar(what: str, total: int | None) -> Iterator[Advance]:
    """A bar on standard error while long work runs; nothing where that is no terminal. total: None = not known.

    Yields what moves it on.
    """
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    columns = (
        (SpinnerColumn(), TextColumn("{task.description}"))
        if total is None
        else (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)
