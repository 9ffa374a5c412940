"""Both replay drivers over fake tiers: exact numbers, right bytes, pages held as long as they are touched."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_fakes import (
    TOKENS,
    FakeTiers,
    make_engine,
    make_memory,
    random_trace,
    report_of,
)

from kvoffload.errors import ConfigError
from kvoffload.replay import driver, lanes
from kvoffload.replay.base import ReplayRequest
from kvoffload.replay.driver import Engine
from kvoffload.replay.lanes import Lanes, Streams
from kvoffload.replay.oracle_lru import simulate
from kvoffload.replay.report import Tally
from kvoffload.replay.sequential import replay_sequential
from kvoffload.testing.pool import PagePool


def oracle_of(requests, *capacities):
    return simulate([r.ids.tolist() for r in requests], capacities)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.sampled_from([0, 40, 60, 120]), st.integers(0, 150), st.integers(0, 250))
def test_sequential_hits_equal_the_brute_force(seed, device, host, disk):
    """On random prefix trees hits by tier and produced blocks are those of the brute-force LRU, any
    capacities."""
    requests = random_trace(seed)
    tiers = FakeTiers(host=host, disk=disk)
    engine = make_engine(tiers, requests, device=device)
    replay_sequential(engine, requests)
    report = report_of(engine, tiers, requests, oracle_of(requests, device, host, disk))

    assert report.broken() == []
    assert engine.pool.free == engine.pool.pages
    engine.pool.check_integrity()


@pytest.mark.parametrize("device", [0, 50])
def test_sequential_bytes_are_right(device):
    """Every block that HBM or a tier gives back has the bytes of its key."""
    requests = random_trace(5)
    memory = make_memory(device or 40)
    tiers = FakeTiers(memory, host=60, disk=200)
    engine = make_engine(tiers, requests, device=device, memory=memory)
    replay_sequential(engine, requests)
    report = report_of(engine, tiers, requests)

    assert report.ok
    assert report.hits[1] > 0
    assert report.hits[2] > 0


def test_one_wrong_byte_is_one_mismatch():
    """A load that brings one wrong byte makes the report fail and names the request and block."""
    requests = random_trace(5)
    memory = make_memory(40)
    tiers = FakeTiers(memory, corrupt=3)
    engine = make_engine(tiers, requests, memory=memory)
    replay_sequential(engine, requests)
    report = report_of(engine, tiers, requests)

    assert report.mismatches == 1
    assert not report.ok
    assert "load" in report.samples[0]


def test_blocks_that_a_load_does_not_bring_are_produced():
    """A load that ends early lowers the hits and raises produced by the same number; nothing is counted
    twice."""
    requests = random_trace(8)
    whole, less = FakeTiers(), FakeTiers(lose=2)
    reports = []
    for tiers in (whole, less):
        engine = make_engine(tiers, requests)
        replay_sequential(engine, requests)
        reports.append(report_of(engine, tiers, requests))

    assert reports[1].broken() == []
    lost = sum(reports[0].hits) - sum(reports[1].hits)
    assert reports[1].produced - reports[0].produced == lost
    assert lost > 0


@pytest.mark.parametrize("faults", [{"busy": 7}, {"fail": 2}])
def test_refused_and_failed_stores_are_offered_again(faults):
    """Offers refused for now, and stores that fail, change no hit: the blocks are stored in the end."""
    requests = random_trace(9)
    tiers = FakeTiers(host=80, disk=300, **faults)
    engine = make_engine(tiers, requests)
    replay_sequential(engine, requests)

    assert report_of(engine, tiers, requests, oracle_of(requests, 0, 80, 300)).broken() == []


def run_lanes(requests, tiers, memory, *, count, device, prefill=64):
    engine = make_engine(tiers, requests, device=device, memory=memory)
    Lanes(engine, count, prefill).run(requests)
    return engine, report_of(engine, tiers, requests, lanes=count)


@pytest.mark.parametrize("count", [1, 3, 8])
@pytest.mark.parametrize("device", [40, 64, 400])
@pytest.mark.parametrize("delay", [1, 9])
def test_lanes_end_with_right_bytes_and_no_page_held(count, device, delay):
    """With few pages and slow jobs every request ends, no block is wrong, and all pages are free again."""
    requests = random_trace(11, sessions=5)
    memory = make_memory(device)
    engine, report = run_lanes(
        requests, FakeTiers(memory, host=70, disk=120, delay=delay), memory, count=count, device=device
    )

    assert report.ok, report.broken()
    assert report.requests == len(requests)
    assert engine.pool.free == device
    engine.pool.check_integrity()


def test_lanes_see_pages_given_back_too_early(monkeypatch):
    """Planted fault: a driver that frees pages under a running store is found by the bytes."""
    monkeypatch.setattr(Engine, "_hold", lambda self, jobs, pages: self.pool.release(pages))
    requests = random_trace(11, sessions=5)
    memory = make_memory(40)
    tiers = FakeTiers(memory, delay=9)
    _, report = run_lanes(requests, tiers, memory, count=4, device=40)

    assert report.mismatches > 0


def test_turns_of_one_agent_keep_their_order():
    """Requests of one (session, agent) end in file order, however many run; other streams overlap."""
    requests = random_trace(12, sessions=3)
    tiers = FakeTiers(delay=3)
    run_lanes(requests, tiers, None, count=6, device=400)
    by_stream = {}
    for index in tiers.finished:
        request = requests[index]
        by_stream.setdefault((request.session, request.agent), []).append(index)

    assert all(order == sorted(order) for order in by_stream.values())
    assert sorted(tiers.finished) != tiers.finished


def test_streams_start_the_next_turn_only_after_the_one_before():
    """A stream gives one request at a time; requests without a session do not wait for each other."""
    ids = np.arange(1, 2, dtype=np.int64)
    names = ["a", "a", "", "", "b"]
    requests = [ReplayRequest(i, name, "main", "", 16, ids) for i, name in enumerate(names)]
    streams = Streams(requests)
    first = [streams.next() for _ in range(5)]

    assert [r.index for r in first if r] == [0, 2, 3, 4]
    assert first[4] is None
    streams.ended(requests[0])
    assert streams.next() is requests[1]
    streams.ended(requests[1])
    assert streams.next() is None


def test_lanes_take_no_room_while_blocks_could_be_evicted_unwritten():
    """No block is offered and no load begins while blocks on their way to disk are unprotected."""
    tiers = FakeTiers(host=60, exposed=3)
    run_lanes(random_trace(13), tiers, None, count=3, device=60)

    assert tiers.exposed_until > 0
    assert len(tiers.offers) > 32
    assert tiers.loads
    assert not any(exposed for _, _, exposed in tiers.offers + tiers.loads)


def test_a_prompt_that_finds_no_room_ends_without_it():
    """Where nothing runs that could give room back, what was refused is left out and the request ends."""
    requests = random_trace(16)
    for run in (replay_sequential, lambda engine, rows: Lanes(engine, 3, 64).run(rows)):
        tiers = FakeTiers(host=9, full=True)
        engine = make_engine(tiers, requests, device=80)
        run(engine, requests)
        report = report_of(engine, tiers, requests)

        assert report.ok
        assert report.requests == len(requests)


def test_prefill_takes_several_steps():
    """A prompt longer than a step is offered piece by piece, whole blocks each time."""
    requests = [ReplayRequest(0, "s", "a", "", 10 * TOKENS, np.arange(1, 11, dtype=np.int64))]
    tiers = FakeTiers()
    run_lanes(requests, tiers, None, count=1, device=10, prefill=3 * TOKENS)

    assert [computed for _, computed, _ in tiers.offers] == [48, 96, 144, 160]


@pytest.mark.parametrize(("patience", "hits"), [(60.0, 8), (0.0, 0)])
def test_waiting_for_blocks_on_their_way_gives_a_hit(monkeypatch, patience, hits):
    """A request whose blocks are being stored by another waits and loads them; out of patience it computes
    them."""
    monkeypatch.setattr(lanes, "PATIENCE_S", patience)
    ids = np.arange(1, 9, dtype=np.int64)
    requests = [ReplayRequest(i, f"s{i}", "a", "", 8 * TOKENS, ids) for i in range(2)]
    tiers = FakeTiers(delay=4)
    engine = Engine(tiers, PagePool(16, cached=False), [], TOKENS, Tally())
    runner = lanes.Lanes(engine, 1, 8 * TOKENS)
    runner.run(requests)

    assert report_of(engine, tiers, requests).hits == (0, hits, 0)


def test_prompt_longer_than_the_device_says_what_to_do():
    """The error names the prompt's blocks, the device's, and the option."""
    requests = random_trace(14)
    engine = make_engine(FakeTiers(), requests, device=3)
    with pytest.raises(
        ConfigError, match=r"has \d+ blocks and the device 3: raise --device-blocks to at least"
    ):
        Lanes(engine, 2, 64).run(requests)


def test_lanes_refuse_what_cannot_run():
    """No lane, and steps shorter than a block, are errors with the value in them."""
    engine = make_engine(FakeTiers(), random_trace(1), device=50)
    with pytest.raises(ConfigError, match="--lanes 0"):
        Lanes(engine, 0)
    with pytest.raises(ConfigError, match="15 tokens is shorter than a block of 16"):
        Lanes(engine, 1, 15)


def test_standstill_is_an_error_not_a_hang(monkeypatch):
    """A job that never ends stops the replay with an error that says what still waits."""
    monkeypatch.setattr(driver, "IDLE_S", 0.0)
    requests = random_trace(15)
    time = iter(range(10**9))
    engine = make_engine(FakeTiers(delay=10**9), requests, clock=lambda: float(next(time)))
    with pytest.raises(driver.StandstillError, match=r"nothing has moved for 60 s: 0 loads, 1 stores"):
        replay_sequential(engine, requests)
