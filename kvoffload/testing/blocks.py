"""Blocks with known content: the oracle of the tier and copy suites."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

import numpy as np

from kvoffload.layout import CacheGroup, GroupKind, Layout
from kvoffload.messages import COPY_DTYPE, Copies

ODD_SIZES = (1, 2, 80, 576, 656, 1152, 4095, 4096, 4097, 65537)
"""Payload bytes that do not fit a slot's borders, and some that do."""


def make_key(number: int) -> bytes:
    """A key unlike any other."""
    return hashlib.sha256(number.to_bytes(8, "little")).digest()[:16]


def payload(key: bytes, group: int, nbytes: int) -> bytes:
    """The bytes that belong to a key in a group, and to no other."""
    return random.Random(key + group.to_bytes(2, "little")).randbytes(nbytes)


def make_layout(*block_bytes: int) -> Layout:
    """Full groups of the given sizes."""
    return Layout(16, tuple(CacheGroup(i, GroupKind.FULL, 16, n) for i, n in enumerate(block_bytes)))


def make_copies(
    group: int,
    keys: Sequence[bytes],
    *,
    page: Sequence[int] = (),
    host: Sequence[int] = (),
    disk: Sequence[int] = (),
) -> Copies:
    """Copies of one group; places not given are -1. Depth and seq count up from 0 and 1."""
    copies = np.zeros(len(keys), COPY_DTYPE)
    for name, places in (("page", page), ("host", host), ("disk", disk)):
        copies[name] = places if len(places) else -1
    copies["group"] = group
    copies["depth"] = np.arange(len(keys))
    copies["seq"] = np.arange(len(keys)) + 1
    copies["key"] = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 16)
    copies["parent"][1:] = np.ascontiguousarray(copies["key"][:-1, :4]).view("<u4").ravel()
    return copies


def key_of(copies: Copies, position: int) -> bytes:
    """The key of one copy."""
    return bytes(copies["key"][position].tobytes())
