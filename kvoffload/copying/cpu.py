"""The copy engine of devices whose pages the CPU can address: gather and scatter by native threads."""

from __future__ import annotations

import os

from kvoffload import _C
from kvoffload.arena import HostArena
from kvoffload.copying.base import CopyEngine, Direction
from kvoffload.errors import LayoutError
from kvoffload.layout import CacheGroup, Layout, Pools, Region
from kvoffload.messages import Copies, StatusArray

MAX_THREADS = 2
"""Two threads reach the memory bandwidth that is left beside a computing engine."""


class CpuCopyEngine(CopyEngine):
    """A block in its slot is the pages of its group's regions, one after the other.

    A copy whose page or host slot is -1 or does not exist gets COPY_FAILED and touches nothing.
    REQUIRES: copies that run at the same time do not write the same place.
    """

    def __init__(self, threads: int = 0) -> None:
        """threads: 0 = as many as there are cores for, at most MAX_THREADS."""
        self._threads = threads or min(MAX_THREADS, len(os.sched_getaffinity(0)))
        self._copier: _C.CpuCopier | None = None
        self._running: dict[int, Copies] = {}

    def register(self, layout: Layout, pools: Pools, arena: HostArena) -> None:
        if len(pools) != len(layout.groups):
            raise LayoutError(
                f"{len(pools)} pools for {len(layout.groups)} groups; give one (or ()) per group"
            )
        for group, regions in zip(layout.groups, pools, strict=True):
            check_regions(group, regions)
        self.close()
        native = [[(r.base, r.stride, r.page_bytes, r.pages) for r in pool] for pool in pools]
        self._copier = _C.CpuCopier(arena.base, arena.space, native, self._threads)

    def submit(self, copies: Copies, direction: Direction, after: object) -> int:
        if after is not None:
            raise ValueError("CPU pages have no streams; `after` must be None")
        copier = self._native()
        handle = copier.submit(copies, direction is Direction.TO_DEVICE)
        self._running[handle] = copies
        return handle

    def query(self, handle: int) -> StatusArray | None:
        status = self._native().query(handle)
        if status is not None:
            del self._running[handle]
        return status

    def wait(self, handle: int, timeout: float) -> bool:
        return self._native().wait(handle, max(timeout, 0.0))

    def close(self) -> None:
        """Copies not begun end with NOT_DONE; handles may still be queried."""
        if self._copier is not None:
            self._copier.close()

    def _native(self) -> _C.CpuCopier:
        if self._copier is None:
            raise RuntimeError("register() comes before copies")
        return self._copier


def check_regions(group: CacheGroup, regions: tuple[Region, ...]) -> None:
    """Raise LayoutError unless the regions' pages make exactly one block. A transient group may have none."""
    for number, region in enumerate(regions):
        name = f"group {group.id}, region {number}"
        if region.base <= 0 or region.page_bytes < 1 or region.pages < 0:
            raise LayoutError(
                f"{name}: base {region.base}, {region.page_bytes} bytes per page, {region.pages} pages"
            )
        if region.stride < region.page_bytes:
            raise LayoutError(
                f"{name}: stride {region.stride} is below the {region.page_bytes} bytes of a page"
            )
    total = sum(r.page_bytes for r in regions)
    if total != group.block_bytes and not (group.transient and not regions):
        raise LayoutError(
            f"group {group.id}: the pages of {len(regions)} regions are {total} bytes, "
            f"block_bytes is {group.block_bytes}; they must be equal"
        )
