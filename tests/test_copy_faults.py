"""The fault wrappers do what they say, around tiers and engines alike; the null twins answer at once."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kvoffload.arena import HostArena
from kvoffload.copying import CpuCopyEngine, Direction, NullCopyEngine
from kvoffload.layout import Region
from kvoffload.messages import Status
from kvoffload.testing.blocks import make_copies, make_key, make_layout
from kvoffload.testing.faults import Counting, Failing, FaultyEngine, FaultyTier, Gated, Op, Slow
from kvoffload.tiers import MemoryTier, NullTier

LAYOUT = make_layout(100)
KEYS = [make_key(n) for n in range(3)]


@pytest.fixture
def arena():
    arena = HostArena(1 << 20, 1, LAYOUT)
    yield arena
    arena.close()


def places():
    return make_copies(0, KEYS, page=range(3), host=range(3), disk=range(3))


def make_engine(arena, *faults):
    pages = np.arange(300, dtype=np.uint8)
    engine = FaultyEngine(CpuCopyEngine(1), *faults)
    engine.register(LAYOUT, ((Region(pages.ctypes.data, 100, 100, 3),),), arena)
    return engine, pages


def test_failing_keys_and_calls(arena):
    """Named keys fail untried, in place; so do all copies of a numbered call; the rest are done."""
    failing = Failing(keys=[KEYS[1]], calls=[3], ops=[Op.WRITE])
    tier = FaultyTier(MemoryTier(LAYOUT, 1 << 20, 1), failing)
    assert tier.write(places(), arena).tolist() == [Status.OK, Status.COPY_FAILED, Status.OK]
    assert tier.read(places(), arena).tolist() == [Status.OK, Status.READ_FAILED, Status.OK]
    failing.keys.clear()
    assert tier.write(places(), arena).tolist() == [Status.OK] * 3
    assert tier.write(places(), arena).tolist() == [Status.COPY_FAILED] * 3
    assert tier.write(places(), arena).tolist() == [Status.OK] * 3


def test_counting(arena):
    """Copies are counted per key and operation, those that fail too."""
    counting = Counting()
    tier = FaultyTier(MemoryTier(LAYOUT, 1 << 20, 1), Failing(keys=KEYS), counting)
    tier.write(places(), arena)
    tier.read(places()[:1], arena)
    tier.read(places()[:2], arena)
    assert [counting.copies(Op.READ, key) for key in KEYS] == [2, 1, 0]
    assert (counting.copies(Op.READ), counting.copies(Op.WRITE), counting.calls(Op.READ)) == (3, 3, 2)


def test_a_gated_tier_waits(arena):
    """A held call reaches the tier only after release."""
    gate, inner = Gated([Op.WRITE]), MemoryTier(LAYOUT, 1 << 20, 1)
    tier = FaultyTier(inner, gate)
    writer = threading.Thread(target=tier.write, args=(places(), arena))
    writer.start()
    assert gate.arrived()
    assert (tier.read(places(), arena) == Status.READ_FAILED).all()
    gate.release()
    writer.join()
    assert (tier.read(places(), arena) == Status.OK).all()


def test_a_gated_engine_does_not_block(arena):
    """A held job moves nothing, answers None, waits out its timeout, and is done after release."""
    gate = Gated()
    engine, pages = make_engine(arena, gate)
    handle = engine.submit(places(), Direction.TO_HOST, None)
    assert engine.query(handle) is None
    assert not engine.wait(handle, 0.01)
    assert not arena.view(0, 1).any()
    gate.release()
    assert engine.wait(handle, 60)
    assert engine.query(handle).tolist() == [Status.OK] * 3
    assert (arena.view(0, 1) == pages[100:200]).all()
    gate.hold()
    assert engine.query(engine.submit(places(), Direction.TO_HOST, None)) is None
    engine.close()


def test_a_slow_and_failing_engine(arena):
    """Faults add up: late, and without the key that fails."""
    engine, pages = make_engine(arena, Slow(0.02), Failing(keys=[KEYS[0]]))
    handle = engine.submit(places(), Direction.TO_HOST, None)
    assert engine.query(handle) is None
    assert engine.wait(handle, 60)
    assert engine.query(handle).tolist() == [Status.COPY_FAILED, Status.OK, Status.OK]
    assert not arena.view(0, 0).any()
    assert (arena.view(0, 2) == pages[200:]).all()
    engine.close()


def test_null_twins(arena):
    """Index-only twins answer OK at once and touch nothing."""
    engine, tier = NullCopyEngine(), NullTier(4)
    engine.register(LAYOUT, ((),), arena)
    handle = engine.submit(places(), Direction.TO_HOST, None)
    assert engine.wait(handle, 0.0)
    assert engine.query(handle).tolist() == [Status.OK] * 3
    with pytest.raises(KeyError):
        engine.query(handle)
    assert (tier.write(places(), arena) == Status.OK).all()
    assert (tier.read(places(), arena) == Status.OK).all()
    assert (tier.slabs, NullTier().slabs, len(tier.records()), tier.healthy, tier.probe()) == (
        4,
        0,
        0,
        True,
        True,
    )
    tier.reset()
    tier.close()
    engine.close()


def test_after_is_none_without_streams(arena):
    """The CPU engine refuses an event that it could not wait for, and copies before registration."""
    with pytest.raises(ValueError, match="after"):
        CpuCopyEngine().submit(places(), Direction.TO_HOST, object())
    with pytest.raises(RuntimeError, match="register"):
        CpuCopyEngine().submit(places(), Direction.TO_HOST, None)
