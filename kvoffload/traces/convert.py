"""Traces written as files: Mooncake full, runs or delta, or Weka sessions; read back before they count."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from kvoffload.errors import TraceError
from kvoffload.traces.load import open_trace
from kvoffload.traces.record import MAIN, Ids, Request, Trace

Target: TypeAlias = Literal["full", "delta", "runs", "weka"]
TARGETS: tuple[Target, ...] = ("full", "delta", "runs", "weka")


def write_trace(trace: Trace, out: Path, to: Target = "runs", *, force: bool = False) -> None:
    """Writes a trace; gzip where the name ends in .gz; the file appears whole or not at all.

    Each line is read back and compared before: what the target cannot hold is a TraceError, not a loss. Weka
    holds sessions one after another and names ids per session, so there the comparison is by session and up
    to renaming; tokens are held by no file. Raises TraceError where `out` exists, unless `force`.
    """
    suffixes = (".json", ".json.gz", ".jsonl", ".jsonl.gz")
    if not out.name.endswith(suffixes):
        raise TraceError(f"{out}: the name must end in {', '.join(suffixes)}")
    if out.exists() and not force:
        raise TraceError(f"{out}: exists; give another name, or force=True (--force) to replace it")
    lines = _LINES[to](trace)
    # The temporary name keeps the suffix: reading back goes by it.
    temporary = out.with_name(f".{os.getpid()}.{out.name}")
    try:
        _write(temporary, lines)
        _verify(trace, temporary, out, to)
        temporary.replace(out)
    except OSError as error:
        raise TraceError(f"{out}: cannot be written ({error}); is the folder there, with room?") from error
    finally:
        with suppress(FileNotFoundError, NotADirectoryError):
            temporary.unlink()


def _write(path: Path, lines: Iterable[str]) -> None:
    """The same lines make the same bytes: no name, no time in the gzip header."""
    with path.open("xb") as stream:
        if path.name.endswith(".gz"):
            with gzip.GzipFile(filename="", mode="wb", fileobj=stream, mtime=0) as packed:
                packed.writelines(line.encode() + b"\n" for line in lines)
        else:
            stream.writelines(line.encode() + b"\n" for line in lines)
        stream.flush()
        os.fsync(stream.fileno())


def full_lines(trace: Trace) -> Iterator[str]:
    """Mooncake, each prompt's ids as a list."""
    for request in trace.requests:
        yield _line(trace, request, **_aligned(trace), hash_ids=request.ids.tolist())


def runs_lines(trace: Trace) -> Iterator[str]:
    """Mooncake, each prompt's ids as [[start, count], ...]."""
    for request in trace.requests:
        yield _line(trace, request, **_aligned(trace), hash_runs=runs_of(request.ids))


def _aligned(trace: Trace) -> dict[str, object]:
    """The mark of full prompts that hold generated tokens without ids."""
    return {} if trace.aligned else {"aligned": False}


def delta_lines(trace: Trace) -> Iterator[str]:
    """Mooncake, each turn's new ids and tokens. Raises TraceError where a prompt does not extend the last."""
    last: dict[tuple[str, str], Request] = {}
    for request in trace.requests:
        before = last.get((request.session, request.agent))
        if request.session:
            last[request.session, request.agent] = request
        if before is None:
            yield _line(trace, request, hash_ids=request.ids.tolist())
            continue
        known, wait = len(before.ids), _microseconds(request.t) - _microseconds(before.t)
        tokens = request.input_tokens - before.input_tokens - before.output_tokens
        if not np.array_equal(request.ids[:known], before.ids) or tokens < 0 or wait < 0:
            raise TraceError(
                f"{trace.source}: turn {request.turn} of {request.session} ({request.agent}) does not"
                f" extend the turn before ({tokens} new tokens, {wait / 1000:g} ms later); use --to runs"
            )
        yield _line(
            trace,
            request,
            delay=_whole(wait / 1000),
            input_length=tokens,
            hash_ids=request.ids[known:].tolist(),
        )


def weka_lines(trace: Trace) -> Iterator[str]:
    """Weka, a session a line, in order of first request."""
    sessions: dict[str, list[Request]] = {}
    for request in trace.requests:
        sessions.setdefault(request.session, []).append(request)
    if "" in sessions:
        raise TraceError(
            f"{trace.source}: requests without a session; Weka holds sessions: use --to full or runs"
        )
    if not trace.aligned or trace.partial_tail != "floor":
        raise TraceError(
            f"{trace.source}: Weka lists full blocks only; use --to full or runs, or a larger --block-size"
        )
    owner: dict[int, str] = {}
    for name, requests in sessions.items():
        for block in np.unique(np.concatenate([request.ids for request in requests])).tolist():
            if owner.setdefault(block, name) != name:
                raise TraceError(
                    f"{trace.source}: id {block} is in sessions {owner[block]} and {name}; Weka ids are local"
                    " to a session: use --to full or runs"
                )
        yield _dump(_session(trace, name, requests))


def _session(trace: Trace, name: str, requests: list[Request]) -> dict[str, object]:
    """Each sub-agent's requests in one entry, put where its first one stands."""
    rows: list[object] = []
    agents: dict[str, list[object]] = {MAIN: rows}
    for request in requests:
        if request.agent not in agents:
            inner = agents[request.agent] = []
            rows.append(
                {
                    "t": request.t,
                    "type": "subagent",
                    "agent_id": request.agent,
                    "subagent_type": "",
                    "duration_ms": None,
                    "total_tokens": None,
                    "tool_use_count": None,
                    "status": "completed",
                    "requests": inner,
                    "models": [],
                    "tool_tokens": 0,
                    "system_tokens": 0,
                }
            )
        agents[request.agent].append(
            {
                "t": request.t,
                "type": "n",
                "model": "",
                "in": request.input_tokens,
                "out": request.output_tokens,
                "hash_ids": request.ids.tolist(),
                "stop": request.finish_reason,
                "api_time": request.service_s,
                "think_time": None,
            }
        )
    head = {"id": name, "models": [], "block_size": trace.block_tokens, "hash_id_scope": "local"}
    return {**head, "tool_tokens": 0, "system_tokens": 0, "requests": rows}


def _line(trace: Trace, request: Request, **own: object) -> str:
    """A Mooncake line; `own` replaces or adds fields, a delay takes the timestamp's place."""
    fields: dict[str, object] = (
        {} if "delay" in own else {"timestamp": _whole(_microseconds(request.t) / 1000)}
    )
    fields |= {"input_length": request.input_tokens, "output_length": request.output_tokens} | own
    if request.session:
        fields |= {"session_id": request.session, "agent": request.agent}
    elif request.agent != MAIN:
        fields["agent"] = request.agent
    if request.session or request.turn:
        fields["turn"] = request.turn
    if request.finish_reason:
        fields["finish_reason"] = request.finish_reason
    if request.service_s is not None:
        fields["service_s"] = request.service_s
    fields["block_size"] = trace.block_tokens
    return _dump(fields)


def runs_of(ids: Ids) -> list[list[int]]:
    """Maximal runs of consecutive ids, as [start, count]."""
    if not len(ids):
        return []
    starts = np.concatenate(([0], np.flatnonzero(np.diff(ids) != 1) + 1))
    counts = np.diff(np.append(starts, len(ids)))
    pairs: list[list[int]] = np.stack((ids[starts], counts), axis=1).tolist()
    return pairs


def _microseconds(t: float) -> int:
    return round(t * 1e6)


def _whole(value: float) -> float:
    return int(value) if value == int(value) else value


def _dump(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


_LINES: dict[Target, Callable[[Trace], Iterator[str]]] = {
    "full": full_lines,
    "runs": runs_lines,
    "delta": delta_lines,
    "weka": weka_lines,
}


_LIMITS: dict[Target, str] = {
    "delta": "there each turn starts a new block and generated tokens have no ids, and these prompts differ from that",
}


def _verify(trace: Trace, written: Path, out: Path, to: Target) -> None:
    form: Literal["auto", "delta"] = "delta" if to == "delta" else "auto"
    try:
        problem = difference(trace, open_trace(written, trace.block_tokens, form), by_session=to == "weka")
    except TraceError:  # its advice is for someone who reads a trace
        problem = _LIMITS.get(to, "what was written cannot be read back")
    if problem:
        raise TraceError(f"{out}: the form {to} cannot hold this trace: {problem}; use --to full or runs")


def difference(left: Trace, right: Trace, *, by_session: bool = False) -> str:
    """The first difference of two traces' requests, tokens apart, or "".

    by_session: order counts within sessions only, and ids up to a renaming that is one to one.
    """
    if left.block_tokens != right.block_tokens or left.partial_tail != right.partial_tail:
        return (
            f"blocks {left.block_tokens}/{left.partial_tail} became {right.block_tokens}/{right.partial_tail}"
        )
    if len(left.requests) != len(right.requests):
        return f"{len(left.requests)} requests became {len(right.requests)}"
    order = (lambda request: request.session) if by_session else (lambda _: "")
    ours, theirs = sorted(left.requests, key=order), sorted(right.requests, key=order)
    for one, other in zip(ours, theirs, strict=True):
        if _facts(one) != _facts(other):
            return f"turn {one.turn} of session {one.session or '-'}: {_facts(one)} became {_facts(other)}"
        if len(one.ids) != len(other.ids) or not (by_session or np.array_equal(one.ids, other.ids)):
            return f"turn {one.turn} of session {one.session or '-'}: other ids"
    return "" if not by_session or _renamed(ours, theirs) else "ids: two became one, or one became two"


def _facts(request: Request) -> tuple[object, ...]:
    place = (request.session, request.agent, request.turn, request.parent, request.t)
    return (*place, request.input_tokens, request.output_tokens, request.finish_reason, request.service_s)


def _renamed(ours: list[Request], theirs: list[Request]) -> bool:
    """Whether the ids of two equally long lists of prompts differ by a one-to-one renaming only."""
    empty = [np.empty(0, dtype=np.int64)]
    old = np.concatenate(empty + [request.ids for request in ours])
    new = np.concatenate(empty + [request.ids for request in theirs])
    _, first, place = np.unique(old, return_index=True, return_inverse=True)
    names = new[first]
    return bool(np.array_equal(names[place], new)) and len(np.unique(names)) == len(names)
