"""The replay through the real planner, index, copies and disk: published numbers, brute force, right
bytes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_fakes import TOKENS, make_setup, random_trace
from typer.testing import CliRunner

from kvoffload.cli import app
from kvoffload.errors import ConfigError
from kvoffload.replay.driver import Engine
from kvoffload.replay.oracle_lru import simulate
from kvoffload.replay.report import Tally
from kvoffload.replay.run import Options, run_replay
from kvoffload.replay.sequential import replay_sequential
from kvoffload.replay.tiers import Capacity, open_counting, replay_layout
from kvoffload.testing.pool import PagePool
from kvoffload.traces.load import open_trace
from kvoffload.traces.record import Request, Trace

SAMPLE12 = "cc_v8_sample12_b64.mooncake.jsonl.gz"
BLOCK = 4096


@pytest.fixture(scope="module")
def sample12(traces):
    return open_trace(traces / SAMPLE12)


def small_trace(seed, **more):
    """A random prefix tree as a trace."""
    requests = tuple(
        Request(r.session, r.agent, i, float(i), -1, r.ids, r.tokens, 1, r.reason, None)
        for i, r in enumerate(random_trace(seed, **more))
    )
    return Trace(f"small{seed}", f"small{seed}", TOKENS, "floor", "full", True, requests)


@pytest.mark.parametrize(
    ("host", "disk", "hits", "produced"),
    [
        (5_000, 0, (1_579_168, 0), 636_533),
        (10_000, 0, (2_108_329, 0), 107_372),
        (None, 0, (2_110_913, 0), 104_788),
        (5_000, 10_000, (1_579_168, 529_161), 107_372),
        (2_000, 10_000, (604_223, 1_504_106), 107_372),
    ],
)
def test_sample12_gives_the_published_numbers(sample12, host, disk, hits, produced):
    """Real agent sessions through planner and index give exactly the LRU's numbers, and nothing is lost to
    backlog."""
    report = run_replay(sample12, Options(index_only=True, host_blocks=host, disk_blocks=disk))

    assert report.broken() == []
    assert (report.hits, report.produced) == ((0, *hits), produced)
    assert report.stored.dropped.get("disk_backlog", 0) == 0
    if disk:
        assert report.stored.disk == produced


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.integers(0, 10**6),
    st.sampled_from([0, 40, 60, 120]),
    st.integers(1, 150),
    st.one_of(st.just(0), st.integers(1, 250)),
)
def test_random_prefix_trees_equal_the_brute_force(seed, device, host, disk):
    """Hits by tier and produced blocks of the real code are the brute-force LRU's, whatever the capacities."""
    sizes = {"device_blocks": device, "host_blocks": host, "disk_blocks": disk}
    report = run_replay(small_trace(seed), Options(index_only=True, check=True, **sizes))

    assert report.broken() == []


def test_index_is_sound_and_nothing_is_pinned_at_the_end():
    """After a replay with every tier too small the index passes its own check and no slot is pinned."""
    requests = random_trace(21)
    tiers = open_counting(replay_layout(TOKENS, BLOCK), Capacity(20, 50))
    engine = Engine(tiers, PagePool(40), [], TOKENS, Tally())
    replay_sequential(engine, requests)
    planner = tiers.local.planner
    planner.check_integrity()

    assert planner.idle
    assert planner.pinned() == 0
    assert engine.tally.report(make_setup(), tiers.stored(), 0.0).broken() == []


@pytest.mark.parametrize("device", [0, 60])
def test_sequential_with_bytes_equals_counting(tmp_path, device):
    """Moving real bytes through host and disk changes no figure, and no byte is wrong."""
    trace = small_trace(22, sessions=5, turns=12)
    sizes = {"device_blocks": device, "host_blocks": 60, "disk_blocks": 150}
    counted = run_replay(trace, Options(index_only=True, **sizes))
    moved = run_replay(trace, Options(block_bytes=BLOCK + 24, disk_path=tmp_path / "disk", **sizes))

    assert moved.ok, moved.broken() + list(moved.samples)
    assert (moved.hits, moved.produced, moved.stored) == (counted.hits, counted.produced, counted.stored)
    assert moved.hits[2] > 0


@pytest.mark.parametrize(("lanes", "device"), [(1, 40), (4, 44), (4, 200)])
def test_lanes_with_bytes_end_right(lanes, device):
    """Several requests over few pages, small host and disk: every block accounted for, no byte wrong, none
    lost."""
    trace = small_trace(23, sessions=6, turns=15)
    report = run_replay(
        trace,
        Options(lanes=lanes, block_bytes=BLOCK, device_blocks=device, host_blocks=60, disk_blocks=400),
    )

    assert report.ok, report.broken() + list(report.samples)
    assert report.requests == 90
    assert sum(report.hits) > 0
    assert report.stored.dropped.get("disk_backlog", 0) == 0


def test_second_replay_finds_the_disk_of_the_first(tmp_path):
    """With --disk-path what one replay wrote is hit by the next, and its bytes are right."""
    trace = small_trace(24)
    options = Options(block_bytes=BLOCK, host_blocks=200, disk_blocks=1000, disk_path=tmp_path / "disk")
    first, second = run_replay(trace, options), run_replay(trace, options)

    assert first.ok
    assert second.ok
    assert second.stored.restored == first.stored.disk == first.distinct
    assert second.produced == 0
    with pytest.raises(ConfigError, match="blocks of an earlier replay, and the oracle starts empty"):
        run_replay(trace, replace(options, check=True))


def test_options_that_contradict_are_refused(tmp_path):
    """Each bad combination is an error that names the options."""
    with pytest.raises(ConfigError, match="--disk-path with --index-only"):
        Options(index_only=True, disk_path=tmp_path, disk_blocks=5)
    with pytest.raises(ConfigError, match="--disk-path without --disk-blocks"):
        Options(disk_path=tmp_path)
    with pytest.raises(ConfigError, match="--check with --lanes"):
        Options(check=True, lanes=2)
    with pytest.raises(ConfigError, match="--block-bytes 0"):
        Options(block_bytes=0)
    trace = small_trace(1)
    longest = max(len(request.ids) for request in trace.requests)
    message = rf"has {longest} blocks and the device 2: raise --device-blocks to at least {longest}"
    with pytest.raises(ConfigError, match=message):
        run_replay(trace, Options(index_only=True, device_blocks=2))


def test_more_than_the_memory_is_refused_before_it_is_taken():
    """A host tier larger than free memory is an error that names both sizes and the ways out."""
    with pytest.raises(ConfigError, match=r"host tier .* lower --host-blocks"):
        run_replay(small_trace(1), Options(block_bytes=1 << 20, host_blocks=1 << 24))


def invoke(*arguments):
    return CliRunner().invoke(app, ["replay", *map(str, arguments)])


@pytest.fixture
def trace_file(tmp_path):
    path = tmp_path / "small.jsonl"
    lines = [
        {
            "timestamp": i,
            "input_length": r.input_tokens,
            "output_length": 1,
            "hash_ids": r.ids.tolist(),
            "session_id": r.session,
        }
        for i, r in enumerate(small_trace(3).requests)
        if len(r.ids)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_command_prints_one_json_object(trace_file):
    """--json gives one object whose figures are the oracle's, and exit status 0."""
    result = invoke(
        trace_file, "--block-size", TOKENS, "--index-only", "--host-blocks", 30, "--check", "--json"
    )
    requests = [r.ids.tolist() for r in open_trace(trace_file, TOKENS).requests]
    oracle = simulate(requests, [30])

    assert result.exit_code == 0, result.output
    body = json.loads(result.stdout)
    assert (body["hits"]["host"], body["produced"]) == (oracle.hits[0], oracle.produced)
    assert body["ok"] is True


def test_command_prints_tables_within_80_columns(trace_file):
    """Without --json people get tables that fit a terminal, with real bytes checked."""
    result = invoke(trace_file, "--block-size", TOKENS, "--block-bytes", "4KiB", "--disk-blocks", 500)

    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "wrong blocks" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sequential", "--lanes", "2"], "--sequential with --lanes 2"),
        (["--block-bytes", "16"], "has no unit"),
        (["--device-blocks", "2"], "raise --device-blocks"),
        (["--lanes", "2", "--check"], "--check with --lanes"),
    ],
)
def test_command_refuses_with_status_2(trace_file, arguments, words):
    """Arguments that cannot be used end with status 2 and one line that says what to change."""
    result = invoke(trace_file, "--block-size", TOKENS, *arguments)

    assert result.exit_code == 2
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_command_ends_with_status_1_on_a_wrong_byte(trace_file, monkeypatch):
    """One flipped byte in a loaded page makes the command fail and name the block."""
    take = Engine._loaded
    spoiled = []

    def flip(self, turn, item):
        if not spoiled and item.boundary:
            spoiled.append(turn.pages[item.boundary // TOKENS - 1])
            self._memories[0].arrays[0][0][spoiled[0], 7] ^= 1
        take(self, turn, item)

    monkeypatch.setattr(Engine, "_loaded", flip)
    result = invoke(trace_file, "--block-size", TOKENS, "--block-bytes", "4KiB", "--json")

    assert result.exit_code == 1
    body = json.loads(result.stdout)
    assert body["mismatches"] == 1
    assert body["ok"] is False
