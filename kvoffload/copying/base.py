"""The contract of a copy engine: device pages <-> host slots."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import IntEnum

from kvoffload.arena import HostArena
from kvoffload.layout import Layout, Pools
from kvoffload.messages import Copies, StatusArray


class Direction(IntEnum):
    """Which way the bytes go."""

    TO_HOST = 0
    TO_DEVICE = 1


class CopyEngine(ABC):
    """Copies every layer of a page into a slot and back.

    Thread: several threads may call at the same time, each with handles of its own; the copies run elsewhere.
    Lifetime: pools and arena outlive the engine.
    Handles are small integers, used once: after `query` gave a result the handle is gone.
    """

    @property
    def streams(self) -> bool:
        """Whether the device has streams, so that every copy needs the point of one behind which it may start."""
        return False

    @abstractmethod
    def register(self, layout: Layout, pools: Pools, arena: HostArena) -> None:
        """Fix what pages and slots are. Raises LayoutError where page bytes and block bytes do not add up."""

    @abstractmethod
    def submit(self, copies: Copies, direction: Direction, after: object) -> int:
        """Start one set of copies after the event `after` (None on a device without streams).

        Never blocks on the copies. `copies` must not be changed before the handle has ended.
        """

    def submit_layers(self, copies: Copies, after: object, layers: Sequence[int]) -> int:
        """A load whose layers can be waited for one by one, where the engine can do that; otherwise as `submit`.

        layers: the layer of each region of the group that the copies are of."""
        return self.submit(copies, Direction.TO_DEVICE, after)

    def wait_layer(self, handle: int, layer: int, stream: int, timeout: float) -> bool:
        """On a device with streams: later work of `stream` waits until the layer is loaded, the calling thread does
        not. Without streams: as `wait`. A failed copy is told by `query` alone."""
        return self.wait(handle, timeout)

    @abstractmethod
    def query(self, handle: int) -> StatusArray | None:
        """The outcome, or None while it runs."""

    @abstractmethod
    def wait(self, handle: int, timeout: float) -> bool:
        """Block until the handle has an outcome (it stays to be queried); False after `timeout` seconds."""

    @abstractmethod
    def close(self) -> None:
        """End all copies and release threads. Idempotent."""
