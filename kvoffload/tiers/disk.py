"""The disk tier: one slot file, one table of records, overwritten in place (docs/block-format.md)."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvoffload import _C
from kvoffload.arena import HostArena
from kvoffload.errors import ConfigError, LayoutError, TierError
from kvoffload.layout import MAX_SLABS, SLOT_ALIGN, Layout
from kvoffload.messages import RECORD_DTYPE, Copies, StatusArray
from kvoffload.tiers import files
from kvoffload.tiers.base import Tier
from kvoffload.tiers.table import (
    RECORD_BYTES,
    Manifest,
    adopt,
    bumped,
    load_manifest,
    new_manifest,
    save_manifest,
)

THREADS = 4
"""Of each direction. Four outstanding requests reach what a local drive gives at 256 KiB and more."""

ERROR_LIMIT = 3
"""Slots that fail one after the other before the tier is not healthy."""

_MAX_GROUPS = 1 << 16
_MAX_BLOCK_BYTES = (1 << 32) - 1


def rank_directory(disk_path: Path, namespace: bytes, dp: int, rank: int) -> Path:
    """Where one rank of one data-parallel engine keeps its blocks."""
    return disk_path / namespace.hex() / f"dp{dp}" / f"rank{rank}"


class DiskTier(Tier):
    """Blocks in the slots of a preallocated file.

    One process owns a directory. Every read is verified against key, record and payload checksum. With
    `checksum=False` payloads are trusted, so nothing that an earlier process wrote is.
    """

    def __init__(
        self,
        directory: Path,
        layout: Layout,
        slab_bytes: int,
        slabs: int,
        namespace: bytes,
        *,
        checksum: bool = True,
        direct: bool = True,
    ) -> None:
        """Open or create. Raises TierError where the directory is in use, cannot be written or lacks room.

        direct: use O_DIRECT if the file system has it.
        """
        _check_sizes(layout, slab_bytes, slabs)
        self.directory = directory
        self._slabs = slabs
        self._files: list[int] = []
        self._io: _C.DiskIO
        self._manifest: Manifest
        self._records: NDArray[np.void]
        wanted = new_manifest(namespace, layout, slab_bytes, slabs, checksum)
        try:
            self._open(wanted, direct)
        except BaseException as error:
            self._close_files()
            if isinstance(error, OSError) and not isinstance(error, TierError):
                raise TierError(f"{directory}: cannot open the disk tier: {error}") from error
            raise

    @property
    def slabs(self) -> int:
        return self._slabs

    @property
    def direct(self) -> bool:
        """True where payloads bypass the page cache."""
        return self._direct

    @property
    def healthy(self) -> bool:
        return self._io.healthy

    def probe(self) -> bool:
        return self._io.probe()

    def records(self) -> NDArray[np.void]:
        return self._records

    def read(self, copies: Copies, arena: HostArena) -> StatusArray:
        return self._io.read(copies, arena.base, arena.space)

    def write(self, copies: Copies, arena: HostArena) -> StatusArray:
        return self._io.write(copies, arena.base, arena.space)

    def counters(self) -> dict[str, int]:
        """Blocks and bytes moved, mismatches, I/O errors; none ever goes down. last_errno is the latest."""
        return self._io.counters()

    def reset(self) -> None:
        """Durable when it returns. Raises TierError where that failed; this process has forgotten."""
        self._manifest = bumped(self._manifest)
        self._io.reset(self._manifest.epoch)
        self._records = np.empty(0, RECORD_DTYPE)
        try:
            save_manifest(self.directory, self._manifest)
        except OSError as error:
            raise TierError(f"{self.directory}: the reset will not outlive this process: {error}") from error

    def close(self) -> None:
        if self._files:
            self._io.close()
        self._close_files()

    def _open(self, wanted: Manifest, direct: bool) -> None:
        files.make_private_directory(self.directory)
        self._keep(files.lock_directory(self.directory))
        there = load_manifest(self.directory)
        self._manifest = adopt(there, wanted, self.directory) or wanted
        slots_path, table_path = self.directory / "slots", self.directory / "table"
        slots, table = self._keep(files.open_private(slots_path)), self._keep(files.open_private(table_path))
        slots_bytes = wanted.slabs * wanted.slab_bytes + SLOT_ALIGN
        slots_before = files.reserve(slots, slots_path, slots_bytes)
        files.reserve(table, table_path, (wanted.slabs * wanted.records_per_slab + 1) * RECORD_BYTES)
        fast = files.open_direct(slots_path) if direct else None
        self._direct = fast is not None
        if fast is not None:
            slots = self._keep(fast)
        if self._manifest != there:  # a full drive has no room for a new one, and need not
            save_manifest(self.directory, self._manifest)
        self._io = _C.DiskIO(
            slots,
            table,
            _C.SlotSpace(wanted.slab_bytes, wanted.slabs, [slot for _, slot in wanted.groups]),
            [block for block, _ in wanted.groups],
            self._manifest.epoch,
            wanted.checksum,
            THREADS,
            ERROR_LIMIT,
        )
        self._records = self._io.scan(slots_before)

    def _keep(self, file: int) -> int:
        self._files.append(file)
        return file

    def _close_files(self) -> None:
        """The lock goes last: it was opened first. Closing alone would leave it with a forked child."""
        while self._files:
            file = self._files.pop()
            if not self._files:
                fcntl.flock(file, fcntl.LOCK_UN)
            os.close(file)


def _check_sizes(layout: Layout, slab_bytes: int, slabs: int) -> None:
    if slab_bytes < SLOT_ALIGN or slab_bytes % SLOT_ALIGN:
        raise ConfigError(f"a slab of {slab_bytes} bytes: it must be a positive multiple of {SLOT_ALIGN}")
    if not 0 < slabs <= MAX_SLABS:
        raise ConfigError(f"{slabs} disk slabs of {slab_bytes} bytes: between 1 and {MAX_SLABS} are possible")
    if len(layout.groups) > _MAX_GROUPS:
        raise LayoutError(f"{len(layout.groups)} groups; the disk format has room for {_MAX_GROUPS}")
    for group in layout.groups:
        if group.block_bytes > _MAX_BLOCK_BYTES:
            raise LayoutError(
                f"group {group.id}: block_bytes {group.block_bytes} is above {_MAX_BLOCK_BYTES}"
            )
