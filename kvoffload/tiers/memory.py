"""Tiers without a medium: one in memory for tests, one that moves nothing for index-only runs."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from kvoffload import _C
from kvoffload.arena import HostArena
from kvoffload.layout import SLOT_INDEX_BITS, Layout
from kvoffload.messages import RECORD_DTYPE, Copies, Status, StatusArray
from kvoffload.tiers.base import Tier


class MemoryTier(Tier):
    """The contract of a tier in its shortest form: slots in a dictionary, gone with the process."""

    def __init__(self, layout: Layout, slab_bytes: int, slabs: int) -> None:
        self._slabs = slabs
        self._space = _C.SlotSpace(slab_bytes, slabs, [g.slot_bytes for g in layout.groups])
        self._blocks: dict[tuple[int, int], tuple[bytes, bytes]] = {}  # (group, slot) -> (key, payload)
        self._owner: dict[int, int] = {}  # slab -> group
        self._lock = threading.Lock()  # protects both

    @property
    def slabs(self) -> int:
        return self._slabs

    def records(self) -> NDArray[np.void]:
        return np.empty(0, RECORD_DTYPE)

    def read(self, copies: Copies, arena: HostArena) -> StatusArray:
        status = np.full(len(copies), Status.READ_FAILED, np.uint8)
        for number, copy in enumerate(copies):
            group, slot = int(copy["group"]), int(copy["disk"])
            with self._lock:
                key, payload = self._blocks.get((group, slot), (b"", b""))
            if key == copy["key"].tobytes() and arena.space.offset(group, int(copy["host"])) >= 0:
                arena.view(group, int(copy["host"]))[:] = np.frombuffer(payload, np.uint8)
                status[number] = Status.OK
        return status

    def write(self, copies: Copies, arena: HostArena) -> StatusArray:
        status = np.full(len(copies), Status.COPY_FAILED, np.uint8)
        for number, copy in enumerate(copies):
            group, slot, host = int(copy["group"]), int(copy["disk"]), int(copy["host"])
            if self._space.offset(group, slot) < 0 or arena.space.offset(group, host) < 0:
                continue
            payload = arena.view(group, host).tobytes()
            with self._lock:
                self._claim(group, slot >> SLOT_INDEX_BITS)
                self._blocks[group, slot] = (copy["key"].tobytes(), payload)
            status[number] = Status.OK
        return status

    def reset(self) -> None:
        self._blocks.clear()
        self._owner.clear()

    def close(self) -> None:
        self.reset()

    def _claim(self, group: int, slab: int) -> None:
        """A slab that changes its group loses the blocks of the group before."""
        if self._owner.setdefault(slab, group) != group:
            self._owner[slab] = group
            self._blocks = {k: v for k, v in self._blocks.items() if k[1] >> SLOT_INDEX_BITS != slab}


class NullTier(Tier):
    """Moves nothing and answers OK. 0 slabs stand for "no disk", more for a run without bytes."""

    def __init__(self, slabs: int = 0) -> None:
        self._slabs = slabs

    @property
    def slabs(self) -> int:
        return self._slabs

    def records(self) -> NDArray[np.void]:
        return np.empty(0, RECORD_DTYPE)

    def read(self, copies: Copies, arena: HostArena) -> StatusArray:
        return np.full(len(copies), Status.OK, np.uint8)

    def write(self, copies: Copies, arena: HostArena) -> StatusArray:
        return np.full(len(copies), Status.OK, np.uint8)

    def reset(self) -> None:
        """Nothing to forget."""

    def close(self) -> None:
        """Nothing to release."""
