"""Wrappers that make a tier or a copy engine fail, wait or count, without the inner one knowing.

A fault is written once and works around both: `FaultyTier(tier, Failing(...), Counting())`,
`FaultyEngine(engine, Gated())`.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from kvoffload.arena import HostArena
from kvoffload.copying.base import CopyEngine, Direction
from kvoffload.layout import Layout, Pools
from kvoffload.messages import Copies, Status, StatusArray
from kvoffload.tiers.base import Tier

PATIENCE = 60.0
"""Seconds after which a gate that nobody opens raises in a tier call."""


class Op(Enum):
    """What a wrapped call does; the value is the status of a copy that is made to fail."""

    READ = (Status.READ_FAILED, "read")
    WRITE = (Status.COPY_FAILED, "write")
    TO_HOST = (Status.COPY_FAILED, "to_host")
    TO_DEVICE = (Status.COPY_FAILED, "to_device")

    @property
    def failure(self) -> Status:
        """The status of a failed copy."""
        return self.value[0]


ALL_OPS = frozenset(Op)


class Fault:
    """What happens around a call. Thread: may be called from several threads at once."""

    healthy = True
    """Set to False: the tier says that its medium is lost, and a probe does not help."""

    def begin(self, op: Op, copies: Copies) -> NDArray[np.bool_]:
        """A call arrives: which of its copies fail without being tried."""
        return np.zeros(len(copies), np.bool_)

    def released(self, op: Op, since: float) -> bool:
        """True once a call that arrived at `since` (time.monotonic) may go on."""
        return True


class Failing(Fault):
    """Copies of the given keys fail, and all copies of the calls numbered in `calls` (1 = the first).

    `keys` may be changed between calls: a medium that recovers. times: how often each key fails, None = for ever.
    """

    def __init__(
        self,
        keys: Collection[bytes] = (),
        calls: Collection[int] = (),
        ops: Collection[Op] = ALL_OPS,
        times: int | None = None,
    ) -> None:
        self.keys = set(keys)
        self._times = times
        self._failed: Counter[bytes] = Counter()
        self.calls = set(calls)
        self._ops = ops
        self._seen = 0
        self._lock = threading.Lock()

    def begin(self, op: Op, copies: Copies) -> NDArray[np.bool_]:
        if op not in self._ops:
            return np.zeros(len(copies), np.bool_)
        with self._lock:
            self._seen += 1
            if self._seen in self.calls:
                return np.ones(len(copies), np.bool_)
            return np.array([self._fails(key.tobytes()) for key in copies["key"]], np.bool_)

    def _fails(self, key: bytes) -> bool:
        if key not in self.keys or self._failed[key] == self._times:
            return False
        self._failed[key] += 1
        return True


class Slow(Fault):
    """Every call goes on `seconds` after it arrived."""

    def __init__(self, seconds: float, ops: Collection[Op] = ALL_OPS) -> None:
        self._seconds = seconds
        self._ops = ops

    def released(self, op: Op, since: float) -> bool:
        return op not in self._ops or time.monotonic() - since >= self._seconds


class Counting(Fault):
    """How often each key was asked for, by operation."""

    def __init__(self) -> None:
        self._counts: dict[Op, Counter[bytes]] = {op: Counter() for op in Op}
        self._calls: Counter[Op] = Counter()
        self._lock = threading.Lock()

    def begin(self, op: Op, copies: Copies) -> NDArray[np.bool_]:
        with self._lock:
            self._calls[op] += 1
            self._counts[op].update(key.tobytes() for key in copies["key"])
        return np.zeros(len(copies), np.bool_)

    def copies(self, op: Op, key: bytes | None = None) -> int:
        """Copies seen, of one key or of all."""
        with self._lock:
            return self._counts[op].total() if key is None else self._counts[op][key]

    def calls(self, op: Op) -> int:
        """Calls seen."""
        with self._lock:
            return self._calls[op]


class Gated(Fault):
    """Calls stop here until `release`; `hold` closes the gate again. It is closed at first unless `is_open`."""

    def __init__(self, ops: Collection[Op] = ALL_OPS, *, is_open: bool = False) -> None:
        self._ops = ops
        self._open = threading.Event()
        if is_open:
            self._open.set()
        self._arrivals = threading.Semaphore(0)

    def begin(self, op: Op, copies: Copies) -> NDArray[np.bool_]:
        if op in self._ops:
            self._arrivals.release()
        return np.zeros(len(copies), np.bool_)

    def released(self, op: Op, since: float) -> bool:
        return op not in self._ops or self._open.is_set()

    def arrived(self, timeout: float = PATIENCE) -> bool:
        """Wait for one call that was not waited for before; False after `timeout` seconds."""
        return self._arrivals.acquire(timeout=timeout)

    def release(self) -> None:
        """Let everything through."""
        self._open.set()

    def hold(self) -> None:
        """Stop calls again."""
        self._open.clear()


class FaultyTier(Tier):
    """A tier with faults around its reads and writes."""

    def __init__(self, inner: Tier, *faults: Fault) -> None:
        self._inner = inner
        self._faults = faults

    @property
    def slabs(self) -> int:
        return self._inner.slabs

    @property
    def healthy(self) -> bool:
        return self._inner.healthy and all(fault.healthy for fault in self._faults)

    def probe(self) -> bool:
        return self._inner.probe() and self.healthy

    def records(self) -> NDArray[np.void]:
        return self._inner.records()

    def read(self, copies: Copies, arena: HostArena) -> StatusArray:
        return self._call(Op.READ, copies, lambda some: self._inner.read(some, arena))

    def write(self, copies: Copies, arena: HostArena) -> StatusArray:
        return self._call(Op.WRITE, copies, lambda some: self._inner.write(some, arena))

    def reset(self) -> None:
        self._inner.reset()

    def close(self) -> None:
        self._inner.close()

    def _call(self, op: Op, copies: Copies, move: Callable[[Copies], StatusArray]) -> StatusArray:
        call = _Call.begin(self._faults, op, copies)
        while not call.released(self._faults):
            if time.monotonic() - call.since > PATIENCE:
                raise TimeoutError(f"{op.name}: nobody opened the gate for {PATIENCE} s")
            time.sleep(0.001)
        return call.merge(move(call.allowed))


class FaultyEngine(CopyEngine):
    """A copy engine with faults around its copies. A held copy is not begun before it is released."""

    def __init__(self, inner: CopyEngine, *faults: Fault) -> None:
        self._inner = inner
        self._faults = faults
        self._calls: dict[int, _EngineCall] = {}
        self._numbers = itertools.count(1)  # several threads of a mover submit

    @property
    def streams(self) -> bool:
        return self._inner.streams

    def register(self, layout: Layout, pools: Pools, arena: HostArena) -> None:
        self._inner.register(layout, pools, arena)

    def submit(self, copies: Copies, direction: Direction, after: object) -> int:
        op = Op.TO_HOST if direction is Direction.TO_HOST else Op.TO_DEVICE
        call = _EngineCall(_Call.begin(self._faults, op, copies), direction, after)
        handle = next(self._numbers)
        self._calls[handle] = call
        self._started(call)
        return handle

    def query(self, handle: int) -> StatusArray | None:
        call = self._calls[handle]
        inner = self._started(call)
        status = None if inner is None else self._inner.query(inner)
        if status is None:
            return None
        del self._calls[handle]
        return call.call.merge(status)

    def wait(self, handle: int, timeout: float) -> bool:
        call = self._calls[handle]
        deadline = time.monotonic() + timeout
        while (inner := self._started(call)) is None:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.001)
        return self._inner.wait(inner, max(deadline - time.monotonic(), 0.0))

    def close(self) -> None:
        self._inner.close()

    def _started(self, call: _EngineCall) -> int | None:
        """The inner handle, submitted at the first time that the faults allow."""
        if call.inner is None and call.call.released(self._faults):
            call.inner = self._inner.submit(call.call.allowed, call.direction, call.after)
        return call.inner


@dataclass(slots=True)
class _Call:
    """One call with the copies that the faults let through."""

    op: Op
    refused: NDArray[np.bool_]
    allowed: Copies
    since: float

    @classmethod
    def begin(cls, faults: tuple[Fault, ...], op: Op, copies: Copies) -> _Call:
        refused = np.zeros(len(copies), np.bool_)
        for fault in faults:
            refused |= fault.begin(op, copies)
        allowed = copies if not refused.any() else copies[~refused]
        return cls(op, refused, allowed, time.monotonic())

    def released(self, faults: tuple[Fault, ...]) -> bool:
        return all(fault.released(self.op, self.since) for fault in faults)

    def merge(self, inner: StatusArray) -> StatusArray:
        status = np.full(len(self.refused), self.op.failure, np.uint8)
        status[~self.refused] = inner
        return status


@dataclass(slots=True)
class _EngineCall:
    call: _Call
    direction: Direction
    after: object
    inner: int | None = None
