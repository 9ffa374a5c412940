"""The brute-force LRU against published numbers of real traces and against identities that need no oracle."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_fakes import random_trace

from kvoffload.replay.oracle_lru import TailFirstLRU, simulate
from kvoffload.traces.load import open_trace

SAMPLE12 = "cc_v8_sample12_b64.mooncake.jsonl.gz"


@pytest.fixture(scope="module")
def sample12(traces):
    return [request.ids.tolist() for request in open_trace(traces / SAMPLE12).requests]


def ids_of(seed):
    return [request.ids.tolist() for request in random_trace(seed)]


@pytest.mark.parametrize(
    ("capacities", "hits", "produced"),
    [
        ([5_000], (1_579_168,), 636_533),
        ([10_000], (2_108_329,), 107_372),
        ([5_000, 10_000], (1_579_168, 529_161), 107_372),
        ([2_000, 10_000], (604_223, 1_504_106), 107_372),
        ([None], (2_110_913,), 104_788),
    ],
)
def test_sample12_gives_the_published_numbers(sample12, capacities, hits, produced):
    """Real agent sessions: hits by tier and produced blocks are those measured elsewhere."""
    result = simulate(sample12, capacities)

    assert (result.requests, result.total, result.distinct) == (1_398, 2_215_701, 104_788)
    assert (result.hits, result.produced) == (hits, produced)


def test_conversation_gives_the_published_numbers(traces):
    """Chat prompts of 512-token blocks, ceil rule: both tiers' hits and what is produced."""
    trace = open_trace(traces / "mooncake_conversation.jsonl.gz", 512)
    result = simulate((request.ids.tolist() for request in trace.requests), [10_000, 30_000])

    assert (result.requests, result.total, result.distinct) == (12_031, 288_500, 182_790)
    assert (result.hits, result.produced) == ((61_046, 32_932), 194_522)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(0, 60), st.integers(0, 200))
def test_two_inclusive_tiers_are_two_caches(seed, first, more):
    """With C2 >= C1: hits of tier 1 are LRU(C1)'s, hits of both LRU(C2)'s, and produced is LRU(C2)'s."""
    requests = ids_of(seed)
    both = simulate(requests, [first, first + more])
    small, large = simulate(requests, [first]), simulate(requests, [first + more])

    assert (both.hits[0], sum(both.hits), both.produced) == (small.hits[0], large.hits[0], large.produced)
    assert both.inserted == (small.inserted[0], large.inserted[0])


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_hits_grow_with_capacity_up_to_the_unbounded_cache(seed):
    """More capacity never means fewer hits; hits and produced add up; the unbounded cache produces each block
    once."""
    requests = ids_of(seed)
    results = [simulate(requests, [capacity]) for capacity in (0, 5, 20, 60, 150, None)]
    hits = [result.hits[0] for result in results]

    assert hits == sorted(hits)
    assert hits[0] == 0
    assert all(result.hits[0] + result.produced == result.total for result in results)
    assert results[-1].produced == results[-1].distinct


def test_tail_goes_before_the_head():
    """The last blocks of the oldest request are evicted first; what is left is always a prefix."""
    lru = TailFirstLRU(5)
    lru.touch([1, 2, 3, 4])
    lru.touch([1, 2, 11, 12])

    assert [block for block in (1, 2, 3, 4, 11, 12) if block in lru] == [1, 2, 3, 11, 12]


def test_a_prompt_longer_than_the_tier_keeps_its_head():
    """Eviction follows the request: of six blocks in a tier of four, the first four stay."""
    lru = TailFirstLRU(4)

    assert lru.touch([1, 2, 3, 4, 5, 6]) == 6
    assert [block in lru for block in range(1, 7)] == [True] * 4 + [False] * 2
    assert len(lru) == 4
