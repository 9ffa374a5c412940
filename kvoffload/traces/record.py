"""The one record every trace format is read into, and the keys a trace's blocks get in the index."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Ids: TypeAlias = NDArray[np.int64]
Tokens: TypeAlias = NDArray[np.uint32]
Tail: TypeAlias = Literal["floor", "ceil"]
Form: TypeAlias = Literal["full", "delta", "weka", "synth"]

MAIN = "main"  # the root agent of a session
NO_PARENT = -1

_U64 = 0xFFFFFFFFFFFFFFFF


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One prompt and its answer.

    `ids` names the blocks of the whole prompt, chained: an id stands for its block and for everything before
    it, in this trace only. `t` is the start in seconds, whole microseconds, on the trace's clock (Weka: the
    session's). `turn` counts the requests of a session in time order; `parent` is the turn this one follows:
    the agent's last, for a new agent the last one of `main`, else NO_PARENT. `session` "" means unknown.
    `tokens`, where known, is prompt then answer: `input_tokens + output_tokens` of them, read-only.
    """

    session: str
    agent: str
    turn: int
    t: float
    parent: int
    ids: Ids
    input_tokens: int
    output_tokens: int
    finish_reason: str
    service_s: float | None
    tokens: Tokens | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Requests in file order, with what is true of all of them.

    `partial_tail`: floor = only full blocks have ids, ceil = a partial last block has one too.
    `aligned`: block i covers tokens [i * block_tokens, (i + 1) * block_tokens); false where generated tokens
    have no ids (delta form), which rules out larger blocks. `notes` says what reading changed, for people.
    """

    name: str
    source: str
    block_tokens: int
    partial_tail: Tail
    form: Form
    aligned: bool
    requests: tuple[Request, ...]
    notes: tuple[str, ...] = ()

    @property
    def namespace(self) -> bytes:
        """16 bytes that keep this trace's ids apart from those of another name or block size."""
        scope = f"kvoffload.trace.v1\0{self.name}\0{self.block_tokens}".encode()
        return hashlib.blake2b(scope, digest_size=16).digest()

    def keys(self, request: Request) -> NDArray[np.uint8]:
        """The keys of the request's blocks, (n, 16)."""
        return trace_keys(request.ids, self.namespace)


def trace_keys(ids: Ids, namespace: bytes) -> NDArray[np.uint8]:
    """Engine-made keys for ids: (n, 16) uint8, C-contiguous, little-endian, the same on every machine.

    Each half is a bijection of the id (splitmix64's finaliser over id + half of the namespace), so two ids of
    one trace never share even 8 bytes, and every byte is as mixed as a hash's.
    REQUIRES: 16 bytes of namespace.
    """
    if len(namespace) != 16:
        raise ValueError(f"a trace namespace has 16 bytes, not {len(namespace)}")
    halves = np.frombuffer(namespace, dtype="<u8").astype(np.uint64)
    keys = np.empty((len(ids), 2), dtype="<u8")
    unsigned = ids.astype(np.uint64)
    for half in (0, 1):
        keys[:, half] = mix64(unsigned + halves[half : half + 1])
    return keys.view(np.uint8).reshape(len(ids), 16)


def mix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's step and finaliser, a bijection of 64-bit values; arithmetic wraps."""
    z = values + np.array([0x9E3779B97F4A7C15], dtype=np.uint64)
    z = (z ^ (z >> np.uint64(30))) * np.array([0xBF58476D1CE4E5B9], dtype=np.uint64)
    z = (z ^ (z >> np.uint64(27))) * np.array([0x94D049BB133111EB], dtype=np.uint64)
    return z ^ (z >> np.uint64(31))


def seconds(microseconds: float) -> float:
    """A time in whole microseconds as seconds; exact both ways up to 2**52 microseconds."""
    return round(microseconds) / 1e6


class TurnCounter:
    """Numbers the turns of each session in the order asked, and finds the turn each one follows."""

    def __init__(self) -> None:
        self._next: dict[str, int] = {}
        self._last: dict[tuple[str, str], int] = {}

    def last(self, session: str, agent: str) -> int:
        """The last turn of this agent, or NO_PARENT."""
        return self._last.get((session, agent), NO_PARENT)

    def take(self, session: str, agent: str, turn: int | None = None) -> tuple[int, int]:
        """(turn, parent) of the next request; a turn the trace states itself is kept."""
        if not session:
            return (0 if turn is None else turn), NO_PARENT
        number = self._next.get(session, 0) if turn is None else turn
        parent = self._last.get((session, agent), self.last(session, MAIN))
        self._last[session, agent] = number
        self._next[session] = max(self._next.get(session, 0), number + 1)
        return number, parent
