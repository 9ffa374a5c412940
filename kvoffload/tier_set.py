"""What a planner has once every rank has attached: the index, and what works on it."""

from __future__ import annotations

from dataclasses import dataclass

from kvoffload.config import Config
from kvoffload.index import Index
from kvoffload.inflight import InFlight
from kvoffload.layout import Layout
from kvoffload.loads import Loads
from kvoffload.messages import Geometry
from kvoffload.stats import Counters
from kvoffload.stores import Stores, WriteBudget
from kvoffload.tails import Tails

_TRANSIENT = 3
"""The kind under which the index knows a transient group."""


@dataclass(frozen=True, slots=True)
class ExactSlots:
    """Slot counts instead of bytes, for replays of one group: the last slab of a tier is cut short. -1 = all."""

    host: int = -1
    transit: int = -1
    disk: int = -1


@dataclass(frozen=True, slots=True)
class TierSet:
    """What exists once every rank has attached."""

    index: Index
    stores: Stores
    loads: Loads
    tails: Tails


@dataclass(frozen=True, slots=True)
class Shared:
    """What loads, stores and the planner keep together. ranks: by which bytes of one rank are to be multiplied."""

    inflight: InFlight
    counters: Counters
    ranks: int


def open_tiers(
    layout: Layout, config: Config, geometry: Geometry, exact: ExactSlots, shared: Shared
) -> TierSet:
    """An empty index of the size that all ranks agreed on."""
    index = Index(
        [
            (_TRANSIENT if g.transient else int(g.kind), m, g.lookback)
            for g, m in zip(layout.groups, layout.multiples, strict=True)
        ],
        layout.base_tokens,
        [0 if g.transient else n for g, n in zip(layout.groups, geometry.slots_per_slab, strict=True)],
        geometry.host_slabs,
        geometry.transit_slabs,
        geometry.disk_slabs,
        host_slots=exact.host,
        transit_slots=exact.transit,
        disk_slots=exact.disk,
        host_policy=config.host_policy,
        disk_policy=config.disk_policy,
        disk_admission=config.disk_admission,
    )
    inflight, counters, ranks = shared.inflight, shared.counters, shared.ranks
    tails = Tails(layout, index, counters, config.retention)
    stores = Stores(layout, index, inflight, counters, WriteBudget(config.disk_write_budget), ranks, tails)
    return TierSet(index, stores, Loads(layout, index, inflight, counters, ranks), tails)
