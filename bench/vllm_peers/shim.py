"""Let vLLM's own offloaders run on a CPU engine, in its process: streams and events that do nothing, copies by memmove.

As shipped they refuse a CPU. Their scheduling, bookkeeping and files are theirs; only what touches a device is
replaced, so function, hits and bytes can be compared. How long their copies take means nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

STREAM_ORDER = 1
"""In a batch copy: the source is read in the order of the stream, which means a store."""


@dataclass(slots=True)
class Copied:
    """Bytes since start, and CPU time that the engine's thread itself spent copying."""

    stored: int = 0
    loaded: int = 0
    ns: int = 0


COPIED = Copied()


def _move(sources: Any, targets: Any, sizes: Any, *, store: bool) -> None:
    begun = time.thread_time_ns()
    for source, target, size in zip(sources, targets, sizes, strict=True):
        ctypes.memmove(target, source, size)
    if store:
        COPIED.stored += sum(sizes)
    else:
        COPIED.loaded += sum(sizes)
    if threading.current_thread() is threading.main_thread():
        COPIED.ns += time.thread_time_ns() - begun


class Event:
    """Has happened as soon as it is recorded: copies are done when their call returns."""

    def __init__(self, enable_timing: bool = False) -> None:
        del enable_timing

    def record(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


class Stream:
    """No order but that of the calls."""

    cuda_stream = 0

    def __init__(self, priority: int = 0) -> None:
        del priority

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0

    def wait_stream(self, other: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...


@contextlib.contextmanager
def _stream(stream: Any) -> Iterator[None]:
    yield


class DeviceTensor(torch.Tensor):
    """Host memory that says that it is a device's."""

    is_cuda = True


class _Torch:
    """torch, with the streams and events above."""

    Event = Event
    cuda = SimpleNamespace(Stream=Stream, current_stream=Stream)

    def __getattr__(self, name: str) -> Any:
        return torch.__dict__[name]


def _swap(sources: Any, targets: Any, sizes: Any, is_src_access_order_any: bool = False) -> None:
    _move(sources.tolist(), targets.tolist(), sizes.tolist(), store=not is_src_access_order_any)


def _batch(targets: int, sources: int, sizes: int, count: int, attributes: int, *rest: Any) -> int:
    rows = [list((ctypes.c_uint64 * count).from_address(at)) for at in (sources, targets, sizes)]
    _move(*rows, store=ctypes.c_uint.from_address(attributes).value == STREAM_ORDER)
    return 0


def _worker_of(spec: Any, caches: Any) -> Any:
    """CPUOffloadingSpec.get_worker without its question about the platform."""
    if spec._worker is None:
        caches.tensors = [replace(t, tensor=t.tensor.as_subclass(DeviceTensor)) for t in caches.tensors]
        spec._worker = spec.create_worker(caches)
    return spec._worker


def install() -> None:
    """Replace what needs a device, for this process. Call before the first engine."""
    from vllm.v1.kv_offload.cpu import gpu_worker
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
    from vllm.v1.simple_kv_offload import copy_backend, cuda_mem_ops, disk_backend, worker

    platform = SimpleNamespace(
        Stream=Stream,
        current_stream=Stream,
        stream=_stream,
        set_device=lambda device: None,
        is_xpu=lambda: False,
        is_rocm=lambda: False,
    )
    replaced = _Torch()
    for module in (gpu_worker, copy_backend, disk_backend, worker):
        module.torch = replaced
        module.current_platform = platform
    cuda_mem_ops.current_platform = platform
    gpu_worker.ops = SimpleNamespace(swap_blocks_batch=_swap)
    cuda_mem_ops._batch_memcpy = (_batch, 1)
    disk_backend.pin_tensor = lambda tensor: None
    CPUOffloadingSpec.get_worker = _worker_of
