"""Weka (AgentX) sessions: one JSON object each, sub-agents nested, blocks of the full prompt only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvoffload.errors import TraceError
from kvoffload.traces.blocks import Entry
from kvoffload.traces.chain import Rekey
from kvoffload.traces.lines import Fields, Row
from kvoffload.traces.record import MAIN, Ids, Request, TurnCounter, seconds

_SLACK_S = 1e-6  # an inner time this much before its entry's is relative to it


@dataclass(frozen=True, slots=True)
class _Call:
    where: str
    agent: str
    t: float
    kind: str
    tokens_in: int
    tokens_out: int
    ids: Ids
    stop: str
    api_time: float | None


@dataclass(frozen=True, slots=True)
class _Session:
    where: str
    name: str
    block_size: int
    scope: str
    calls: list[_Call]


class WekaReader:
    """Turns sessions into entries: session after session, each in time order with its own clock.

    Local ids are moved past those of the sessions before; global ones are re-keyed by (parent, id).
    One session is in memory at a time.
    """

    def __init__(self, rows: Iterable[Row]) -> None:
        self.notes: list[str] = []
        self._rows = rows
        self._scope = ""
        self._names: dict[str, str] = {}
        self._next_id: int | None = None
        self._rekey = Rekey()
        self._dropped = 0

    def __iter__(self) -> Iterator[Entry]:
        for row in self._rows:
            session = _session(row)
            self._admit(session)
            yield from self._entries(session)
        if self._dropped:
            self.notes.append(f"{self._dropped} requests of type s left out: their turns are there as type n")
        if self._scope == "global":
            self.notes.append("hash_id_scope is global: ids re-keyed by (parent, id)")

    def _admit(self, session: _Session) -> None:
        if session.name in self._names:
            raise TraceError(
                f"{session.where}: session {session.name} is also at {self._names[session.name]}; remove one"
            )
        self._names[session.name] = session.where
        self._scope = self._scope or session.scope
        if session.scope != self._scope:
            raise TraceError(
                f"{session.where}: hash_id_scope = {session.scope} after {self._scope}; read them apart"
            )

    def _entries(self, session: _Session) -> Iterator[Entry]:
        calls = _once(session.calls)
        self._dropped += len(session.calls) - len(calls)
        calls.sort(key=lambda call: call.t)
        shift = self._shift(calls)
        turns = TurnCounter()
        for call in calls:
            turn, parent = turns.take(session.name, call.agent)
            request = Request(
                session=session.name,
                agent=call.agent,
                turn=turn,
                t=call.t,
                parent=parent,
                ids=self._rekey.apply(call.ids) if self._scope == "global" else call.ids + shift,
                input_tokens=call.tokens_in,
                output_tokens=call.tokens_out,
                finish_reason=call.stop,
                service_s=call.api_time,
            )
            size = session.block_size
            yield Entry(call.where, request, len(call.ids), call.tokens_in, size, exact=False, aligned=True)

    def _shift(self, calls: list[_Call]) -> int:
        """What to add to a session's ids; the first session keeps its own."""
        filled = [call.ids for call in calls if len(call.ids)]
        if self._scope == "global" or not filled:
            return 0
        lowest, highest = min(int(ids.min()) for ids in filled), max(int(ids.max()) for ids in filled)
        shift = 0 if self._next_id is None else self._next_id - lowest
        if highest + shift >= 2**63 - 1:
            raise TraceError(
                f"{calls[0].where}: id {highest} leaves no room to tell sessions apart; use smaller ids"
            )
        self._next_id = highest + shift + 1
        return shift


def _once(calls: list[_Call]) -> list[_Call]:
    """Without the s rows that repeat an n row of the same agent: equal ids, equal input; one s for each n."""

    def turn(call: _Call) -> tuple[str, int, bytes]:
        return call.agent, call.tokens_in, call.ids.tobytes()

    recorded = Counter(turn(call) for call in calls if call.kind == "n")
    kept = []
    for call in calls:
        if call.kind == "s" and recorded[turn(call)] > 0:
            recorded[turn(call)] -= 1
        else:
            kept.append(call)
    return kept


def _session(row: Row) -> _Session:
    fields = Fields(row.where, row.value)
    name = fields.text("id")
    if not name:
        raise fields.wrong("id", name, "a name that is not empty")
    fields.drop("models", "tool_tokens", "system_tokens", "totals")
    block_size = fields.integer("block_size", 1)
    scope = fields.text("hash_id_scope")
    if scope not in ("local", "global"):
        raise fields.wrong("hash_id_scope", scope, "local or global")
    rows = fields.array("requests")
    fields.finish()
    where = f"{row.where}: session {name}"
    calls = list(_calls(where, rows, MAIN, 0.0))
    if not calls:
        raise TraceError(f"{where}: no requests; remove the session")
    return _Session(row.where, name, block_size, scope, calls)


def _calls(where: str, rows: list[object], agent: str, base: float) -> Iterator[_Call]:
    """The calls of one list and, in place, those of its sub-agents. `base` is added to every time."""
    for number, value in enumerate(rows):
        fields = Fields(f"{where}, request {number}", value)
        kind = fields.text("type")
        if kind == "subagent":
            yield from _subagent(fields, base)
        elif kind in ("n", "s"):
            yield _call(fields, kind, agent, base)
        else:
            raise fields.wrong("type", kind, "n, s or subagent")


def _subagent(fields: Fields, base: float) -> Iterator[_Call]:
    start = base + fields.number("t")
    agent = fields.text("agent_id")
    if agent == MAIN or not agent:
        raise fields.wrong("agent_id", agent, f"a name other than {MAIN}")
    rows = fields.array("requests")
    fields.drop("subagent_type", "status", "models", "tool_tokens", "system_tokens")
    fields.drop("duration_ms", "total_tokens", "tool_use_count")
    fields.finish()
    times = [value.get("t") for value in rows if isinstance(value, dict)]
    relative = any(isinstance(t, int | float) and t + _SLACK_S < start for t in times)
    yield from _calls(f"{fields.where}, {agent}", rows, agent, start if relative else 0.0)


def _call(fields: Fields, kind: str, agent: str, base: float) -> _Call:
    t = base + fields.number("t")
    fields.drop("model", "input_types", "output_types", "think_time")
    if kind == "s":
        fields.drop("ttft")
    call = _Call(
        where=fields.where,
        agent=agent,
        t=seconds(t * 1e6),
        kind=kind,
        tokens_in=fields.integer("in"),
        tokens_out=fields.integer("out"),
        ids=fields.ids("hash_ids"),
        stop=fields.text_or("stop", ""),
        api_time=fields.maybe_number("api_time"),
    )
    fields.finish()
    return call


def is_session(value: object) -> bool:
    """Whether a row is a Weka session, not a Mooncake request."""
    return isinstance(value, dict) and "requests" in value
