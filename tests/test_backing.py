"""Host memory that is backed ahead of its use."""

from __future__ import annotations

import resource

import numpy as np

from kvoffload.arena import HostArena
from kvoffload.backing import Backing
from kvoffload.layout import CacheGroup, GroupKind, Layout

LAYOUT = Layout(16, (CacheGroup(0, GroupKind.FULL, 16, 4096),))
SLAB = 1 << 20


def test_backing_keeps_what_is_written_and_takes_the_page_faults():
    """Every slab gets backed, bytes written before and meanwhile stay, and later writes fault no page in."""
    arena = HostArena(SLAB, 32, LAYOUT)
    arena.view(0, 0)[:] = 7
    backing = Backing(arena)
    arena.view(0, 31 << 16)[:] = 9
    assert backing.wait(60)
    assert backing.backed == 32
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for slab in range(1, 31):
        for index in range(SLAB // 4096):
            arena.view(0, slab << 16 | index)[0] = 1
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    assert faults < 30 * SLAB // 4096 // 10
    assert np.unique(arena.view(0, 0)).tolist() == [7]
    assert np.unique(arena.view(0, 31 << 16)).tolist() == [9]
    backing.stop()
    arena.close()


def test_stopping_comes_before_the_end():
    """A backing that is stopped ends with the slab under way, and stopping again is fine."""
    arena = HostArena(SLAB, 4096, LAYOUT)
    backing = Backing(arena)
    backing.stop()
    backing.stop()
    assert backing.wait(0)
    assert backing.backed < 4096
    arena.close()
