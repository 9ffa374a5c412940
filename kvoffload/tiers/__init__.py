"""Tiers below host: disk, and two without a medium."""

from kvoffload.tiers.base import Tier
from kvoffload.tiers.disk import DiskTier, rank_directory
from kvoffload.tiers.memory import MemoryTier, NullTier

__all__ = ["DiskTier", "MemoryTier", "NullTier", "Tier", "rank_directory"]
