"""How many slabs, and how large, from bytes."""

from __future__ import annotations

from dataclasses import dataclass

from kvoffload.errors import ConfigError
from kvoffload.layout import DEFAULT_SLAB_BYTES, MAX_SLABS, MIN_SLOTS_PER_SLAB, SLOT_ALIGN, Layout

TRANSIT_SHARE = 16
"""One slab in so many of a rank's host slabs is transit, and always at least one."""

MIN_HOST_SLABS = 16
"""A small host tier is cut into at least so many slabs, as far as MIN_SLOTS_PER_SLAB lets it."""


@dataclass(frozen=True, slots=True)
class Slabs:
    """Sizes of one rank's tiers, in slabs of `slab_bytes`."""

    slab_bytes: int
    host: int
    transit: int
    disk: int


def size_slabs(layout: Layout, host_bytes: int, disk_bytes: int) -> Slabs:
    """Cut one rank's bytes into slabs. Transit lies inside host_bytes.

    Raises ConfigError when host_bytes has no room for one slab of each kind.
    """
    largest = max(g.slot_bytes for g in layout.groups)
    least = MIN_SLOTS_PER_SLAB * largest
    wanted = max(least, min(DEFAULT_SLAB_BYTES, host_bytes // MIN_HOST_SLABS))
    slab_bytes = max(wanted, -(-max(host_bytes, disk_bytes) // MAX_SLABS))
    slab_bytes = -(-slab_bytes // SLOT_ALIGN) * SLOT_ALIGN
    total = host_bytes // slab_bytes
    if total < 2:
        raise ConfigError(
            f"host_bytes gives {host_bytes} bytes to this rank; one slab of {slab_bytes} bytes for blocks and one for"
            f" transit need {2 * slab_bytes}: raise host_bytes"
        )
    if disk_bytes and disk_bytes < slab_bytes:
        raise ConfigError(
            f"disk_bytes gives {disk_bytes} bytes to this rank; one slab needs {slab_bytes}: raise disk_bytes"
        )
    transit = max(1, total // TRANSIT_SHARE)
    return Slabs(slab_bytes, total - transit, transit, disk_bytes // slab_bytes)
