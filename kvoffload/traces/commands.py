"""`kvoffload trace`: look at a trace, convert one, make one."""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvoffload.traces.convert import write_trace
from kvoffload.traces.info import Summary, summarize
from kvoffload.traces.load import open_trace
from kvoffload.traces.record import Trace
from kvoffload.traces.synth import synthesize
from kvoffload.traces.synth_spec import SynthSpec, parse_spec, shown

app = typer.Typer(no_args_is_help=True, help="Look at request traces, convert them, make them.")


class FormChoice(StrEnum):
    """How the prompts are listed."""

    auto = "auto"
    full = "full"
    delta = "delta"


class TargetChoice(StrEnum):
    """What is written."""

    full = "full"
    delta = "delta"
    runs = "runs"
    weka = "weka"


WRITTEN = {
    TargetChoice.full: "full prompts, Mooncake",
    TargetChoice.delta: "delta, Mooncake",
    TargetChoice.runs: "full prompts, Mooncake, ids as runs",
    TargetChoice.weka: "sessions, Weka",
}
"""Each target in the words of docs/traces.md."""


Source = Annotated[
    str, typer.Argument(metavar="TRACE", help="File, folder of sessions, or synth:name=value,...")
]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="*.jsonl, *.jsonl.gz, *.json or *.json.gz")]
BlockSize = Annotated[int | None, typer.Option("--block-size", metavar="TOKENS", help="Block size wanted.")]
Form = Annotated[FormChoice, typer.Option("--form", help="full prompts, each turn's delta, or found out.")]
Rekey = Annotated[bool, typer.Option("--rekey", help="Ids are not chained: name blocks by (parent, id).")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")]
Force = Annotated[bool, typer.Option("--force", help="Replace OUT.")]


@app.command()
def info(
    trace: Source,
    block_size: BlockSize = None,
    form: Form = FormChoice.auto,
    rekey: Rekey = False,
    as_json: Json = False,
) -> None:
    """Sizes, reuse in an unbounded cache, and the cost of storing full prompts."""
    _show(open_trace(trace, block_size, form.value, rekey), as_json)


@app.command()
def convert(
    trace: Source,
    out: Out,
    to: Annotated[TargetChoice, typer.Option("--to", help="What to write.")] = TargetChoice.runs,
    block_size: BlockSize = None,
    form: Form = FormChoice.auto,
    rekey: Rekey = False,
    force: Force = False,
) -> None:
    """Write a trace in another form, or in larger blocks; what OUT cannot hold is an error."""
    source = open_trace(trace, block_size, form.value, rekey)
    write_trace(source, out, to.value, force=force)
    size = f"{len(source.requests):,} requests in blocks of {source.block_tokens} tokens"
    typer.echo(f"{out}: {size}, written as {WRITTEN[to]}")
    if any(request.tokens is not None for request in source.requests):
        typer.echo("token ids are left out: a file has none, so answers are not named and not stored")


@app.command()
def synth(
    out: Out,
    sessions: Annotated[int, typer.Option(help="Sessions.")] = SynthSpec.sessions,
    seed: Annotated[int, typer.Option(help="Equal seeds and options make equal traces.")] = SynthSpec.seed,
    max_context: Annotated[str, typer.Option(metavar="TOKENS", help="Like 300k.")] = str(
        SynthSpec.max_context
    ),
    shared_prefix: Annotated[
        str, typer.Option(metavar="TOKENS", help="Tokens that all sessions start with.")
    ] = "0",
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE", help="Any other option of docs/traces.md, like turns=40."
        ),
    ] = None,
    force: Force = False,
) -> None:
    """Make AgentX-like sessions: turns, growth, sub-agents, resets, think times."""
    given = [
        f"sessions={sessions}",
        f"seed={seed}",
        f"max_context={max_context}",
        f"shared_prefix={shared_prefix}",
    ]
    spec = parse_spec("synth:" + ",".join(given + (option or [])))
    trace = synthesize(spec)
    write_trace(trace, out, "runs", force=force)
    typer.echo(f"{out}: {len(trace.requests):,} requests of {spec.sessions} sessions, without token ids")
    typer.echo(f"the same with token ids, so that answers are stored too: give as TRACE\n  {spec.short()}")


def _show(trace: Trace, as_json: bool) -> None:
    summary = summarize(trace)
    if as_json:
        typer.echo(json.dumps(asdict(summary)))
        return
    table = Table(title=None, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", justify="right")
    for name, value in _lines(summary):
        table.add_row(name, value)
    Console(width=80, highlight=False, markup=False).print(table)
    for note in summary.notes:
        typer.echo(f"note: {note}")


def _lines(summary: Summary) -> list[tuple[str, str]]:
    tail = {"floor": "only full blocks listed (floor)", "ceil": "partial tail listed (ceil)"}
    return [
        ("trace", shown(str(summary.source))),
        ("form", summary.form),
        ("block size", f"{summary.block_tokens} tokens, {tail[summary.partial_tail]}"),
        ("requests", f"{summary.requests:,}"),
        ("sessions", "not named" if summary.sessions is None else f"{summary.sessions:,}"),
        ("agents", "not named" if summary.agents is None else f"{summary.agents:,}"),
        ("duration", f"{summary.duration_s:,.0f} s"),
        ("tokens in / out", f"{summary.input_tokens:,} / {summary.output_tokens:,}"),
        ("median in / out", f"{summary.median_input:,.0f} / {summary.median_output:,.0f}"),
        ("blocks", f"{summary.blocks:,}"),
        ("unique blocks", f"{summary.unique_blocks:,}"),
        ("hits, unbounded cache", f"{summary.hit_blocks:,} ({summary.hit_percent:.2f} %)"),
        ("the same, of tokens", f"{summary.hit_percent_tokens:.2f} %"),
        ("rewrite factor", f"{summary.rewrite_factor:.2f} (blocks / unique blocks)"),
    ]
