"""Sessions as trees of turns: who waits for whom, and how long after."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from kvoffload.keys import Chain, KeyArray, Namespace
from kvoffload.traces.record import MAIN, Request, Trace, trace_keys

JOIN_SLACK_S = 1e-3
"""A sub-agent that ended at most so much after a turn of its parent began was waited for by that turn."""


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One request. after: turns of the tree that must have ended. delay: seconds from the end of the last of these to
    the request (for one without, from the start of the session)."""

    request: Request
    after: tuple[int, ...]
    delay: float


@dataclass(frozen=True, slots=True, eq=False)
class Tree:
    """One session, turns by time."""

    session: str
    turns: tuple[Turn, ...]


def trees_of(trace: Trace) -> list[Tree]:
    """The sessions of a trace, in order of their first request. A request without a session is one of its own."""
    sessions: defaultdict[str, list[Request]] = defaultdict(list)
    for position, request in enumerate(trace.requests):
        sessions[request.session or f"request {position}"].append(request)
    return [Tree(name, _turns(requests)) for name, requests in sessions.items()]


def _end(request: Request) -> float:
    return request.t + (request.service_s or 0.0)


def _turns(requests: list[Request]) -> tuple[Turn, ...]:
    """A turn follows its agent's last one; a sub-agent's first one follows the turn that spawned it; a turn of the main
    agent also waits for the sub-agents spawned by the turn before it that had ended when it began."""
    ordered = sorted(requests, key=lambda r: r.t)
    last: dict[str, int] = {}
    spawned: list[str] = []
    turns: list[Turn] = []
    for position, request in enumerate(ordered):
        agent = request.agent
        after: list[int] = []
        if agent in last:
            after.append(last[agent])
        elif agent != MAIN and MAIN in last:
            after.append(last[MAIN])
            spawned.append(agent)
        if agent == MAIN:
            joined = [a for a in spawned if _end(ordered[last[a]]) <= request.t + JOIN_SLACK_S]
            joined = [a for a in joined if not _goes_on(ordered[position:], a)]
            spawned = [a for a in spawned if a not in joined]
            after += [last[a] for a in joined]
        start = max((_end(ordered[i]) for i in after), default=ordered[0].t)
        turns.append(Turn(request, tuple(after), max(0.0, request.t - start)))
        last[agent] = position
    return tuple(turns)


def _goes_on(later: Iterable[Request], agent: str) -> bool:
    return any(r.agent == agent for r in later)


class KeyMaker:
    """The keys of prompts and, where the trace has tokens, of answers; other ones for every play of a session."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._space = Namespace("replay", trace.block_tokens, hash="xxh3_128")

    def keys(self, request: Request, play: int) -> KeyArray:
        """Keys of the full blocks of prompt and answer; from the ids of a trace without tokens, of the prompt only.

        play 0 shares blocks with other sessions as the trace has it, later ones with nobody.
        """
        if request.tokens is None:
            full = request.ids[: request.input_tokens // self._trace.block_tokens]
            return trace_keys(
                full, bytes(a ^ b for a, b in zip(self._trace.namespace, _tag(play), strict=True))
            )
        chain = Chain(self._space, salt=f"play {play}" if play else None)
        chain.extend(np.asarray(request.tokens))
        return chain.keys


def _tag(play: int) -> bytes:
    return play.to_bytes(16, "little")
