"""Boundaries of a chain against a set oracle, on random layouts with sliding and state groups."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from kvoffload.index import Code, Index, Matcher

CASES = 300
TRANSIENT = 3


class World:
    """One chain over a random layout, with random blocks stored, on disk, pending; the truth as plain sets."""

    def __init__(self, seed, off=0):
        rng = self.rng = random.Random(seed)
        self.base = rng.choice((1, 4))
        self.layout = []
        for kind in rng.choice(((0,), (0, 1), (0, 2), (0, 1, 2), (1, 2), (0, 0, 1), (1,), (2,), (0, 3, 1))):
            lookback = rng.randint(1, 12) * rng.choice((1, self.base)) if kind == 1 else 0
            self.layout.append((kind, rng.choice((1, 2, 3)), lookback))
        self.stored = [g for g, (kind, _, _) in enumerate(self.layout) if kind != TRANSIENT]
        self.keys = np.frombuffer(rng.randbytes(16 * rng.randint(1, 30)), np.uint8).reshape(-1, 16)
        groups = len(self.layout)
        slots = [4 if g in self.stored else 0 for g in range(groups)]
        groups_off = [(k, m, b + off if k == 1 else b) for k, m, b in self.layout]
        self.index = Index(groups_off, self.base, slots, 200, 0, 200)
        self.segment = self.index.open_segment(0.0)
        self.there = [{} for _ in self.layout]  # by group: block -> code

    def blocks(self, group):
        return len(self.keys) // self.layout[group][1]

    def store(self, group, end):
        """Random absent blocks of the group; left pending, in host, or moved to disk."""
        density = self.rng.choice((0.5, 0.9, 1.0))
        pages = [np.empty(0, np.int32) for _ in self.layout]
        pages[group] = np.array([0 if self.rng.random() < density else -1 for _ in range(end)], np.int32)
        begins, ends = [0] * len(self.layout), [0] * len(self.layout)
        ends[group] = end
        copies, *_ = self.index.offer(self.segment, self.keys, begins, ends, pages)
        to = self.rng.choice((Code.PENDING, Code.HOST, Code.HOST, Code.HOST | Code.DISK))
        if to is not Code.PENDING:
            self.index.complete_store(copies, None)
        if Code.DISK in to:
            while len(writes := self.index.next_writes(1000)):
                self.index.complete_write(writes, None)
                for c in writes:  # of earlier stores, too
                    self.there[c["group"]][int(c["depth"])] = Code.HOST | Code.DISK
        there = self.there[group]
        for b in map(int, copies["depth"]):
            there[b] = there.get(b, Code(0)) & Code.DISK | to

    def forget_host(self):
        self.index.reset(0)
        kept = (Code.DISK, Code.HOST | Code.DISK)  # what a running job holds goes everywhere
        self.there = [{b: Code.DISK for b, c in there.items() if c in kept} for there in self.there]

    def change(self):
        """One random step."""
        if self.rng.random() < 0.1:
            self.forget_host()
            return
        group = self.rng.choice(self.stored)
        self.store(group, self.rng.randint(0, self.blocks(group)))

    def boundaries(self, blocks, computed, mask):
        """By the definition, from sets."""
        sizes = [self.layout[g][1] * self.base for g in self.stored]
        step = math.lcm(*sizes)
        return [b for b in range(step, blocks * self.base + 1, step) if self.restorable(b, computed, mask)]

    def restorable(self, b, computed, mask):
        for (kind, k, lookback), there in zip(self.layout, self.there, strict=True):
            if kind == TRANSIENT:
                continue
            size = k * self.base
            first = {0: 0, 1: max(0, b - lookback), 2: b - 1}[kind]  # of the tokens needed, up to b
            needed = {token // size for token in range(first, b)}
            have = {i for i in needed if there.get(i, Code(0)) & mask or (i + 1) * size <= computed}
            if needed != have:
                return False
        return True


def check(world, matcher, blocks, computed):
    """The matcher's whole answer against the oracle's."""
    boundary, pending, host, disk, loading = matcher.update(world.keys[:blocks], computed)
    visible = world.boundaries(blocks, computed, Code.HOST | Code.DISK)
    further = world.boundaries(blocks, computed, Code.HOST | Code.DISK | Code.PENDING)

    assert boundary == max([computed, *visible])
    assert pending == max([boundary, *further])
    assert matcher.boundaries().tolist() == visible
    assert not loading
    if world.layout[0][0] == 0:
        size, there = world.layout[0][1] * world.base, world.there[0]
        tokens = {Code.HOST: 0, Code.DISK: 0}
        for token in range(computed, boundary):
            code = there.get(token // size, Code(0))
            for tier in (Code.HOST, Code.DISK):
                if tier in code:
                    tokens[tier] += 1
                    break
        assert (host, disk) == (tokens[Code.HOST] // world.base, tokens[Code.DISK] // world.base)


def play(world):
    """Random changes, with the matcher's answer compared in between."""
    matcher = Matcher(world.index)
    for _ in range(6):
        for _ in range(world.rng.randint(0, 4)):
            world.change()
        blocks = world.rng.randint(0, len(world.keys))
        computed = world.rng.choice((0, world.rng.randint(0, blocks) * world.base))
        check(world, matcher, blocks, computed)
    world.index.check_integrity()


@pytest.mark.parametrize("first", range(0, CASES, 50))
def test_boundaries_follow_the_definition(first):
    """Boundary, pending boundary, tier mix and all boundaries are what the definition says, also after changes."""
    for seed in range(first, first + 50):
        play(World(seed))


@pytest.mark.parametrize("off", [-1, 1])
def test_a_lookback_that_is_off_by_one_is_noticed(off):
    """The oracle tells an index whose windows are one token too short or too long from a right one."""
    noticed = 0
    for seed in range(200):
        try:
            play(World(seed, off))
        except AssertionError:
            noticed += 1
    assert noticed > 0


def full(slots=64, disk=0):
    return Index([(0, 1, 0)], 16, [16], slots // 16, 0, disk // 16)


def chain(n, seed=0):
    return np.frombuffer(random.Random(seed).randbytes(16 * n), np.uint8).reshape(-1, 16)


def test_another_chain_is_probed_anew():
    """A matcher that is handed other keys answers for these."""
    index, a, b = full(), chain(8), chain(8, 1)
    copies, *_ = index.offer(index.open_segment(0.0), a, [0], [8], [np.zeros(8, np.int32)])
    index.complete_store(copies, None)
    matcher = Matcher(index)

    assert matcher.update(a, 0)[0] == 8 * 16
    assert matcher.update(b, 0)[0] == 0
    assert matcher.update(a[:3], 0)[0] == 3 * 16
    assert matcher.update(a, 0)[0] == 8 * 16


def test_an_overrun_log_is_noticed():
    """After more changes than the log holds the answer is still right."""
    index = Index([(0, 1, 0)], 1, [1024], 1, 0, 0)
    keys = chain(1000)
    matcher = Matcher(index)
    assert matcher.update(keys, 0)[0] == 0
    pages = [np.zeros(1000, np.int32)]
    for round_ in range(40):
        copies, *_ = index.offer(index.open_segment(0.0), keys, [0], [1000], pages)
        index.complete_store(copies, np.full(1000, 0 if round_ == 39 else 2, np.uint8))

    assert index.changes(0)[1] is None
    assert matcher.update(keys, 0)[0] == 1000


def test_loading_is_told_until_the_deadline():
    """Blocks on their way to the device are loading for others, until the load ends or is late."""
    index, keys, pages = full(), chain(4), [np.zeros(4, np.int32)]
    segment = index.open_segment(0.0)
    index.complete_store(index.offer(segment, keys, [0], [4], pages)[0], None)
    matcher = Matcher(index)

    assert matcher.update(keys, 0) == (64, 64, 4, 0, False)
    copies, _ = index.begin_load(segment, keys, [1], [3], pages, 0)
    assert matcher.update(keys, 0) == (64, 64, 4, 0, True)
    assert matcher.codes(0).tolist() == [1, 9, 9, 1]
    assert matcher.update(keys, 48) == (64, 64, 1, 0, False)
    index.expire(copies)
    assert matcher.update(keys, 0) == (64, 64, 4, 0, False)
    index.complete_load(copies, None)


def test_a_store_in_flight_is_pending_not_missing():
    """Turn n + 1 sees what turn n is writing as pending, as restorable once it ended, as missing once it is late."""
    index, keys, pages = full(), chain(4), [np.zeros(4, np.int32)]
    copies, *_ = index.offer(index.open_segment(0.0), keys, [0], [4], pages)
    matcher = Matcher(index)

    assert matcher.update(keys, 0) == (0, 64, 0, 0, False)
    index.expire(copies)
    assert matcher.update(keys, 0) == (0, 0, 0, 0, False)
    index.complete_store(copies, None)
    assert matcher.update(keys, 0) == (64, 64, 4, 0, False)


def test_disk_that_is_offline_answers_nothing():
    """Blocks only on disk go and come with the tier, also for a matcher that knew them."""
    index, keys, pages = full(64, 64), chain(4), [np.zeros(4, np.int32)]
    index.complete_store(index.offer(index.open_segment(0.0), keys, [0], [4], pages)[0], None)
    index.complete_write(index.next_writes(9), None)
    index.reset(0)
    matcher = Matcher(index)

    assert matcher.update(keys, 0) == (64, 64, 0, 4, False)
    index.set_online(1, False)
    assert matcher.update(keys, 0) == (0, 0, 0, 0, False)
    index.set_online(1, True)
    assert matcher.update(keys, 0) == (64, 64, 0, 4, False)
