"""The contract of a tier below host: a numbered set of slots that outlives the process, or not.

Wrappers (kvoffload.testing.faults) compose behaviour on top; `kvoffload.testing.tier_suite` is what every
implementation runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from kvoffload.arena import HostArena
from kvoffload.messages import Copies, StatusArray


class Tier(ABC):
    """Slots named by the planner; the tier moves bytes and vouches for them.

    Thread: `read` and `write` may run at the same time from several threads, never on the same slot (the
    planner pins); `reset` and `probe` beside reads, never beside a write; the other methods run alone. Lifetime: the
    arena must outlive every call that was given it.
    A copy whose slot does not exist in tier or arena fails like any other and touches nothing.
    """

    @property
    def healthy(self) -> bool:
        """False after several failures of the medium in a row, until `probe` finds it working again."""
        return True

    def probe(self) -> bool:
        """Try the medium with a small write and read; True = it works. May block like a write."""
        return self.healthy

    @property
    @abstractmethod
    def slabs(self) -> int:
        """Slabs of the layout's slab size that the tier holds."""

    @abstractmethod
    def records(self) -> NDArray[np.void]:
        """(n,) of RECORD_DTYPE: what was found at open. Payloads are not read."""

    @abstractmethod
    def read(self, copies: Copies, arena: HostArena) -> StatusArray:
        """Fill host slots from disk slots; READ_FAILED where the bytes are not exactly the key's.

        Never raises for a failure of the medium. After READ_FAILED the host slot's content is undefined.
        """

    @abstractmethod
    def write(self, copies: Copies, arena: HostArena) -> StatusArray:
        """Put host slots into disk slots; COPY_FAILED where that did not happen.

        After OK a `read` of the same (key, slot) gives the bytes back until the slot, or a slot of another
        group in the same slab, is written. Never raises for a failure of the medium.
        """

    @abstractmethod
    def reset(self) -> None:
        """Forget every block, also for the next open."""

    @abstractmethod
    def close(self) -> None:
        """Release files and locks. Idempotent. REQUIRES: no call is running."""
