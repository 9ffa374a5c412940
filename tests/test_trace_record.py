"""Keys, summaries and comparison of traces, against oracles."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_files import chained_traces, hits_of, ids_of, request, trace_of

from kvoffload.traces import Trace, summarize, trace_keys
from kvoffload.traces.convert import difference

QUICK = settings(max_examples=60, derandomize=True, deadline=None, database=None)
GOLDEN_KEY = "dfb2d6ff57d91d6da45caefa695aad91"


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
    hits = [hits_of(prompts[: place + 1]) - hits_of(prompts[:place]) for place in range(len(prompts))]
    tokens = sum(
        min(n * trace.block_tokens, r.input_tokens) for n, r in zip(hits, trace.requests, strict=True)
    )
    prompt = sum(r.input_tokens for r in trace.requests)
    assert found.hit_percent_tokens == (100.0 * tokens / prompt if prompt else 0.0)
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


def splitmix(state: int) -> int:
    """Oracle: one step of splitmix64 on Python integers."""
    mask = 2**64 - 1
    z = (state + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


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
    assert keys.tobytes() == b"".join(
        splitmix(block + int.from_bytes(half, "little")).to_bytes(8, "little")
        for block in ids
        for half in (namespace[:8], namespace[8:])
    )


def test_keys_are_the_same_everywhere_and_apart_by_name() -> None:
    """Golden keys; another trace name or block size gives others; a short namespace is refused."""
    trace = trace_of(request("s", 0, [0, 1, 2**62], 192))
    keys = trace.keys(trace.requests[0])
    assert keys[1].tobytes().hex() == GOLDEN_KEY
    for other in (replace(trace, name="u"), replace(trace, block_tokens=128)):
        assert not (other.keys(trace.requests[0]) == keys).all(axis=1).any()
    with pytest.raises(ValueError, match="16 bytes"):
        trace_keys(trace.requests[0].ids, b"short")
