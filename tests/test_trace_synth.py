"""The generator: equal bytes everywhere, tokens that agree with ids, and the shape that was asked for."""

from __future__ import annotations

import hashlib
import statistics
from collections import Counter
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_files import hits_of, ids_of

from kvoffload.errors import TraceError
from kvoffload.traces import NO_PARENT, SynthSpec, Trace, open_trace, parse_spec, summarize, synthesize
from kvoffload.traces.convert import runs_lines

GOLDEN = SynthSpec(sessions=3, seed=7, max_context=60_000, shared_prefix=1_000, turns=20, subagents=1.0)
GOLDEN_LINES = "581e9bfa2ad7a72d4979317b4c5bdaeeca28790a9f5321197befab0dede9fdb6"
GOLDEN_TOKENS = "31693aad4e1338ec498d28707b086ced23be7ae49bcac767ff946087f2e80bdb"
QUICK = settings(max_examples=8, derandomize=True, deadline=None, database=None)


@lru_cache(maxsize=4)
def made(spec: SynthSpec) -> Trace:
    """The spec's trace, made once."""
    return synthesize(spec)


def test_golden_bytes() -> None:
    """The lines and the tokens of a spec are these bytes, on any Python version."""
    lines = hashlib.sha256("\n".join(runs_lines(made(GOLDEN))).encode()).hexdigest()
    tokens = hashlib.sha256()
    for request in made(GOLDEN).requests:
        assert request.tokens is not None
        tokens.update(request.tokens.astype("<u4").tobytes())
    assert (lines, tokens.hexdigest()) == (GOLDEN_LINES, GOLDEN_TOKENS)


def test_seed_changes_the_trace() -> None:
    """Another seed gives other lengths and other tokens."""
    one, other = (synthesize(SynthSpec(sessions=1, turns=3, seed=seed)) for seed in (1, 2))
    assert [r.input_tokens for r in one.requests] != [r.input_tokens for r in other.requests]
    assert one.requests[0].tokens[:9].tolist() != other.requests[0].tokens[:9].tolist()  # type: ignore[index]


@QUICK
@given(
    seed=st.integers(0, 2**63 - 1),
    sizes=st.sampled_from([(1, 4_096), (16, 9_000), (64, 60_000), (1_000, 9_000)]),
    shared=st.sampled_from([0, 63, 1_500]),
)
def test_ids_are_chained_and_agree_with_tokens(seed: int, sizes: tuple[int, int], shared: int) -> None:
    """A block's id names exactly the tokens up to its end; lengths, cap and vocabulary are kept."""
    block, context = sizes
    spec = SynthSpec(
        sessions=2,
        seed=seed,
        block_size=block,
        max_context=context,
        shared_prefix=shared,
        turns=6,
        subagents=1.0,
        vocabulary=50_000,
    )
    trace = synthesize(spec)
    names: dict[int, bytes] = {}
    for request in trace.requests:
        assert request.tokens is not None
        assert request.input_tokens >= 1
        assert request.output_tokens >= 1
        assert request.input_tokens + request.output_tokens == len(request.tokens) <= context
        assert len(request.ids) == request.input_tokens // block
        assert int(request.tokens.max()) < 50_000
        assert not request.tokens.flags.writeable
        step = max(1, len(request.ids) // 40)  # a sample of the blocks: each digest reads the whole prefix
        for place in range(0, len(request.ids), step):
            digest = hashlib.blake2b(request.tokens[: (place + 1) * block].tobytes()).digest()
            assert names.setdefault(int(request.ids[place]), digest) == digest
    assert len(set(names.values())) == len(names)
    assert hits_of(ids_of(trace)) == summarize(trace).hit_blocks


def test_answers_come_back_in_the_next_prompt() -> None:
    """Unless the context was cut, a turn's prompt starts with the last prompt and its answer."""
    kept, last = Counter[bool](), {}
    for request in made(GOLDEN).requests:
        before = last.get((request.session, request.agent))
        last[request.session, request.agent] = request
        if before is not None:
            assert before.tokens is not None
            assert request.tokens is not None
            kept[np.array_equal(before.tokens, request.tokens[: len(before.tokens)])] += 1
    assert kept[True] > 10 * kept[False] > 0


def test_time_turns_and_parents() -> None:
    """Requests are in time order; turns count per session; a parent is earlier, of main or the agent."""
    trace = made(GOLDEN)
    times = [r.t for r in trace.requests]
    assert times == sorted(times)
    agents: dict[tuple[str, int], str] = {}
    for request in trace.requests:
        agents[request.session, request.turn] = request.agent
        if request.parent == NO_PARENT:
            assert (request.turn, request.agent) == (0, "main")
        else:
            assert request.parent < request.turn
            assert agents[request.session, request.parent] in ("main", request.agent)
    assert len(agents) == len(trace.requests)


def test_sessions_share_only_what_was_asked_for() -> None:
    """Without a shared prefix no id is in two sessions; with one, all of its full blocks are in each."""
    for shared in (0, 1_000):
        trace = synthesize(SynthSpec(sessions=3, turns=4, shared_prefix=shared, subagents=0.0))
        sessions: dict[str, set[int]] = {}
        for request in trace.requests:
            sessions.setdefault(request.session, set()).update(request.ids.tolist())
        assert len(sessions) == 3
        assert len(set.intersection(*sessions.values())) == shared // 64


def test_sub_agents_start_fresh_with_a_common_prefix() -> None:
    """First prompts of a session's sub-agents share their prefix, and no block with main."""
    trace = synthesize(SynthSpec(sessions=1, seed=1, subagents=1.0, turns=60))
    first = {}
    for request in trace.requests:
        first.setdefault(request.agent, set(request.ids.tolist()))
    main = first.pop("main")
    assert len(first) >= 2
    assert len(set.intersection(*first.values())) == 152
    assert all(not main & ids for ids in first.values())


def test_shape_is_that_of_the_table() -> None:
    """Medians, sub-agent share and ideal hit of a larger trace lie near the published figures."""
    trace = synthesize(SynthSpec(sessions=40, seed=1))
    main = [r for r in trace.requests if r.agent == "main"]
    summary = summarize(trace)
    assert summary.hit_percent > 96
    assert 60_000 < statistics.median(r.input_tokens for r in main) < 180_000
    assert 200 < summary.median_output < 450
    assert 100 < len(main) / 40 < 220
    with_agents = {r.session for r in trace.requests if r.agent != "main"}
    assert 0.3 < len(with_agents) / 40 < 0.6
    reasons = Counter(r.finish_reason for r in main)
    assert 0.8 < reasons["tool_use"] / len(main) < 0.92
    assert set(reasons) == {"tool_use", "end_turn"}


def test_spec_strings() -> None:
    """A spec string makes what the dataclass makes; suffixes are thousands; str() reads back."""
    text = "synth:sessions=3,seed=7,max_context=60k,shared_prefix=1k,turns=20,subagents=1"
    assert parse_spec(text) == GOLDEN
    assert parse_spec(str(GOLDEN)) == GOLDEN
    assert parse_spec(f"synth:seed={2**63 - 1}").seed == 2**63 - 1
    assert parse_spec("synth:max_context=1.5m").max_context == 1_500_000
    trace = open_trace(text)
    assert ids_of(trace) == ids_of(made(GOLDEN))
    assert (trace.form, trace.name, trace.block_tokens) == ("synth", str(GOLDEN), 64)
    assert open_trace(text, 16).block_tokens == 16


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("synth:session=3", "unknown option 'session'; the options are sessions, seed"),
        ("synth:sessions=3,sessions=4", "sessions is given twice"),
        ("synth:sessions=many", "sessions = 'many'; it must be a number"),
        ("synth:sessions=1.5", "whole number"),
        ("synth:sessions=inf", "must be a number"),
        ("synth:seed=nank", "must be a number"),
        ("synth:sessions=0", "sessions = 0; it must be 1 to"),
        ("synth:max_context=1k", "max_context = 1000; it must be 4,096"),
        ("synth:subagents=1.1", "subagents = 1.1"),
        ("synth:max_context=8k,shared_prefix=5k", "at most half of max_context"),
    ],
)
def test_bad_specs_are_refused(text: str, message: str) -> None:
    """An unknown option or a value out of range is a TraceError with the limits."""
    with pytest.raises(TraceError, match=message):
        open_trace(text)
