"""The copy suite over the CPU engine, with one and two threads and through the wrappers."""

from __future__ import annotations

import mmap

import numpy as np

from kvoffload.copying import CpuCopyEngine
from kvoffload.testing.copy_suite import CopySuite
from kvoffload.testing.faults import Counting, Failing, FaultyEngine, Gated, Slow


class CpuMemory:
    """Sparse private memory: only touched pages are backed."""

    def __init__(self, nbytes):
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._bytes = np.frombuffer(mapping, np.uint8)
        self.base = int(self._bytes.ctypes.data)

    def put(self, offset, data):
        self._bytes[offset : offset + len(data)] = np.frombuffer(data, np.uint8)

    def get(self, offset, nbytes):
        return self._bytes[offset : offset + nbytes].tobytes()


class TestCpu(CopySuite):
    threads = 2

    def make_engine(self):
        return CpuCopyEngine(self.threads)

    def make_memory(self, nbytes):
        return CpuMemory(nbytes)


class TestCpuOneThread(TestCpu):
    threads = 1


class TestCpuManyThreads(TestCpu):
    threads = 5


class TestCpuThroughWrappers(TestCpu):
    def make_engine(self):
        gate = Gated()
        gate.release()
        return FaultyEngine(FaultyEngine(super().make_engine(), Slow(0.0), gate), Counting(), Failing())
