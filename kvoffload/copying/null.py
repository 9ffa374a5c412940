"""The copy engine that moves nothing: index-only runs, where only decisions count."""

from __future__ import annotations

import numpy as np

from kvoffload.arena import HostArena
from kvoffload.copying.base import CopyEngine, Direction
from kvoffload.layout import Layout, Pools
from kvoffload.messages import Copies, Status, StatusArray


class NullCopyEngine(CopyEngine):
    """Every copy is OK at once."""

    def __init__(self) -> None:
        self._done: dict[int, StatusArray] = {}
        self._next = 1

    def register(self, layout: Layout, pools: Pools, arena: HostArena) -> None:
        """Nothing to fix."""

    def submit(self, copies: Copies, direction: Direction, after: object) -> int:
        handle = self._next
        self._next += 1
        self._done[handle] = np.full(len(copies), Status.OK, np.uint8)
        return handle

    def query(self, handle: int) -> StatusArray | None:
        return self._done.pop(handle)

    def wait(self, handle: int, timeout: float) -> bool:
        return self._done[handle] is not None

    def close(self) -> None:
        self._done.clear()
