"""Conversion: what comes back is what went in; larger blocks; files that appear whole or not at all."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvoffload.errors import TraceError
from kvoffload.traces import Request, Trace, coarsen, open_trace, summarize, trace_keys, write_trace
from kvoffload.traces.convert import TARGETS, difference, runs_lines, runs_of
from tests.trace_files import chained_traces, facts, hits_of, ids_of, write_lines

QUICK = settings(max_examples=60, derandomize=True, deadline=None, database=None)
S0 = {"session_id": "s", "timestamp": 1000, "input_length": 1000, "output_length": 30, "hash_ids": [0, 1]}
S1 = {"session_id": "s", "delay": 2500, "input_length": 600, "output_length": 40, "hash_ids": [2, 3]}
ONE = {"timestamp": 0, "input_length": 1000, "output_length": 7, "hash_ids": [4, 9]}


def request(session: str, turn: int, ids: list[int], tokens: int, **more: object) -> Request:
    """A request of the main agent."""
    base = Request(session, "main", turn, float(turn), turn - 1, np.array(ids, np.int64), tokens, 0, "", None)
    return replace(base, **more)  # type: ignore[arg-type]


def trace_of(*requests: Request) -> Trace:
    """A floor trace of 64-token blocks."""
    return Trace("t", "t", 64, "floor", "full", True, requests)


@QUICK
@given(
    trace=chained_traces(),
    to=st.sampled_from(["full", "runs"]),
    suffix=st.sampled_from(["jsonl", "jsonl.gz"]),
)
def test_full_and_runs_hold_any_trace(
    tmp_path_factory: pytest.TempPathFactory, trace: Trace, to: str, suffix: str
) -> None:
    """Full and runs give back every field and id, in order, with block size and tail rule."""
    out = tmp_path_factory.getbasetemp() / f"any.{suffix}"
    write_trace(trace, out, to, force=True)  # type: ignore[arg-type]
    back = open_trace(out)
    assert [facts(r) for r in back.requests] == [facts(r) for r in trace.requests]
    assert (back.block_tokens, back.partial_tail, back.form) == (
        trace.block_tokens,
        trace.partial_tail,
        "full",
    )


@QUICK
@given(trace=chained_traces(named=False))
def test_traces_without_sessions_survive(tmp_path_factory: pytest.TempPathFactory, trace: Trace) -> None:
    """Requests of no session keep none."""
    out = tmp_path_factory.getbasetemp() / "unnamed.jsonl"
    write_trace(trace, out, force=True)
    assert [facts(r) for r in open_trace(out).requests] == [facts(r) for r in trace.requests]


@QUICK
@given(trace=chained_traces(share_sessions=False))
def test_weka_holds_sessions_up_to_names_of_ids(
    tmp_path_factory: pytest.TempPathFactory, trace: Trace
) -> None:
    """Weka gives back each session's requests, and ids that are equal where they were; ceil is refused."""
    out = tmp_path_factory.getbasetemp() / "weka.jsonl"
    times = {(r.session, r.t) for r in trace.requests}
    assume(len(times) == len(trace.requests))  # equal times of two agents leave their order open
    if trace.partial_tail == "ceil":
        with pytest.raises(TraceError, match="full blocks only"):
            write_trace(trace, out, "weka", force=True)
        return
    write_trace(trace, out, "weka", force=True)
    back = open_trace(out)
    names: dict[int, int] = {}
    for session in {r.session for r in trace.requests}:
        ours = [r for r in trace.requests if r.session == session]
        theirs = [r for r in back.requests if r.session == session]
        assert [facts(r)[:-1] for r in ours] == [facts(r)[:-1] for r in theirs]
        for one, other in zip(ours, theirs, strict=True):
            for old, new in zip(one.ids.tolist(), other.ids.tolist(), strict=True):
                assert names.setdefault(old, new) == new
    assert len(set(names.values())) == len(names)


@QUICK
@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 40), st.integers(0, 9), st.integers(0, 9999)))
)
def test_delta_to_full_to_delta(
    tmp_path_factory: pytest.TempPathFactory, turns: list[tuple[str, int, int, int]]
) -> None:
    """A delta trace survives full, runs and delta again; its full form is marked as not aligned."""
    folder = tmp_path_factory.getbasetemp()
    rows: list[dict[str, object]] = [{**S0, "session_id": "z"}, {**S1, "session_id": "z"}]
    started: set[str] = set()
    for place, (name, new, out, delay) in enumerate(turns):
        when = {"delay": delay} if name in started else {"timestamp": delay}
        started.add(name)
        blocks = list(range(100 * place + 10, 100 * place + 10 - (-new // 512)))
        rows.append(
            {"session_id": name, "input_length": new, "output_length": out, "hash_ids": blocks, **when}
        )
    trace = open_trace(write_lines(folder / "d0.jsonl", rows))
    write_trace(trace, folder / "d1.jsonl", "full", force=True)
    full = open_trace(folder / "d1.jsonl")
    assert (trace.aligned, full.aligned, full.form) == (False, False, "full")
    write_trace(full, folder / "d2.jsonl", "runs", force=True)
    write_trace(open_trace(folder / "d2.jsonl"), folder / "d3.jsonl", "delta", force=True)
    back = open_trace(folder / "d3.jsonl")
    assert [facts(r) for r in back.requests] == [facts(r) for r in trace.requests]
    assert back.form == "delta"


def test_what_a_target_cannot_hold_is_refused(tmp_path: Path) -> None:
    """A delta of a prompt that starts anew, Weka ids shared by sessions or without one: no file appears."""
    out = tmp_path / "out.jsonl"
    anew = trace_of(request("s", 0, [1, 2], 128), request("s", 1, [1, 3, 4], 192))
    shorter = trace_of(request("s", 0, [1, 2], 190), request("s", 1, [1, 2], 130))
    shared = trace_of(request("a", 0, [1], 64), request("b", 0, [1, 2], 128))
    backwards = trace_of(
        request("s", 0, [1], 64), request("s", 1, [1], 64, t=0.5), request("s", 2, [1], 64, t=0.2)
    )
    swapped = trace_of(request("s", 0, [1], 64, t=3.0), request("s", 1, [1], 64, t=0.5))
    for trace, to, message in (
        (anew, "delta", "turn 1 of s .main. does not extend"),
        (shorter, "delta", "-60 new tokens"),
        (backwards, "delta", "-300 ms later"),
        (shared, "weka", "id 1 is in sessions a and b"),
        (trace_of(request("", 0, [1], 64)), "weka", "without a session"),
        (swapped, "weka", "the form weka cannot hold this trace: turn 0"),
    ):
        with pytest.raises(TraceError, match=message):
            write_trace(trace, out, to)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_files_appear_whole_and_replace_on_request_only(tmp_path: Path) -> None:
    """A file that exists stays as it is without force, and after a failed conversion; no temporary stays."""
    trace = open_trace(write_lines(tmp_path / "in.jsonl", [ONE]))
    out = tmp_path / "out.jsonl"
    out.write_text("mine")
    with pytest.raises(TraceError, match=r"out\.jsonl: exists.*--force"):
        write_trace(trace, out)
    with pytest.raises(TraceError, match="without a session"):
        write_trace(trace, out, "weka", force=True)
    assert out.read_text() == "mine"
    write_trace(trace, out, force=True)
    assert ids_of(open_trace(out)) == [[4, 9]]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
    with pytest.raises(TraceError, match="cannot be written"):
        write_trace(trace, tmp_path / "none" / "out.jsonl")
    with pytest.raises(TraceError, match="must end in"):
        write_trace(trace, tmp_path / "out.csv")


def test_equal_traces_make_equal_bytes(tmp_path: Path) -> None:
    """The gzip file depends on the lines only, not on its name or the time; each target has a golden line."""
    trace = open_trace(write_lines(tmp_path / "in.jsonl", [S0, S1]))
    write_trace(trace, tmp_path / "a.jsonl.gz", "delta")
    write_trace(trace, tmp_path / "b.jsonl.gz", "delta")
    packed = (tmp_path / "a.jsonl.gz").read_bytes()
    assert packed == (tmp_path / "b.jsonl.gz").read_bytes()
    assert [json.loads(line) for line in gzip.decompress(packed).splitlines()] == [
        {**S0, "agent": "main", "turn": 0, "block_size": 512},
        {**S1, "agent": "main", "turn": 1, "block_size": 512},
    ]
    assert list(runs_lines(open_trace(tmp_path / "in.jsonl", form="delta")))[1] == (
        '{"timestamp":3500,"input_length":1630,"output_length":40,"aligned":false,"hash_runs":[[0,4]],'
        '"session_id":"s","agent":"main","turn":1,"block_size":512}'
    )


@QUICK
@given(st.lists(st.integers(0, 5) | st.integers(2**63 - 3, 2**63 - 1), max_size=9))
def test_runs_are_maximal_and_complete(ids: list[int]) -> None:
    """Runs expand to the ids and no two could be one."""
    runs = runs_of(np.array(ids, dtype=np.int64))
    assert [start + i for start, count in runs for i in range(count)] == ids
    assert all(before[0] + before[1] != after[0] for before, after in pairwise(runs))


def chained(texts: list[list[int]], block: int) -> list[list[int]]:
    """Oracle: chained ids of the full blocks of token lists."""
    names: dict[tuple[int, ...], int] = {}
    return [
        [names.setdefault(tuple(text[:end]), len(names)) for end in range(block, len(text) + 1, block)]
        for text in texts
    ]


@QUICK
@given(
    texts=st.lists(st.lists(st.integers(0, 1), max_size=24), max_size=8),
    small=st.integers(1, 3),
    factor=st.integers(1, 4),
    ceil=st.booleans(),
)
def test_larger_blocks_equal_those_made_from_tokens(
    texts: list[list[int]], small: int, factor: int, ceil: bool
) -> None:
    """Every k-th id of small blocks names the same prefixes as large blocks made from the tokens."""
    ids = chained(texts, small)
    if ceil:
        tails = [[10_000 + n] if len(text) % small else [] for n, text in enumerate(texts)]
        ids = [row + tail for row, tail in zip(ids, tails, strict=True)]
    requests = tuple(
        request("s", n, row, len(text)) for n, (row, text) in enumerate(zip(ids, texts, strict=True))
    )
    trace = Trace("t", "t", small, "ceil" if ceil else "floor", "full", True, requests)
    large = coarsen(trace, small * factor)
    if factor == 1:
        assert large is trace
        return
    oracle = chained(texts, small * factor)
    assert [len(row) for row in oracle] == [len(row) for row in ids_of(large)]
    pairs = {
        (a, b)
        for mine, right in zip(ids_of(large), oracle, strict=True)
        for a, b in zip(mine, right, strict=True)
    }
    assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})


def test_smaller_blocks_and_unaligned_ones_are_refused(tmp_path: Path) -> None:
    """Blocks are never made smaller, nor larger where generated tokens have no ids."""
    trace = trace_of(request("s", 0, [1, 2], 128))
    for size in (32, 96, 1):
        with pytest.raises(TraceError, match=f"blocks of {size} tokens.*multiple of 64"):
            coarsen(trace, size)
    with pytest.raises(TraceError, match="generated tokens have no ids"):
        open_trace(write_lines(tmp_path / "d.jsonl", [S0, S1]), 1024)


@QUICK
@given(trace=chained_traces())
def test_summary_agrees_with_the_definition(trace: Trace) -> None:
    """Unbounded hits are the leading ids seen before; the other figures follow by hand."""
    found = summarize(trace)
    prompts = ids_of(trace)
    total, unique = sum(map(len, prompts)), len({block for prompt in prompts for block in prompt})
    assert (found.blocks, found.unique_blocks, found.hit_blocks) == (total, unique, hits_of(prompts))
    assert found.rewrite_factor == (total / unique if unique else 0.0)
    assert found.hit_percent == (100.0 * found.hit_blocks / total if total else 0.0)
    assert 0 <= found.hit_percent_tokens <= 100
    assert found.agents == len({(r.session, r.agent) for r in trace.requests})


@QUICK
@given(trace=chained_traces(), place=st.integers(0, 7), field=st.integers(0, 9))
def test_difference_sees_every_field(trace: Trace, place: int, field: int) -> None:
    """Changing any one field of any request, ids too, is seen; equal traces have no difference."""
    changes = [
        {"session": "other"},
        {"agent": "other"},
        {"turn": 99},
        {"parent": 98},
        {"t": 1e9},
        {"input_tokens": 10**9},
        {"output_tokens": 10**9},
        {"finish_reason": "length"},
        {"service_s": 2e6},
    ]
    index = place % len(trace.requests)
    old = trace.requests[index]
    changes.append({"ids": np.append(old.ids, 7)})  # type: ignore[dict-item]
    new = replace(old, **changes[field])  # type: ignore[arg-type]
    other = replace(trace, requests=(*trace.requests[:index], new, *trace.requests[index + 1 :]))
    assert difference(trace, trace) == ""
    assert difference(trace, other) != ""


@pytest.mark.parametrize("ids", [[5, 5], [5, 6]])
def test_difference_by_session_wants_one_to_one_names(ids: list[int]) -> None:
    """Up to renaming, two ids must not become one, nor one two."""
    one, other = trace_of(request("s", 0, ids, 128)), trace_of(request("s", 0, [7, 9], 128))
    assert (difference(one, other, by_session=True) == "") == (ids == [5, 6])
    assert (difference(other, one, by_session=True) == "") == (ids == [5, 6])


@QUICK
@given(st.lists(st.integers(0, 2**63 - 1), unique=True, max_size=50), st.binary(min_size=16, max_size=16))
def test_keys_are_one_to_one(ids: list[int], namespace: bytes) -> None:
    """Keys are (n, 16) contiguous bytes; ids of one namespace never share a key, nor either half of one."""
    keys = trace_keys(np.array(ids, dtype=np.int64), namespace)
    assert keys.shape == (len(ids), 16)
    assert keys.dtype == np.uint8
    assert keys.flags.c_contiguous
    for half in (keys[:, :8], keys[:, 8:], keys):
        assert len({row.tobytes() for row in half}) == len(ids)


def test_keys_are_the_same_everywhere_and_apart_by_name() -> None:
    """Golden keys; another trace name or block size gives others; a short namespace is refused."""
    trace = trace_of(request("s", 0, [0, 1, 2**62], 192))
    keys = trace.keys(trace.requests[0])
    assert keys[1].tobytes().hex() == GOLDEN_KEY
    for other in (replace(trace, name="u"), replace(trace, block_tokens=128)):
        assert not (other.keys(trace.requests[0]) == keys).all(axis=1).any()
    with pytest.raises(ValueError, match="16 bytes"):
        trace_keys(trace.requests[0].ids, b"short")


GOLDEN_KEY = "dfb2d6ff57d91d6da45caefa695aad91"


def test_targets_are_all_written() -> None:
    """The targets that the command line offers are those that exist."""
    from kvoffload.traces.commands import TargetChoice

    assert tuple(choice.value for choice in TargetChoice) == TARGETS
