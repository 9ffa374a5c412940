"""What keeps the learned order from harm: LRU beside it, experience for ages not seen yet, and all groups as one."""

from __future__ import annotations

import numpy as np
import pytest

from kvoffload.index import Index
from kvoffload.replay.base import requests_of
from kvoffload.replay.commands import Options, run_replay
from kvoffload.replay.compare import run_policy
from kvoffload.replay.oracle_lru import simulate
from kvoffload.replay.tiers import Capacity, Policies
from kvoffload.traces.adversarial import Adversary
from kvoffload.traces.record import trace_keys

PAGES = np.arange(4096, dtype=np.int32)
TOOL_USE, END_TURN = 1, 2


@pytest.mark.parametrize(("shape", "seed"), [("restart", 0), ("scans", 1), ("bursts", 2)])
@pytest.mark.parametrize("capacity", [600, 1500])
def test_what_an_lru_would_hit_is_known_exactly(shape: str, seed: int, capacity: int) -> None:
    """What the policy counts for an LRU of its size is what the brute-force LRU hits; what it counts for
    itself is what was hit."""
    requests = requests_of(Adversary(shape, seed, 400).trace())
    result = run_policy(requests, 64, Capacity(capacity, 0), Policies("rri"))
    learned = result.learned["host"]
    assert learned["lru_blocks"] == simulate((r.ids.tolist() for r in requests), [capacity]).hits[0]
    assert learned["held_blocks"] == result.hits[0]


def test_a_policy_that_loses_gives_way_to_lru() -> None:
    """Where what was learned does harm, LRU takes over before 0.3 points are lost; where it does good, never."""
    requests = requests_of(Adversary("restart", 3, 3000).trace())
    lru = simulate((r.ids.tolist() for r in requests), [1000]).hits[0]
    harmed = run_policy(requests, 64, Capacity(1000, 0), Policies("rri"), finish_reason=False)
    assert harmed.learned["host"]["fallbacks"] >= 1
    assert 0 < harmed.learned["host"]["lru_requests"] < 3000
    assert harmed.hits[0] >= lru - 0.003 * harmed.total
    served = requests_of(Adversary("bursts", 0, 400).trace())
    assert run_policy(served, 64, Capacity(1000, 0), Policies("rri")).learned["host"]["fallbacks"] == 0


def keys(ids: list[int]) -> np.ndarray:
    """Keys of a path given by the ids of its blocks."""
    return trace_keys(np.array(ids, np.int64), bytes(16))


def serve(index: Index, ids: list[int], now: float, stream: int, reason: int, begins: list[int]) -> int:
    """One request that stores group g from block begins[g] on; its segment."""
    chain, ends, pages = keys(ids), [len(ids)] * len(begins), [PAGES] * len(begins)
    segment = index.open_segment(now, stream)
    copies, *_ = index.offer(segment, chain, begins, ends, pages)
    index.complete_store(copies, None)
    index.close_segment(segment, reason, now)
    return segment


def held(index: Index, ids: list[int], group: int = 0) -> list[bool]:
    """Per block of the path, whether the group has it."""
    rows = {bytes(e["key"]) for e in index.entries() if e["group"] == group}
    return [bytes(k) in rows for k in keys(ids)]


def own_by_age(index: Index) -> list[float]:
    """What the end of a stream of unknown pace whose turn has ended is worth, by age."""
    rows = index.policy(0)["classes"]
    mine = next(r for r in rows if (r["kind"], r["pace"], r["finish"]) == ("own", "unknown", "end_turn"))
    values: list[float] = mine["index_by_age"]
    return values


def test_ages_that_nobody_has_lived_through_are_as_those_before_them() -> None:
    """300 prompts a quarter of a second apart, none of which returns: at the ages of minutes that none has come to yet
    a prompt is worth less than half of what it is worth without experience."""
    index = Index([(0, 1, 0)], 1, [8], 400, 0, 0, host_policy="rri")
    before = own_by_age(index)
    for n in range(300):
        serve(index, [n * 10 + i for i in range(8)], 0.25 * n, n + 1, END_TURN, [0])
    after = own_by_age(index)
    minutes = 16  # begins at 0.5 s x 2 ** 7.5 = 90 s; the oldest prompt is 75 s old
    assert all(
        0 < now < 0.5 * then
        for now, then in zip(after[minutes : minutes + 3], before[minutes:], strict=False)
    )
    assert before == sorted(before, reverse=True)


GROUPS = [(0, 1, 0), (1, 1, 2)]
TAIL = 3


def two_groups(policy: str) -> tuple[Index, dict[int, list[int]], float]:
    """Full blocks and windows of 3: two busy streams, learned as such, and one that has come once; the time."""
    index = Index(GROUPS, 1, [10, 3], 12, 0, 0, host_policy=policy)
    paths = {n: [1000 * n + i for i in range(10)] for n in range(3)}
    now = 0.0
    for turn in range(200):
        now += 0.5
        serve(index, paths[turn % 2], now, 1 + turn % 2, TOOL_USE, [0, 10 - TAIL])
        if turn % 20 == 10:
            once = [50_000 + 100 * turn + i for i in range(10)]
            serve(index, once, now, 100 + turn, END_TURN, [0, 10 - TAIL])
    serve(index, paths[2], now, 3, END_TURN, [0, 10 - TAIL])
    return index, paths, now


def test_a_segment_carries_all_groups_and_gives_up_its_end_in_each() -> None:
    """Under rri a request's blocks and windows are one segment; the busy streams keep both whatever comes, and of every
    other path each group holds a run that starts where it was stored."""
    index, paths, now = two_groups("rri")
    for n in range(40):
        ids = [90_000 + 50 * n + i for i in range(10)]
        serve(index, ids, now + 0.01 * n, 900 + n, END_TURN, [0, 10 - TAIL])
        index.check_integrity()
        for path in (*paths.values(), ids):
            full, window = held(index, path, 0), held(index, path, 1)[10 - TAIL :]
            assert full == sorted(full, reverse=True)
            assert window == sorted(window, reverse=True)
    for busy in (0, 1):
        assert all(held(index, paths[busy], 0))
        assert held(index, paths[busy], 1) == [False] * (10 - TAIL) + [True] * TAIL
        rows = [e for e in index.entries() if bytes(e["key"]) in {bytes(k) for k in keys(paths[busy])}]
        assert len({int(e["segment"]) for e in rows}) == 1
        assert {int(e["group"]) for e in rows} == {0, 1}


@pytest.mark.parametrize(("policy", "refuses"), [("rri", True), ("rri-keep", False), ("lru", False)])
def test_only_rri_refuses_and_no_byte_is_wrong(policy: str, refuses: bool) -> None:
    """With real bytes and a disk for all, rri loads what host refused through transit and does not keep it; rri-keep
    stores in host whatever comes, like lru, and hits of both tiers together are the same."""
    trace = Adversary("scans", 2, 160).trace()
    options = Options(
        block_bytes=64, host_blocks=700, disk_blocks=20_000, host_policy=policy, disk_policy="rri"
    )
    report = run_replay(trace, options)
    assert report.ok, report.broken()
    distinct = {int(i) for r in trace.requests for i in r.ids}
    assert report.stored.disk == len(distinct)
    assert sum(report.hits) == sum(run_replay(trace, Options(index_only=True)).hits)
    if refuses:
        assert report.stored.host < len(distinct)
    else:
        assert report.stored.host == len(distinct)
