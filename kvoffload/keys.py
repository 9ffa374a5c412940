"""What a block is called: namespaces, chained hashes, and the growing array of a sequence's keys.

    digest = sha256(canonical msgpack map of the namespace)                          32 bytes
    key[-1] = H(digest)[:16]
    key[i] = H(key[i-1] || tokens of block i as little-endian uint32 || extra[i])[:16]

The token count of a block is part of the namespace, so the hashed bytes split in one way only. `extra[i]` is empty
or one msgpack array of typed records; msgpack prefixes every field with its type and length, so no two sets of
records encode alike. What holds for the whole sequence (adapter, salt) stands in block 0: the chain carries it on.

Two namespaces never share an index or a directory: only inside one namespace do equal keys mean equal bytes.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, TypeAlias

import msgpack
import numpy as np
import xxhash
from numpy.typing import NDArray

from kvoffload.errors import ConfigError

KEY_BYTES = 16
SCHEMA = 1
"""Raised whenever the bytes that are hashed, or the bytes of a stored block, change their meaning."""

TOKEN_LIMIT = 1 << 32
"""Token ids are below this: they are hashed as uint32, never cut."""

Scalar: TypeAlias = int | str | bytes | None
GroupRow: TypeAlias = tuple[Scalar, ...]
Record: TypeAlias = tuple[Scalar, ...]
Tokens: TypeAlias = NDArray[np.integer[Any]] | Sequence[int]
KeyArray: TypeAlias = NDArray[np.uint8]


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:KEY_BYTES]


HASHES: dict[str, Callable[[bytes], bytes]] = {"sha256": _sha256, "xxh3_128": xxhash.xxh3_128_digest}
"""What `Chain.extend` can hash with: bytes -> 16 bytes, one library call. `xxh3_128` is the big-endian canonical
form; it does not resist an adversary, so it is for one tenant that trusts its own prompts."""


@dataclass(frozen=True)
class Namespace:
    """Everything beside tokens that changes the bytes of a block, or who may read them.

    groups: one row per cache group, equal on all ranks: whatever fixes the bytes of its blocks (kind, tokens per
        block, lookback, heads, head size, layers).
    ranks: the rank grid, for example (tensor, pipeline); a block written by one grid is never read by another.
    hash: a name in HASHES, or a name of the engine's own algorithm, for example "vllm:sha256_cbor".
    """

    model_id: str
    tokens_per_block: int
    weights_revision: str = ""
    dtype: str = ""
    groups: tuple[GroupRow, ...] = ()
    ranks: tuple[int, ...] = (1,)
    tenant: str = ""
    hash: str = "sha256"
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        if self.tokens_per_block < 1:
            raise ConfigError(f"tokens_per_block is {self.tokens_per_block}; it must be at least 1")
        if not self.hash:
            raise ConfigError(
                f"hash is empty; use one of {', '.join(HASHES)} or the engine's name for its own"
            )

    @cached_property
    def canonical(self) -> bytes:
        """The msgpack map that is hashed: field names in order of their bytes, tuples as arrays."""
        body = {name: self.__dict__[name] for name in sorted(f.name for f in fields(self))}
        return msgpack.packb(body, use_bin_type=True)

    @classmethod
    def from_canonical(cls, data: bytes) -> Namespace:
        """The namespace whose `canonical` is `data`, as kept in manifests. Raises TypeError on other fields."""
        body = msgpack.unpackb(data, raw=False, use_list=False)
        return cls(**body)

    @cached_property
    def digest(self) -> bytes:
        """32 bytes."""
        return hashlib.sha256(self.canonical).digest()

    @property
    def hex(self) -> str:
        """The digest in hexadecimal: the name of the namespace's directory."""
        return self.digest.hex()

    @cached_property
    def root(self) -> bytes:
        """key[-1]. For an engine's algorithm nothing is chained on it."""
        return HASHES.get(self.hash, _sha256)(self.digest)


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter (LoRA) that the whole sequence runs with. A new revision has other bytes."""

    name: str
    revision: str = ""


@dataclass(frozen=True, slots=True)
class Media:
    """A picture, sound or embedding at the tokens [begin, end) of the sequence.

    id: the digest of the content, whole: two contents never share one.
    """

    id: bytes | str
    begin: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.begin < self.end:
            raise ValueError(f"media at tokens [{self.begin}, {self.end}); it needs 0 <= begin < end")


class Chain:
    """The keys of one sequence, growing as it does.

    Fed with tokens (`extend`) where the namespace's hash is in HASHES, with the engine's hashes (`append`) otherwise.
    Thread: one at a time. Lifetime: an array that `keys` or `token_ids` returned keeps its memory and its content
    for ever; a longer chain is a new view, of the same memory until that is full.
    """

    def __init__(
        self, namespace: Namespace, *, adapter: Adapter | None = None, salt: str | None = None
    ) -> None:
        self.namespace = namespace
        self._hash = HASHES.get(namespace.hash)
        if self._hash is None and (adapter or salt is not None):
            raise ValueError(f"{namespace.hash} hashes are the engine's; adapter and salt must be in them")
        self._first: list[Record] = []
        if adapter is not None:
            self._first.append(("adapter", adapter.name, adapter.revision))
        if salt is not None:
            self._first.append(("salt", salt))
        self._media: list[Media] = []
        self._rows = np.empty((0, KEY_BYTES), np.uint8)
        self._ids = np.empty(0, np.dtype("<u4"))
        self._blocks = 0
        self._tokens = 0

    @classmethod
    def from_engine(cls, hashes: Sequence[bytes] | KeyArray, namespace: Namespace) -> Chain:
        """A chain of hashes that the engine made by the algorithm that `namespace.hash` names."""
        chain = cls(namespace)
        chain.append(hashes)
        return chain

    @property
    def blocks(self) -> int:
        """Complete blocks: rows of `keys`."""
        return self._blocks

    @property
    def tokens(self) -> int:
        """Tokens fed so far, the incomplete block at the end included."""
        return self._tokens

    @property
    def keys(self) -> KeyArray:
        """(blocks, 16) uint8, C-contiguous, read-only."""
        return _read_only(self._rows[: self._blocks])

    @property
    def token_ids(self) -> NDArray[np.uint32]:
        """(tokens,) uint32, read-only; empty for a chain of the engine's hashes."""
        return _read_only(self._ids[: self._tokens])

    def extend(self, tokens: Tokens, media: Sequence[Media] = ()) -> int:
        """Feed tokens [tokens, tokens + n) and hash the blocks that they complete; the number of these.

        media: lies in blocks not hashed yet; it may end beyond the tokens given so far. A refused call changes
        nothing. Raises ValueError for a token outside [0, 2**32).
        """
        if self._hash is None:
            raise ValueError(f"{self.namespace.hash} hashes come from the engine; use append")
        size = self.namespace.tokens_per_block
        ids = _token_array(tokens)
        late = next((m for m in media if m.begin < self._blocks * size), None)
        if late is not None:
            raise ValueError(f"media at token {late.begin}; {self._blocks * size} tokens are hashed already")
        self._media.extend(media)
        self._ids = _grown(self._ids, self._tokens, ids)
        self._tokens += len(ids)

        begin, end = self._blocks, self._tokens // size
        if begin == end:
            return 0
        data = self._ids[begin * size : end * size].data.cast("B")
        parent = self._rows[begin - 1].tobytes() if begin else self.namespace.root
        made = _hash_blocks(self._hash, parent, data, 4 * size, self._extras(begin, end))
        self._push(np.frombuffer(b"".join(made), np.uint8).reshape(-1, KEY_BYTES))
        return end - begin

    def append(self, hashes: Sequence[bytes] | KeyArray) -> int:
        """Take the engine's hashes of the next blocks, cut to 16 bytes each; the number of these."""
        if self._hash is not None:
            raise ValueError(f"a chain of {self.namespace.hash} is fed with tokens; use extend")
        self._push(_engine_rows(hashes))
        self._tokens = self._blocks * self.namespace.tokens_per_block
        return len(hashes)

    def _push(self, rows: KeyArray) -> None:
        self._rows = _grown(self._rows, self._blocks, rows)
        self._blocks += len(rows)

    def _extras(self, begin: int, end: int) -> dict[int, bytes]:
        """extra[i] by i - begin, for the blocks [begin, end) that have one. Forgets media that ends before `end`."""
        size = self.namespace.tokens_per_block
        records: dict[int, list[Record]] = {0: list(self._first)} if begin == 0 and self._first else {}
        for m in sorted(self._media, key=lambda m: (m.begin, m.end)):
            for block in range(max(m.begin // size, begin), min(-(-m.end // size), end)):
                record = ("media", m.id, m.begin - block * size, min(m.end - block * size, size))
                records.setdefault(block - begin, []).append(record)
        self._media = [m for m in self._media if m.end > end * size]
        return {block: msgpack.packb(body, use_bin_type=True) for block, body in records.items()}


def _hash_blocks(
    step: Callable[[bytes], bytes], parent: bytes, data: memoryview, width: int, extras: dict[int, bytes]
) -> list[bytes]:
    """The keys of the blocks in `data`, `width` bytes each. The loop that speed depends on: one call per block."""
    made: list[bytes] = []
    add = made.append
    at = 0
    for special in (*sorted(extras), len(data) // width):
        for (row,) in struct.iter_unpack(f"{width}s", data[at * width : special * width]):
            parent = step(parent + row)
            add(parent)
        if special in extras:
            parent = step(parent + data[special * width : (special + 1) * width] + extras[special])
            add(parent)
        at = special + 1
    return made


def _token_array(tokens: Tokens) -> NDArray[np.uint32]:
    """The tokens as little-endian uint32. Raises ValueError for one that does not fit."""
    if not isinstance(tokens, np.ndarray):
        try:
            return np.frombuffer(array("I", tokens), np.uint32).astype("<u4", copy=False)
        except OverflowError:
            tokens = np.array(tokens, dtype=object)
    elif tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(f"tokens are {tokens.dtype} {tokens.shape}; they must be one row of integers")
    if len(tokens) and tokens.dtype != np.uint32:
        low, high = tokens.min(), tokens.max()
        if low < 0 or high >= TOKEN_LIMIT:
            raise ValueError(f"token {low if low < 0 else high} is outside [0, {TOKEN_LIMIT})")
    return tokens.astype("<u4", copy=False)


def _engine_rows(hashes: Sequence[bytes] | KeyArray) -> KeyArray:
    """(n, 16) uint8: the first 16 bytes of each hash. Raises ValueError where one is shorter or they differ."""
    if not isinstance(hashes, np.ndarray):
        widths = {len(h) for h in hashes} or {KEY_BYTES}
        if len(widths) > 1:
            raise ValueError(f"hashes of {min(widths)} and {max(widths)} bytes; they must be equal")
        hashes = np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, widths.pop() or 1)
    if hashes.ndim != 2 or hashes.dtype != np.uint8 or hashes.shape[1] < KEY_BYTES:
        raise ValueError(f"hashes are {hashes.dtype} {hashes.shape}; they must be (n, >= {KEY_BYTES}) uint8")
    return hashes[:, :KEY_BYTES]


def _grown(buffer: NDArray[Any], used: int, more: NDArray[Any]) -> NDArray[Any]:
    """`buffer` with `more` at [used, used + n): itself while it has room, else a copy of at least twice the size.

    What lies below `used` is never written again, so views of an older buffer stay right.
    """
    need = used + len(more)
    if need > len(buffer):
        bigger = np.empty((max(need, 2 * len(buffer)), *buffer.shape[1:]), buffer.dtype)
        bigger[:used] = buffer[:used]
        buffer = bigger
    buffer[used:need] = more
    return buffer


def _read_only(view: NDArray[Any]) -> NDArray[Any]:
    view.flags.writeable = False
    return view
