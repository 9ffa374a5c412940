"""The reference engine: it schedules alike with and without a connector, and gives everything back."""

from __future__ import annotations

import pytest

from kvoffload.config import Config
from kvoffload.errors import ConfigError
from kvoffload.layout import CacheGroup, GroupKind, Layout
from kvoffload.messages import Inventory
from kvoffload.planner import ExactSlots, Planner
from kvoffload.requests import RequestInfo
from kvoffload.scheduler_side import PlannerConnector
from kvoffload.testing.engine import Device, Engine, Limits, NullConnector, Sequence, State
from kvoffload.testing.engine.drive import Traffic, engine_over, play, settle, step, unfinished
from kvoffload.testing.engine.sequence import random_keys
from kvoffload.testing.faults import Gated, Op
from kvoffload.testing.late import LateMover
from kvoffload.testing.pool import PageMemory
from kvoffload.testing.rig import Clock, Rig, Sizes, one_group
from kvoffload.testing.rig import Keys as Chain
from kvoffload.worker_side import MoverConnector


def late_engine(*, ranks=1, failures=0.0, pages=40, host=100, disk=200):
    """An engine over tiers without bytes whose jobs end late."""
    clock, layout = Clock(), one_group()
    planner = Planner(layout, Config(), ranks=ranks, exact=ExactSlots(host, 16, disk))
    scheduler, workers = PlannerConnector(planner), []
    for rank in range(ranks):
        inventory = Inventory((8,), -(-host // 8), 2, -(-disk // 8))
        workers.append(MoverConnector(LateMover(rank, inventory, failures=failures)))
        scheduler.attach(rank, workers[-1].register(()))
    limits = Limits(tokens=128, running=6)
    return Engine(Device(layout, [pages]), scheduler, workers, limits=limits, clock=clock), planner


def drain(engine, planner):
    """Let the last disk writes end."""
    for _ in range(1000):
        if planner.idle and not any(planner.backlog()):
            return
        engine.step()
    raise AssertionError(planner.describe())


@pytest.mark.parametrize("ranks", [1, 2])
def test_ten_thousand_random_requests_leave_nothing(ranks):
    """10,000 requests with aborts, preemptions, resets and failing copies: all end; pages, pins and jobs are back."""
    engine, planner = late_engine(ranks=ranks, failures=0.05)
    free = engine.device.free
    requests = play(engine, Traffic(10_000 // ranks))
    drain(engine, planner)
    planner.check_integrity()

    assert unfinished(requests) == []
    assert engine.totals.preemptions > 100
    assert engine.totals.aborts > 100
    assert engine.totals.failed_loads > 0
    assert (engine.device.free, planner.pinned(), len(planner.requests)) == (free, 0, 0)
    assert (engine.scheduler._live, engine.scheduler._loads, engine.scheduler._holds) == ({}, {}, {})


def test_random_requests_with_bytes(tmp_path):
    """Two ranks, host smaller than the texts, disk, aborts, preemptions, resets: no wrong byte, and nothing is left."""
    sizes = Sizes(host=6, transit=1, disk=40, pages=60)
    with Rig(sizes=sizes, path=tmp_path, ranks=2) as rig:
        engine = engine_over(rig, limits=Limits(tokens=128, running=6))
        free = engine.device.free
        requests = play(engine, Traffic(600, texts=20))
        rig.local.drain()
        rig.check()

        assert unfinished(requests) == []
        assert (engine.device.mismatches, engine.device.free) == (0, free)
        assert sum(seq.loaded for seq in requests) > 0
        assert sum(seq.disk for seq in requests) > 0


def test_the_same_schedule_when_nothing_is_hit():
    """Texts that nobody shares, no prefix cache: the same end at the same time, with and without a connector."""

    def times(engine):
        ended = []
        for number in range(60):
            prompt, output = 20 + 7 * number, 5 + number % 20
            engine.add(Sequence(RequestInfo(number), random_keys(30, number), 16, prompt, output))
            ended += engine.step()
        return [(seq.info.id, round(seq.ended, 6)) for seq in ended + settle(engine)]

    layout, limits = one_group(), Limits(tokens=128, running=6)
    alone = times(Engine(Device(layout, [300], cached=False), NullConnector(), limits=limits))
    with Rig(sizes=Sizes(pages=300)) as rig:
        assert times(engine_over(rig, limits=limits, cached=False)) == alone
        rig.local.drain()
        assert rig.planner.stats().totals["stored_host"] > 100
        rig.check()
    assert len(alone) == 60


def test_groups_of_different_sizes():
    """Two full groups, blocks of 16 and 48 tokens, each with its own pages: hits stop where both have them."""
    groups = (
        CacheGroup(0, GroupKind.FULL, 16, 8192, layers=("a",)),
        CacheGroup(1, GroupKind.FULL, 48, 4096, layers=("b", "c")),
    )
    with Rig(sizes=Sizes(host=20, pages=64), layout=Layout(16, groups)) as rig:
        engine = engine_over(rig)
        text = random_keys(30, 1)
        engine.add(Sequence(RequestInfo(1), text, 16, 330, 4))
        settle(engine)
        engine.device.forget()
        rig.wipe()
        engine.add(Sequence(RequestInfo(2), text, 16, 330, 4))
        (second,) = settle(engine)
        rig.local.drain()
        rig.check()

        assert (second.hbm, second.loaded, engine.device.mismatches) == (0, 288, 0)


def test_decode_preempts_the_last_admitted():
    """Two answers that outgrow the pages together: the later one is preempted, both end with all their tokens."""
    engine = Engine(Device(one_group(), [10]), NullConnector())
    first = Sequence(RequestInfo(1), random_keys(10, 1), 16, 60, 80)
    second = Sequence(RequestInfo(2), random_keys(10, 2), 16, 60, 80)
    engine.add(first)
    engine.add(second)
    ended = settle(engine)

    assert ended == [first, second]
    assert (first.preempted, second.preempted) == (0, 1)
    assert (second.generated, second.computed) == (80, 139)
    assert engine.device.free == 10


def test_ORDER_04_a_store_that_is_held_up_keeps_its_pages_through_a_preemption():
    """A store is held, its request preempted, and another request asks for all pages: it gets none of those that the
    store still reads, and what was stored comes back right."""
    gate = Gated([Op.TO_HOST])
    with Rig(Sizes(pages=12), copy_faults=[gate]) as rig:
        engine = engine_over(rig, cached=False)
        first = Sequence(RequestInfo("first"), random_keys(10, 1), 16, 100, 40)
        engine.add(first)
        engine.step()
        held = first.table[0].tolist()
        engine.preempt(first)
        other = Sequence(RequestInfo("other"), random_keys(10, 2), 16, 60, 3)
        engine.waiting.insert(0, other)
        for _ in range(10):
            step(engine)
        assert other.state is State.ENDED
        assert (len(engine.held), len(held)) == (2, 7)
        gate.release()
        settle(engine, idle_s=0.1)
        rig.local.drain()
        chain = Chain(random_keys(10, 1)[:6])
        assert rig.match(chain).boundary == 96
        assert rig.load(chain)[2] == 0
        assert engine.device.mismatches == 0


def test_what_never_fits_is_refused():
    """A request longer than the device names both numbers."""
    engine = Engine(Device(one_group(), [4]), NullConnector())
    with pytest.raises(ConfigError, match="request 1 has 65 tokens and the device 4 pages"):
        engine.add(Sequence(RequestInfo(1), random_keys(5, 1), 16, 60, 5))


def test_gliding_changes_nothing():
    """Steps that are done at once end every request at the same virtual time, with the same blocks, as one by one."""

    def times(glide):
        engine = Engine(Device(one_group(), [64]), NullConnector())
        for number in range(4):
            engine.add(
                Sequence(RequestInfo(number), random_keys(20, number), 16, 40 + number, 100 + 30 * number)
            )
        ended = []
        while not engine.idle:
            ended += engine.step()
            if glide:
                engine.glide(1e9)
        found = [len(engine.device.pools[0].match(seq.all_keys)) for seq in ended]
        return [(seq.info.id, round(seq.ended, 9)) for seq in ended], engine.totals, found

    slow, fast = times(False), times(True)
    assert slow == fast


def test_wrong_bytes_are_seen():
    """One byte of a page changed behind the engine's back is one mismatch at the end of its request."""
    layout = one_group()
    memory = PageMemory(layout, [8])
    engine = Engine(Device(layout, [8], [memory]), NullConnector())
    seq = Sequence(RequestInfo(1), random_keys(5, 1), 16, 64, 3)
    engine.add(seq)
    engine.step()
    memory.arrays[0][1][seq.table[0][2], 5] ^= 1
    settle(engine)

    assert engine.device.mismatches == 1
    assert "request 1 group 0 block 2" in engine.device.samples[0]
    assert seq.state is State.ENDED
