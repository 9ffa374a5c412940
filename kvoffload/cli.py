"""The command line: one sub-app per area, and errors as one line."""

from __future__ import annotations

import sys
from typing import Any

import typer
from typer.core import TyperGroup

from kvoffload.bench.commands import app as bench_app
from kvoffload.console import UNUSABLE
from kvoffload.doctor.commands import doctor
from kvoffload.errors import KVOffloadError
from kvoffload.replay.commands import replay
from kvoffload.tiers.commands import app as disk_app
from kvoffload.traces.commands import app as trace_app

_ARGUMENT_ERROR: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "UsageError")
"""What is raised for arguments. Its home differs between versions of typer; BadParameter is its public child."""

INTERRUPTED = 130


class OneLineErrors(TyperGroup):
    """Errors that a user can mend are one line on standard error: what is wrong, and what to do.

    Status 2 for arguments and input that cannot be used, 1 for what was checked and is wrong; 130 after Ctrl-C. A
    traceback means a defect of kvoffload.
    """

    def main(self, *args: Any, **options: Any) -> Any:
        if not options.pop("standalone_mode", True):
            return super().main(*args, **options, standalone_mode=False)  # type: ignore[misc]
        try:
            status = super().main(*args, **options, standalone_mode=False)  # type: ignore[misc]
        except KVOffloadError as error:
            status = _say(str(error))
        except _ARGUMENT_ERROR as error:
            status = _argument(error)
        except typer.Abort:
            typer.echo("stopped", err=True)
            status = INTERRUPTED
        except MemoryError:
            status = _say("not enough memory for this; ask for less, or raise the limit of the container")
        except OSError as error:
            if error.filename is None:
                raise
            status = _say(f"{error.filename}: {error.strerror}; give a path that this user can use")
        sys.exit(status if isinstance(status, int) else 0)


def _say(message: str) -> int:
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    return UNUSABLE


def _argument(error: Any) -> int:
    """A line for a wrong argument, with the command whose help lists the right ones; help itself as it is."""
    message = error.format_message()
    if not message or "\n" in message.strip():
        typer.echo(message, err=True)
        return UNUSABLE
    command = error.ctx.command_path if error.ctx is not None else "kvoffload"
    return _say(f"{message.rstrip('.')}; see {command} --help")


app = typer.Typer(
    cls=OneLineErrors,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="The KV cache of an LLM engine through tiers: HBM, CPU, disk.",
)
app.command("replay")(replay)
app.add_typer(trace_app, name="trace")
app.add_typer(bench_app, name="bench")
app.add_typer(disk_app, name="disk")
app.command("doctor")(doctor)
