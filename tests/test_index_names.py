"""Keys that no honest chain has: one named at two depths, and many whose blocks look alike to a policy that learns."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvoffload.index import Index, Matcher

HOST, SLOTS = 0, 6
PAGES = [np.arange(64, dtype=np.int32)]


def named(names):
    """A chain of the keys with these numbers; they differ in their first bytes only."""
    keys = np.zeros((len(names), 16), np.uint8)
    keys[:, 0] = names
    return keys


def store(index, chain):
    segment, n = index.open_segment(0.0), len(chain)
    copies, *_ = index.offer(segment, chain, [0], [n], PAGES)
    index.complete_store(copies, None)
    while len(writes := index.next_writes(64)):
        index.complete_write(writes, None)
    index.close_segment(segment, 0, 0.0)
    return len(copies)


@pytest.mark.parametrize("policy", ["lru", "rri", "rri-keep"])
def test_a_key_is_found_at_its_own_depth_only(policy):
    """A chain that names a block twice stores it once, and where only disk has it takes one host slot for it."""
    index = Index([(0, 1, 0)], 1, [1], SLOTS, 0, 2 * SLOTS, host_policy=policy, disk_policy=policy)
    chain = named([1, 2, 1, 3])
    assert store(index, chain) == 3
    matcher = Matcher(index)
    matcher.update(chain, 0)
    assert (matcher.codes(0) != 0).tolist() == [True, True, False, True]
    index.reset(HOST)
    again = index.open_segment(1.0)
    copies, ends = index.begin_load(again, chain, [0], [4], PAGES, 0)
    assert (len(copies), list(ends)) == (2, [2])
    index.complete_load(copies, None)
    index.check_integrity()
    assert store(index, chain) == 1
    assert index.usage(HOST)["groups"][0]["used"] == 3
    index.check_integrity()


@pytest.mark.parametrize("seed", range(10))
def test_blocks_that_share_a_ghost_are_still_counted(seed):
    """Paths whose keys differ only where ghosts do not look: every count of the lineage holds, and blocks come back."""
    rng = random.Random(seed)
    index = Index([(0, 1, 0)], 1, [1], SLOTS, 0, 4, host_policy="rri", disk_policy="rri")
    for _ in range(100):
        trunk, leaf = rng.randint(0, 4), rng.randint(1, 3)
        store(index, named([i + 1 if i < trunk else 10 * leaf + i for i in range(rng.randint(1, 8))]))
        index.check_integrity()
    assert index.usage(HOST)["groups"][0]["used"] > 0
