"""Replayed one request after another, the index is tail-first LRU: the identities of a trace replay, by brute force."""

from __future__ import annotations

import gzip
import hashlib
import json
import random
from collections import OrderedDict
from itertools import pairwise

import numpy as np
import pytest

from kvoffload.index import Index, Matcher

SEEDS = range(40)


def tree(seed, length=30, longest=14):
    """Requests as paths of a growing prefix tree: each continues, cuts or leaves an earlier one."""
    rng = random.Random(seed)
    paths = [[rng.randrange(3)]]
    for _ in range(length):
        base = rng.choice(paths[-6:])
        kept = base[: rng.randint(0, len(base))] if rng.random() < 0.4 else list(base)
        paths.append((kept + [rng.randrange(1 << 30) for _ in range(rng.randint(1, 5))])[:longest])
    return [[tuple(p[: i + 1]) for i in range(len(p))] for p in paths]


class Lru:
    """Touch last first, evict the least recent; what is in `kept` after each request."""

    def __init__(self, capacity):
        self.capacity, self.kept = capacity, OrderedDict()

    def hits(self, ids):
        return next((i for i, x in enumerate(ids) if x not in self.kept), len(ids))

    def use(self, ids):
        for x in reversed(ids):
            self.kept[x] = True
            self.kept.move_to_end(x)
        while len(self.kept) > self.capacity:
            self.kept.popitem(last=False)


def name(x):
    """16 bytes of a block id."""
    return (
        int(x).to_bytes(16, "little")
        if isinstance(x, int)
        else hashlib.sha256(repr(x).encode()).digest()[:16]
    )


class Replay:
    """One tier or two, every copy ends at once and well."""

    def __init__(self, host, disk=0, transit=0):
        slabs = [-(-slots // 8) for slots in (host, transit, disk)]
        self.index = Index(
            [(0, 1, 0)], 1, [8], *slabs, host_slots=host, transit_slots=transit, disk_slots=disk
        )
        self.host_hits = self.disk_hits = self.host_stores = self.disk_writes = self.total = 0

    def run(self, ids, keys=None):
        """One request. `keys` if the caller has them as an array."""
        if keys is None:
            keys = np.frombuffer(b"".join(name(x) for x in ids), np.uint8).reshape(-1, 16)
        index, n = self.index, len(ids)
        pages = [np.zeros(n, np.int32)]
        boundary, pending, host, disk, loading = Matcher(index).update(keys, 0)
        assert (pending, loading, host + disk) == (boundary, False, boundary)
        segment = index.open_segment(0.0)
        done = 0
        while done < boundary:
            copies, (done,) = index.begin_load(segment, keys, [done], [boundary], pages, 3)
            assert len(copies)
            index.complete_load(copies, None)
        self._store(segment, keys, done, pages)
        index.close_segment(segment, 0, 0.0)
        self.host_hits += host
        self.disk_hits += disk
        self.total += n
        return boundary

    def _store(self, segment, keys, done, pages):
        refused = 0
        while done < len(keys) and not refused:
            copies, (done,), _, _, refused = self.index.offer(segment, keys, [done], [len(keys)], pages)
            self.index.complete_store(copies, None)
            below = copies[copies["flags"] != 0]
            self.index.complete_write(below, None)
            self.host_stores += len(copies) - len(below)
            self.disk_writes += len(below)
        while len(copies := self.index.next_writes(1 << 20)):
            self.disk_writes += len(copies)
            self.index.complete_write(copies, None)

    def held(self, tier):
        """Keys in the tier, least valuable first."""
        column = ("host", "disk")[tier]
        return [e["key"].tobytes() for e in self.index.entries() if e[column] >= 0]


@pytest.mark.parametrize("capacity", [1, 3, 7, 20, 60])
def test_one_tier_is_lru(capacity):
    """Hits of every request and the kept blocks in their order of eviction are those of brute force."""
    for seed in SEEDS:
        replay, lru = Replay(capacity), Lru(capacity)
        for ids in tree(seed):
            assert replay.run(ids) == lru.hits(ids)

            lru.use(ids)

            assert replay.held(0) == [name(x) for x in lru.kept]
        replay.index.check_integrity()


def test_hits_rise_with_capacity():
    """A larger host never has fewer hits; an unbounded one hits every block seen before."""
    for seed in SEEDS:
        requests, hits = tree(seed), []
        for capacity in (1, 2, 4, 8, 16, 32, 64, 1000):
            replay = Replay(capacity)
            for ids in requests:
                replay.run(ids)
            hits.append(replay.host_hits)
        seen = {x for ids in requests for x in ids}

        assert all(a <= b for a, b in pairwise(hits))
        assert hits[-1] == replay.total - len(seen)


def test_hits_and_stores_are_all_blocks():
    """Where every request fits, each block is either a hit or stored."""
    for seed in SEEDS:
        replay = Replay(14)
        for ids in tree(seed):
            replay.run(ids)

        assert replay.host_hits + replay.host_stores == replay.total


@pytest.mark.parametrize(
    ("host", "disk", "transit"), [(14, 30, 0), (14, 14, 0), (3, 20, 2), (1, 16, 1), (5, 60, 3)]
)
def test_two_tiers_are_two_lrus(host, disk, transit):
    """Host hits are those of LRU(host), both tiers' those of LRU(disk), also where requests are longer than host."""
    for seed in SEEDS:
        replay, small, large, written = Replay(host, disk, transit), Lru(host), Lru(disk), 0
        for ids in tree(seed):
            expected = small.hits(ids), large.hits(ids)
            before = replay.host_hits
            written += len(ids) - expected[1]

            assert replay.run(ids) == expected[1]
            assert replay.host_hits - before == expected[0]

            small.use(ids)
            large.use(ids)

            assert replay.held(1) == [name(x) for x in large.kept]
            assert sorted(replay.held(0)) == sorted(name(x) for x in small.kept)
        assert replay.disk_writes == written
        replay.index.check_integrity()


def real_requests(traces):
    """Block ids of every request of the 12-session trace."""
    with gzip.open(traces / "cc_v8_sample12_b64.mooncake.jsonl.gz", "rt") as lines:
        for line in lines:
            runs = json.loads(line)["hash_runs"]
            yield [x for start, count in runs for x in range(start, start + count)]


@pytest.mark.parametrize(
    ("host", "disk", "transit", "expected"),
    [
        (5_000, 0, 0, (1_579_168, 0, 0)),
        (10_000, 0, 0, (2_108_329, 0, 0)),
        (5_000, 10_000, 0, (1_579_168, 529_161, 107_372)),
        (2_000, 10_000, 64, (604_223, 1_504_106, 107_372)),
    ],
)
def test_real_agent_sessions(traces, host, disk, transit, expected):
    """Hits of both tiers and disk writes on real sessions are the published numbers, to the block."""
    replay = Replay(host, disk, transit)
    for ids in real_requests(traces):
        keys = np.zeros((len(ids), 16), np.uint8)
        keys[:, :8] = np.array(ids, "<u8").view(np.uint8).reshape(-1, 8)
        replay.run(ids, keys)
    replay.index.check_integrity()

    assert (replay.host_hits, replay.disk_hits, replay.disk_writes) == expected
