"""Which copies of a job can be done, worked out with numpy: for the engines that have no native copier."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvoffload.arena import HostArena
from kvoffload.copying.base import Direction
from kvoffload.copying.cpu import check_regions
from kvoffload.errors import LayoutError
from kvoffload.layout import SLOT_INDEX_BITS, Layout, Pools
from kvoffload.messages import Copies, CopyFlag, Status, StatusArray


@dataclass(frozen=True, slots=True)
class Placed:
    """Copies of one group in the order of their slots: index in the job, device page, byte offset in the arena."""

    group: int
    index: NDArray[np.int64]
    page: NDArray[np.int64]
    offset: NDArray[np.int64]


def check_pools(layout: Layout, pools: Pools) -> None:
    """Raise LayoutError unless every group's regions make exactly its block."""
    if len(pools) != len(layout.groups):
        raise LayoutError(f"{len(pools)} pools for {len(layout.groups)} groups; give one (or ()) per group")
    for group, regions in zip(layout.groups, pools, strict=True):
        check_regions(group, regions)


def place(
    copies: Copies, direction: Direction, pools: Pools, arena: HostArena, status: StatusArray
) -> list[Placed]:
    """What can be copied, by group. The rest gets COPY_FAILED in `status`: pages, slots and groups that do not exist,
    copies that wait for another job, and destinations that a copy before has."""
    placed = []
    status[:] = Status.COPY_FAILED
    waiting = (copies["flags"] & CopyFlag.WAIT) != 0
    for group, regions in enumerate(pools):
        slot_bytes = arena.layout.groups[group].slot_bytes
        pages = min((r.pages for r in regions), default=0)
        host = copies["host"].astype(np.int64)
        slab, index = host >> SLOT_INDEX_BITS, host & ((1 << SLOT_INDEX_BITS) - 1)
        good = (copies["group"] == group) & ~waiting & (host >= 0) & (slab < arena.slabs)
        good &= (
            ((index + 1) * slot_bytes <= arena.slab_bytes) & (copies["page"] >= 0) & (copies["page"] < pages)
        )
        chosen = np.flatnonzero(good)
        offsets = (slab * arena.slab_bytes + index * slot_bytes)[chosen]
        target = offsets if direction is Direction.TO_HOST else copies["page"][chosen]
        first = np.unique(target, return_index=True)[1]
        order = first[np.argsort(offsets[first], kind="stable")]
        chosen, offsets = chosen[order], offsets[order]
        status[chosen] = Status.OK
        if len(chosen):
            placed.append(Placed(group, chosen, copies["page"][chosen].astype(np.int64), offsets))
    return placed
