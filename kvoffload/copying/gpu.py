"""The copy engine of CUDA, HIP and simulated devices: DMA and kernels, ordered by streams and events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from kvoffload.arena import HostArena
from kvoffload.copying.base import CopyEngine, Direction
from kvoffload.copying.cpu import check_regions
from kvoffload.copying.modes import CopyMode, Modes, calibrated
from kvoffload.copying.pinned import CHUNK_BYTES, PinnedArena
from kvoffload.errors import ConfigError, LayoutError
from kvoffload.layout import Layout, Pools
from kvoffload.messages import Copies, StatusArray
from kvoffload.native import Copier, DeviceModule, device_module


@dataclass(frozen=True, slots=True)
class StreamPoint:
    """After which point of which of the engine's streams a copy may start; handles of the device's runtime.

    event: recorded behind the producer of a store's pages, or behind the last reader of a load's. Never 0.
    stream: the stream whose later work may overwrite the pages of a store; loads do not look at it.
    """

    event: int
    stream: int


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """Sizes in bytes; 0 = the default of csrc/gpu_copier.h."""

    chunk: int = 0
    store_staging: int = 0
    load_staging: int = 0
    side_blocks: int = 0
    batch_limit: int = 0
    pin_chunk: int = field(default=CHUNK_BYTES)

    def native(self) -> dict[str, int]:
        """What the native copier is told."""
        given: dict[str, int] = asdict(self)
        return {k: v for k, v in given.items() if v and k != "pin_chunk"}


class GpuCopyEngine(CopyEngine):
    """Moves blocks between device pages and host slots; `after` is a StreamPoint and always needed.

    A store's pages are free for the engine's next work on the point's stream as soon as `submit` returns. What does
    not fit the staging buffer of stores ends with NOT_DONE, and can be offered again while its pages live.
    Thread: any.
    """

    def __init__(
        self,
        module: DeviceModule | None = None,
        device: int = 0,
        mode: str = "auto",
        options: DeviceOptions = DeviceOptions(),
    ) -> None:
        """module: None = the first runtime that has a device; ConfigError with the reasons where none has."""
        if module is None:
            found = device_module()
            module = found.module
            if module is None:
                raise ConfigError(f"no device can be used ({found.reason}); use the CPU copy engine")
        self._module = module
        self._device = device
        self._modes = calibrated(module, device) if mode == "auto" else Modes.fixed(CopyMode.of(mode))
        self._options = options
        self._copier: Copier | None = None
        self._pinned: PinnedArena | None = None

    @property
    def streams(self) -> bool:
        return True

    def register(self, layout: Layout, pools: Pools, arena: HostArena) -> None:
        if len(pools) != len(layout.groups):
            raise LayoutError(
                f"{len(pools)} pools for {len(layout.groups)} groups; give one (or ()) per group"
            )
        for group, regions in zip(layout.groups, pools, strict=True):
            check_regions(group, regions)
        self.close()
        space = (arena.slab_bytes, arena.slabs, [g.slot_bytes for g in layout.groups])
        regions_of = [[(r.base, r.stride, r.page_bytes, r.pages) for r in pool] for pool in pools]
        modes = [self._modes.choose(pool) for pool in pools]
        options = {"device": self._device, **self._options.native()}
        try:
            copier = self._module.GpuCopier(arena.base, space, regions_of, modes, **options)
        except ValueError as error:
            raise LayoutError(str(error)) from error
        except RuntimeError as error:
            raise ConfigError(f"device {self._device} cannot be used: {error}") from error
        self._copier = copier
        self._pinned = PinnedArena(
            self._module, self._device, arena, copier, chunk_bytes=self._options.pin_chunk
        )

    def submit(self, copies: Copies, direction: Direction, after: object) -> int:
        point = checked_point(after)
        return self._native().submit(copies, direction is Direction.TO_DEVICE, point.event, point.stream)

    def submit_layers(self, copies: Copies, after: object, layers: Sequence[int]) -> int:
        return self._native().submit_layers(copies, checked_point(after).event, layers)

    def wait_layer(self, handle: int, layer: int, stream: int, timeout: float = 60.0) -> bool:
        """Of a load that did not go layer by layer, `stream` waits for all of it, and the caller until its copies have
        been put into their streams. Where the device refuses a wait the caller waits for the load itself."""
        try:
            self._native().wait_layer(handle, layer, stream)
        except RuntimeError:
            return self.wait(handle, timeout)
        return True

    def query(self, handle: int) -> StatusArray | None:
        return self._native().query(handle)

    def wait(self, handle: int, timeout: float) -> bool:
        return self._native().wait(handle, max(timeout, 0.0))

    def wait_pinned(self, timeout: float) -> bool:
        """Block until the arena is page-locked or that has failed; False after `timeout` seconds."""
        return self._pinned is not None and self._pinned.wait(timeout)

    def stats(self) -> dict[str, int]:
        """Counters of the copier, and the bytes of host memory that are page-locked."""
        return {
            **self._native().counters(),
            "pinned_bytes": 0 if self._pinned is None else self._pinned.pinned_bytes,
        }

    @property
    def message(self) -> str:
        """The last failure or warning of the device, for people; "" if there was none."""
        pinned = "" if self._pinned is None else self._pinned.message
        return "; ".join(filter(None, (pinned, "" if self._copier is None else self._copier.message())))

    def close(self) -> None:
        """Copies that are not on their way end with NOT_DONE; handles may still be queried."""
        if self._copier is not None:
            self._copier.close()
        if self._pinned is not None:
            self._pinned.close()

    def _native(self) -> Copier:
        if self._copier is None:
            raise RuntimeError("register() comes before copies")
        return self._copier


def checked_point(after: object) -> StreamPoint:
    """`after` itself: a device copy without an event to wait for would read or write too early."""
    if not isinstance(after, StreamPoint) or not after.event:
        raise ValueError(
            f"a device copy needs a StreamPoint with the event after which it may start, not {after!r}"
        )
    return after
