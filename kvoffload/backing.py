"""Backs host memory in the background, so that the first copy into a slot meets no page fault."""

from __future__ import annotations

import logging
import threading

from kvoffload.arena import HostArena

log = logging.getLogger(__name__)


class Backing:
    """Goes through an arena's slabs from the first on a thread of its own, the order in which they come into use.

    Lifetime: stop it before the arena is closed.
    """

    def __init__(self, arena: HostArena) -> None:
        self._arena = arena
        self._stopped = threading.Event()
        self.backed = 0
        """Slabs so far."""
        self._thread = threading.Thread(target=self._run, name="kvoffload-backing", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for slab in range(self._arena.slabs):
            if self._stopped.is_set():
                return
            if not self._arena.prefault_slab(slab):
                log.warning(
                    "host memory: the kernel gave %d of %d bytes ahead of their use; lower host_bytes if it runs out",
                    slab * self._arena.slab_bytes,
                    self._arena.nbytes,
                )
                return
            self.backed += 1

    def wait(self, timeout: float) -> bool:
        """Until it has ended; False after `timeout` seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def stop(self) -> None:
        """End with the slab that is under way. Idempotent."""
        self._stopped.set()
        self._thread.join()
