"""The device modules: which were built, which can be used here, and why the others cannot."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from kvoffload.messages import Copies, StatusArray

RegionTuple = tuple[int, int, int, int]
"""(base, stride, page bytes, pages)"""


class Copier(Protocol):
    """The native copier: see csrc/gpu_copier.h. Streams and events are handles of the device's runtime."""

    def add_pinned(self, base: int, bytes: int) -> None: ...
    def withdraw_pinned(self) -> None: ...
    def forget_pinned(self) -> None: ...
    def submit(self, copies: Copies, to_device: bool, event: int, stream: int) -> int: ...
    def submit_layers(self, copies: Copies, event: int, layers: Sequence[int]) -> int: ...
    def wait_layer(self, handle: int, layer: int, stream: int) -> None: ...
    def query(self, handle: int) -> StatusArray | None: ...
    def wait(self, handle: int, timeout: float) -> bool: ...
    def close(self) -> None: ...
    def counters(self) -> dict[str, int]: ...
    def message(self) -> str: ...


class CopierClass(Protocol):
    """How a copier is made. modes: by group (store, load). options: the fields of CopierOptions."""

    def __call__(
        self,
        base: int,
        space: tuple[int, int, list[int]],
        pools: list[list[RegionTuple]],
        modes: list[tuple[int, int]],
        **options: int,
    ) -> Copier: ...


class PinModule(Protocol):
    """What page-locking asks of a runtime."""

    def device_info(self, device: int) -> tuple[str, str, int, int]:
        """(name, PCI address, driver version, runtime version)."""

    def host_register(self, base: int, nbytes: int, device: int) -> str:
        """Page-lock host memory: "" or why not."""

    def host_unregister(self, base: int) -> None: ...


class DeviceModule(PinModule, Protocol):
    """One of the modules _cuda, _hip and _sim. Calls that the runtime refuses raise RuntimeError."""

    @property
    def GpuCopier(self) -> CopierClass: ...  # noqa: N802
    def device_count(self) -> tuple[int, str]:
        """(devices, why there are none)."""

    def stream_create(self, low_priority: bool = False) -> int: ...
    def stream_destroy(self, stream: int) -> None: ...
    def stream_wait(self, stream: int, event: int) -> None: ...
    def stream_synchronize(self, stream: int) -> None: ...
    def event_create(self) -> int: ...
    def event_destroy(self, event: int) -> None: ...
    def event_record(self, event: int, stream: int) -> None: ...
    def memory_allocate(self, bytes: int) -> int: ...
    def memory_free(self, address: int) -> None: ...
    def fill(self, address: int, value: int, bytes: int, stream: int) -> None: ...
    def copy(self, to: int, source: int, bytes: int, to_device: bool, stream: int) -> None: ...


class SimModule(DeviceModule, Protocol):
    """The simulated runtime: what it recorded, and faults to plant (csrc/sim_runtime.h)."""

    def operations(self) -> list[tuple[str, int, int, int, int, int, bool, bool]]:
        """(kind, stream, event, bytes, count, thread, blocked, strict source order) in the order of calls."""

    def forget_operations(self) -> None: ...
    def plant(self, name: str, value: int) -> None: ...
    def clear_plants(self) -> None: ...
    def number(self, handle: int) -> int: ...


@dataclass(frozen=True, slots=True)
class Found:
    """A module, or why there is none. devices: how many it can use; `reason` says why not when there are none."""

    name: str
    module: DeviceModule | None
    devices: int
    reason: str


def load(name: str) -> Found:
    """Import one of "_cuda", "_hip", "_sim" and count its devices. Never raises."""
    try:
        module = cast("DeviceModule", importlib.import_module(f"kvoffload.{name}"))
    except ImportError as error:
        return Found(name, None, 0, str(error))
    devices, reason = module.device_count()
    return Found(name, module, devices, reason)


def device_modules() -> tuple[Found, ...]:
    """What `doctor` shows: the real runtimes, in the order in which they are tried."""
    return load("_cuda"), load("_hip")


def device_module() -> Found:
    """The first runtime with a device; without any, a Found with module None and all reasons."""
    tried = device_modules()
    for found in tried:
        if found.devices:
            return found
    return Found("", None, 0, "; ".join(f"{f.name}: {f.reason}" for f in tried))


def simulation() -> SimModule:
    """The simulated runtime. Raises ImportError where it was not built."""
    return cast("SimModule", importlib.import_module("kvoffload._sim"))
