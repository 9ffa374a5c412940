"""PlannerConnector beyond the contract: before ranks are there, prefetch, notes of stores, partial loads."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from engine_world import counting_engine, feed, forget, request, stored, until

from kvoffload.config import Config
from kvoffload.connector import Hit, Scheduled
from kvoffload.layout import CacheGroup, GroupKind, Layout
from kvoffload.planner import Planner
from kvoffload.scheduler_side import PlannerConnector
from kvoffload.testing.engine import Device, Engine
from kvoffload.testing.engine.drive import engine_over, settle
from kvoffload.testing.faults import Failing, Op
from kvoffload.testing.rig import Rig, Sizes, one_group


def test_before_all_ranks_are_there_everything_is_a_miss():
    """A connector that nobody has attached to finds nothing, stores nothing, and requests run."""
    scheduler = PlannerConnector(Planner(one_group(), Config(), ranks=2))
    engine = Engine(Device(one_group(), [16]), scheduler)
    assert scheduler.match(request(1, 100), 0) == Hit()
    seq = request(2, 100, 5)
    engine.add(seq)
    settle(engine)
    assert (seq.generated, engine.device.free) == (5, 16)


def test_a_prefetch_turns_disk_into_host(tmp_path):
    """What is on disk only is announced, steps pass, and the hit comes from host; nothing was taken or pinned."""
    with Rig(Sizes(host=4, disk=8, pages=16), path=tmp_path) as rig:
        engine = engine_over(rig)
        stored(engine, 1, 160)
        rig.local.drain()
        rig.planner.reset(["host"])
        seq = request(2, 160)
        assert engine.scheduler.match(seq, 0) == Hit(144, 144)
        engine.scheduler.prefetch(seq, rig.clock.now + 60.0)
        until(engine, lambda: rig.planner.counters["prefetched"] == 9)
        assert engine.scheduler.match(seq, 0) == Hit(144, 0)
        rig.check()
        engine.add(seq)
        settle(engine)
        assert (seq.loaded, seq.disk, engine.device.mismatches) == (144, 0, 0)


def test_stores_are_noted_by_request():
    """Every store job is noted with its request and its blocks: new ones only."""
    engine, _, _ = counting_engine(pages=32)
    notes = []
    engine.scheduler.on_store = lambda request_id, blocks: notes.append((request_id, blocks))
    stored(engine, 1, 96)
    stored(engine, 2, 161)
    assert notes == [("request 1", 6), ("request 2", 4)]


def test_a_part_of_a_prompt_in_pages():
    """The engine holds 3 of 10 blocks: 6 more are offered, and the load covers those and no others."""
    engine, planner, _ = counting_engine(pages=32)
    stored(engine, 1, 160)
    seq, pages = request(2, 160), [np.arange(10, dtype=np.int32)]
    assert engine.scheduler.match(seq, 48) == Hit(96, 0)
    engine.scheduler.allocated(seq, pages, 48, 96)
    assert [item.boundary for item in feed(engine)] == [144]
    assert planner.counters["loaded_host"] == 6


def test_a_failed_store_is_offered_again():
    """A copy from the device fails: the blocks are offered again with the request's next step, though none is new."""
    with Rig(Sizes(pages=16), copy_faults=[Failing(calls=[1], ops=[Op.TO_HOST])]) as rig:
        engine = engine_over(rig)
        engine.add(request(1, 96, 8))
        engine.step()
        assert rig.movers[0].wait(range(100), 30.0)
        settle(engine)
        forget(engine)
        assert rig.planner.counters["store_failed"] == 6
        assert engine.scheduler.match(request(2, 160), 0).tokens == 96
        rig.check()


def test_the_example_of_the_docs_runs():
    """The first Python block of docs/engine.md is complete and holds."""
    text = (Path(__file__).parents[1] / "docs/engine.md").read_text()
    exec(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0], {})


def _sliding(lookback):
    groups = (CacheGroup(0, GroupKind.FULL, 16, 4096), CacheGroup(1, GroupKind.SLIDING, 16, 4096, lookback))
    return Layout(16, groups)


def _state():
    return Layout(16, (CacheGroup(0, GroupKind.FULL, 16, 4096), CacheGroup(1, GroupKind.STATE, 16, 4096)))


@pytest.mark.parametrize(
    ("layout", "whole", "tokens"),
    [
        (one_group(), False, 144),
        (one_group(), True, 160),
        (_sliding(31), True, 160),
        (_sliding(32), True, 144),
        (_state(), True, 144),
    ],
    ids=["kept back", "one group", "window reaches back", "window begins at a block", "state"],
)
def test_all_of_a_prompt_is_offered_where_its_last_token_can_be_computed_again(layout, whole, tokens):
    """An engine that takes the last token back after a load is offered every full block of a prompt, but not where a
    state has taken that token in, nor where its window begins one block before what the boundary needs."""
    with Rig(Sizes(host=16, pages=32), layout=layout) as rig:
        scheduler = PlannerConnector(rig.planner, whole=whole)
        first = request(1, 160)
        pages = [np.arange(10 * g, 10 * g + 10, dtype=np.int32) for g in range(len(layout.groups))]
        scheduler.match(first, 0)
        scheduler.allocated(first, pages, 0, 0)
        plans = scheduler.step([Scheduled(first, 160, pages)], 0.0)
        rig.movers[0].submit(plans)
        assert rig.movers[0].wait([job.id for job in plans.jobs], 30.0)
        scheduler.update(rig.movers[0].poll())
        assert scheduler.match(request(2, 160), 0).tokens == tokens
