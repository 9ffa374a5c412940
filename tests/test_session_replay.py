"""Session replay: trees, the cost model, virtual time, controls, and the command."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from typer.testing import CliRunner

from kvoffload.cli import app
from kvoffload.errors import ConfigError
from kvoffload.messages import COPY_DTYPE, CopyFlag, Job, JobKind
from kvoffload.replay.cost import Channels, CostModel
from kvoffload.replay.session_run import LRU_RUN, RUNS, SessionOptions, run_sessions
from kvoffload.replay.sessions import Schedule, _primers
from kvoffload.replay.trees import KeyMaker, trees_of
from kvoffload.traces.load import open_trace
from kvoffload.traces.record import Request, Trace

SMALL = "synth:sessions=4,turns=8,max_context=8k,subagents=1,seed=5"


@pytest.fixture(scope="module")
def trace():
    whole = open_trace(SMALL)
    kept = [r for r in whole.requests if r.turn < 30]
    return Trace(
        whole.name,
        whole.source,
        whole.block_tokens,
        whole.partial_tail,
        whole.form,
        whole.aligned,
        tuple(kept),
    )


def options(window=0.0, lanes=4, **more):
    sizes = {"device_blocks": 200, "host_blocks": 250, "disk_blocks": 4000, "block_bytes": 4096}
    return SessionOptions(Schedule(lanes, window), **(sizes | more))


def ask(agent, t, service, turn):
    ids = np.arange(turn + 1)
    return Request("s", agent, turn, t, -1, ids, 64 * (turn + 1), 5, "end_turn", service)


def tree_of(*requests):
    (tree,) = trees_of(Trace("t", "t", 64, "floor", "weka", True, requests))
    return tree


def test_a_sub_agent_follows_the_turn_before_it_and_is_joined():
    """main, sub-agent twice, main: each waits for the end of the one it follows, and main for the sub-agent."""
    tree = tree_of(ask("main", 0, 2, 0), ask("a", 3, 1, 1), ask("a", 5, 2, 2), ask("main", 10, 1, 3))

    assert [(turn.after, turn.delay) for turn in tree.turns] == [((), 0), ((0,), 1), ((1,), 1), ((0, 2), 3)]


def test_a_background_agent_is_not_waited_for():
    """A sub-agent that still runs when main goes on, or that comes back later, is not joined."""
    tree = tree_of(ask("main", 0, 2, 0), ask("a", 3, 50, 1), ask("main", 10, 1, 2), ask("b", 12, 1, 3))
    assert [turn.after for turn in tree.turns] == [(), (0,), (0,), (2,)]

    tree = tree_of(ask("main", 0, 2, 0), ask("a", 3, 1, 1), ask("main", 10, 1, 2), ask("a", 12, 1, 3))
    assert [turn.after for turn in tree.turns] == [(), (0,), (0,), (1,)]


def test_primers_are_the_last_turns_of_active_agents():
    """Cut before the last turns of main and of one sub-agent: the turn before it of each, none of an ended agent."""
    turns = [
        ask("main", 0, 1, 0),
        ask("a", 2, 1, 1),
        ask("b", 2.5, 1, 2),
        ask("main", 5, 1, 3),
        ask("b", 7, 1, 4),
    ]
    tree = tree_of(*turns, ask("main", 9, 1, 5))

    assert _primers(tree, 4) == {2, 3}
    assert _primers(tree, 0) == set()


def extends(first, second):
    """Whether a prompt begins with all that the other one said and was answered."""
    head = second.tokens[: len(first.tokens)]
    return len(head) == len(first.tokens) and bool((head == first.tokens).all())


def test_keys_of_another_play_are_others(trace):
    """A session that is played again shares no block with its first play; keys extend from turn to turn."""
    maker = KeyMaker(trace)
    turns = [turn for tree in trees_of(trace) for turn in tree.turns]
    first, second = next((a, b) for a, b in pairwise(turns) if extends(a.request, b.request))
    keys, later = maker.keys(first.request, 0), maker.keys(second.request, 0)

    assert (keys == later[: len(keys)]).all()
    assert not (keys == maker.keys(first.request, 1)).all(axis=1).any()


def test_a_step_costs_what_limits_it():
    """Decode is bound by memory, prefill by arithmetic, and attention makes late tokens dearer."""
    cost = CostModel(overhead_s=0.0)

    assert cost.step([]) == 0.0
    assert cost.step([(1, 0)]) == pytest.approx((cost.weight_bytes + cost.kv_bytes) / cost.memory)
    assert cost.step([(8192, 0)]) == pytest.approx(cost.prefill(8192, 0))
    assert cost.prefill(1000, 100_000) > 2 * cost.prefill(1000, 0)
    assert cost.prefill(1000, 500) == pytest.approx(cost.prefill(1500, 0) - cost.prefill(500, 0))


def test_copies_queue_by_direction():
    """Two stores follow each other; a load beside them does not wait; a read from disk bounds its load."""
    cost = CostModel(link_in=1e6, link_out=1e6, disk_read=1e5, disk_write=1e5, job_s=0.0)
    channels = Channels(cost, 1000)

    def job(kind, count, reads=0):
        copies = np.zeros(count, COPY_DTYPE)
        copies["flags"][:reads] = CopyFlag.READ
        return Job(1, kind, copies)

    assert channels.ends(job(JobKind.STORE, 1000), 0.0) == pytest.approx(1.0)
    assert channels.ends(job(JobKind.STORE, 1000), 0.5) == pytest.approx(2.0)
    assert channels.ends(job(JobKind.LOAD, 100), 0.5) == pytest.approx(0.6)
    assert channels.ends(job(JobKind.LOAD, 100, 50), 1.0) == pytest.approx(1.5)
    assert channels.ends(job(JobKind.READ, 10), 1.0) == pytest.approx(1.6)
    assert channels.ends(job(JobKind.WRITE, 10), 1.0) == pytest.approx(1.1)
    assert channels.moved == {"in": 200_000, "out": 2_000_000, "read": 60_000, "write": 10_000}


@pytest.mark.parametrize("text", ["link=3", "flops=fast", "memory=0", "kv_bytes=-1"])
def test_rates_that_make_no_sense_are_refused(text):
    """A rate that does not exist, is no number or is not above 0 names itself."""
    with pytest.raises(ConfigError, match=text.partition("=")[0]):
        CostModel.parse(text)


def test_every_session_once_with_bytes(trace):
    """All sessions through pages, host and disk: no wrong byte, hits + computed = prompt, and the controls bracket
    what offload can change."""
    report = run_sessions(trace, options())
    main, none, infinite, rewrite = report.runs

    assert report.ok, report.broken()
    assert [run.name for run in report.runs] == list(RUNS)
    assert {run.requests for run in report.runs} == {len(trace.requests)}
    assert len({(run.prompt, run.output) for run in report.runs}) == 1
    assert min(main.hits) > 0
    assert none.prefill_s > main.prefill_s >= infinite.prefill_s
    assert none.ttft_mean > main.ttft_mean >= infinite.ttft_mean
    assert sum(none.hits) < sum(main.hits) <= sum(infinite.hits)
    assert none.moved["out"] == 0 < main.moved["out"] < rewrite.moved["out"]
    assert main.stored["disk"] * 64 * report.setup.cost["kv_bytes"] == main.moved["write"]


def test_virtual_time_does_not_depend_on_real_copies(trace):
    """With bytes and without, twice: the same figures, because the model and not the machine ends jobs."""
    runs = [
        run_sessions(trace, options(index_only=only, controls=False)).runs[0].to_dict()
        for only in (False, True, True)
    ]
    for run in runs:
        run.pop("wall_s")

    assert runs[0] == runs[1] == runs[2]


def test_a_larger_host_and_a_faster_link_pay(trace):
    """Host doubled: less prefill time and an earlier first token, no disk beside it. A slower link: a later one."""
    small, large = (
        run_sessions(trace, options(index_only=True, host_blocks=n, disk_blocks=0, controls=False)).runs[0]
        for n in (200, 400)
    )
    slow = CostModel(link_in=5e8)
    late = run_sessions(
        trace, options(index_only=True, host_blocks=400, disk_blocks=0, controls=False, cost=slow)
    ).runs[0]

    assert small.prefill_s > large.prefill_s
    assert small.ttft_mean > large.ttft_mean
    assert late.ttft_mean > large.ttft_mean


def test_a_window_is_measured_after_the_warm_up(trace):
    """Two live sessions for 300 s: only requests that ended in the window count, after primers and warm-up, also when
    sessions end and others are drawn."""
    report = run_sessions(trace, options(window=300.0, lanes=2, index_only=True, controls=False))
    (run,) = report.runs

    assert report.ok, report.broken()
    assert 300.0 <= run.seconds < 310.0
    assert 10 < run.requests < len(trace.requests) * 20
    assert run.hits[0] > 0


def test_command(trace):
    """--sessions prints one JSON object, or tables within 80 columns; options that contradict it are refused."""
    base = ["replay", "synth:sessions=2,turns=2,max_context=8k,subagents=0,seed=1", "--sessions", "2"]
    done = CliRunner().invoke(app, [*base, "--window", "0", "--index-only", "--host-blocks", "100", "--json"])
    assert done.exit_code == 0, done.output
    body = json.loads(done.output)
    assert [run["name"] for run in body["runs"]] == list(RUNS)
    assert body["ok"]
    assert body["runs"][0]["ttft"]["p50"] > 0

    done = CliRunner().invoke(app, [*base, "--window", "0", "--index-only", "--no-controls"])
    assert done.exit_code == 0, done.output
    assert max(map(len, done.output.splitlines())) <= 80
    assert "TTFT p50" in done.output

    for wrong in (["--lanes", "2"], ["--check"], ["--cost", "speed=1"], ["--device-blocks", "3"]):
        done = CliRunner().invoke(app, [*base, *wrong])
        assert done.exit_code == 2, done.output


def test_a_policy_that_learns_is_played_beside_lru() -> None:
    """With host_policy rri the same tiers are played under LRU too, and the policy's run differs from it."""
    trace = open_trace("synth:sessions=4,seed=3,max_context=20k")
    options = SessionOptions(
        Schedule(4, 0.0), True, device_blocks=700, host_blocks=500, disk_blocks=20_000, controls=False
    )
    learning = replace(options, policies=("rri", "lru"))

    report = run_sessions(trace, learning)
    alone = run_sessions(trace, options)

    assert learning.runs == ("offload", LRU_RUN)
    assert [run.name for run in report.runs] == list(learning.runs)
    ours, lru = report.runs
    assert (lru.stored, lru.hits, lru.ttft) == (alone.runs[0].stored, alone.runs[0].hits, alone.runs[0].ttft)
    assert ours.hits[1] != lru.hits[1]
