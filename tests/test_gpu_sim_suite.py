"""The copy suite over the device copier on the simulated runtime, in every mode."""

from __future__ import annotations

import pytest
from gpu_world import SMALL, EventedEngine, SparseMemory

from kvoffload import native
from kvoffload.copying.gpu import DeviceOptions, GpuCopyEngine
from kvoffload.testing.copy_suite import CopySuite


class TestStaged(CopySuite):
    mode = "staged"
    options = SMALL

    def make_engine(self):
        module = native.simulation()
        return EventedEngine(GpuCopyEngine(module, 0, self.mode, self.options), module)

    def make_memory(self, nbytes):
        return SparseMemory(nbytes)


class TestDma(TestStaged):
    mode = "dma"


class TestDmaSmallBatches(TestStaged):
    mode = "dma"
    options = DeviceOptions(chunk=256 << 10, store_staging=8 << 20, load_staging=1 << 20, batch_limit=3)


class TestKernel(TestStaged):
    mode = "kernel"


class TestNothingPinned(TestStaged):
    """Memory that cannot be page-locked is copied all the same."""

    @pytest.fixture(autouse=True)
    def _no_pins(self):
        module = native.simulation()
        module.plant("register_call", 1)
        yield
        module.clear_plants()
