"""Mooncake lines: full, delta and run-length coded; what is refused and how."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_files import ids_of, refused, write_lines

from kvoffload.traces import iter_requests, open_trace

QUICK = settings(max_examples=60, derandomize=True, deadline=None, database=None)
FULL = {"timestamp": 1500, "input_length": 1000, "output_length": 7, "hash_ids": [4, 9]}
S0 = {"session_id": "s", "timestamp": 1000, "input_length": 1000, "output_length": 30, "hash_ids": [0, 1]}
S1 = {"session_id": "s", "delay": 2500, "input_length": 600, "output_length": 40, "hash_ids": [2, 3]}
S2 = {"session_id": "s", "delay": 500, "input_length": 512, "output_length": 5, "hash_ids": [4]}


def test_full_line_is_read_as_published(tmp_path: Path) -> None:
    """A published line needs no option: 512-token blocks and the ceil rule follow from the lengths."""
    trace = open_trace(write_lines(tmp_path / "t.jsonl", [FULL]))
    (request,) = trace.requests
    assert (trace.block_tokens, trace.partial_tail, trace.form, trace.aligned) == (512, "ceil", "full", True)
    assert (request.session, request.agent, request.turn, request.parent) == ("", "main", 0, -1)
    assert (request.t, request.input_tokens, request.output_tokens) == (1.5, 1000, 7)
    assert request.ids.tolist() == [4, 9]
    assert request.ids.dtype == np.int64


def test_trap_floor_or_ceil_comes_from_the_lengths(tmp_path: Path) -> None:
    """Trap 3: the same ids count as full blocks or with a partial tail, as the lengths say, never mixed."""
    floor = [{**FULL, "input_length": 130}, {**FULL, "input_length": 191}]
    ceil = [{**FULL, "input_length": 128}, {**FULL, "input_length": 65}]
    assert open_trace(write_lines(tmp_path / "f.jsonl", floor), 64).partial_tail == "floor"
    assert open_trace(write_lines(tmp_path / "c.jsonl", ceil), 64).partial_tail == "ceil"
    both = write_lines(tmp_path / "b.jsonl", [floor[0], ceil[1]])
    refused(both, f"{both}:2", f"{both}:1", "64", "--block-size", block_size=64)
    declared = [{**row, "block_size": 64} for row in (floor[0], ceil[1])]
    refused(write_lines(tmp_path / "d.jsonl", declared), "d.jsonl:2", "floor(tokens / 64)")


def test_trap_delta_prompts_are_joined(tmp_path: Path) -> None:
    """Trap 2: turn k of a delta trace is all ids so far, and all inputs and earlier outputs so far."""
    trace = open_trace(write_lines(tmp_path / "t.jsonl", [S0, S1, S2]))
    assert ids_of(trace) == [[0, 1], [0, 1, 2, 3], [0, 1, 2, 3, 4]]
    assert [r.input_tokens for r in trace.requests] == [1000, 1000 + 30 + 600, 1000 + 30 + 600 + 40 + 512]
    assert [r.t for r in trace.requests] == [1.0, 3.5, 4.0]
    assert [(r.turn, r.parent) for r in trace.requests] == [(0, -1), (1, 0), (2, 1)]
    assert (trace.form, trace.aligned, trace.partial_tail) == ("delta", False, "ceil")


def test_trap_delta_given_as_full_is_refused(tmp_path: Path) -> None:
    """Trap 2: a delta trace read as full, or the reverse, names line, ids, and the form to give."""
    delta = write_lines(tmp_path / "d.jsonl", [S0, S1, S2])
    refused(delta, f"{delta}:2", "id 2", "delta form, not full", "--form delta", form="full")
    full = write_lines(tmp_path / "f.jsonl", [S0, {**S1, "hash_ids": [0, 5, 6, 7], "input_length": 1630}])
    refused(full, f"{full}:2", "id 0", "full form, not delta", "--form full", form="delta")
    assert open_trace(full).form == "full"


@pytest.mark.parametrize("swap", [False, True])
def test_trap_mixed_forms_are_refused(tmp_path: Path, swap: bool) -> None:
    """Trap 2: sessions of both forms in one file are refused with both places, in either order."""
    full = [
        {**S0, "session_id": "f"},
        {**S1, "session_id": "f", "hash_ids": [0, 5, 6, 7], "input_length": 1630},
    ]
    rows = [*full, S0, S1] if swap else [S0, S1, *full]
    mixed = write_lines(tmp_path / "m.jsonl", rows)
    refused(mixed, f"{mixed}:4", f"{mixed}:2", "form", "split the trace")


def test_undelayed_turn_in_a_delta_trace_is_refused(tmp_path: Path) -> None:
    """A later turn without delay is a full prompt, so among deltas it is a mixture, unless delta is given."""
    no_delay = {name: value for name, value in S2.items() if name != "delay"}
    mixed = write_lines(tmp_path / "m.jsonl", [S0, S1, no_delay])
    refused(mixed, f"{mixed}:3", "no delay", "delta form at")
    assert ids_of(open_trace(mixed, form="delta"))[2] == [0, 1, 2, 3, 4]


def test_form_waits_for_a_turn_that_shows_it(tmp_path: Path) -> None:
    """While the session's only block may be partial, a turn waits for a later one; order is kept."""
    first, other = {**S0, "input_length": 9, "hash_ids": [0]}, {**FULL, "hash_ids": [70, 71]}
    full_next = {**S1, "input_length": 1000, "hash_ids": [50, 51]}
    full_last = {**S2, "input_length": 1500, "hash_ids": [50, 52, 53]}
    full = open_trace(write_lines(tmp_path / "f.jsonl", [first, full_next, other, full_last]))
    assert (full.form, ids_of(full)) == ("full", [[0], [50, 51], [70, 71], [50, 52, 53]])
    delta = open_trace(write_lines(tmp_path / "d.jsonl", [first, {**S1, "hash_ids": [1, 2]}, other, S2]))
    assert (delta.form, ids_of(delta)) == ("delta", [[0], [0, 1, 2], [70, 71], [0, 1, 2, 4]])
    silent = [first, {**S1, "input_length": 9, "hash_ids": [1]}, other]
    assert ids_of(open_trace(write_lines(tmp_path / "s.jsonl", silent))) == [[0], [0, 1], [70, 71]]


def test_trap_unchained_ids_are_refused_or_rekeyed(tmp_path: Path) -> None:
    """Trap 1: an id after two others is refused with its line; --rekey names blocks by (parent, id)."""
    rows = [{**FULL, "hash_ids": ids} for ids in ([1, 2], [3, 2], [1, 2], [3, 2])]
    path = write_lines(tmp_path / "t.jsonl", rows)
    refused(path, f"{path}:2", "id 2 (block 1) follows id 3 here and id 1 elsewhere", "--rekey")
    trace = open_trace(path, rekey=True)
    assert ids_of(trace) == [[0, 1], [2, 3], [0, 1], [2, 3]]
    assert trace.notes == ("ids re-keyed by (parent, id), as asked",)


@pytest.mark.parametrize("ids", [[5, 6, 5], [5, 5], [2**40, 7, 2**40]])
def test_id_twice_in_one_prompt_is_not_chained(tmp_path: Path, ids: list[int]) -> None:
    """A repeated id has two places, so the trace is not chained, for small and for huge ids."""
    path = write_lines(tmp_path / "t.jsonl", [{**FULL, "hash_ids": ids, "input_length": 512 * len(ids)}])
    refused(path, f"{path}:1", f"id {ids[0]}", "not chained")
    assert len(set(ids_of(open_trace(path, rekey=True))[0])) == len(ids)


@QUICK
@given(st.lists(st.lists(st.integers(0, 3) | st.integers(2**62, 2**62 + 2), max_size=6), max_size=8))
def test_rekeying_gives_a_prefix_tree(
    tmp_path_factory: pytest.TempPathFactory, prompts: list[list[int]]
) -> None:
    """Re-keyed ids are equal exactly where prefixes are, and chained ids pass unchanged."""
    rows = [{"input_length": len(ids), "hash_ids": ids} for ids in [*prompts, [9]]]
    path = write_lines(tmp_path_factory.getbasetemp() / "rekey.jsonl", rows)
    trace = open_trace(path, 1, rekey=True)
    names: dict[tuple[int, ...], int] = {}
    for row, request in zip(rows, trace.requests, strict=True):
        for end, name in enumerate(request.ids.tolist(), 1):
            assert names.setdefault(tuple(row["hash_ids"][:end]), name) == name  # type: ignore[index]
    assert len(set(names.values())) == len(names)
    predecessors: dict[int, set[int]] = {}
    for ids in prompts:
        for before, block in zip([-1, *ids], ids, strict=False):
            predecessors.setdefault(block, set()).add(before)
    if all(len(before) == 1 for before in predecessors.values()) and 9 not in predecessors:
        assert ids_of(open_trace(path, 1)) == [row["hash_ids"] for row in rows]
    else:
        refused(path, "not chained", block_size=1)


def test_runs_and_sample_fields(tmp_path: Path) -> None:
    """hash_runs expand, and session, agent, turn, finish reason, server time and block size are read."""
    row = {
        "timestamp": 0,
        "input_length": 330,
        "output_length": 1,
        "hash_runs": [[7, 3], [20, 1], [4, 1]],
        "session_id": "s",
        "agent": "agent_001",
        "turn": 4,
        "finish_reason": "end_turn",
        "service_s": 1.25,
        "block_size": 64,
    }
    (request,) = open_trace(write_lines(tmp_path / "t.jsonl", [row])).requests
    assert request.ids.tolist() == [7, 8, 9, 20, 4]
    assert (request.agent, request.turn, request.parent) == ("agent_001", 4, -1)
    assert (request.finish_reason, request.service_s) == ("end_turn", 1.25)


def test_new_agent_follows_main(tmp_path: Path) -> None:
    """The parent of an agent's first turn is main's last turn; later ones follow the agent's own."""
    agents = ["main", "main", "x", "main", "x"]
    rows = [{**FULL, "session_id": "s", "agent": agent} for agent in agents]
    trace = open_trace(write_lines(tmp_path / "t.jsonl", rows))
    assert [(r.turn, r.parent) for r in trace.requests] == [(0, -1), (1, 0), (2, 1), (3, 1), (4, 2)]


def test_block_size_is_stated_deduced_or_asked_for(tmp_path: Path) -> None:
    """Two sizes in one file are refused; lengths that fit several ask for one; a given one must fit."""
    sizes = [{**FULL, "block_size": 512}, {**FULL, "block_size": 1024}]
    path = write_lines(tmp_path / "two.jsonl", sizes)
    refused(path, f"{path}:2", "block_size = 1024, but 512", f"{path}:1")
    vague = write_lines(tmp_path / "vague.jsonl", [{**FULL, "input_length": 100, "hash_ids": [1]}])
    refused(vague, f"{vague}:1", "64, 128, 256", "--block-size")
    assert open_trace(vague, 128).partial_tail == "ceil"
    assert open_trace(vague, 100).partial_tail == "floor"
    refused(write_lines(tmp_path / "t.jsonl", [FULL]), "blocks of 64", "512", block_size=64)
    stated = write_lines(tmp_path / "t.jsonl", [{**FULL, "block_size": 512}])
    refused(stated, "blocks of 768", "multiple of 512", block_size=768)
    assert ids_of(
        open_trace(write_lines(tmp_path / "big.jsonl", [{**FULL, "input_length": 1024}]), 1024)
    ) == [[9]]


@QUICK
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 5)), min_size=1, max_size=3), st.integers(1, 6))
def test_block_size_fits_by_floor_or_by_ceil(
    tmp_path_factory: pytest.TempPathFactory, lines: list[tuple[int, int]], size: int
) -> None:
    """A stated size passes exactly if all lines follow floor, or all follow ceil; floor is named first."""
    rows = [
        {"input_length": tokens, "hash_ids": list(range(blocks)), "block_size": size}
        for tokens, blocks in lines
    ]
    path = write_lines(tmp_path_factory.getbasetemp() / "shape.jsonl", rows)
    if all(blocks == tokens // size for tokens, blocks in lines):
        assert open_trace(path).partial_tail == "floor"
    elif all(blocks == -(-tokens // size) for tokens, blocks in lines):
        assert open_trace(path).partial_tail == "ceil"
    else:
        refused(path, f"floor(tokens / {size})")


def test_turn_that_goes_back_is_refused(tmp_path: Path) -> None:
    """Turns of one agent rise; a repeated one is refused with its line."""
    rows = [{**FULL, "session_id": "s", "turn": turn} for turn in (0, 3, 3)]
    path = write_lines(tmp_path / "t.jsonl", rows)
    refused(path, f"{path}:3", "turn = 3 after turn 3")


@QUICK
@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(1, 40), st.integers(0, 9), st.integers(0, 99)),
        min_size=1,
    )
)
def test_delta_sum_rule_on_random_sessions(
    tmp_path_factory: pytest.TempPathFactory, turns: list[tuple[str, int, int, int]]
) -> None:
    """For interleaved delta sessions, ids and lengths follow the sum rule computed by hand."""
    rows: list[dict[str, object]] = []
    ids: dict[str, list[int]] = {}
    tokens: dict[str, int] = {}
    expected, fresh = [], 0
    for name, new, out, delay in turns:
        blocks = list(range(fresh, fresh - (-new // 8)))
        fresh += len(blocks)
        when = {"delay": delay} if name in ids else {"timestamp": delay}
        rows.append(
            {"session_id": name, "input_length": new, "output_length": out, "hash_ids": blocks, **when}
        )
        ids[name] = ids.get(name, []) + blocks
        expected.append((ids[name], tokens.get(name, 0) + new))
        tokens[name] = tokens.get(name, 0) + new + out
    path = write_lines(tmp_path_factory.getbasetemp() / "delta.jsonl", rows)
    trace = open_trace(path, 8, form="delta")
    assert [(r.ids.tolist(), r.input_tokens) for r in trace.requests] == expected
    assert trace.form == "delta"
    assert [r.ids.tolist() for r in iter_requests(path, form="delta")] == [prompt for prompt, _ in expected]
