"""How host bytes are cut into slabs."""

from __future__ import annotations

import pytest

from kvoffload.errors import ConfigError
from kvoffload.layout import CacheGroup, GroupKind, Layout
from kvoffload.sizing import size_slabs

LAYOUT = Layout(16, (CacheGroup(0, GroupKind.FULL, 16, 65536),))
SLAB = 8 * 65536


def test_without_a_disk_all_of_host_holds_blocks():
    """No slab is set aside for blocks that pass through where there is nothing to pass to; with a disk one is."""
    alone, beside = (size_slabs(LAYOUT, 10 * SLAB, disk) for disk in (0, 100 * SLAB))
    assert (alone.slab_bytes, alone.host, alone.transit) == (SLAB, 10, 0)
    assert (beside.slab_bytes, beside.host, beside.transit) == (SLAB, 9, 1)


@pytest.mark.parametrize(("disk", "needed"), [(0, 1), (100, 2)])
def test_too_little_host_is_refused(disk, needed):
    """One slab is needed for blocks, and with a disk one for transit: one byte less is an error with the bytes."""
    size_slabs(LAYOUT, needed * SLAB, disk * SLAB)
    with pytest.raises(ConfigError, match=f"needs {needed * SLAB}: raise host_bytes"):
        size_slabs(LAYOUT, needed * SLAB - 1, disk * SLAB)
