"""The copy engine in torch operations, for pages in host memory: nothing native but torch itself."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from kvoffload.arena import HostArena
from kvoffload.copying.base import CopyEngine, Direction
from kvoffload.copying.placing import Placed, check_pools, place
from kvoffload.layout import Layout, Pools, Region
from kvoffload.messages import Copies, StatusArray


class TorchCopyEngine(CopyEngine):
    """Copies inside `submit`: every handle has its outcome at once. REQUIRES: pages that the CPU can address."""

    def __init__(self) -> None:
        self._pools: Pools | None = None
        self._arena: HostArena | None = None
        self._host = torch.empty(0, dtype=torch.uint8)
        self._pages: list[list[torch.Tensor]] = []
        self._done: dict[int, StatusArray] = {}
        self._next = 1

    def register(self, layout: Layout, pools: Pools, arena: HostArena) -> None:
        check_pools(layout, pools)
        self._pools, self._arena = pools, arena
        self._host = _bytes_at(arena.base, arena.nbytes)
        self._pages = [[_rows(r) for r in pool] for pool in pools]

    def submit(self, copies: Copies, direction: Direction, after: object) -> int:
        if after is not None:
            raise ValueError("CPU pages have no streams; `after` must be None")
        if self._pools is None or self._arena is None:
            raise RuntimeError("register() comes before copies")
        status = np.empty(len(copies), np.uint8)
        for placed in place(copies, direction, self._pools, self._arena, status):
            self._copy(placed, direction)
        self._done[self._next] = status
        self._next += 1
        return self._next - 1

    def query(self, handle: int) -> StatusArray | None:
        return self._done.pop(handle)

    def wait(self, handle: int, timeout: float) -> bool:
        if handle not in self._done:
            raise KeyError(f"no copy has the handle {handle}")
        return True

    def close(self) -> None:
        """Handles may still be queried."""
        self._pages = []

    def _copy(self, placed: Placed, direction: Direction) -> None:
        for page, offset in zip(placed.page.tolist(), placed.offset.tolist(), strict=True):
            begin = offset
            for rows in self._pages[placed.group]:
                end = begin + rows.shape[1]
                if direction is Direction.TO_HOST:
                    self._host[begin:end].copy_(rows[page])
                else:
                    rows[page].copy_(self._host[begin:end])
                begin = end


def _bytes_at(address: int, nbytes: int) -> torch.Tensor:
    """A view of memory that somebody else owns."""
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)


def _rows(region: Region) -> torch.Tensor:
    """(pages, page bytes): the pages of a region."""
    if not region.pages:
        return torch.empty((0, region.page_bytes), dtype=torch.uint8)
    whole = _bytes_at(region.base, (region.pages - 1) * region.stride + region.page_bytes)
    return whole.as_strided((region.pages, region.page_bytes), (region.stride, 1))
