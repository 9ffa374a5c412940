"""What the ranks have in common: the geometry of all tiers, and the blocks that all of them found on disk."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvoffload.messages import RECORD_DTYPE, Geometry, Inventory


def agree(ranks: Sequence[Inventory]) -> Geometry:
    """The most that every rank can give. REQUIRES: at least one rank, all with the same number of groups."""
    return Geometry(
        tuple(min(counts) for counts in zip(*(r.slots_per_slab for r in ranks), strict=True)),
        min(r.host_slabs for r in ranks),
        min(r.transit_slabs for r in ranks),
        min(r.disk_slabs for r in ranks),
    )


def common_records(ranks: Sequence[Inventory]) -> NDArray[np.void]:
    """Records, by (group, slot, key), that every rank reports that has the group; the first such rank's copy."""
    parts = [np.empty(0, RECORD_DTYPE)]
    for group in range(len(ranks[0].slots_per_slab)):
        holders = [r.records[r.records["group"] == group] for r in ranks if group not in r.lacks]
        common = holders[0] if holders else parts[0]
        for other in holders[1:]:
            common = common[np.isin(_places(common), _places(other))]
        parts.append(common)
    return np.concatenate(parts)


def _places(records: NDArray[np.void]) -> NDArray[np.void]:
    """(n,) of 22-byte strings: group, slot and key of each record."""
    packed = np.empty(len(records), [("group", "<u2"), ("slot", "<i4"), ("key", "u1", (16,))])
    for name in ("group", "slot", "key"):
        packed[name] = records[name]
    return packed.view("V22")
