"""INCR rows of docs/cases.md on the reference engine: only what is new is stored, only what is confirmed."""

from __future__ import annotations

import numpy as np
import pytest
from engine_world import counting_engine, feed, forget, request, stored, until

from kvoffload.connector import Scheduled
from kvoffload.messages import JobKind
from kvoffload.requests import RequestInfo
from kvoffload.testing.engine import Limits, Sequence
from kvoffload.testing.engine.drive import engine_over, settle
from kvoffload.testing.engine.sequence import random_keys
from kvoffload.testing.faults import Counting, Op
from kvoffload.testing.rig import Keys, Rig, Sizes, one_group

GUARD = 0xA5


def test_INCR_01_a_load_leaves_alone_what_the_device_holds():
    """The device holds 160 tokens and host 384, blocks of 32: pages of tokens [160, 384) alone are written."""
    count = Counting()
    with Rig(Sizes(pages=32, host=8), layout=one_group(32), copy_faults=[count]) as rig:
        engine = engine_over(rig)
        stored(engine, 1, 385, size=32)
        engine.add(request(2, 161, size=32))
        settle(engine)
        before = count.copies(Op.TO_DEVICE)
        forget(engine)
        head = request(3, 161, size=32)
        held = engine.device.pools[0].allocate(5)
        engine.device.pools[0].publish(held, head.all_keys[:5])
        for array in rig.memory[0].arrays[0]:
            array[:] = GUARD
        seq = request(4, 385, size=32)
        engine.add(seq)
        engine.device.attend = lambda *args: None
        until(engine, lambda: seq.loaded)
        assert (seq.hbm, seq.loaded, count.copies(Op.TO_DEVICE) - before) == (160, 224, 7)
        for array in rig.memory[0].arrays[0]:
            assert (array[held] == GUARD).all()
        assert rig.mismatches(Keys(seq.all_keys), [np.asarray(seq.table[0])], 5, 12) == 0


def test_INCR_02_one_store_per_border():
    """Blocks of 128 tokens, decoded one by one to 512 and beyond: stores at 128, 256, 384 and 512, of a block each."""
    engine, _, _ = counting_engine(pages=8, size=128)
    seq = request(1, 100, 450, size=128)
    engine.add(seq)
    stores, inner = [], engine.scheduler.step

    def watched(scheduled, now):
        plans = inner(scheduled, now)
        stores.extend((scheduled[0].computed, len(j.copies)) for j in plans.jobs if j.kind is JobKind.STORE)
        return plans

    engine.scheduler.step = watched
    settle(engine)
    assert stores == [(128, 1), (256, 1), (384, 1), (512, 1)]


def test_INCR_04_what_is_found_is_loaded():
    """200 tokens, blocks of 64: 192 are offered, and 192 loaded."""
    with Rig(Sizes(pages=16), layout=one_group(64)) as rig:
        engine = engine_over(rig)
        stored(engine, 1, 200, 64, size=64)
        seq = request(2, 200, size=64)
        assert engine.scheduler.match(seq, 0).tokens == 192
        engine.add(seq)
        settle(engine)
        assert (seq.loaded, engine.device.mismatches) == (192, 0)


def test_INCR_05_a_full_hit_leaves_a_token_to_compute():
    """A prompt of exactly 4 stored blocks: all but the last one are offered, and block 4 keeps its key and place."""
    count = Counting()
    with Rig(Sizes(pages=16), copy_faults=[count]) as rig:
        engine = engine_over(rig)
        first = stored(engine, 1, 64)
        assert engine.scheduler.match(request(2, 64), 0).tokens == 48
        again = request(3, 64)
        engine.add(again)
        settle(engine)
        assert (again.loaded, again.made, again.generated) == (48, 16, 1)
        assert (again.chain.keys == first.all_keys[:4]).all()
        assert count.copies(Op.TO_HOST, first.all_keys[3].tobytes()) == 1
        assert rig.match(Keys(first.all_keys[:4])).boundary == 64


def test_INCR_06_placeholders_make_no_block():
    """Blocks of 16, 30 tokens confirmed and 4 scheduled ones not made yet: one block now, the second after 32, under
    the key of the real tokens."""
    engine, planner, _ = counting_engine(pages=8)
    real, guess = random_keys(2, 1), random_keys(2, 2)
    seq = Sequence(RequestInfo(1), real, 16, 30, 10)
    pages = [np.arange(4, dtype=np.int32)]
    feed(engine, Scheduled(seq, 34, pages))
    assert planner.counters["stored_host"] == 1
    seq.advance(2)
    feed(engine, Scheduled(seq, 36, pages))
    assert planner.counters["stored_host"] == 2
    for keys, expected in ((real, 32), (guess, 0)):
        other = Sequence(RequestInfo(int(expected) + 5), keys, 16, 40, 1)
        assert engine.scheduler.match(other, 0).tokens == expected


@pytest.mark.parametrize("slow", [False, True])
def test_INCR_08_a_long_prompt_is_stored_whole(slow):
    """60,000 tokens, 4,096 a step, blocks of 16, then 40 of answer: all 3,752 full blocks can be found. Also where no
    copy ends before the prompt is computed."""
    engine, planner, mover = counting_engine(pages=4000, limits=Limits(tokens=4096))
    seq = request(1, 60_000, 40)
    engine.add(seq)
    mover.held = slow
    until(engine, lambda: seq.generated)
    mover.held = False
    settle(engine)
    assert planner.counters["stored_host"] == 3752
    assert engine.scheduler.match(request(2, 60_000, 200), 0).tokens == 59_984
    longer = Sequence(RequestInfo(3), seq.all_keys, 16, 60_039, 1)
    assert engine.scheduler.match(longer, 0).tokens == 60_032


def test_INCR_09_a_preempted_request_finds_its_answer():
    """100 tokens of prompt and 60 of answer, blocks of 16: after the preemption 144 tokens are loaded."""
    with Rig(Sizes(pages=16)) as rig:
        engine = engine_over(rig, cached=False)
        seq = request(1, 100, 80)
        engine.add(seq)
        until(engine, lambda: seq.generated == 60)
        rig.local.drain()
        engine.preempt(seq)
        assert engine.scheduler.match(seq, 0).tokens == 144
        settle(engine)
        assert (seq.loaded, seq.generated, engine.device.mismatches) == (144, 80, 0)
        rig.check()


def test_INCR_10_a_turn_writes_what_is_new(tmp_path):
    """A conversation of 2,000 tokens and 4 turns of 500 more: each turn writes its new full blocks, to host and to
    disk, and a repeated turn writes nothing."""
    count = Counting()
    sizes = Sizes(host=40, disk=40, pages=300)
    with Rig(sizes, path=tmp_path, copy_faults=[count], tier_faults=[count]) as rig:
        engine = engine_over(rig)
        written = []
        for number, prompt in enumerate((2000, 2500, 3000, 3500, 4000, 4000)):
            before = count.copies(Op.TO_HOST), count.copies(Op.WRITE)
            engine.add(Sequence(RequestInfo(number), random_keys(251, 1), 16, prompt, 1))
            settle(engine)
            forget(engine)
            rig.local.drain()
            written.append((count.copies(Op.TO_HOST) - before[0], count.copies(Op.WRITE) - before[1]))
        assert written == [(125, 125), (31, 31), (31, 31), (31, 31), (32, 32), (0, 0)]
        assert engine.device.mismatches == 0
