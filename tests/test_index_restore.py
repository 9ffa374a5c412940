"""Start from the records found on disk: what is taken, in which order, and what is passed over."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvoffload.index import Index, Matcher
from kvoffload.messages import RECORD_DTYPE

LAYOUT = [(0, 1, 0), (2, 2, 0)]


def records(rows):
    """Rows of (key, seq, slot, depth, parent, group)."""
    out = np.zeros(len(rows), RECORD_DTYPE)
    for row, (key, *rest) in zip(out, rows, strict=True):
        row["key"] = np.frombuffer(key, np.uint8)
        for name, value in zip(("seq", "slot", "depth", "parent", "group"), rest, strict=True):
            row[name] = value
    return out


def forest(seed):
    """Random records of two groups: prefix trees whose sequence numbers say nothing about depth."""
    rng = random.Random(seed)
    rows, slots = [], {0: iter(range(10**6)), 1: iter(range(10**6))}
    for group in (0, 1):
        known = [(b"", -1)]
        for _ in range(rng.randint(1, 40)):
            parent, depth = rng.choice(known[-8:])
            key = rng.randbytes(16)
            n = next(slots[group])
            slot = (2 * (n // 4) + group) << 16 | n % 4
            rows.append(
                (key, rng.randint(1, 30), slot, depth + 1, int.from_bytes(parent[:4], "little"), group)
            )
            known.append((key, depth + 1))
    rng.shuffle(rows)
    return rows


def effective(rows):
    """Key -> the highest sequence number among the block and everything that continues it."""
    best = {key: seq for key, seq, *_ in rows}
    for key, _, _, depth, parent, group in sorted(rows, key=lambda r: -r[3]):
        for other, *_, other_depth, _, other_group in rows:
            if (other_group, other_depth, int.from_bytes(other[:4], "little")) == (group, depth - 1, parent):
                best[other] = max(best[other], best[key])
    return best


@pytest.mark.parametrize("seed", range(30))
def test_order_is_that_of_the_last_use(seed):
    """Blocks come back oldest first, continuations before what they continue, and later numbers are higher."""
    rows = forest(seed)
    index = Index(LAYOUT, 1, [4, 4], 4, 0, 64)
    assert index.restore(records(rows)) == len(rows)
    index.check_integrity()
    order, ends = effective(rows), {r[0]: (r[3] + 1) * LAYOUT[r[5]][1] for r in rows}

    entries = index.entries()
    keys = [e["key"].tobytes() for e in entries]

    assert sorted(keys) == sorted(order)
    assert [(order[k], -ends[k]) for k in keys] == sorted((order[k], -ends[k]) for k in keys)
    assert entries["order"].tolist() == [order[k] for k in keys]
    assert set(entries["pins"]) == {0}
    index.open_segment(0.0)
    keys = np.frombuffer(random.Random(seed).randbytes(16), np.uint8).reshape(1, 16)
    copies, *_ = index.offer(index.open_segment(0.0), keys, [0, 0], [1, 0], [np.zeros(1, np.int32)] * 2)
    assert copies["seq"][0] > max(order.values())


def test_the_highest_sequence_wins():
    """Of records with one key, or with one slot, the latest is taken; slots out of range are passed over."""
    a, b, c, d = (bytes([i]) * 16 for i in range(4))
    rows = [
        (a, 5, 0, 0, 0, 0),
        (a, 9, 1, 0, 0, 0),
        (b, 3, 2, 0, 0, 0),
        (c, 4, 2, 0, 0, 0),
        (d, 7, 99 << 16, 0, 0, 0),
        (d, 6, 3 | 4, 0, 0, 0),
        (d, 6, -1, 0, 0, 0),
        (d, 6, 3, -1, 0, 0),
        (d, 6, 3, 0, 0, 2),
        (d, 6, 3, 0, 0, 1),
    ]
    index = Index(LAYOUT, 1, [4, 4], 1, 0, 2)

    assert index.restore(records(rows)) == 2
    index.check_integrity()
    assert {(e["key"].tobytes(), int(e["disk"])) for e in index.entries()} == {(a, 1), (c, 2)}


def test_restored_blocks_are_matched_and_loaded():
    """A chain found on disk is restorable from there at once; nothing can be restored over it."""
    keys = np.frombuffer(random.Random(0).randbytes(16 * 3), np.uint8).reshape(-1, 16)
    parents = [0, *(int.from_bytes(k[:4].tobytes(), "little") for k in keys[:2])]
    rows = records([(k.tobytes(), 1, i, i, p, 0) for i, (k, p) in enumerate(zip(keys, parents, strict=True))])
    index = Index([(0, 1, 0)], 1, [4], 1, 0, 1)
    matcher = Matcher(index)
    assert matcher.update(keys, 0)[0] == 0
    assert index.restore(rows) == 3

    assert matcher.update(keys, 0) == (3, 3, 0, 3, False)
    copies, _ = index.begin_load(index.open_segment(0.0), keys, [0], [3], [np.zeros(3, np.int32)], 0)
    assert copies["disk"].tolist() == [0, 1, 2]
    assert copies["parent"].tolist() == parents
    index.complete_load(copies, None)
    with pytest.raises(ValueError, match="stored already"):
        index.restore(rows)
