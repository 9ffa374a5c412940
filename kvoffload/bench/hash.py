"""What naming blocks costs beside the hash library alone: a cold chain, and one block at a time.

The limit is the shortest loop over the library that makes the same keys: one call per block, from tokens that lie
ready as an array. The chain checks the tokens, keeps them, and makes the array of keys besides.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvoffload.bench.rows import MILLISECONDS, Limit, Row, compare, each, ratio_at_most
from kvoffload.bench.timing import ROUNDS, timed
from kvoffload.keys import HASHES, Chain, Namespace

TARGET = 1.15
"""A cold chain is to take no longer than this times the limit."""

VOCABULARY = 200_000
SINGLE_BLOCKS = 2000


def bench_hash(tokens: int = 1_000_000, block: int = 16, rounds: int = ROUNDS) -> Iterator[Row]:
    """Rows of every hash, cold and block by block. REQUIRES: tokens >= block."""
    source = random.Random(0)
    ids = np.array(array("I", (source.randrange(VOCABULARY) for _ in range(tokens))))
    for name in HASHES:
        namespace = Namespace("bench", block, hash=name)
        ours, limit = partial(_cold, namespace, ids), partial(_bare, namespace, ids)
        if ours() != limit():
            raise RuntimeError(f"{name}: the two loops that are compared make different keys")
        yield from compare(
            f"{name}, {tokens:,} tokens at {block}",
            MILLISECONDS,
            timed(ours),
            [Limit("bare loop over the library", timed(limit), ratio_at_most(TARGET))],
            rounds,
        )
        few = ids[: min(SINGLE_BLOCKS * block, tokens // block * block)]
        yield from compare(
            f"{name}, one block a call",
            each(len(few) // block, "block"),
            timed(partial(_single, namespace, few)),
            [Limit("bare loop over the library", timed(partial(_bare, namespace, few)))],
            rounds,
        )


def _cold(namespace: Namespace, ids: NDArray[np.uint32]) -> bytes:
    chain = Chain(namespace)
    chain.extend(ids)
    return chain.keys.tobytes()


def _single(namespace: Namespace, ids: NDArray[np.uint32]) -> None:
    chain, size = Chain(namespace), namespace.tokens_per_block
    for at in range(0, len(ids), size):
        chain.extend(ids[at : at + size])


def _bare(namespace: Namespace, ids: NDArray[np.uint32]) -> bytes:
    """The same keys by the library alone."""
    hasher: Callable[[bytes], hashlib._Hash | xxhash.xxh3_128]
    hasher = hashlib.sha256 if namespace.hash == "sha256" else xxhash.xxh3_128
    data, width = ids.data.cast("B"), 4 * namespace.tokens_per_block
    parent, made = namespace.root, []
    for at in range(0, len(data) - width + 1, width):
        parent = hasher(parent + data[at : at + width]).digest()[:16]
        made.append(parent)
    return b"".join(made)
