"""What each connector decided to copy, read from its own plans: the same few numbers for all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any

from shim import COPIED

from kvoffload.index import ChangeKind, IndexTier
from kvoffload.messages import JobKind


class Ledger(ABC):
    """Counts since start. again: stores of a block that had been stored before; twice: of those, the ones whose
    earlier copy was still there."""

    def __init__(self) -> None:
        self.stored = self.loaded = self.again = self.twice = 0
        self._known: set[Hashable] = set()
        self._there: set[Hashable] = set()
        self._base = (COPIED.stored, COPIED.loaded)

    def store(self, keys: Iterable[Hashable]) -> None:
        for key in keys:
            self.stored += 1
            self.again += key in self._known
            self.twice += key in self._there
            self._known.add(key)
            self._there.add(key)

    def gone(self, keys: Iterable[Hashable]) -> None:
        self._there.difference_update(keys)

    def bytes(self) -> tuple[int, int]:
        """(stored, loaded): between the engine's pages and what is beside them."""
        return COPIED.stored - self._base[0], COPIED.loaded - self._base[1]

    def copy_ns(self) -> int:
        """CPU time that the engine's thread spent copying."""
        return COPIED.ns

    @abstractmethod
    def planned(self, plans: Any) -> None:
        """The connector has planned a step."""

    @abstractmethod
    def host_bytes(self) -> int:
        """Of host memory that holds blocks now."""

    def disk_bytes(self, folder: Path) -> int:
        """Of disk that holds blocks now."""
        return sum(f.stat().st_blocks * 512 for f in folder.rglob("*") if f.is_file())


class OffloadingLedger(Ledger):
    """Of OffloadingConnector, whose manager is asked for every store and load. A chunk has room for every group's
    bytes, whatever group it is of."""

    def __init__(self, connector: Any, worker: Any) -> None:
        super().__init__()
        self._spec = worker.connector_worker.spec
        manager = connector.connector_scheduler.manager
        self._host = manager.__dict__.get("primary_tier", manager)
        make_room = self._host.prepare_store

        def prepare_room(keys: Any, context: Any) -> Any:
            answer = make_room(keys, context)
            if answer is not None:
                self.gone(answer.evicted_keys)
            return answer

        self._host.prepare_store = prepare_room  # also what a promotion from the second tier calls
        ask, load = manager.prepare_store, manager.prepare_load

        def prepare_store(keys: Any, context: Any) -> Any:
            answer = ask(keys, context)
            if answer is not None:
                self.store(answer.keys_to_store)
            return answer

        def prepare_load(keys: Any, context: Any) -> Any:
            self.loaded += len(keys)
            return load(keys, context)

        manager.prepare_store, manager.prepare_load = prepare_store, prepare_load

    def planned(self, plans: Any) -> None:
        """The manager has been asked."""

    def host_bytes(self) -> int:
        chunks = self._host._num_allocated_chunks - len(self._host._free_list)
        return int(chunks * self._spec.kv_bytes_per_chunk)


class SimpleLedger(Ledger):
    """Of SimpleCPUOffloadConnector, whose second block pool holds the blocks of all groups in places of one size."""

    def __init__(self, connector: Any, worker: Any) -> None:
        super().__init__()
        self._manager = connector.scheduler_manager
        self._worker = worker.worker_handler
        self._pool = self._manager.cpu_block_pool
        evict = self._pool._maybe_evict_cached_block

        def maybe_evict(block: Any) -> bool:
            self.gone([block.block_hash])
            return bool(evict(block))

        self._pool._maybe_evict_cached_block = maybe_evict

    def planned(self, plans: Any) -> None:
        blocks = self._manager._gpu_block_pool.blocks
        self.store(blocks[page].block_hash for page in plans.store_gpu_blocks)
        self.loaded += len(plans.load_gpu_blocks)

    def host_bytes(self) -> int:
        if self._worker.disk_mode:
            return sum(t.nbytes for t in self._worker._backend._store_buffer_caches.values()) * 2
        size = sum(t.stride(0) * t.element_size() for t in self._worker.cpu_kv_caches.values())
        return sum(block.block_hash is not None for block in self._pool.blocks) * size


class OwnLedger(Ledger):
    """Of kvoffload, whose copies run on threads of their own."""

    def __init__(self, connector: Any, worker: Any) -> None:
        super().__init__()
        self._planner = connector._scheduler.core.planner
        self._stamp = self._planner._tiers.index.changes(0)[0]

    def planned(self, told: Any) -> None:
        self._stamp, rows = self._planner._tiers.index.changes(self._stamp)
        if rows is None:
            self._there.clear()
        else:
            away = rows[(rows["kind"] == ChangeKind.REMOVED) & (rows["tier"] == IndexTier.HOST)]
            self.gone((row["key"].tobytes(), int(row["group"])) for row in away)
        for job in told.plans.jobs:
            if job.kind is JobKind.STORE:
                self.store((copy["key"].tobytes(), int(copy["group"])) for copy in job.copies)
            elif job.kind is JobKind.LOAD:
                self.loaded += len(job.copies)

    def bytes(self) -> tuple[int, int]:
        totals = self._planner.stats().totals
        return totals["store_bytes_host"], totals["load_bytes_host"]

    def host_bytes(self) -> int:
        return int(self._planner.stats().tiers["host"].used)

    def disk_bytes(self, folder: Path) -> int:
        """Its files are allocated whole at start: the slots that hold something."""
        return int(self._planner.stats().tiers["disk"].used)
