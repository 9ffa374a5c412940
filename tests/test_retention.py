"""Retention: masks against their definition, and what planner and index make of them."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from kvoffload.config import POLICIES, Config
from kvoffload.layout import CacheGroup, GroupKind, Layout
from kvoffload.messages import CopyFlag, JobKind
from kvoffload.requests import RequestInfo
from kvoffload.retention import Bounds, Retention, last_boundary
from kvoffload.testing.faults import Gated, Op
from kvoffload.testing.rig import Keys, Rig, Sizes

FULL, SLIDING, STATE = GroupKind


def group(number: int, kind: GroupKind, tokens: int, lookback: int = 0, **more: object) -> CacheGroup:
    return CacheGroup(number, kind, tokens, 4096, lookback, ("a",), **more)  # type: ignore[arg-type]


def layout(lookback: int = 40, tokens: int = 16) -> Layout:
    """Full attention beside one window."""
    return Layout(16, (group(0, FULL, 16), group(1, SLIDING, tokens, lookback)))


def needed(g: CacheGroup, boundary: int) -> set[int]:
    """By the definition: the blocks that tokens of the lookback lie in."""
    if g.kind is STATE:
        return {boundary // g.tokens_per_block - 1} if boundary else set()
    return {t // g.tokens_per_block for t in range(max(0, boundary - g.lookback), boundary)}


@pytest.mark.parametrize("seed", range(40))
def test_masks_follow_the_definition(seed: int) -> None:
    """A block is kept exactly if some kept boundary needs it, or it may be part of an answer's last tail."""
    rng = random.Random(seed)
    kind = rng.choice((SLIDING, STATE))
    size = 4 * rng.choice((1, 2, 3))
    g = group(1, kind, size, rng.randint(1, 60) if kind is SLIDING else 0)
    table = Layout(4, (group(0, FULL, 4 * rng.choice((1, 2))), g))
    step = table.alignment
    bounds = Bounds(rng.randint(0, 200), tuple(step * rng.randint(0, 10) for _ in range(rng.randint(0, 2))))
    bounds = Bounds(bounds.prompt, tuple(f for f in bounds.forks if f <= bounds.prompt))
    every = rng.randint(1, 90)
    count = 300 // size
    cursor = rng.randint(0, count)
    answer = bounds.prompt // step * step

    rule = Retention(table, "boundaries")
    kept = set().union(*(needed(g, b // step * step) for b in (bounds.prompt, *bounds.forks)))
    kept |= {b for b in range(count) if (b + 1) * size > answer}
    mask = rule.mask(1, (cursor, count), bounds)
    mine = set(range(cursor, count)) if mask is None else set((np.flatnonzero(mask) + cursor).tolist())
    assert mine == {b for b in kept if b >= cursor}
    assert rule.first(1, cursor, bounds) == min((b for b in kept if b >= cursor), default=cursor)

    period = -(-every // step) * step
    mask = Retention(table, f"every {every}").mask(1, (cursor, count), bounds)
    mine = set(range(cursor, count)) if mask is None else set((np.flatnonzero(mask) + cursor).tolist())
    tails = set().union(*(needed(g, b) for b in range(period, 300 + 2 * period, period)))
    assert mine == {b for b in tails if cursor <= b < count}

    seen = rng.randint(bounds.prompt, 300)
    end = seen // size
    extra = {b for s in rule.superfluous(1, end, seen, bounds) for b in range(*s)}
    kept = set().union(*(needed(g, b // step * step) for b in (bounds.prompt, *bounds.forks, seen)))
    assert extra == {b for b in range(end) if (b + 1) * size > answer} - kept


def stored(rig: Rig, chain: Keys, number: int = 1) -> list[int]:
    """Blocks of a group that some tier has."""
    return np.flatnonzero(rig.codes(chain, number)).tolist()


def turn(rig: Rig, keys: Keys, prompt: int, session: str = "", steps: int = 1) -> int:
    """A request that matches, loads, computes the rest of the prompt in steps, then the answer block by block; the
    tokens that it was given."""
    info = RequestInfo(rig.info().id, session)
    head, pages = Keys(keys.keys[:prompt]), rig.pages(keys)
    found = rig.planner.match(info, head)
    plan = rig.planner.load(info, head, found.boundary, pages)
    rig.local.drain()
    assert plan.boundary == found.boundary
    assert rig.mismatches(head, pages, 0, found.boundary // 16) == 0
    rig.paint(keys, pages)
    begin, tokens = found.boundary, rig.layout.base_tokens
    for i in range(steps):
        done = begin + (prompt * tokens - begin) * (i + 1) // steps
        rig.planner.offer(info, head, done, pages)
        rig.local.drain()
    for blocks in range(prompt + 1, keys.blocks + 1):
        rig.planner.offer(info, Keys(keys.keys[:blocks]), blocks * tokens, pages)
        rig.local.drain()
    rig.planner.finish(info.id, "end_turn", rig.clock.now)
    rig.planner.check_integrity()
    return found.boundary


def test_only_the_tails_at_the_ends_of_prompt_and_turn_are_kept() -> None:
    """A prompt of 60 blocks and an answer of 20 leave two tails of the window; the next turn resumes at the second."""
    with Rig(Sizes(host=40), layout=layout()) as rig:
        chain = Keys.of(range(100))
        assert turn(rig, Keys(chain.keys[:80]), 60, steps=3) == 0
        assert stored(rig, chain) == [57, 58, 59, 77, 78, 79]
        assert len(stored(rig, chain, 0)) == 80
        assert rig.planner.counters["pruned"] == 17
        assert rig.match(Keys(chain.keys[:60])).boundary == 960
        assert turn(rig, chain, 90) == 1280
        rig.check()


def test_dense_and_every_n_keep_what_they_say() -> None:
    """`dense` keeps all window blocks; `every 320` those of the tails at multiples of 320 tokens, also in an answer."""
    chain = Keys.of(range(90))
    for rule, want in (
        ("dense", list(range(90))),
        ("every 320", [b for e in (20, 40, 60, 80) for b in range(e - 3, e)]),
    ):
        with Rig(Sizes(host=40), layout=layout(), config=Config(retention=rule)) as rig:
            turn(rig, chain, 70, steps=2)
            assert stored(rig, chain) == want
            assert rig.match(Keys(chain.keys[:50])).boundary == (800 if rule == "dense" else 640)


def test_a_fork_point_becomes_a_boundary_the_second_time() -> None:
    """Two chains part inside the first one's prompt: the second computes it all and keeps the tail there; the third
    resumes at the fork."""
    with Rig(Sizes(host=60), layout=layout()) as rig:
        trunk = list(range(40))
        a, b, c = (Keys.of([*trunk, *range(k, k + 30)]) for k in (1000, 2000, 3000))
        assert turn(rig, a, 70) == 0
        assert turn(rig, b, 70) == 0
        assert stored(rig, b) == [37, 38, 39, 67, 68, 69]
        assert turn(rig, c, 70) == 640
        rig.check()


def test_a_state_group_keeps_snapshots_at_boundaries() -> None:
    """Snapshots every 64 tokens beside blocks of 16: those at the ends of prompt and turn stay, and serve a resume."""
    table = Layout(16, (group(0, FULL, 16), group(1, STATE, 64)))
    with Rig(Sizes(host=40), layout=table) as rig:
        chain = Keys.of(range(60))
        turn(rig, Keys(chain.keys[:50]), 30)
        assert stored(rig, chain) == [6, 11]
        assert turn(rig, chain, 60) == 768


WIDE = Layout(
    16, (CacheGroup(0, FULL, 16, 512, layers=("a",)), CacheGroup(1, SLIDING, 16, 32768, 40, ("b",)))
)
"""A slab holds 64 full blocks or 8 of windows: these are what room is short of."""


@pytest.mark.parametrize("policy", POLICIES)
def test_superseded_tails_go_first(policy: str) -> None:
    """Under every policy, when windows are short of room, the tails that a session has left behind go before any
    other, although a tail of another session was used longer ago; one that is used again is as good as others."""
    with Rig(Sizes(host=3), layout=WIDE, config=Config(host_policy=policy)) as rig:
        old, new = Keys.of(range(100, 110)), Keys.of(range(30))
        turn(rig, old, 10, "old")
        for blocks in (10, 20, 30):
            turn(rig, Keys(new.keys[:blocks]), blocks, "new")
        assert rig.planner.counters["superseded"] == 6
        assert stored(rig, new) == [7, 8, 9, 17, 18, 19, 27, 28, 29]
        assert turn(rig, Keys(new.keys[:10]), 10, "again") == 160
        turn(rig, Keys.of(range(500, 514)), 14, "third")
        turn(rig, Keys.of(range(600, 610)), 10, "fourth")
        assert stored(rig, new) == [7, 8, 9, 17, 27, 28, 29]
        assert stored(rig, old) == [7, 8, 9]
        rig.check()


@pytest.mark.parametrize("policy", POLICIES)
def test_what_two_sessions_use_is_superseded_only_where_nobody_learns(policy: str) -> None:
    """Two sessions resume at the end of one prompt. When the first goes on, a policy that knows who used what keeps
    that tail in its order."""
    with Rig(Sizes(host=40), layout=layout(), config=Config(host_policy=policy)) as rig:
        trunk = list(range(10))
        turn(rig, Keys.of(trunk), 10, "first")
        assert turn(rig, Keys.of([*trunk, *range(100, 110)]), 20, "second") == 160
        assert turn(rig, Keys.of([*trunk, *range(200, 210)]), 20, "first") == 160
        assert rig.planner.counters["superseded"] == (3 if policy == "lru" else 0)
        rig.check()


@pytest.mark.parametrize("policy", [p for p in POLICIES if p != "rri"])  # it refuses the newcomer
def test_a_dropped_end_takes_the_windows_beyond_it_along(policy: str) -> None:
    """Full blocks are short of room: the blocks of the windows of a session whose end they give up go with it, although
    there is room for windows, and those of its earlier boundary stay and serve."""
    with Rig(Sizes(host=12), layout=layout(), config=Config(host_policy=policy)) as rig:
        chain = Keys.of(range(40))
        turn(rig, Keys(chain.keys[:20]), 20)
        turn(rig, chain, 40)
        assert stored(rig, chain) == [17, 18, 19, 37, 38, 39]
        turn(rig, Keys.of(range(500, 552)), 52)
        left = len(stored(rig, chain, 0))
        assert 20 < left < 38
        assert stored(rig, chain) == [17, 18, 19]
        assert rig.planner.stats().totals["orphaned"] == 3
        assert rig.match(chain).boundary == 320
        rig.check()


def test_windows_stay_while_another_tier_has_the_blocks_before_them(tmp_path: Path) -> None:
    """What host gives up and disk keeps takes no window along: the boundary can be restored."""
    with Rig(Sizes(host=12, disk=40), layout=layout(), path=tmp_path) as rig:
        chain = Keys.of(range(40))
        turn(rig, chain, 40)
        turn(rig, Keys.of(range(500, 570)), 70)
        assert rig.planner.stats().totals["evicted_host"] > 0
        assert rig.planner.stats().totals["orphaned"] == 0
        assert stored(rig, chain) == [37, 38, 39]
        assert turn(rig, chain, 40) == 640
        rig.check()


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_prunes_and_supersedes(policy: str) -> None:
    """Under every policy the tails of many turns are pruned, superseded and resumed from."""
    with Rig(Sizes(host=40), layout=layout(), config=Config(host_policy=policy)) as rig:
        for session in range(4):
            chain = Keys.of(range(session * 100, session * 100 + 40))
            reached = [turn(rig, Keys(chain.keys[: n + 5]), n, f"s{session}") for n in (10, 20, 30)]
            assert reached == [0, 240, 400]
        assert rig.planner.counters["superseded"] > 0
        assert rig.planner.counters["pruned"] > 0
        rig.check()


def test_pruning_spares_what_another_request_uses() -> None:
    """A generated block that another request has taken up since belongs to that one and stays."""
    with Rig(Sizes(host=40), layout=layout()) as rig:
        chain, pages = Keys.of(range(40)), [np.arange(40, dtype=np.int32)] * 2
        rig.paint(chain, pages)
        first, second = rig.info(), rig.info()
        rig.planner.match(first, Keys(chain.keys[:10]))
        rig.planner.offer(first, chain, 640, pages)
        rig.local.drain()
        rig.planner.match(second, Keys(chain.keys[:20]))
        rig.planner.offer(second, Keys(chain.keys[:20]), 320, pages)
        rig.planner.finish(first.id, "end_turn", 0.0)
        assert stored(rig, chain) == [7, 8, 9, 17, 18, 19, 37, 38, 39]
        rig.planner.finish(second.id, "end_turn", 0.0)
        rig.check()


def test_a_block_pruned_while_it_is_stored_never_shows() -> None:
    """A request that ends before its stores have: the pruned blocks are invisible at once and their slots come back."""
    with Rig(Sizes(host=40), layout=layout()) as rig:
        chain, info = Keys.of(range(40)), rig.info()
        pages = rig.pages(chain)
        rig.paint(chain, pages)
        rig.planner.match(info, Keys(chain.keys[:10]))
        rig.planner.offer(info, chain, 640, pages)
        rig.planner.finish(info.id, "end_turn", 0.0)
        rig.local.drain()
        assert stored(rig, chain) == [7, 8, 9, 37, 38, 39]
        rig.check()


def test_pruned_blocks_go_from_disk_too(tmp_path: Path) -> None:
    """What is pruned frees its disk slot; the tails that stay come back from disk alone."""
    with Rig(Sizes(host=40, disk=40), layout=layout(), path=tmp_path) as rig:
        chain = Keys.of(range(60))
        turn(rig, Keys(chain.keys[:50]), 30)
        usage = rig.planner._tiers.index.usage(1)["groups"]  # type: ignore[union-attr]
        assert [row["used"] for row in usage] == [50, 6]
        rig.planner.reset(["host"])
        assert turn(rig, chain, 60) == 800
        rig.check()


def test_a_load_moves_no_block_outside_the_window() -> None:
    """The copies of a load of 60 blocks name 60 full blocks and the 3 that the window reaches."""
    with Rig(Sizes(host=40), layout=layout()) as rig:
        chain = Keys.of(range(60))
        rig.store(chain)
        info = rig.info()
        found = rig.planner.match(info, chain)
        rig.planner.load(info, chain, found.boundary, rig.pages(chain))
        (job,) = rig.planner.tick(0.0).jobs
        assert job.kind is JobKind.LOAD
        assert not (job.copies["flags"] & CopyFlag.READ).any()
        assert job.copies["depth"][job.copies["group"] == 1].tolist() == [57, 58, 59]
        assert (job.copies["group"] == 0).sum() == 60
        for mover in rig.movers:
            mover.submit(rig.planner.tick(0.0))


@pytest.mark.parametrize("seed", range(60))
def test_a_load_that_stopped_short_leaves_the_last_restorable_boundary(seed: int) -> None:
    """Against sets: what resuming at start takes and what arrived; boundaries are tried from the longest one down."""
    rng = random.Random(seed)
    kinds = rng.choice(((FULL, FULL), (FULL, SLIDING), (FULL, SLIDING, STATE), (SLIDING,), (FULL, STATE)))
    groups = []
    for number, kind in enumerate(kinds):
        lookback = rng.randint(1, 60) if kind is SLIDING else 0
        groups.append(group(number, kind, 4 * rng.choice((1, 2, 3)), lookback))
    table = Layout(4, tuple(groups))
    step = table.alignment
    start, boundary = step * rng.randint(0, 6), 0
    boundary = start + step * rng.randint(1, 8)
    begins = [g.needs(start, boundary)[0] for g in groups]
    good = [g.needs(start, boundary)[1] for g in groups]
    for i, begin in enumerate(begins):
        if rng.random() < 0.6:
            good[i] = rng.randint(begin, good[i])

    def there(b: int) -> bool:
        have = [
            set(range(*g.needs(0, start))) | set(range(begin, end))
            for g, begin, end in zip(groups, begins, good, strict=True)
        ]
        return all(set(range(*g.needs(0, b))) <= mine for g, mine in zip(groups, have, strict=True))

    want = next(b for b in range(boundary, start - 1, -step) if b == start or there(b))
    assert last_boundary(table, (start, boundary), begins, good) == want


def test_a_load_that_is_short_of_one_groups_slots_waits_for_them(tmp_path: Path) -> None:
    """Host full of another load's blocks, and the only transit slab goes to one of two groups: the load is no miss, it
    goes on when the other one has ended."""
    gate = Gated(ops=[Op.READ], is_open=True)
    table = Layout(16, (group(0, FULL, 16), group(1, FULL, 16)))
    sizes = Sizes(host=2, transit=1, disk=8)
    with Rig(sizes, layout=table, path=tmp_path, tier_faults=[gate]) as rig:
        chains = [Keys.of(range(n, n + 8)) for n in (0, 100)]
        for chain in chains:
            rig.store(chain)
        rig.planner.reset(["host"])
        rig.wipe()
        gate.hold()
        for number, chain in enumerate(chains):
            info = rig.info()
            assert rig.planner.match(info, chain).boundary == 128
            assert rig.planner.load(info, chain, 128, rig.pages(chain, 50 * number)).id
            for _ in range(5):
                assert rig.local.step() == []
        gate.release()
        assert [f.boundary for f in rig.local.drain()] == [128, 128]
        for number, chain in enumerate(chains):
            assert rig.mismatches(chain, rig.pages(chain, 50 * number), 0, 8) == 0
