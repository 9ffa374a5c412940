"""The real traces: the reference table, and what must hold of any of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from trace_files import facts, hits_of, ids_of

from kvoffload.traces import iter_requests, open_trace, summarize, write_trace

SAMPLE12 = "cc_v8_sample12_b64.mooncake.jsonl.gz"
SAMPLE36 = "cc_v8_sample36_gap300_b64.mooncake.jsonl.gz"
CONVERSATION = "mooncake_conversation.jsonl.gz"


@pytest.mark.parametrize(
    ("name", "facts", "hit", "medians", "rewrite"),
    [
        (SAMPLE12, (1398, 12, 64, "floor", 2_215_701, 104_788, 2_110_913), 95.27, (103_700, 235), 21.1),
        (SAMPLE36, (3238, 36, 64, "floor", 5_324_279, 255_045, 5_069_234), 95.21, (100_786, 233), 20.9),
        (CONVERSATION, (12_031, None, 512, "ceil", 288_500, 182_790, 105_710), 36.64, (6_909, 350), 1.6),
    ],
)
def test_reference_table(
    traces: Path, name: str, facts: tuple[object, ...], hit: float, medians: tuple[int, int], rewrite: float
) -> None:
    """Counts, unbounded hits, medians, rewrite factor, block size and tail rule are the published ones."""
    found = summarize(open_trace(traces / name))
    assert facts == (
        found.requests,
        found.sessions,
        found.block_tokens,
        found.partial_tail,
        found.blocks,
        found.unique_blocks,
        found.hit_blocks,
    )
    assert hit == round(found.hit_percent, 2)
    assert medians == (int(found.median_input), int(found.median_output))
    assert rewrite == round(found.rewrite_factor, 1)


@pytest.mark.parametrize(
    ("name", "requests", "agents", "blocks", "unique"),
    [
        ("trace_0277.json.gz", 53, 5, 40_230, 5_091),
        ("trace_0291.json.gz", 32, 3, 35_209, 3_606),
        ("trace_0504.json.gz", 3, 1, 525, 182),
    ],
)
def test_original_sessions(
    traces: Path, name: str, requests: int, agents: int, blocks: int, unique: int
) -> None:
    """Single sessions keep every request, an s row without a twin too; hits agree with their definition."""
    trace = open_trace(traces / name)
    found = summarize(trace)
    assert (requests, agents, 1) == (found.requests, found.agents, found.sessions)
    assert (blocks, unique) == (found.blocks, found.unique_blocks)
    assert found.hit_blocks == hits_of(ids_of(trace))
    assert trace.notes == ()


def test_sub_agents_start_fresh_and_share_with_siblings(traces: Path) -> None:
    """In session 0277 the four sub-agents share no block with main, and at least 100 with one another."""
    first = {}
    for request in open_trace(traces / "trace_0277.json.gz").requests:
        first.setdefault(request.agent, set(request.ids.tolist()))
    main = first.pop("main")
    assert len(first) == 4
    assert all(not main & ids for ids in first.values())
    assert len(set.intersection(*first.values())) >= 100


@pytest.mark.parametrize("name", [SAMPLE12, CONVERSATION])
def test_larger_blocks_hit_no_more(traces: Path, name: str) -> None:
    """Four times larger blocks hit no more tokens, and list no partial block."""
    small = open_trace(traces / name)
    large = open_trace(traces / name, small.block_tokens * 4)
    assert all(len(r.ids) == r.input_tokens // large.block_tokens for r in large.requests)
    assert summarize(large).hit_percent_tokens <= summarize(small).hit_percent_tokens
    assert large.partial_tail == "floor"


def test_one_by_one_is_the_same(traces: Path) -> None:
    """iter_requests gives the requests that open_trace holds."""
    whole = open_trace(traces / SAMPLE12).requests
    for one, other in zip(iter_requests(traces / SAMPLE12), whole, strict=True):
        assert np.array_equal(one.ids, other.ids)
        assert (one.session, one.agent, one.turn, one.parent) == (
            other.session,
            other.agent,
            other.turn,
            other.parent,
        )


def test_the_folder_itself_is_not_a_trace(traces: Path) -> None:
    """A folder with other traces beside sessions is refused with the first such file."""
    with pytest.raises(ValueError, match="not a Weka session"):
        open_trace(traces)


@pytest.mark.parametrize(
    ("name", "to"), [(SAMPLE12, "runs"), (SAMPLE12, "weka"), ("trace_0277.json.gz", "weka")]
)
def test_real_traces_convert_and_come_back(traces: Path, tmp_path: Path, name: str, to: str) -> None:
    """Run-length coding gives back every request; Weka each session's, with as much reuse."""
    trace, out = open_trace(traces / name), tmp_path / "out.jsonl.gz"
    write_trace(trace, out, to)  # type: ignore[arg-type]
    back = open_trace(out)
    one, other = summarize(trace), summarize(back)
    assert (one.requests, one.blocks, one.hit_blocks) == (other.requests, other.blocks, other.hit_blocks)
    if to == "runs":
        assert [facts(r) for r in back.requests] == [facts(r) for r in trace.requests]
