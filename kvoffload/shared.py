"""Host memory and the disk tier of ranks with equal bytes, each rank a process of its own on one machine.

The first rank of a set makes the memory and owns the disk directory: it alone writes, the others read beside it. The
memory lives as long as somebody has it mapped, and has no name once all have (rendezvous.py).
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path

from kvoffload.arena import HostArena, available_host_bytes
from kvoffload.errors import ConfigError
from kvoffload.layout import Layout
from kvoffload.rendezvous import PREFIX, Rendezvous
from kvoffload.sizing import Slabs
from kvoffload.tiers import files
from kvoffload.tiers.base import Tier
from kvoffload.tiers.disk import DiskTier
from kvoffload.tiers.disk_reader import DiskReader
from kvoffload.tiers.lent import LentTier

FOLDER = Path("/dev/shm")
START_SECONDS = 60.0
BACKED_PER_SECOND = 256 << 20
"""Bytes of shared memory that any machine backs in a second."""


@dataclass(frozen=True, slots=True)
class Member:
    """One of `count` processes that share. name: of this set and this run of the engine, the same for all of them and
    never used again, of letters, digits, - and _. index 0 owns."""

    name: str
    index: int
    count: int

    def __post_init__(self) -> None:
        bare = self.name.replace("-", "").replace("_", "")
        if not (bare.isalnum() and bare.isascii()):
            raise ConfigError(f"shared memory called {self.name!r}: give letters, digits, - and _")
        if not 0 <= self.index < self.count:
            raise ConfigError(f"member {self.index} of {self.count}: members count from 0")


@dataclass(frozen=True, slots=True)
class DiskPlace:
    """Where the set keeps its blocks: rank_directory of its first rank."""

    directory: Path
    namespace: bytes
    checksum: bool = True


class SharedTiers:
    """What one member gives its Mover: `Mover(rank, layout, slabs, copier, shared.tier, arena=shared.arena)`, where
    rank % count is the member's index and every group has `count` replicas. Close it after the mover.

    token: of this memory and no other; whoever gets plans for several members checks that theirs is the same.
    Thread: one. Lifetime: arena and tier are good until `close`."""

    def __init__(
        self,
        member: Member,
        layout: Layout,
        slabs: Slabs,
        disk: DiskPlace | None = None,
        *,
        folder: Path = FOLDER,
        timeout: float | None = None,
    ) -> None:
        """slabs: the same for all members. folder: on a file system in memory. timeout: seconds for the first member to
        be ready; None = START_SECONDS and what backing the memory takes. Blocks until then.

        Raises ConfigError for sizes that do not fit, TierError where the disk tier cannot be used or the first member
        is not ready in time."""
        unlike = [g.id for g in layout.groups if not g.transient and g.replicas != member.count]
        if unlike:
            raise ConfigError(
                f"{member.count} ranks cannot share groups {unlike}, which have other numbers of replicas"
            )
        self._arena: HostArena | None = None
        self._place: Rendezvous | None = None
        self._owned: Tier | None = None
        self.tier: Tier | None = None
        path = folder / (PREFIX + member.name)
        count = slabs.host + slabs.transit * (member.count if disk is not None else 1)
        nbytes = slabs.slab_bytes * count
        try:
            if member.index == 0:
                self._open_disk(layout, slabs, disk)
                self._place = Rendezvous.make(path, lambda new: _reserve(new / "memory", nbytes, folder))
            else:
                wait = START_SECONDS + nbytes / BACKED_PER_SECOND if timeout is None else timeout
                self._place = Rendezvous.join(path, wait)
                self._read_disk(layout, slabs, disk)
            self._arena = HostArena(slabs.slab_bytes, count, layout, self._place.inside("memory"))
            self.token = self._place.token
            self._place.arrive(member.index, member.count)
        except BaseException:
            self.close()
            raise

    @property
    def arena(self) -> HostArena:
        """The memory of all members. Raises ValueError after `close`."""
        if self._arena is None:
            raise ValueError("the shared memory is closed")
        return self._arena

    def close(self) -> None:
        """Release memory and files. Idempotent. REQUIRES: the mover is closed."""
        owned, self._owned = self._owned, None
        if owned is not None:
            owned.close()
        arena, self._arena = self._arena, None
        if arena is not None:
            arena.close()
        place, self._place = self._place, None
        if place is not None:
            place.close()

    def _open_disk(self, layout: Layout, slabs: Slabs, disk: DiskPlace | None) -> None:
        if disk is None:
            return
        self._owned = DiskTier(
            disk.directory, layout, slabs.slab_bytes, slabs.disk, disk.namespace, checksum=disk.checksum
        )
        self.tier = LentTier(self._owned, writer=True)

    def _read_disk(self, layout: Layout, slabs: Slabs, disk: DiskPlace | None) -> None:
        """REQUIRES: the first member is there, since it opens its disk before."""
        if disk is not None:
            self._owned = self.tier = DiskReader(disk.directory, layout, slabs.slab_bytes, slabs.disk)


def _reserve(path: Path, nbytes: int, folder: Path) -> None:
    """A file with every byte backed: a full file system is an error here, and not a signal when it is touched."""
    if nbytes > available_host_bytes():
        raise ConfigError(
            f"{nbytes} bytes of host memory are to be shared and {available_host_bytes()} are available (machine and"
            " cgroup limits counted); lower host_bytes or raise the limit"
        )
    memory = files.open_private(path)
    try:
        os.posix_fallocate(memory, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EFBIG):
            raise
        os.ftruncate(memory, 0)
        room = os.fstatvfs(memory)
        raise ConfigError(
            f"{folder}: {nbytes} bytes of host memory are to be shared and {room.f_bavail * room.f_frsize} are free"
            " there; lower host_bytes or enlarge that file system (a container's: --shm-size)"
        ) from error
    finally:
        os.close(memory)
