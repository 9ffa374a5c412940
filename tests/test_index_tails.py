"""What the end of a full group takes along: direct calls on the index."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvoffload.index import Index, Matcher
from kvoffload.testing.rig import Keys

FULL, SLIDING, STATE = 0, 1, 2


class Small:
    """An index of full blocks of one base block beside windows and states, with a slab for each slot."""

    def __init__(self, others, host, disk=0):
        groups = [(FULL, 1, 0), *((SLIDING if m == 1 else STATE, m, 3 if m == 1 else 0) for m in others)]
        self.others = others
        self.inner = Index(groups, 1, [1] * len(groups), host, 2, disk)

    def store(self, chain, groups):
        """An open request that stores the whole chain in the first so many groups."""
        multiples = [1, *self.others]
        ends = [chain.blocks // m if g < groups else 0 for g, m in enumerate(multiples)]
        pages = [np.arange(end, dtype=np.int32) for end in ends]
        segment = self.inner.open_segment(0.0)
        copies, *_ = self.inner.offer(segment, chain.keys, [0] * len(ends), ends, pages)
        self.inner.complete_store(copies, None)
        return segment

    def there(self, chain, group):
        """Blocks of the chain that a tier has."""
        matcher = Matcher(self.inner)
        matcher.update(chain.keys, 0)
        return np.flatnonzero(matcher.codes(group)).tolist()


@pytest.mark.parametrize("seed", range(30))
def test_what_lies_beyond_the_full_blocks_goes_with_them(seed):
    """However many full blocks of an old request are given up: of its windows and states just those stay that end where
    the full blocks that are left end, or before."""
    rng = random.Random(seed)
    others = rng.choice(([1], [2], [1, 2], [4, 1]))
    blocks, more = rng.randint(4, 24), rng.randint(1, 8)
    old, new = Keys.of(range(blocks)), Keys.of(range(100, 100 + more))
    index = Small(others, blocks + sum(blocks // m for m in others))
    index.inner.close_segment(index.store(old, 3), 0, 0.0)
    index.store(new, 1)

    left = index.there(old, 0)
    assert left == list(range(len(left))) != list(range(blocks))
    for group, multiple in enumerate(others, 1):
        want = [b for b in range(blocks // multiple) if (b + 1) * multiple <= len(left)]
        assert index.there(old, group) == want
    index.inner.check_integrity()
