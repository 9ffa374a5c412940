"""What naming blocks costs beside the hash library alone: a cold chain, and one block at a time.

The limit is the shortest loop over the library that makes the same keys: one call per block, from tokens that lie
ready as an array. The chain checks the tokens, keeps them, and makes the array of keys besides.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvoffload.bench.timing import Timing, interleaved
from kvoffload.keys import HASHES, Chain, Namespace

TARGET = 1.15
"""A cold chain is to take no longer than this times the limit."""

VOCABULARY = 200_000
SINGLE_BLOCKS = 2000


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison: ours beside the limit of the same run."""

    name: str
    blocks: int
    ours: Timing
    limit: Timing

    @property
    def ratio(self) -> float:
        """Ours over the limit, medians."""
        return self.ours.median / self.limit.median


def run(tokens: int = 1_000_000, block: int = 16, repeats: int = 7) -> Iterator[Row]:
    """Measure every hash, cold and block by block. REQUIRES: tokens >= block."""
    source = random.Random(0)
    ids = np.array(array("I", (source.randrange(VOCABULARY) for _ in range(tokens))))
    for name in HASHES:
        namespace = Namespace("bench", block, hash=name)
        things = {"ours": partial(_cold, namespace, ids), "limit": partial(_bare, namespace, ids)}
        if things["ours"]() != things["limit"]():
            raise RuntimeError(f"{name}: the two loops that are compared make different keys")
        times = interleaved(things, repeats)
        yield Row(f"{name} cold", tokens // block, times["ours"], times["limit"])
        few = ids[: min(SINGLE_BLOCKS * block, tokens // block * block)]
        times = interleaved(
            {"ours": partial(_single, namespace, few), "limit": partial(_bare, namespace, few)}, repeats
        )
        yield Row(f"{name} one block a call", len(few) // block, times["ours"], times["limit"])


def report(rows: Iterator[Row]) -> Iterator[str]:
    """The rows as lines of a table, as they come."""
    yield f"{'':26}{'blocks':>8}{'ours ms':>10}{'spread':>8}{'limit ms':>10}{'spread':>8}{'ratio':>7}{'ns/block':>10}"
    for row in rows:
        numbers = f"{1e3 * row.ours.median:10.2f}{row.ours.spread:8.0%}"
        numbers += f"{1e3 * row.limit.median:10.2f}{row.limit.spread:8.0%}"
        per_block = 1e9 * row.ours.median / row.blocks
        yield f"{row.name:26}{row.blocks:8}{numbers}{row.ratio:7.2f}{per_block:10.0f}"
    yield f"limit: a bare loop over the library, same run, in turns; target for cold: ratio <= {TARGET}"


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


def main() -> None:
    """Run and print with the defaults."""
    for line in report(run()):
        print(line)


if __name__ == "__main__":
    main()
