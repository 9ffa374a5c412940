"""The command line: one sub-app per area, and errors as one line."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from kvoffload.errors import KVOffloadError
from kvoffload.replay.commands import replay
from kvoffload.traces.commands import app as trace_app


class _OneLineErrors(TyperGroup):
    """Shows the errors that kvoffload raises on purpose as one line; the exit status is 1."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KVOffloadError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from None


app = typer.Typer(
    cls=_OneLineErrors,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="The KV cache of an LLM engine through tiers: HBM, CPU, disk.",
)
app.command("replay")(replay)
app.add_typer(trace_app, name="trace")
