"""OBS rows of docs/cases.md on the reference engine: what is counted is what happened."""

from __future__ import annotations

import numpy as np
from engine_world import counting_engine, feed, request, stored

from kvoffload.replay.cost import CostModel
from kvoffload.replay.session_run import SessionOptions, run_sessions
from kvoffload.replay.sessions import Schedule
from kvoffload.testing.engine.drive import Traffic, engine_over, play
from kvoffload.testing.rig import Rig, Sizes
from kvoffload.traces.load import open_trace

TRACE = "synth:sessions=3,turns=8,max_context=8k,subagents=0,seed=3"


def test_OBS_01_gauges_add_up_after_every_step(tmp_path):
    """Random traffic through host and disk: at every step used + free is the capacity of each tier, and nothing is
    pinned or pending beyond it."""
    with Rig(Sizes(host=6, disk=20, pages=60), path=tmp_path) as rig:
        engine = engine_over(rig)
        inner, seen = engine.step, set()

        def watched():
            ended = inner()
            for tier, usage in rig.planner.stats().tiers.items():
                assert usage.used + usage.free == usage.capacity > 0
                assert 0 <= usage.pinned <= usage.capacity
                seen.add((tier, usage.used > 0, usage.pinned > 0))
            return ended

        engine.step = watched
        play(engine, Traffic(80, texts=20))
        rig.local.drain()
        assert {("host", True, True), ("disk", True, True)} <= seen
        for usage in rig.planner.stats().tiers.values():
            assert (usage.pinned, usage.pending) == (0, 0)


def test_OBS_02_counters_never_go_down():
    """Hits in pages and below that overlap, less taken than offered, aborts, preemptions, resets: at every step no
    counter is below what it was, and the sums are those of the requests."""
    with Rig(Sizes(host=6, pages=60)) as rig:
        engine = engine_over(rig)
        inner, last = engine.step, dict(rig.planner.stats().totals)

        def watched():
            ended = inner()
            now = dict(rig.planner.stats().totals)
            assert {name for name in now if now[name] < last[name]} == set()
            last.update(now)
            return ended

        engine.step = watched
        play(engine, Traffic(150, texts=12, abort=0.3))
        rig.local.drain()
        totals = rig.planner.stats().totals
        assert totals["matched_host"] >= totals["used"] > 0
        assert totals["loaded_host"] >= totals["used"]


def test_OBS_06_declined_loads_are_not_credited():
    """10 blocks are found and the engine loads 6: matched 10, loaded and used 6, 4 declined by the engine."""
    engine, planner, _ = counting_engine(pages=16)
    stored(engine, 1, 161)
    seq, pages = request(2, 161), [np.arange(11, dtype=np.int32)]
    assert engine.scheduler.match(seq, 0).tokens == 160
    engine.scheduler.allocated(seq, pages, 0, 96)
    assert [(item.request, item.boundary) for item in feed(engine)] == [("request 2", 96)]
    totals = planner.stats().totals
    assert [totals[n] for n in ("matched_host", "loaded_host", "used", "declined", "vanished")] == [
        10,
        6,
        6,
        4,
        0,
    ]
    assert planner.stats().family("declined_blocks") == {"engine": 4, "gone": 0}


def test_OBS_06_what_vanished_is_not_credited():
    """10 blocks are found, and gone when the engine takes them: nothing is used, 10 are counted as gone."""
    engine, planner, _ = counting_engine(pages=16)
    stored(engine, 1, 161)
    seq, pages = request(2, 161), [np.arange(11, dtype=np.int32)]
    assert engine.scheduler.match(seq, 0).tokens == 160
    planner.reset(["host"])
    engine.scheduler.allocated(seq, pages, 0, 160)
    update = engine.scheduler.update([])
    assert [(item.request, item.boundary) for item in update.loaded] == [("request 2", 0)]
    totals = planner.stats().totals
    assert [totals[n] for n in ("matched_host", "loaded_host", "used", "declined", "vanished")] == [
        10,
        0,
        0,
        0,
        10,
    ]


def test_OBS_07_a_hit_takes_less_time_than_a_miss():
    """The same sessions without offload, with a small host and with one without limit: prefill time and the mean TTFT
    fall, and requests that hit answer earlier than the same requests that miss."""
    trace = open_trace(TRACE)
    runs = []
    for host in (200, None):
        options = SessionOptions(Schedule(3, 0.0), index_only=True, device_blocks=160, host_blocks=host)
        report = run_sessions(trace, options)
        assert report.ok, report.broken()
        runs.append({run.name: run for run in report.runs})
    without, small, large = runs[0]["no offload"], runs[0]["offload"], runs[1]["offload"]

    assert without.prefill_s > small.prefill_s > large.prefill_s
    assert without.ttft_mean > small.ttft_mean > large.ttft_mean
    model = CostModel()
    assert model.prefill(100, 0) < model.prefill(200, 0) < model.prefill(200, 10_000)
