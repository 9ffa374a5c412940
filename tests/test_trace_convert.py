"""Conversion: what comes back is what went in; larger blocks; files that appear whole or not at all."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from trace_files import chained_traces, facts, ids_of, request, trace_of, write_lines

from kvoffload.errors import TraceError
from kvoffload.traces import Trace, coarsen, open_trace, write_trace
from kvoffload.traces.convert import TARGETS, runs_lines, runs_of

QUICK = settings(max_examples=40, derandomize=True, deadline=None, database=None)
S0 = {"session_id": "s", "timestamp": 1000, "input_length": 1000, "output_length": 30, "hash_ids": [0, 1]}
S1 = {"session_id": "s", "delay": 2500, "input_length": 600, "output_length": 40, "hash_ids": [2, 3]}
ONE = {"timestamp": 0, "input_length": 1000, "output_length": 7, "hash_ids": [4, 9]}


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
    assert packed[3:8] == bytes(5)  # no name, no time
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


def test_targets_are_all_written() -> None:
    """The targets that the command line offers are those that exist."""
    from kvoffload.traces.commands import TargetChoice

    assert tuple(choice.value for choice in TargetChoice) == TARGETS
