"""All that crosses between planner and mover: frozen, picklable, encodable with msgpack.

Copies are one structured array per job (COPY_DTYPE, the C struct BlockCopy): a record per block.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import IntEnum, IntFlag
from typing import Any, TypeAlias

import msgpack
import numpy as np
from numpy.typing import NDArray

COPY_DTYPE = np.dtype(
    [
        ("key", "u1", (16,)),
        ("seq", "<u8"),
        ("entry", "<u4"),
        ("page", "<i4"),
        ("host", "<i4"),
        ("disk", "<i4"),
        ("depth", "<i4"),
        ("parent", "<u4"),
        ("group", "<u2"),
        ("flags", "<u2"),
        ("reserved", "<u4"),
    ]
)

RECORD_DTYPE = np.dtype(
    [
        ("key", "u1", (16,)),
        ("seq", "<u8"),
        ("slot", "<i4"),
        ("depth", "<i4"),
        ("parent", "<u4"),
        ("group", "<u2"),
        ("reserved", "<u2"),
    ]
)
"""One block found on disk at start: the mover's inventory."""

RequestId: TypeAlias = str | int

Copies: TypeAlias = NDArray[np.void]
"""(n,) of COPY_DTYPE, C-contiguous."""

StatusArray: TypeAlias = NDArray[np.uint8]
"""(n,) of Status, one per copy of the job, same order."""


class CopyFlag(IntFlag):
    """Bits of Copies["flags"]."""

    READ = 1
    TRANSIT = 2
    WAIT = 4


class Status(IntEnum):
    """What became of one copy."""

    OK = 0
    READ_FAILED = 1
    COPY_FAILED = 2
    NOT_DONE = 3


class JobKind(IntEnum):
    """What a job moves, and between which places."""

    STORE = 0
    LOAD = 1
    READ = 2
    WRITE = 3


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A set of copies with one id; it ends exactly once on every rank.

    STORE: device page -> host slot. LOAD: host slot -> device page, after a read from disk where
    CopyFlag.READ is set. READ: disk slot -> host slot. WRITE: host slot -> disk slot.
    In a LOAD a transit slot may stand in several copies: they use it one after the other, in order.
    request: whose pages the job touches, None where there are none or the request has gone. whole: the job is all of a
    load from its first block to its last, so that the load has ended well once every copy is OK.
    """

    id: int
    kind: JobKind
    copies: Copies
    request: RequestId | None = None
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Geometry:
    """What all ranks agreed on: slabs per tier and slots per slab of each group.

    Host slabs [0, host_slabs) belong to the index, [host_slabs, host_slabs + transit_slabs) are transit.
    """

    slots_per_slab: tuple[int, ...]
    host_slabs: int
    transit_slabs: int
    disk_slabs: int


@dataclass(frozen=True, slots=True)
class Plans:
    """What the planner sends to every mover in one step, in the order in which it is to be submitted."""

    jobs: tuple[Job, ...] = ()
    cancels: tuple[int, ...] = ()
    geometry: Geometry | None = None
    reset_disk: bool = False

    def __bool__(self) -> bool:
        return bool(self.jobs or self.cancels or self.geometry or self.reset_disk)


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """How a job ended on one rank. `status` None = every copy is OK. `error` says why, for people.

    disk_ok: whether this rank's disk tier works at all just now. job 0 = news of the disk only. disk_hung: calls of it
    that were found not to return in time since the last outcome.
    """

    job: int
    rank: int
    status: StatusArray | None = None
    error: str = ""
    disk_ok: bool = True
    disk_hung: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Inventory:
    """What one rank can give.

    slots_per_slab: what fits this rank's slabs; the planner takes the minimum over ranks.
    records: (n,) of RECORD_DTYPE, the blocks found on disk. lacks: groups of which the rank holds no bytes; it reports
    their copies as OK.
    """

    slots_per_slab: tuple[int, ...]
    host_slabs: int
    transit_slabs: int
    disk_slabs: int
    records: NDArray[np.void] = field(default_factory=lambda: np.empty(0, RECORD_DTYPE))
    lacks: tuple[int, ...] = ()


_TYPES = {c.__name__: c for c in (Job, Geometry, Plans, Outcome, Inventory)}
_ARRAYS = {"copies": COPY_DTYPE, "records": RECORD_DTYPE, "status": np.dtype("u1")}


def encode(message: Job | Geometry | Plans | Outcome | Inventory) -> bytes:
    """One message as msgpack; arrays as their bytes."""
    return msgpack.packb(_pack(message), use_bin_type=True)


def decode(data: bytes) -> Any:
    """The message that `encode` was given. Raises ValueError on data of another kind."""
    try:
        message = _unpack(msgpack.unpackb(data, raw=False, strict_map_key=False))
    except (TypeError, KeyError, msgpack.UnpackException) as error:
        raise ValueError(f"not a kvoffload message: {error}") from error
    if type(message).__name__ not in _TYPES:
        raise ValueError(f"not a kvoffload message but a {type(message).__name__}")
    return message


def _pack(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, tuple):
        return [_pack(v) for v in value]
    if type(value).__name__ in _TYPES:
        body = {f.name: _pack(object.__getattribute__(value, f.name)) for f in fields(value)}
        return {"_": type(value).__name__, **body}
    return int(value) if isinstance(value, IntEnum) else value


def _unpack(value: Any, name: str = "") -> Any:
    if isinstance(value, bytes):
        if name not in _ARRAYS:
            raise ValueError(f"no array is called {name!r} in a message")
        return np.frombuffer(value, _ARRAYS[name]).copy()
    if isinstance(value, list):
        return tuple(_unpack(v) for v in value)
    if isinstance(value, dict):
        kind = _TYPES.get(value.pop("_", ""))
        if kind is None:
            raise ValueError("not a kvoffload message")
        body = {k: _unpack(v, k) for k, v in value.items()}
        if kind is Job:
            body["kind"] = JobKind(body["kind"])
        return kind(**body)
    return value
