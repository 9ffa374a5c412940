"""Identities that replays of one trace through the real planner owe each other, and that a fault in one is seen."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_fakes import TOKENS, random_trace
from typer.testing import CliRunner

from kvoffload.cli import app
from kvoffload.replay.base import requests_of
from kvoffload.replay.identities import Counts, broken_identities
from kvoffload.replay.oracle_lru import simulate, victim_hits
from kvoffload.replay.run import Options, run_replay
from kvoffload.replay.session_run import SessionOptions, run_sessions
from kvoffload.replay.sessions import Schedule
from kvoffload.traces.load import open_trace
from kvoffload.traces.record import Request, Trace

SYNTH = "synth:sessions=4,turns=6,max_context=16k,subagents=0.5,seed={}"


def prompts_of(trace: Trace) -> list[list[int]]:
    return [r.ids.tolist() for r in requests_of(trace)]


def random_tree(seed: int, longest: int = 40) -> Trace:
    """A random trace as one that can be replayed."""
    rows = [
        Request(r.session, r.agent, i, float(i), -1, r.ids, r.tokens, 1, r.reason, 0.0)
        for i, r in enumerate(random_trace(seed))
        if 0 < len(r.ids) <= longest
    ]
    return Trace("tree", "tree", TOKENS, "floor", "weka", True, tuple(rows))


def replays(trace: Trace, host: int | None, disk: int) -> Counts:
    return run_replay(trace, Options(index_only=True, host_blocks=host, disk_blocks=disk))


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("part", [0.02, 0.3, 1.2])
def test_identities_1_to_4_hold_on_agent_sessions(seed: int, part: float) -> None:
    """Sequential, counting only, host from a part of the longest prompt to more than one: 1 to 4 of docs/replay.md."""
    trace = open_trace(SYNTH.format(seed))
    prompts = prompts_of(trace)
    first = max(1, int(part * max(map(len, prompts))))

    assert broken_identities(lambda host, disk: replays(trace, host, disk), prompts, first, 3 * first) == []


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(0, 80))
def test_identities_hold_on_random_prefix_trees(seed: int, first: int, more: int) -> None:
    """Random prompts that share prefixes, any two capacities."""
    trace = random_tree(seed)
    prompts = prompts_of(trace)
    assert broken_identities(lambda h, d: replays(trace, h, d), prompts, first, first + more) == []


class _Off:
    """Counts of a replay with one of them wrong."""

    def __init__(
        self, right: Counts, host_hits: int = 0, disk_hits: int = 0, host: int = 0, disk: int = 0
    ) -> None:
        self.total, self.distinct = right.total, right.distinct
        hbm, first, second = right.hits
        self.hits = (hbm, first + host_hits, second + disk_hits)
        self.stored_by_tier = (right.stored_by_tier[0] + host, right.stored_by_tier[1] + disk)


@pytest.mark.parametrize(
    ("wrong", "where", "number"),
    [
        ({"host_hits": -1_000_000}, (None, 0), "1"),
        ({"host": 1}, (400, 0), "2"),
        ({"host_hits": 1, "disk_hits": -1}, (400, 800), "3"),
        ({"disk": -1}, (400, 800), "3"),
        ({"host_hits": 1}, (1200, 0), "4"),
    ],
)
def test_a_wrong_count_breaks_its_identity(
    wrong: dict[str, int], where: tuple[int | None, int], number: str
) -> None:
    """One block too many or too few in one replay is named under the number of the identity."""
    trace = open_trace(SYNTH.format(1))

    def replay(host: int | None, disk: int) -> Counts:
        found = replays(trace, host, disk)
        return _Off(found, **wrong) if (host, disk) == where else found

    texts = broken_identities(replay, prompts_of(trace), 400, 800)
    assert any(text.startswith(f"identity {number}:") for text in texts), texts


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(30, 60), st.integers(0, 80))
def test_victim_tiers_are_one_larger_tier(seed: int, first: int, second: int) -> None:
    """Identity 4 on the models alone, where every prompt fits the first tier."""
    prompts = prompts_of(random_tree(seed, longest=first))
    assert victim_hits(prompts, first, second) == sum(simulate(prompts, [first + second]).hits)


def test_identity_5_holds_in_every_run_of_sessions() -> None:
    """Hits by tier + computed = prompt tokens in the replay, in each control and with sessions joined in the middle."""
    trace = open_trace("synth:sessions=3,turns=4,max_context=8k,subagents=0.5,seed=3")
    for window in (0.0, 120.0):
        options = SessionOptions(
            Schedule(3, window), True, device_blocks=200, host_blocks=150, disk_blocks=900
        )
        report = run_sessions(trace, options)
        assert report.ok, report.broken()
        for run in report.runs:
            assert run.prompt > 0
            assert sum(run.hits) + run.made == run.prompt, run.name


def test_check_says_that_identities_hold() -> None:
    """`--check` compares with the brute force and checks identities 1 to 4, and says so."""
    line = [
        "replay",
        SYNTH.format(1),
        "--check",
        "--index-only",
        "--host-blocks",
        "800",
        "--disk-blocks",
        "2000",
    ]
    done = CliRunner().invoke(app, line)
    assert done.exit_code == 0, done.output
    assert "identities 1 to 4 of docs/replay.md: hold" in done.output
