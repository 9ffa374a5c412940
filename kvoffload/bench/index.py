"""`kvoffload bench index`, the native half: match, pins and memory, beside a table that does nothing else."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvoffload import _C
from kvoffload.bench.rows import Limit, Row, at_most, compare, constant, each
from kvoffload.bench.timing import ROUNDS, timed
from kvoffload.index import Index, Matcher

SLOTS = 1024
TOKENS = 16
SMALL, LARGE = 62_500, 1_000_000
"""Keys: a million tokens at 16 a block, and sixteen million."""

MATCH_NS = {SMALL: 30.0, LARGE: 60.0}
PIN_NS = 50.0
KEY_BYTES = 80.0
"""Targets by key, those of design.md."""

STEP = 512
"""Keys a call: a chunk of 8,192 tokens."""

GROUPS = ((0, 1, 0), (0, 4, 0), (1, 1, 127), (2, 16, 0))
"""Full in blocks of 16 and of 64 tokens, a window of 128 tokens, a state every 256: as Index takes them."""

GROUPS_NS = 100.0
AGAIN_US = 10.0
"""Per base block of a first match over GROUPS; of the same match again."""

Keys = NDArray[np.uint8]


def bench_match(sizes: Sequence[int] = (SMALL, LARGE), rounds: int = ROUNDS) -> Iterator[Row]:
    """Rows of cold matches, pins and memory. sizes: keys in the index, all of one chain."""
    for count in sizes:
        keys = random_keys(count)
        index = _filled(keys)
        memory = index.memory_bytes() / count
        table = _C.PlainTable(keys)
        yield from compare(
            f"match, {count:,} keys",
            each(count, "key"),
            partial(_match, index, keys),
            [
                Limit("plain table", timed(partial(table.find, keys))),
                Limit("Python dict", _dict_lookups(keys)),
            ],
            rounds,
            at_most(MATCH_NS[count]) if count in MATCH_NS else None,
        )
        yield from compare(
            f"pin + unpin, {count:,} keys",
            each(count, "key"),
            partial(_pin, index, keys, np.arange(count, dtype=np.int32)),
            [Limit("plain table", timed(partial(table.pin_unpin, keys)))],
            rounds,
            at_most(PIN_NS) if count == SMALL else None,
        )
        yield constant(f"memory, {count:,} keys", "B/key", memory, at_most(KEY_BYTES))


def bench_match_groups(others: Sequence[int] = (0, LARGE), rounds: int = ROUNDS) -> Iterator[Row]:
    """Rows of matches of a million tokens over four groups. others: keys of other chains per group beside it."""
    keys = random_keys(SMALL // 16 * 16)
    for count in others:
        index = _filled_groups(keys, count)
        name = f"match, {len(GROUPS)} groups, {len(keys) * TOKENS:,} tokens"
        if count:
            name += f", {count:,} keys each"
        yield from compare(
            name,
            each(len(keys), "block"),
            partial(_match, index, keys),
            [Limit("plain table", timed(partial(_C.PlainTable(keys).find, keys)))],
            rounds,
            None if count else at_most(GROUPS_NS),
        )
        if not count:
            matcher = Matcher(index)
            matcher.update(keys, 0)
            again = min(timed(lambda: matcher.update(keys, 0))() for _ in range(rounds))  # noqa: B023
            yield constant("the same match again", "us", again * 1e6, at_most(AGAIN_US))


def _filled_groups(keys: Keys, others: int) -> Index:
    """An index that holds one chain in every group, and beside it so many keys per group of other chains."""
    sizes = [len(keys) // multiple for _, multiple, _ in GROUPS]
    slabs = sum(-(-(size + others) // SLOTS) + 1 for size in sizes)
    index = Index(GROUPS, TOKENS, [SLOTS] * len(GROUPS), slabs, 0, 0)
    most = max(multiple for _, multiple, _ in GROUPS)
    chains = [random_keys(len(keys) * most, seed) for seed in range(1, 1 + others // len(keys))]
    for chain in [keys, *chains]:
        segment = index.open_segment(0.0)
        ends = sizes if chain is keys else [min(len(keys), others)] * len(GROUPS)
        pages = [np.zeros(end, np.int32) for end in ends]
        copies, *_ = index.offer(segment, chain, [0] * len(GROUPS), ends, pages)
        if len(copies) != sum(ends):
            raise RuntimeError(f"the index took {len(copies)} of {sum(ends)} keys")
        index.complete_store(copies, None)
        index.close_segment(segment, 0, 0.0)
    return index


def random_keys(count: int, seed: int = 0) -> Keys:
    """(count, 16) keys, all different for any sensible count."""
    return np.frombuffer(random.Random(seed).randbytes(16 * count), np.uint8).reshape(count, 16)


def _filled(keys: Keys) -> Index:
    """An index that holds one stored chain."""
    index = Index([(0, 1, 0)], TOKENS, [SLOTS], -(-len(keys) // SLOTS), 1, 0)
    segment, pages = index.open_segment(0.0), [np.arange(len(keys), dtype=np.int32)]
    for begin in range(0, len(keys), STEP):
        copies, *_ = index.offer(segment, keys, [begin], [min(begin + STEP, len(keys))], pages)
        index.complete_store(copies, None)
    index.close_segment(segment, 0, 0.0)
    return index


def _match(index: Index, keys: Keys) -> float:
    """A matcher that knows nothing yet: every key is looked up."""
    begin = time.thread_time()
    boundary = Matcher(index).update(keys, 0)[0]
    seconds = time.thread_time() - begin
    if boundary != len(keys) * TOKENS:
        raise RuntimeError(f"{boundary} of {len(keys) * TOKENS} tokens matched")
    return seconds


def _pin(index: Index, keys: Keys, pages: NDArray[np.int32]) -> float:
    """A load begins and ends: every key is looked up and pinned, and unpinned by its copy."""
    segment = index.open_segment(0.0)
    begin = time.thread_time()
    copies, _ = index.begin_load(segment, keys, [0], [len(keys)], [pages], 0)
    index.complete_load(copies, None)
    seconds = time.thread_time() - begin
    index.close_segment(segment, 0, 0.0)
    if len(copies) != len(keys):
        raise RuntimeError(f"{len(copies)} of {len(keys)} keys were loaded")
    return seconds


def _dict_lookups(keys: Keys) -> Callable[[], float]:
    """The least that a block manager in Python does."""
    rows = [row.tobytes() for row in keys]
    table = {key: number for number, key in enumerate(rows)}

    def look() -> int:
        found = 0
        for key in rows:
            if key not in table:
                break
            found += 1
        return found

    return timed(look)
