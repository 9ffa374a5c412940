"""The native core: index and order, CPU copies, disk I/O.

Arrays are numpy arrays or anything with the buffer protocol, C-contiguous, of exactly the dtype named; anything
else raises ValueError naming the argument. `keys` is always the chain of *base* blocks, (n, 16) uint8; block j of a
group with multiple k has the key `keys[(j + 1) * k - 1]`. Positions, depths and spans count blocks of the group
unless said otherwise. The index classes have no locks: one thread owns an Index with its Matchers.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvoffload.messages import Copies, StatusArray

KeyArray = NDArray[np.uint8]

class Index:
    """Which key lies in which slot, for all groups and tiers, and in which order slots are given up.

    Tiers are numbered 0 = host, 1 = disk. All tiers are empty at first.
    """

    def __init__(
        self,
        groups: Sequence[
            tuple[int, int, int]
        ],  # (kind 0 full | 1 sliding | 2 state | 3 transient, base blocks per block, lookback in tokens)
        base_tokens: int,
        slots_per_slab: Sequence[int],  # by group
        host_slabs: int,
        transit_slabs: int,
        disk_slabs: int,
        *,
        host_slots: int = -1,  # exact number of slots over all slabs, -1 = all; one group only
        transit_slots: int = -1,
        disk_slots: int = -1,
        host_policy: str = "lru",  # or rri, rri-keep: csrc/rri.h
        disk_policy: str = "lru",
        disk_admission: int = 1,  # requests that must have used a block before it is queued for disk; 0 = never
        max_pending_writes: int = -1,  # slots that may be pinned by disk writes; -1 = a quarter of the host slots
    ) -> None: ...

    # Segments. A request opens one; everything it touches joins it, in the order of positions.
    def open_segment(self, now: float, stream: int = 0) -> int:
        """`stream`: 64 bits that name the agent that asks, the same for each of its requests; 0 = unknown."""

    def close_segment(self, segment: int, reason: int, now: float) -> None:
        """The request has ended; the segment lives on as long as it has blocks. Ids are reused afterwards."""

    # Store.
    def offer(
        self,
        segment: int,
        keys: KeyArray,
        begins: Sequence[int],  # by group: the cursor
        ends: Sequence[int],  # by group: blocks that are computed
        pages: Sequence[NDArray[np.int32]],  # by group: page of block i at [i]; shorter or -1 = absent
    ) -> tuple[Copies, list[int], int, int, int]:
        """(copies, new cursors, already resident, in flight, refused): see csrc/index.h for the exact rule."""

    def complete_store(self, copies: Copies, status: StatusArray | None) -> None: ...

    # Host -> disk.
    def next_writes(self, limit: int) -> Copies:
        """Blocks from the write queue, oldest first, pinned and with a disk slot; empty at the pending bound."""

    def complete_write(self, copies: Copies, status: StatusArray | None) -> None: ...

    # Load: disk -> host -> device.
    def begin_load(
        self,
        segment: int,
        keys: KeyArray,
        begins: Sequence[int],
        ends: Sequence[int],
        pages: Sequence[NDArray[np.int32]],
        max_transit: int,
    ) -> tuple[Copies, list[int]]:
        """(copies, by group the end of what they cover). Everything copied is pinned and marked loading."""

    def begin_read(self, segment: int, keys: KeyArray, begins: Sequence[int], ends: Sequence[int]) -> Copies:
        """Disk -> host only (prefetch): as many blocks from the front as host has room for."""

    def complete_load(self, copies: Copies, status: StatusArray | None) -> None:
        """Also ends a begin_read. READ_FAILED erases the key from disk."""

    def ready(self, copies: Copies) -> bool:
        """True when no copy with the WAIT flag waits any longer; clears the flag where the bytes came, sets READ
        where they did not and disk still has them, and leaves host = -1 where no tier has them any more."""

    def expire(self, copies: Copies) -> None:
        """The job is past its deadline: its blocks no longer count as pending or loading."""

    def retire(self, segment: int, keys: KeyArray, begins: Sequence[int], ends: Sequence[int]) -> int:
        """Blocks of the spans that are in this segment go for good. The number of blocks."""
    def supersede(self, segment: int, keys: KeyArray, begins: Sequence[int], ends: Sequence[int]) -> int:
        """Blocks of the spans that are in this or in closed segments are the first to go, until a request touches them.
        The number of blocks."""

    # Whole index.
    def restore(self, records: NDArray[np.void]) -> int:
        """Takes RECORD_DTYPE rows into the disk tier; the number taken. Only before anything else was stored."""
    def reset(self, tier: int) -> None:
        """Nothing in the tier is visible any more; slots of running jobs come back when these end."""
    def set_online(self, tier: int, online: bool) -> None:
        """An offline tier answers nothing and takes nothing; its blocks come back with it."""
    def set_direct_writes(self, allowed: bool) -> None:
        """Whether blocks that host refuses may go to disk through transit; at first they may."""
    def usage(self, tier: int) -> dict[str, Any]:
        """{"slabs_unowned": n, "groups": [{capacity_slots, used, pinned, pending, free, slabs}]}, by group.

        capacity_slots: if the group owned every slab; free: in the slabs it owns; pending: on the way into the tier.
        """
    def transit_free(self) -> int:
        """Transit slots that can be taken now; with several groups counted for the smallest number per slab."""
    def pending_writes(self) -> tuple[int, int]:
        """(queued and not pinned, pinned by running writes and waiting transit slots)."""
    def counters(self) -> dict[str, int]:
        """evicted_host, evicted_disk, stored_host, stored_disk, promoted, dropped_disk_backlog, dropped_disk_full,
        store_failed, write_failed, read_failed, slabs_moved, orphaned; never go down (csrc/index.h Counters)."""
    def policy(self, tier: int) -> dict[str, Any]:
        """What the tier's policy has learned and how much memory that takes; no classes where it does not learn."""
    def changes(self, stamp: int) -> tuple[int, NDArray[np.void] | None]:
        """(new stamp, rows of kvoffload.index.CHANGE_DTYPE since `stamp`; None if they are no longer all there, or
        more changed at once than rows tell: reset, restore, set_online)."""
    def memory_bytes(self) -> int: ...
    def check_integrity(self) -> None:
        """Walks everything; raises RuntimeError naming the first invariant that does not hold."""
    def entries(self) -> NDArray[np.void]:
        """Rows of kvoffload.index.ENTRY_DTYPE, for tests: segments from the least recent one, each from its end."""

class Matcher:
    """What of one chain is restorable, kept up to date as the index changes."""

    def __init__(self, index: Index) -> None: ...
    def update(self, keys: KeyArray, computed: int) -> tuple[int, int, int, int, bool]:
        """(boundary, pending, host, disk, loading).

        boundary, pending: tokens, >= `computed`; host, disk: base blocks of [computed, boundary) that the first
        full group (else the first group) would take from each tier; loading: some block of [computed, pending)
        is on its way to the device.
        """
    def boundaries(self) -> NDArray[np.int32]:
        """All restorable boundaries of the last update in tokens, increasing, without 0."""
    def codes(self, group: int) -> NDArray[np.uint8]:
        """Per block: 1 host, 2 disk, 4 pending, 8 loading, or-ed; 0 = absent."""

class SlotSpace:
    """Where slots lie in a tier: `slab * slab_bytes + index * slot_bytes[group]`. Immutable."""

    def __init__(self, slab_bytes: int, slabs: int, slot_bytes: Sequence[int]) -> None: ...
    def offset(self, group: int, slot: int) -> int:
        """Byte offset of a slot, -1 where no such slot exists."""

class CpuCopier:
    """Copies blocks between pages that the CPU can address and host slots, on its own threads.

    One thread calls. A region is (base, stride, page_bytes, pages).
    """

    def __init__(
        self, base: int, host: SlotSpace, pools: Sequence[Sequence[tuple[int, int, int, int]]], threads: int
    ) -> None: ...
    def submit(self, copies: Copies, to_device: bool) -> int:
        """`copies` must live, unchanged, until the handle has ended."""
    def query(self, handle: int) -> StatusArray | None: ...
    def wait(self, handle: int, timeout: float) -> bool: ...
    def close(self) -> None: ...

class DiskIO:
    """Payloads, records and checksums of the disk tier, on its own threads. Does not close the files."""

    def __init__(
        self,
        slots: int,  # file descriptors, open for reading and writing
        table: int,
        space: SlotSpace,
        block_bytes: Sequence[int],
        epoch: int,
        checksum: bool,
        threads: int,
        error_limit: int,
    ) -> None: ...
    def read(self, copies: Copies, base: int, host: SlotSpace) -> StatusArray: ...
    def write(self, copies: Copies, base: int, host: SlotSpace) -> StatusArray: ...
    def scan(self, slot_file_bytes: int) -> NDArray[np.void]:
        """RECORD_DTYPE rows of all valid records whose slot ends within the first `slot_file_bytes`."""
    def reset(self, epoch: int) -> None: ...
    def probe(self) -> bool: ...
    def counters(self) -> dict[str, int]: ...
    def close(self) -> None: ...
    @property
    def healthy(self) -> bool: ...
    @property
    def slots_bytes(self) -> int: ...
    @property
    def table_bytes(self) -> int: ...

def prefault(base: int, bytes: int, threads: int) -> bool:
    """Backs mapped memory; False where the kernel has none left."""

def raw_file_loop(
    file: int, write: bool, base: int, bytes: int, offsets: Sequence[int], threads: int
) -> float:
    """Seconds to move blocks between memory and a file with nothing else done; negative = -errno. For `bench`."""

def load_chunks(copies: Copies, size: int) -> list[int]: ...
def share_slots(a: Copies, b: Copies) -> bool: ...
def memcpy_loop(target: int, source: int, bytes: int, count: int, threads: int) -> float:
    """Seconds to copy fragments in order. For `bench`."""

class PlainTable:
    """Keys in a table that does nothing else: what `bench` measures the index against."""

    def __init__(self, keys: KeyArray) -> None: ...
    def find(self, keys: KeyArray) -> int:
        """How many of the keys are there."""
    def pin_unpin(self, keys: KeyArray) -> int:
        """Pins each key, then unpins each; the pins that are left."""

def checksum(data: object, portable: bool = False) -> bytes:
    """The 16-byte payload checksum of anything with the buffer protocol (docs/block-format.md)."""

def checksum_has_instruction() -> bool: ...
def kernels_text() -> str:
    """The copy kernel, csrc/kernels.h, for libraries that compile at run time."""

def compat_text() -> str:
    """csrc/compat.h, which it includes."""
