"""`kvoffload bench index`: what a decision costs per key, beside a plain hash table on the same keys."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from kvoffload._C import plain_table_ns
from kvoffload.index import Index, Matcher

CALL = 512
"""Keys of one offer."""

CHAIN = 62_500
"""Keys of one sequence: a million tokens at 16 to a block."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. Low and high are the extremes over repetitions; peer is None where there is none."""

    what: str
    keys: int
    unit: str
    median: float
    low: float
    high: float
    peer: float | None = None
    peer_name: str = ""


def run(keys: int = 1_000_000, repeats: int = 7) -> list[Row]:
    """Measures at one chain and at `keys` keys. Takes about 20 microseconds per key and repetition."""
    rows: list[Row] = []
    for total in sorted({min(CHAIN, keys), keys}):
        chains = [_chain(min(CHAIN, total - first), first) for first in range(0, total, CHAIN)]
        peers = [median(times) for times in plain_table_ns(np.concatenate(chains), repeats)]
        rows += _measure(chains, total, repeats, peers)
    return [*rows, _one_block(repeats), _repeated_match(repeats)]


def _chain(n: int, seed: int) -> NDArray[np.uint8]:
    return np.frombuffer(random.Random(seed).randbytes(16 * n), np.uint8).reshape(-1, 16)


def _index(slots: int) -> Index:
    return Index([(0, 1, 0)], 16, [64], -(-slots // 64), 0, 0, host_slots=slots)


def _timed(keys: int, call: Callable[[], object]) -> float:
    """Nanoseconds per key."""
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / keys


def _row(what: str, keys: int, unit: str, values: list[float], peer: tuple[float, str] | None = None) -> Row:
    cost, name = peer or (None, "")
    return Row(what, keys, unit, median(values), min(values), max(values), cost, name)


def _store(index: Index, chain: NDArray[np.uint8]) -> None:
    """Offers the chain CALL keys at a time, each at once complete."""
    segment, pages = index.open_segment(0.0), [np.arange(len(chain), dtype=np.int32)]
    for begin in range(0, len(chain), CALL):
        copies, *_ = index.offer(segment, chain, [begin], [min(begin + CALL, len(chain))], pages)
        index.complete_store(copies, None)
    index.close_segment(segment, 0, 0.0)


def _load(index: Index, chain: NDArray[np.uint8]) -> None:
    """Pins the whole chain for a new request and lets it go."""
    segment, pages = index.open_segment(0.0), [np.arange(len(chain), dtype=np.int32)]
    copies, _ = index.begin_load(segment, chain, [0], [len(chain)], pages, 0)
    index.complete_load(copies, None)
    index.close_segment(segment, 0, 0.0)


def _measure(chains: list[NDArray[np.uint8]], total: int, repeats: int, peers: list[float]) -> Iterator[Row]:
    insert, find, pin = peers
    stores, index = [], _index(total)
    for _ in range(repeats):
        index = _index(total)
        stores += [_timed(len(c), lambda c=c, i=index: _store(i, c)) for c in chains]  # type: ignore[misc]
    yield _row(f"offer + complete, {CALL} a call", total, "ns/key", stores, (insert, "plain insert"))
    yield _row("memory", total, "B/key", [index.memory_bytes() / total])
    matches = [
        _timed(len(c), lambda c=c: Matcher(index).update(c, 0))  # type: ignore[misc]
        for _ in range(repeats)
        for c in chains
    ]
    yield _row("match", total, "ns/key", matches, (find, "plain find"))
    loads = [_timed(len(c), lambda c=c: _load(index, c)) for _ in range(repeats) for c in chains]  # type: ignore[misc]
    yield _row("pin + unpin", total, "ns/key", loads, (pin, "plain find twice"))
    fresh = [_chain(len(c), total + i) for i, c in enumerate(chains)]
    evicting = [_timed(len(c), lambda c=c: _store(index, c)) for c in fresh]  # type: ignore[misc]
    yield _row(f"offer + complete, {CALL} a call, evicting", total, "ns/key", evicting)


def _one_block(repeats: int) -> Row:
    """Offer and completion of a single block: what a decode step costs."""
    chain = _chain(200 * repeats, 1)
    index, pages = _index(len(chain)), [np.arange(len(chain), dtype=np.int32)]
    segment = index.open_segment(0.0)

    def step(i: int) -> None:
        index.complete_store(index.offer(segment, chain, [i], [i + 1], pages)[0], None)

    times = [_timed(1, lambda i=i: step(i)) / 1000 for i in range(len(chain))]  # type: ignore[misc]
    return _row("offer + complete, one block", len(chain), "us/call", times)


def _repeated_match(repeats: int) -> Row:
    """What an engine pays that asks again for a waiting request."""
    chain = _chain(CHAIN, 2)
    index = _index(CHAIN)
    _store(index, chain)
    matcher = Matcher(index)
    matcher.update(chain, 0)
    times = [_timed(1, lambda: matcher.update(chain, 0)) / 1000 for _ in range(200 * repeats)]
    return _row("match again, nothing changed", CHAIN, "us/call", times)
