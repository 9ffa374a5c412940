"""New blocks, growth and working sets of a session replay."""

from __future__ import annotations

import random

from kvoffload.replay.working_set import BlockLog
from kvoffload.testing.engine.sequence import random_keys


def test_counts_by_hand():
    """Three requests, one of them before the window: what it touched is known, and not counted."""
    keys, log = random_keys(100, 1), BlockLog()
    log.add(1.0, keys[:10])
    log.mark()
    log.add(5.0, keys[:20])
    log.add(70.0, keys[10:40])

    assert log.blocks() == 50
    assert log.new_by_request().tolist() == [10, 20]
    assert log.growth() == ((5.0, 10), (70.0, 30))
    assert log.working_sets((60, 300)) == {60: 30, 300: 40}


def test_nothing_is_nothing():
    """A log without requests, and one whose window is empty."""
    log = BlockLog()
    assert (log.blocks(), log.growth(), log.working_sets()) == (0, (), {60: 0, 300: 0, 900: 0})
    log.add(1.0, random_keys(3, 1))
    log.mark()
    assert (log.blocks(), log.new_by_request().tolist(), log.growth()) == (0, [], ())


def test_against_sets():
    """Random requests: the same counts as with sets of keys."""
    rng, log, keys = random.Random(1), BlockLog(), random_keys(300, 2)
    seen, new, spans, now = set(), [], {}, 0.0
    for _ in range(200):
        now += rng.random() * 20
        begin = rng.randrange(280)
        part = keys[begin : begin + rng.randrange(20)]
        rows = {row.tobytes() for row in part}
        log.add(now, part)
        new.append(len(rows - seen))
        seen |= rows
        spans.setdefault(now // 60, set()).update(rows)

    assert log.new_by_request().tolist() == new
    assert log.growth()[-1] == (now, len(seen))
    assert log.working_sets((60,)) == {60: max(map(len, spans.values()))}
