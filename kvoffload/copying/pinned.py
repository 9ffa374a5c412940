"""Page-locked host memory: registered in chunks in the background, near the device where that can be known."""

from __future__ import annotations

import logging
import os
import resource
import threading
from pathlib import Path
from typing import Protocol

from kvoffload.arena import HostArena, available_host_bytes
from kvoffload.native import PinModule

CHUNK_BYTES = 32 << 30
"""Registered in one call: drivers refuse single calls from some size on (512 GiB seen refused, 64 GiB taken)."""

_log = logging.getLogger("kvoffload")


class PinnedUser(Protocol):
    """Who copies from and to the memory. All are called from the locking thread."""

    def add_pinned(self, base: int, bytes: int) -> None:
        """This range is locked from now on."""

    def withdraw_pinned(self) -> None:
        """Return once no copy uses locked memory; none may begin to before `forget_pinned`."""

    def forget_pinned(self) -> None:
        """Nothing is locked from now on."""


class PinnedArena:
    """Page-locks an arena chunk by chunk on a thread of its own; what is not locked (yet) is copied from as it is.

    Chunks end on slab borders, so no slot lies in two. A failed call ends the locking: one message, no second try, and
    what was locked is unlocked again, for the machine is short of it. The thread runs on the CPUs of the device's
    memory node, so that pages first touched by the locking lie there. Lifetime: close() before the arena is closed.
    """

    def __init__(
        self,
        module: PinModule,
        device: int,
        arena: HostArena,
        user: PinnedUser,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        root: Path = Path("/"),
    ) -> None:
        """user: outlives the thread (`wait`, `close`). root: where /sys is found."""
        self._module = module
        self._device = device
        self._arena = arena
        self._user = user
        self._chunk = max(chunk_bytes // arena.slab_bytes, 1) * arena.slab_bytes
        self._root = root
        self._stop = threading.Event()
        self._chunks: list[int] = []
        self.pinned_bytes = 0
        self.message = ""
        self._thread = threading.Thread(target=self._run, name="kvoffload-pin", daemon=True)
        self._thread.start()

    def wait(self, timeout: float) -> bool:
        """Block until everything is locked or locking has failed; False after `timeout` seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Unlock everything; waits for the call that is running. REQUIRES: no copy is running. Idempotent."""
        self._stop.set()
        self._thread.join()
        self._unlock()

    def _unlock(self) -> None:
        """REQUIRES: no copy uses the memory."""
        chunks, self._chunks, self.pinned_bytes = self._chunks, [], 0
        for base in chunks:
            self._module.host_unregister(base)

    def _undo(self) -> None:
        """Unlock what was locked while copies may be running."""
        self._user.withdraw_pinned()
        try:
            self._unlock()
        except RuntimeError as error:
            _log.warning("host memory could not be unlocked: %s", error)
        finally:
            self._user.forget_pinned()

    def _run(self) -> None:
        node = device_node(self._module.device_info(self._device)[1], self._root)
        run_on_node(node, self._root)
        end = self._arena.base + self._arena.nbytes
        for base in range(self._arena.base, end, self._chunk):
            nbytes = min(self._chunk, end - base)
            if self._stop.is_set():
                return
            error = self._module.host_register(base, nbytes, self._device)
            if error:
                self.message = self._describe(nbytes, error)
                _log.warning(self.message)
                if self._chunks:
                    self._undo()
                return
            self._chunks.append(base)
            self.pinned_bytes += nbytes
            self._user.add_pinned(base, nbytes)

    def _describe(self, nbytes: int, error: str) -> str:
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        locked = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit} bytes"
        return (
            f"page-locking {nbytes} bytes of host memory failed ({error}) after {self.pinned_bytes} of "
            f"{self._arena.nbytes} bytes, which are unlocked again; {available_host_bytes()} bytes of memory are "
            f"available, the limit of locked memory (ulimit -l) is {locked}. Copies go on with memory that is not "
            "locked, more slowly; "
            "lower host_bytes or raise the limit"
        )


def device_node(pci: str, root: Path = Path("/")) -> int | None:
    """The memory node that a PCI device belongs to; None where the machine does not say."""
    try:
        node = int((root / "sys/bus/pci/devices" / pci.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def node_cpus(node: int, root: Path = Path("/")) -> set[int]:
    """The CPUs of a memory node; empty where the machine does not say."""
    try:
        text = (root / f"sys/devices/system/node/node{node}/cpulist").read_text().strip()
    except OSError:
        return set()
    cpus: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def run_on_node(node: int | None, root: Path = Path("/")) -> bool:
    """Bind the calling thread to those CPUs of a node that it may use; False, and no change, where there are none."""
    cpus = set() if node is None else node_cpus(node, root) & os.sched_getaffinity(0)
    if cpus:
        os.sched_setaffinity(0, cpus)
    elif node is not None:
        _log.warning(
            "the CPUs of memory node %d are not known or not allowed; host memory may lie far from it", node
        )
    return bool(cpus)
