"""The tiers of one rank: its own, or those that it shares with the ranks whose bytes are the same."""

from __future__ import annotations

from kvoffload.arena import HostArena
from kvoffload.keys import Namespace
from kvoffload.layout import Layout
from kvoffload.shared import DiskPlace, Member, SharedTiers
from kvoffload.sizing import size_slabs
from kvoffload.tiers.base import Tier
from kvoffload.tiers.disk import DiskTier, rank_directory

from .settings import Settings


class RankTiers:
    """What a rank's Mover is made of. slabs: sizes. arena, memory: of shared host memory and its token, None and ""
    where the mover makes its own. tier: the disk, None without one; the mover closes it. Close this after the mover."""

    def __init__(self, settings: Settings, rank: int, layout: Layout, name: Namespace) -> None:
        """Raises ConfigError or TierError where it does not fit. Blocks until the first of the ranks that share is
        ready."""
        config, copies = settings.config.resolve(), settings.copies
        assert config.host_bytes is not None
        host, disk = config.host_bytes // settings.sets, config.disk_bytes // settings.sets
        self.slabs = size_slabs(layout, host, disk, copies)
        self.arena: HostArena | None = None
        self.tier: Tier | None = None
        self.memory = ""
        self._shared: SharedTiers | None = None
        place = None
        if config.disk_path is not None:
            first = rank - rank % copies
            path = rank_directory(config.disk_path, name.digest, settings.instance, first)
            place = DiskPlace(path, name.digest, config.checksum)
        if copies > 1:
            member = Member(f"{settings.run}-{settings.instance}-{rank // copies}", rank % copies, copies)
            shared = self._shared = SharedTiers(member, layout, self.slabs, place)
            self.arena, self.tier, self.memory = shared.arena, shared.tier, shared.token
        elif place is not None:
            sizes = self.slabs.slab_bytes, self.slabs.disk
            self.tier = DiskTier(place.directory, layout, *sizes, place.namespace, checksum=place.checksum)

    def close(self) -> None:
        """Give the shared ones back. Idempotent."""
        if self._shared is not None:
            self._shared.close()
