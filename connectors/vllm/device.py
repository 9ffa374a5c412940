"""The device that vLLM's pages are on: its copy engine, and points of its streams."""

from __future__ import annotations

from typing import Any

from kvoffload.copying.base import CopyEngine
from kvoffload.copying.cpu import CpuCopyEngine
from kvoffload.errors import ConfigError


class CpuDevice:
    """Pages that the CPU addresses: no streams, and copies are waited for."""

    streams = False

    def copier(self, mode: str) -> CopyEngine:
        return CpuCopyEngine()

    def point(self) -> object:
        """Nothing: there is no order but that of calls."""
        return None

    def stream(self) -> int:
        """None."""
        return 0


class StreamDevice:
    """A CUDA or HIP device. Thread: the worker's, whose current stream runs the forward."""

    streams = True

    def __init__(self, device: Any) -> None:
        import torch

        self._index = device.index if device.index is not None else torch.cuda.current_device()
        self._events: list[Any] = []
        self._next = 0

    def copier(self, mode: str) -> CopyEngine:
        from kvoffload.copying.gpu import GpuCopyEngine

        return GpuCopyEngine(device=self._index, mode=mode)

    def point(self) -> object:
        """Behind all that the current stream has been given. A point stays good when its event is recorded anew on the
        same stream: that is later, never earlier. So two events serve all steps."""
        import torch

        from kvoffload.copying.gpu import StreamPoint

        stream = torch.cuda.current_stream(self._index)
        if len(self._events) < 2:
            self._events.append(torch.cuda.Event())
        event = self._events[self._next % len(self._events)]
        self._next += 1
        event.record(stream)
        return StreamPoint(event.cuda_event, stream.cuda_stream)

    def stream(self) -> int:
        """The stream that runs the forward on the calling thread."""
        import torch

        return int(torch.cuda.current_stream(self._index).cuda_stream)


def device_of(device: Any) -> CpuDevice | StreamDevice:
    """device: torch's. Raises ConfigError for a kind that has no copy engine."""
    if device.type == "cpu":
        return CpuDevice()
    if device.type == "cuda":  # what torch calls HIP devices too
        return StreamDevice(device)
    raise ConfigError(
        f"pages on a device of type {device.type!r}; kvoffload copies from cpu, cuda and hip devices"
    )
