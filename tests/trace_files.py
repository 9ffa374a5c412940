"""Helpers of the trace tests: files from rows, and random traces as Hypothesis strategies."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st

from kvoffload.errors import TraceError
from kvoffload.traces import Request, Trace, open_trace
from kvoffload.traces.record import TurnCounter


def write_lines(path: Path, rows: Iterable[object]) -> Path:
    """A JSONL file; strings are written as they are."""
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    path.write_text(text)
    return path


def refused(path: Path, *parts: str, **options: object) -> str:
    """The message of the TraceError that reading the file raises, which contains all the parts."""
    with pytest.raises(TraceError) as caught:
        open_trace(path, **options)  # type: ignore[arg-type]
    message = str(caught.value)
    for part in parts:
        assert part in message
    return message


def ids_of(trace: Trace) -> list[list[int]]:
    """The ids of every prompt as lists."""
    return [request.ids.tolist() for request in trace.requests]


def hits_of(prompts: Iterable[Iterable[int]]) -> int:
    """Hits of an unbounded cache by definition: the leading run of ids seen in earlier prompts."""
    seen: set[int] = set()
    hits = 0
    for prompt in prompts:
        leading = True
        for block in prompt:
            leading = leading and block in seen
            hits += leading
        seen.update(prompt)
    return hits


def facts(request: Request) -> tuple[object, ...]:
    """All of a request but its tokens."""
    return (
        request.session,
        request.agent,
        request.turn,
        request.parent,
        request.t,
        request.input_tokens,
        request.output_tokens,
        request.finish_reason,
        request.service_s,
        request.ids.tolist(),
    )


def call(t: float, ids: list[int], kind: str = "n", **more: object) -> dict[str, object]:
    """A Weka request of 64-token blocks."""
    tokens = 64 * len(ids) + 5
    return {"t": t, "type": kind, "model": "m", "in": tokens, "out": 7, "hash_ids": ids, **more}


def subagent(t: float, name: str, requests: list[object]) -> dict[str, object]:
    """A Weka sub-agent entry."""
    return {
        "t": t,
        "type": "subagent",
        "agent_id": name,
        "subagent_type": "Explore",
        "status": "completed",
        "duration_ms": None,
        "total_tokens": None,
        "tool_use_count": None,
        "models": ["m"],
        "tool_tokens": 1,
        "system_tokens": 1,
        "requests": requests,
    }


def session(name: str, requests: list[object], scope: str = "local", size: int = 64) -> dict[str, object]:
    """A Weka session."""
    head = {"id": name, "models": ["m"], "block_size": size, "hash_id_scope": scope}
    return {**head, "tool_tokens": 0, "system_tokens": 0, "requests": requests, "totals": {"x": 1}}


def request(session: str, turn: int, ids: list[int], tokens: int, **more: object) -> Request:
    """A request of the main agent."""
    base = Request(session, "main", turn, float(turn), turn - 1, np.array(ids, np.int64), tokens, 0, "", None)
    return replace(base, **more)  # type: ignore[arg-type]


def trace_of(*requests: Request) -> Trace:
    """A floor trace of 64-token blocks."""
    return Trace("t", "t", 64, "floor", "full", True, requests)


@st.composite
def chained_traces(draw: st.DrawFn, *, share_sessions: bool = True, named: bool = True) -> Trace:
    """Traces of a few sessions and agents whose prompts branch off earlier ones; floor or ceil."""
    block = draw(st.sampled_from([1, 4, 64]))
    ceil = draw(st.booleans()) if block > 1 else False
    names = ["a", "b"] if named else [""]
    common: list[list[int]] = [[]]
    pools = {name: common if share_sessions else [[]] for name in names}
    turns, requests, t, fresh = TurnCounter(), [], 0, 1000
    for _ in range(draw(st.integers(1, 8))):
        name = draw(st.sampled_from(names))
        known = draw(st.sampled_from(pools[name]))
        prompt = known[: draw(st.integers(0, len(known)))]
        grown = draw(st.integers(0, 3))
        prompt = prompt + list(range(fresh, fresh + grown))
        fresh += grown + draw(st.integers(0, 2))
        pools[name].append(prompt)
        rest = draw(st.integers(0, block - 1))
        agent = draw(st.sampled_from(["main", "agent_001"])) if named else "main"
        turn, parent = turns.take(name, agent)
        t += draw(st.integers(0, 5_000_000))
        requests.append(
            Request(
                session=name,
                agent=agent,
                turn=turn,
                t=t / 1e6,
                parent=parent,
                ids=np.array(prompt, dtype=np.int64),
                input_tokens=len(prompt) * block + (-rest if ceil and prompt else 0 if ceil else rest),
                output_tokens=draw(st.integers(0, 9)),
                finish_reason=draw(st.sampled_from(["", "tool_use", "end_turn"])),
                service_s=draw(st.none() | st.floats(0, 1e6)),
            )
        )
    short = any(len(request.ids) * block > request.input_tokens for request in requests)
    return Trace(
        name="random",
        source="random",
        block_tokens=block,
        partial_tail="ceil" if short else "floor",
        form="full",
        aligned=True,
        requests=tuple(requests),
    )
