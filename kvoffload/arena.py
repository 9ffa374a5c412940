"""Host slabs: one mapping that copies, the disk tier and transit share."""

from __future__ import annotations


class HostArena:
    """One anonymous mapping of slabs. See the native copy work for the implementation."""
