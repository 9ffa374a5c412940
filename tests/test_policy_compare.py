"""Policies side by side, and the traffic that they are tried on."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from kvoffload.cli import app
from kvoffload.errors import TraceError
from kvoffload.replay.base import requests_of
from kvoffload.replay.compare import compare, gaps, run_policy
from kvoffload.replay.oracle_lru import simulate
from kvoffload.replay.run import Options, run_replay
from kvoffload.replay.tiers import Capacity, Policies
from kvoffload.traces.adversarial import GENERATORS, Adversary
from kvoffload.traces.chain import ChainCheck
from kvoffload.traces.load import open_trace

SMALL = 240


@pytest.mark.parametrize("shape", GENERATORS)
def test_a_shape_is_chained_in_order_and_the_same_for_a_seed(shape: str) -> None:
    """Times rise, no id has two predecessors, sessions come back; a seed gives one trace, another seed another."""
    trace, again, other = (Adversary(shape, seed, SMALL).trace() for seed in (3, 3, 4))
    check = ChainCheck()
    for request in trace.requests:
        check.add("here", request.ids)
    times = [r.t for r in trace.requests]
    assert times == sorted(times)
    assert len(times) == SMALL
    assert [r.ids.tolist() for r in trace.requests] == [r.ids.tolist() for r in again.requests]
    assert [r.t for r in trace.requests] != [r.t for r in other.requests]
    assert len({r.session for r in trace.requests}) < SMALL


def test_an_unknown_shape_and_a_bad_seed_name_the_way_out() -> None:
    """The error lists the shapes, or shows what a spec looks like."""
    with pytest.raises(TraceError, match="one-law, scans, shift, bursts, restart"):
        open_trace("adversary:nothing:0")
    with pytest.raises(TraceError, match="adversary:scans:3:1000"):
        open_trace("adversary:scans:x")


@pytest.mark.parametrize("shape", GENERATORS)
def test_the_worst_loss_against_lru_is_bounded(shape: str) -> None:
    """Where memory is short RRI is on no shape more than 0.3 points below LRU, which is the brute-force one; and a
    second replay gives the same."""
    requests = requests_of(Adversary(shape, 0, 500).trace())
    lru, rri = (run_policy(requests, 64, Capacity(1000, 0), Policies(p)) for p in ("lru", "rri"))
    assert lru.hits[0] == simulate((r.ids.tolist() for r in requests), [1000]).hits[0]
    assert rri.rate >= lru.rate - 0.003
    assert run_policy(requests, 64, Capacity(1000, 0), Policies("rri")).hits == rri.hits


def test_refusing_costs_no_hits_where_a_disk_has_everything() -> None:
    """With a disk for all, RRI in host gives the same hits as LRU, and fewer come from disk."""
    requests = requests_of(Adversary("shift", 1, 400).trace())
    lru, rri = (run_policy(requests, 64, Capacity(1500, 30_000), Policies(p)) for p in ("lru", "rri"))
    assert sum(lru.hits) == sum(rri.hits)
    assert rri.hits[1] < lru.hits[1]
    assert rri.stored[1] == lru.stored[1]


def test_compare_puts_lru_the_policy_and_the_optimum_in_order() -> None:
    """Three results per capacity; none beats the optimum, and the gap closed is that of their hits."""
    requests = requests_of(Adversary("bursts", 2, 300).trace())
    results = list(compare(requests, 64, [Capacity(1000, 0), Capacity(2500, 0)], Policies()))
    assert [r.name for r in results] == ["lru", "rri", "optimum"] * 2
    for lru, rri, best in (results[:3], results[3:]):
        assert max(lru.hits[0], rri.hits[0]) <= best.hits[0]
    shares = gaps(results)
    first = (results[1].hits[0] - results[0].hits[0]) / (results[2].hits[0] - results[0].hits[0])
    assert shares[0] is None
    assert shares[1] == pytest.approx(first)


def test_the_command_compares_and_sweeps() -> None:
    """`replay --compare --sweep` prints a row per policy and size, as JSON too, with what was learned."""
    spec = "adversary:one-law:1:200"
    run = CliRunner().invoke(
        app, ["replay", spec, "--compare", "--host-blocks", "2000", "--host-policy", "rri-keep"]
    )
    assert run.exit_code == 0, run.output
    assert "rri-keep" in run.output
    assert "optimum" in run.output
    run = CliRunner().invoke(app, ["replay", spec, "--sweep", "500,4000", "--json"])
    assert run.exit_code == 0, run.output
    rows = json.loads(run.output)
    assert [(r["policy"], r["host_blocks"]) for r in rows] == [
        (name, size) for size in (500, 4000) for name in ("lru", "rri", "optimum")
    ]
    assert rows[1]["learned"]["host"]["memory_bytes"] > 0
    assert len(rows[1]["learned"]["host"]["classes"]) == 36
    assert np.isfinite(rows[1]["worst_decile"])


@pytest.mark.parametrize("options", [["--sweep", "a"], ["--sweep", "0"], ["--compare", "--lanes", "2"]])
def test_what_cannot_be_compared_is_said(options: list[str]) -> None:
    """Sizes that are no numbers, no room at all, and concurrent replays are errors with exit status 2."""
    run = CliRunner().invoke(app, ["replay", "adversary:scans:0:9", *options])
    assert run.exit_code == 2
    assert "error:" in run.output


@pytest.mark.parametrize("policy", ["lru", "rri"])
def test_concurrent_requests_get_right_bytes_under_both_policies(policy: str) -> None:
    """Six lanes over device pages, host and disk: every block that comes back is right, and every identity holds."""
    trace = Adversary("shift", 0, 120).trace()
    options = Options(
        6, block_bytes=256, device_blocks=2600, host_blocks=800, disk_blocks=20_000, host_policy=policy
    )
    report = run_replay(trace, options)
    assert (report.mismatches, report.broken()) == (0, [])
    assert report.requests == 120
    assert report.hits[1] + report.hits[2] > 0
