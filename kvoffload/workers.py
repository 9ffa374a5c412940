"""Threads of the mover: they take tasks in turn, and none of them keeps the process from ending."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

_Item = tuple["Future[None]", Callable[[], None]]


class Workers:
    """`count` daemon threads over one queue: a task that hangs in the kernel delays neither `close` nor the end of the
    process for longer than it is told. Thread: any."""

    def __init__(self, count: int, name: str) -> None:
        self._queue: SimpleQueue[_Item | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{n}", daemon=True) for n in range(count)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> int:
        """Tasks that no thread has begun."""
        return self._queue.qsize()

    def submit(self, work: Callable[[], None]) -> Future[None]:
        """Queue a task; a future that is cancelled before it began is passed over. REQUIRES: `work` does not raise; not
        after `close`."""
        future: Future[None] = Future()
        self._queue.put((future, work))
        return future

    def close(self, timeout: float) -> bool:
        """Let the queued tasks run and end the threads; False where one still runs after `timeout` seconds."""
        for _ in self._threads:
            self._queue.put(None)
        end = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(t.is_alive() for t in self._threads)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            future, work = item
            if future.set_running_or_notify_cancel():
                work()
                future.set_result(None)
            del item, future, work  # nothing of a task lives on in a thread that waits
