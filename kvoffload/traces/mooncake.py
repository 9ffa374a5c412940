"""Mooncake JSON lines, one request each: full prompts or deltas, ids listed or run-length coded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from kvoffload.errors import TraceError
from kvoffload.traces.blocks import Entry
from kvoffload.traces.lines import Fields, Row
from kvoffload.traces.record import MAIN, Ids, Request, TurnCounter, seconds

Asked: TypeAlias = Literal["auto", "full", "delta"]
Decided: TypeAlias = Literal["full", "delta"]
Sign: TypeAlias = Literal["full", "delta", "undelayed"]


@dataclass(frozen=True, slots=True)
class _Line:
    where: str
    session: str
    agent: str
    turn: int | None
    timestamp: float | None
    delay: float | None
    input_length: int
    output_length: int
    ids: Ids
    finish_reason: str
    service_s: float | None
    block_size: int | None
    aligned: bool


@dataclass(slots=True)
class _Starts:
    """The first ids of a stream's lines so far; `sure` once one of them is a block that must be full."""

    ids: set[int]
    sure: bool


@dataclass(slots=True)
class _Stream:
    """Where one agent of one session stands after its last line."""

    ids: Ids
    tokens: int  # prompt and answer of the last turn
    t: float


class MooncakeReader:
    """Turns rows into entries, in order. `form` is what was asked, or found once a line shows it.

    A line that says nothing about the form (a delay, but so far one block that may be partial) waits, with
    those behind it, for one that does; else memory is bounded by the sessions' last prompts.
    """

    def __init__(self, rows: Iterable[Row], form: Asked) -> None:
        self.notes: list[str] = []
        self.form: Asked = form
        self._forced = form != "auto"
        self._form_at = ""
        self._rows = rows
        self._starts: dict[tuple[str, str], _Starts] = {}
        self._streams: dict[tuple[str, str], _Stream] = {}
        self._turns = TurnCounter()

    def __iter__(self) -> Iterator[Entry]:
        waiting: list[_Line] = []
        for row in self._rows:
            line = _line(row)
            undecided = not self._look(line)
            if waiting or undecided:
                waiting.append(line)
            else:
                yield self._entry(line)
            if waiting and self.form != "auto":
                yield from map(self._entry, waiting)
                waiting = []
        if waiting:
            self.form = "delta"
        yield from map(self._entry, waiting)

    def _look(self, line: _Line) -> bool:
        """Learns from a line; false where it needs the form to be known and it is not."""
        key = (line.session, line.agent)
        starts = self._starts.get(key) if line.session else None
        sign = _sign(line, starts) if starts is not None else None
        if sign is not None and self.form == "auto":
            self.form, self._form_at = ("delta" if sign == "delta" else "full"), line.where
        elif sign is not None and not self._agrees(sign):
            raise self._mismatch(line, sign)
        if line.session:
            known = self._starts.setdefault(key, _Starts(set(), False))
            known.ids.update(line.ids[:1].tolist())
            known.sure = known.sure or len(line.ids) > 1
        return starts is None or self.form != "auto"

    def _agrees(self, sign: Sign) -> bool:
        return sign == self.form or (sign == "undelayed" and (self.form == "full" or self._forced))

    def _mismatch(self, line: _Line, sign: Sign) -> TraceError:
        seen: Decided = "delta" if sign == "delta" else "full"
        start = (
            f"with id {int(line.ids[0])}, {'new' if sign != 'full' else 'as before'}"
            if len(line.ids)
            else "without ids"
        )
        delay = "no delay" if line.delay is None else f"delay {line.delay:g} ms"
        what = f"{line.where}: a later turn of session {line.session} starts {start}, {delay}: {seen} form"
        if self._forced:
            return TraceError(f"{what}, not {self.form}; give form='{seen}' (--form {seen})")
        return TraceError(
            f"{what}, but {self.form} form at {self._form_at}; split the trace by form and convert one part"
        )

    def _entry(self, line: _Line) -> Entry:
        """REQUIRES: the form is decided, or the line is its stream's first."""
        delta, last = self.form == "delta", self._turns.last(line.session, line.agent)
        if line.turn is not None and line.session and line.turn <= last:
            raise TraceError(
                f"{line.where}: turn = {line.turn} after turn {last} of the same session and agent;"
                " put the lines in order, or leave turn out"
            )
        turn, parent = self._turns.take(line.session, line.agent, line.turn)
        stream = self._streams.get((line.session, line.agent))
        ids, prompt, blocks, tokens = line.ids, line.input_length, len(line.ids), line.input_length
        if stream is not None and delta:
            ids, prompt = np.concatenate((stream.ids, ids)), stream.tokens + prompt
        elif stream is not None and not line.aligned:
            blocks, tokens = blocks - len(stream.ids), tokens - stream.tokens
        if stream is not None and (blocks < 0 or tokens < 0):
            raise TraceError(
                f"{line.where}: aligned = false, but {line.input_length} tokens do not extend the turn"
                f" before ({stream.tokens} tokens); remove aligned, or correct the lengths"
            )
        request = Request(
            session=line.session,
            agent=line.agent,
            turn=turn,
            t=_time(line, stream),
            parent=parent,
            ids=ids,
            input_tokens=prompt,
            output_tokens=line.output_length,
            finish_reason=line.finish_reason,
            service_s=line.service_s,
        )
        if line.session:
            self._streams[line.session, line.agent] = _Stream(ids, prompt + line.output_length, request.t)
        return Entry(
            line.where,
            request,
            blocks,
            tokens,
            line.block_size,
            True,
            line.aligned and not (delta and stream),
        )


def _sign(line: _Line, starts: _Starts) -> Sign | None:
    """What a later line of a stream shows of the form.

    full: it starts as an earlier one does. undelayed: no delay, which deltas have. delta: a delay, and a new
    start. None: either, since no block so far must have been full, and a partial one changes as it fills.
    """
    if len(line.ids) and int(line.ids[0]) in starts.ids:
        return "full"
    if line.delay is None:
        return "undelayed"
    return "delta" if len(line.ids) and starts.sure else None


def _time(line: _Line, stream: _Stream | None) -> float:
    """The line's timestamp, else the delay after the stream's last start, else that start; in seconds."""
    if line.timestamp is not None:
        return seconds(line.timestamp * 1000)
    start = stream.t if stream is not None else 0.0
    return seconds(start * 1e6 + (line.delay or 0.0) * 1000)


def _line(row: Row) -> _Line:
    fields = Fields(row.where, row.value)
    input_length = fields.integer("input_length")
    line = _Line(
        where=row.where,
        session=fields.text_or("session_id", ""),
        agent=fields.text_or("agent", MAIN),
        turn=fields.maybe_integer("turn"),
        timestamp=fields.maybe_number("timestamp"),
        delay=fields.maybe_number("delay"),
        input_length=input_length,
        output_length=fields.maybe_integer("output_length") or 0,
        ids=_ids(fields, input_length),
        finish_reason=fields.text_or("finish_reason", ""),
        service_s=fields.maybe_number("service_s"),
        block_size=fields.maybe_integer("block_size", 1),
        aligned=fields.flag("aligned", True),
    )
    fields.finish()
    return line


def _ids(fields: Fields, input_length: int) -> Ids:
    if "hash_runs" not in fields:
        fields.drop("hash_runs")
        return fields.ids("hash_ids")
    if "hash_ids" in fields:
        raise TraceError(f"{fields.where}: both hash_ids and hash_runs; keep one of them")
    fields.drop("hash_ids")
    return fields.runs("hash_runs", input_length)
