"""One tier for several movers of a process: the first of them writes, all read."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvoffload.arena import HostArena
from kvoffload.messages import Copies, Status, StatusArray
from kvoffload.tiers.base import Tier


class LentTier(Tier):
    """A tier that its owner closes, after all who have it. writer: exactly one of those writes, resets and probes, so
    that none of these runs beside another; with the others these do nothing."""

    def __init__(self, tier: Tier, *, writer: bool) -> None:
        self._tier = tier
        self._writer = writer

    @property
    def healthy(self) -> bool:
        return self._tier.healthy

    def probe(self) -> bool:
        return self._tier.probe() if self._writer else self._tier.healthy

    @property
    def slabs(self) -> int:
        return self._tier.slabs

    def records(self) -> NDArray[np.void]:
        return self._tier.records()

    def read(self, copies: Copies, arena: HostArena) -> StatusArray:
        return self._tier.read(copies, arena)

    def write(self, copies: Copies, arena: HostArena) -> StatusArray:
        if self._writer:
            return self._tier.write(copies, arena)
        return np.full(len(copies), Status.COPY_FAILED, np.uint8)

    def reset(self) -> None:
        if self._writer:
            self._tier.reset()

    def close(self) -> None:
        """The owner does it."""
