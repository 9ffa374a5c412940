"""The tier suite over every tier and through the wrappers."""

from __future__ import annotations

import os
from typing import ClassVar

import pytest

from kvoffload.testing.faults import Counting, Failing, FaultyTier, Gated, Slow
from kvoffload.testing.tier_suite import SLAB_BYTES, TIER_SLABS, TierSuite
from kvoffload.tiers import DiskTier, MemoryTier


class TestMemory(TierSuite):
    def make_tier(self, folder, layout):
        return MemoryTier(layout, SLAB_BYTES, TIER_SLABS)

    def poke(self, tier, group, slot):
        del tier._blocks[group, slot]


class TestDirect(TierSuite):
    keeps = True
    direct: ClassVar[bool] = True

    def make_tier(self, folder, layout):
        tier = DiskTier(folder / "rank", layout, SLAB_BYTES, TIER_SLABS, b"n" * 16, direct=self.direct)
        if self.direct and not tier.direct:
            tier.close()
            pytest.skip("no O_DIRECT here")
        return tier

    def poke(self, tier, group, slot):
        size = -(-(1, 2, 80, 576, 656, 1152, 4095, 4096, 4097, 65537)[group] // 4096) * 4096
        offset = (slot >> 16) * SLAB_BYTES + (slot & 0xFFFF) * size
        with (tier.directory / "slots").open("r+b") as file:
            byte = os.pread(file.fileno(), 1, offset)[0]
            os.pwrite(file.fileno(), bytes([byte ^ 4]), offset)
            os.fsync(file.fileno())


class TestBuffered(TestDirect):
    direct = False


class TestThroughWrappers(TestDirect):
    def make_tier(self, folder, layout):
        gate = Gated()
        gate.release()
        inner = super().make_tier(folder, layout)
        return FaultyTier(FaultyTier(inner, Counting(), Slow(0.0)), Failing(), gate)

    def poke(self, tier, group, slot):
        super().poke(tier._inner._inner, group, slot)


class TestMemoryThroughWrappers(TestMemory):
    def make_tier(self, folder, layout):
        return FaultyTier(super().make_tier(folder, layout), Counting(), Failing())

    def poke(self, tier, group, slot):
        super().poke(tier._inner, group, slot)
