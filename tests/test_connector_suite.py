"""The connector suite over Planner and Mover: one rank, two ranks, with disk, without generated blocks."""

from __future__ import annotations

from kvoffload.config import Config
from kvoffload.copying.cpu import CpuCopyEngine
from kvoffload.mover import Mover
from kvoffload.planner import Planner
from kvoffload.scheduler_side import PlannerConnector
from kvoffload.sizing import Slabs
from kvoffload.testing.connector_suite import ConnectorSuite
from kvoffload.tiers.memory import MemoryTier
from kvoffload.worker_side import MoverConnector


class TestOneRank(ConnectorSuite):
    config = Config()
    slabs = Slabs(8 * 8192, 8, 1, 0)

    def make(self, layout, memories):
        planner = Planner(layout, self.config, ranks=len(memories))
        scheduler, workers = PlannerConnector(planner), []
        for memory in memories:
            tier = MemoryTier(layout, self.slabs.slab_bytes, self.slabs.disk) if self.slabs.disk else None
            mover = Mover(memory.rank, layout, self.slabs, CpuCopyEngine(), tier)
            workers.append(MoverConnector(mover))
            scheduler.attach(memory.rank, workers[-1].register(memory.pools))
        return scheduler, workers


class TestTwoRanks(TestOneRank):
    ranks = 2


class TestThroughDisk(TestOneRank):
    """Host holds 16 blocks, a lower tier the rest."""

    slabs = Slabs(8 * 8192, 2, 1, 8)


class TestPromptsOnly(TestOneRank):
    stores_generated = False
    config = Config(store_generated=False)
