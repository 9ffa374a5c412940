"""The index: which key lies in which slot, and in which order slots are given up.

The rules are in csrc/index.h (store, load, room), csrc/order.h (segments) and csrc/match.h (boundaries). This
module names the arrays that the native classes hand out. Tiers: 0 = host, 1 = disk.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag

import numpy as np

from kvoffload._C import Index, Matcher

__all__ = ["CHANGE_DTYPE", "ENTRY_DTYPE", "ChangeKind", "Code", "EntryFlag", "Index", "IndexTier", "Matcher"]


class IndexTier(IntEnum):
    """The tiers the index knows."""

    HOST = 0
    DISK = 1


class Code(IntFlag):
    """What a block is, as Matcher.codes and CHANGE_DTYPE's `code` tell it."""

    HOST = 1
    DISK = 2
    PENDING = 4
    LOADING = 8


class ChangeKind(IntEnum):
    """`kind` of a change: MARKED changes only whether the block is pending or loading."""

    STORED = 0
    REMOVED = 1
    MARKED = 2


class EntryFlag(IntFlag):
    """`flags` of ENTRY_DTYPE."""

    HOST_VALID = 1
    HOST_BUSY = 2
    DISK_VALID = 4
    DISK_BUSY = 8
    PENDING = 16
    LOADING = 32
    WANT_DISK = 64
    DOOMED = 128


CHANGE_DTYPE = np.dtype(
    [
        ("key", "u1", (16,)),
        ("seq", "<u8"),
        ("depth", "<i4"),
        ("group", "u1"),
        ("kind", "u1"),
        ("tier", "u1"),
        ("code", "u1"),
    ]
)
"""One change of what is visible or pending; `tier` is that of STORED and REMOVED, `code` the block's afterwards."""

ENTRY_DTYPE = np.dtype(
    [
        ("key", "u1", (16,)),
        ("order", "<u8"),
        ("host", "<i4"),
        ("disk", "<i4"),
        ("segment", "<u4"),
        ("depth", "<u4"),
        ("group", "<u2"),
        ("pins", "<u2"),
        ("flags", "<u2"),
        ("reserved", "<u2"),
    ]
)
"""One entry, as Index.entries hands them out: segments from the least recent one, each from its end."""
