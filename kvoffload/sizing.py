"""How many slabs, and how large, from bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvoffload.errors import ConfigError
from kvoffload.layout import DEFAULT_SLAB_BYTES, MAX_SLABS, MIN_SLOTS_PER_SLAB, SLOT_ALIGN, Layout

TRANSIT_SHARE = 16
"""One slab in so many of a rank's host slabs is transit, and where there is a disk at least one for each group: a slab
belongs to one group at a time. Without a disk nothing passes through, so there is none."""

MIN_HOST_SLABS = 16
"""A small host tier is cut into at least so many slabs, as far as MIN_SLOTS_PER_SLAB lets it."""


@dataclass(frozen=True, slots=True)
class Slabs:
    """Sizes of one rank's tiers, in slabs of `slab_bytes`."""

    slab_bytes: int
    host: int
    transit: int
    disk: int


def size_slabs(layout: Layout, host_bytes: int, disk_bytes: int, sharers: int = 1) -> Slabs:
    """Cut one rank's bytes, or those that so many ranks share, into slabs. Transit lies inside host_bytes; with a disk
    each of the ranks has its own.

    Raises ConfigError when host_bytes has no room for one slab of each kind.
    """
    groups = sum(not g.transient for g in layout.groups)
    largest = max(g.slot_bytes for g in layout.groups if not g.transient)
    least = MIN_SLOTS_PER_SLAB * largest
    pieces = MIN_HOST_SLABS if sharers == 1 or not disk_bytes else MIN_HOST_SLABS + 2 * groups * sharers
    wanted = max(least, min(DEFAULT_SLAB_BYTES, host_bytes // pieces))
    slab_bytes = max(wanted, -(-max(host_bytes, disk_bytes) // MAX_SLABS))
    slab_bytes = -(-slab_bytes // SLOT_ALIGN) * SLOT_ALIGN
    total = host_bytes // slab_bytes
    needed = sharers if disk_bytes else 0
    if total <= needed:
        beside = f" and {needed} for transit" if needed else ""
        raise ConfigError(
            f"host_bytes gives {host_bytes} {_given_to(sharers)}; one slab of {slab_bytes} bytes for blocks{beside}"
            f" needs {(needed + 1) * slab_bytes}: raise host_bytes"
        )
    if disk_bytes and disk_bytes < slab_bytes:
        raise ConfigError(
            f"disk_bytes gives {disk_bytes} {_given_to(sharers)}; one slab needs {slab_bytes}: raise disk_bytes"
        )
    transit = 0
    if disk_bytes:
        transit = min(max(groups, total // (TRANSIT_SHARE * sharers)), (total - 1) // sharers)
    return Slabs(slab_bytes, total - needed * transit, transit, disk_bytes // slab_bytes)


def _given_to(ranks: int) -> str:
    return "bytes to this rank" if ranks == 1 else f"bytes to {ranks} ranks that share them"


def size_ranks(layouts: Sequence[Layout], host_bytes: int, disk_bytes: int, copies: int = 1) -> list[Slabs]:
    """Cut the bytes of all ranks into as many slabs on each: a rank's slabs are as large as its share of a token.

    copies: so many ranks share one set of slabs, of which each has `transit` to itself.
    """
    if copies > 1:
        sets = len(layouts) // copies
        return [size_slabs(layouts[0], host_bytes // sets, disk_bytes // sets, copies)] * len(layouts)
    shares = [sum(g.slot_bytes / g.tokens_per_block for g in x.groups if not g.transient) for x in layouts]
    if len(set(layouts)) == 1:
        return [size_slabs(layouts[0], host_bytes // len(layouts), disk_bytes // len(layouts))] * len(layouts)
    parts = [(int(host_bytes * s / sum(shares)), int(disk_bytes * s / sum(shares))) for s in shares]
    sizes = [size_slabs(x, *part) for x, part in zip(layouts, parts, strict=True)]
    least = min(sizes, key=lambda s: s.host + s.transit)
    count = least.host + least.transit
    out = []
    for host, disk in parts:
        slab_bytes = host // count // SLOT_ALIGN * SLOT_ALIGN
        out.append(replace(least, slab_bytes=slab_bytes, disk=disk // slab_bytes))
    return [replace(s, disk=min(x.disk for x in out)) for s in out]
