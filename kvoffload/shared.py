"""Host memory and the disk tier of ranks with equal bytes, each rank a process of its own on one machine.

The first rank of a set owns the disk directory: it alone writes, the others read beside it. It makes a folder with the
memory, which appears under its name when all is in place; the others wait for that, and who comes last removes it: the
memory lives as long as somebody has it mapped. What a process left that was killed before that goes with the next
start: every member holds a shared lock on the folder.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from kvoffload.arena import HostArena
from kvoffload.errors import ConfigError, TierError
from kvoffload.layout import Layout
from kvoffload.sizing import Slabs
from kvoffload.tiers import files
from kvoffload.tiers.base import Tier
from kvoffload.tiers.disk import DiskTier
from kvoffload.tiers.disk_reader import DiskReader
from kvoffload.tiers.lent import LentTier

FOLDER = Path("/dev/shm")
PREFIX = "kvoffload-"
WAIT_SECONDS = 0.01
"""Between two looks whether the first rank is ready."""


@dataclass(frozen=True, slots=True)
class Member:
    """One of `count` processes that share. name: of this set and this run of the engine, the same for all of them and
    never used again, of letters, digits, - and _. index 0 owns."""

    name: str
    index: int
    count: int

    def __post_init__(self) -> None:
        if (
            not self.name
            or not self.name.replace("-", "").replace("_", "").isalnum()
            or not self.name.isascii()
        ):
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
    rank % count is the member's index and every group has `count` replicas. Close it after the mover, the first
    member's last.

    Thread: one. Lifetime: arena and tier are good until `close`."""

    def __init__(
        self,
        member: Member,
        layout: Layout,
        slabs: Slabs,
        disk: DiskPlace | None = None,
        *,
        folder: Path = FOLDER,
        timeout: float = 60.0,
    ) -> None:
        """slabs: the same for all members. folder: on a file system in memory. Blocks until the first member is ready.

        Raises ConfigError for sizes that do not fit, TierError where the disk tier cannot be used or the first member
        is not ready after `timeout` seconds."""
        self._arena: HostArena | None = None
        self.tier: Tier | None = None
        self._owned: Tier | None = None
        self._lock: int | None = None
        path = folder / (PREFIX + member.name)
        count = slabs.host + slabs.transit * (member.count if disk is not None else 1)
        try:
            if member.index == 0:
                _sweep(folder)
                if disk is not None:
                    self._owned = DiskTier(
                        disk.directory,
                        layout,
                        slabs.slab_bytes,
                        slabs.disk,
                        disk.namespace,
                        checksum=disk.checksum,
                    )
                    self.tier = LentTier(self._owned, writer=True)
                self._lock = _make(path, slabs.slab_bytes * count)
            else:
                self._lock = _join(path, member, timeout)
                if disk is not None:
                    self._owned = self.tier = DiskReader(disk.directory, layout, slabs.slab_bytes, slabs.disk)
            self._arena = HostArena(slabs.slab_bytes, count, layout, path / "memory")
            _arrive(path, member)
        except BaseException:
            made = member.index == 0 and self._lock is not None
            self.close()
            if made:
                shutil.rmtree(path, ignore_errors=True)
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
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


def _locked(path: Path) -> int:
    """A shared lock on a folder, until the descriptor is closed."""
    held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(held, fcntl.LOCK_SH)
    return held


def _make(path: Path, nbytes: int) -> int:
    """The folder with memory for all, backed now: a full file system is an error here and not a signal later."""
    if path.exists():
        raise ConfigError(f"{path} is in use by another engine: give each set of ranks a name of its own")
    new = path.with_name(f".{path.name}.{os.getpid()}")
    files.make_private_directory(new)
    held = _locked(new)
    try:
        memory = files.open_private(new / "memory")
        try:
            files.reserve(memory, new / "memory", nbytes)
        finally:
            os.close(memory)
        new.rename(path)
    except BaseException as error:
        os.close(held)
        shutil.rmtree(new, ignore_errors=True)
        if isinstance(error, TierError):
            raise ConfigError(
                f"shared host memory: {error}; lower host_bytes or enlarge {path.parent}"
            ) from error
        raise
    return held


def _join(path: Path, member: Member, timeout: float) -> int:
    end = time.monotonic() + timeout
    while True:
        try:
            return _locked(path)
        except FileNotFoundError:
            if time.monotonic() > end:
                raise TierError(
                    f"{path}: the first of {member.count} ranks that share host memory was not ready in {timeout:g} s;"
                    " its log says why"
                ) from None
        time.sleep(WAIT_SECONDS)


def _arrive(path: Path, member: Member) -> None:
    """Say that this member has mapped the memory; with the last one the folder goes."""
    os.close(files.open_private(path / str(member.index)))
    if all((path / str(i)).exists() for i in range(member.count)):
        shutil.rmtree(path, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """Remove what nobody holds any more."""
    for path in [*folder.glob(PREFIX + "*"), *folder.glob("." + PREFIX + "*")]:
        try:
            held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            continue
        finally:
            os.close(held)
