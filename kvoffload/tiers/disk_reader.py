"""The disk tier of another process, read beside it: of ranks with equal bytes one writes to their directory."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvoffload import _C
from kvoffload.arena import HostArena
from kvoffload.errors import TierError
from kvoffload.layout import Layout
from kvoffload.messages import RECORD_DTYPE, Copies, Status, StatusArray
from kvoffload.tiers import files
from kvoffload.tiers.base import Tier
from kvoffload.tiers.disk import ERROR_LIMIT, THREADS
from kvoffload.tiers.table import RECORD_BYTES, Manifest, load_manifest


class DiskReader(Tier):
    """Reads what the owner's DiskTier writes: every read takes the record from the file and verifies it, as the owner's
    do. Writes nothing and holds no lock.

    A reset is the owner's. Its epoch is in the manifest before its next write, so a reader that was told of a reset
    looks there before each read until the epoch has changed; meanwhile what it reads is of before, and verified.
    """

    def __init__(
        self, directory: Path, layout: Layout, slab_bytes: int, slabs: int, *, direct: bool = True
    ) -> None:
        """REQUIRES: the owner has opened its tier. Raises TierError where there is none of these sizes."""
        self.directory = directory
        self._slabs = slabs
        self._stale = False
        self._files: list[int] = []
        groups = tuple((g.block_bytes, g.slot_bytes) for g in layout.groups)
        try:
            self._manifest = self._found()
            _check_sizes(directory, self._manifest, (slab_bytes, slabs, groups))
            flags = os.O_RDONLY | os.O_CLOEXEC
            slots = self._keep(os.open(directory / "slots", flags))
            self._table = self._keep(os.open(directory / "table", flags))
            fast = files.open_direct(directory / "slots") if direct else None
            self._slots = slots if fast is None else self._keep(fast)
            self._io = self._made()
            self._records = self._io.scan(os.fstat(slots).st_size)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError) and not isinstance(error, TierError):
                raise TierError(f"{directory}: cannot read the disk tier of its owner: {error}") from error
            raise

    @property
    def slabs(self) -> int:
        return self._slabs

    @property
    def healthy(self) -> bool:
        return self._io.healthy

    def probe(self) -> bool:
        """Reads the table's first record; then reads count anew."""
        try:
            good = len(os.pread(self._table, RECORD_BYTES, 0)) == RECORD_BYTES
        except OSError:
            return False
        if good:
            self._io = self._made()
        return good

    def records(self) -> NDArray[np.void]:
        return self._records

    def read(self, copies: Copies, arena: HostArena) -> StatusArray:
        if self._stale:
            self._refresh()
        return self._io.read(copies, arena.base, arena.space)

    def write(self, copies: Copies, arena: HostArena) -> StatusArray:
        return np.full(len(copies), Status.COPY_FAILED, np.uint8)

    def reset(self) -> None:
        self._records = np.empty(0, RECORD_DTYPE)
        self._stale = True

    def close(self) -> None:
        while self._files:
            os.close(self._files.pop())

    def _refresh(self) -> None:
        try:
            found = self._found()
        except (OSError, TierError):
            return
        if found.epoch != self._manifest.epoch:
            self._manifest, self._stale = found, False
            self._io.reset(found.epoch)

    def _found(self) -> Manifest:
        found = load_manifest(self.directory)
        if found is None:
            raise TierError(f"{self.directory} has no disk tier: its owner opens it first")
        return found

    def _made(self) -> _C.DiskIO:
        m = self._manifest
        return _C.DiskIO(
            self._slots,
            self._table,
            _C.SlotSpace(m.slab_bytes, m.slabs, [slot for _, slot in m.groups]),
            [block for block, _ in m.groups],
            m.epoch,
            m.checksum,
            THREADS,
            ERROR_LIMIT,
        )

    def _keep(self, file: int) -> int:
        self._files.append(file)
        return file


def _check_sizes(directory: Path, manifest: Manifest, mine: tuple[object, ...]) -> None:
    found = (manifest.slab_bytes, manifest.slabs, manifest.groups)
    if found != mine:
        raise TierError(
            f"{directory} has (slab bytes, slabs, (block, slot) bytes) {found}, this rank {mine}: ranks with equal"
            " bytes need one layout"
        )
