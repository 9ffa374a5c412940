"""The copy suite over torch on the CPU; where torch is not installed that is said."""

from __future__ import annotations

import pytest
from gpu_world import SparseMemory

from kvoffload.testing.copy_suite import CopySuite

copying = pytest.importorskip(
    "kvoffload.copying.torch", reason="torch is not installed", exc_type=ImportError
)


class TestTorch(CopySuite):
    def make_engine(self):
        return copying.TorchCopyEngine()

    def make_memory(self, nbytes):
        return SparseMemory(nbytes)
