"""No offload and an infinite cache bracket offload for every single request, where that is claimed."""

from __future__ import annotations

import io
from collections.abc import Sequence

import pytest
from rich.console import Console

from kvoffload.replay.bracket import CONTROLS, Each, brackets, broken, in_one_row
from kvoffload.replay.cost import CostModel
from kvoffload.replay.session_run import SessionOptions, SessionRuns, run_sessions
from kvoffload.replay.session_show import session_table
from kvoffload.replay.sessions import Schedule
from kvoffload.replay.trees import trees_of
from kvoffload.traces.load import open_trace


def runs_of(seed: int, **more: object) -> SessionRuns:
    """A small workload over a pool for a part of it, a host for a little more, a disk for most."""
    trace = open_trace(f"synth:sessions=3,turns=4,max_context=8k,subagents=0.5,seed={seed}")
    sizes = {"device_blocks": 160, "host_blocks": 150, "disk_blocks": 700}
    return SessionRuns(trace, SessionOptions(Schedule(3, 0.0), True, **(sizes | more)), lambda name: None)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_every_request_lies_between_its_controls(seed: int) -> None:
    """Computed tokens, prefill, first token and speed of each request, so every percentile and sum too."""
    found = runs_of(seed).alone()

    assert [row.outside for row in found] == [0, 0, 0, 0]
    assert broken(found) == []
    computed = found[0].values
    assert computed[0][3] > computed[1][3] >= computed[2][3] > 0
    for row in found:
        falling = row.values if row.name != "tokens/s" else row.values[::-1]
        for none, mine, best in zip(*falling, strict=True):
            assert none >= mine * (1 - 1e-6)
            assert mine >= best * (1 - 1e-6)


def test_without_disk_too() -> None:
    """A host that is smaller than the pool, and nothing below it."""
    found = runs_of(5, host_blocks=60, disk_blocks=0).alone()
    assert [row.outside for row in found] == [0, 0, 0, 0]


def test_a_slow_link_is_said_and_not_claimed() -> None:
    """Where loading is slower than computing, first tokens come later than without offload: shown, and no fault."""
    found = runs_of(1, cost=CostModel(link_in=2e8)).alone()
    outside = {row.name: row.outside for row in found}

    assert outside["TTFT, s"] > 0
    assert outside["computed tokens"] == outside["prefill, s"] == 0
    assert broken(found) == []


@pytest.mark.parametrize("place", range(4))
def test_one_request_outside_is_seen(place: int) -> None:
    """One figure of one request above that without offload, or better than with an infinite cache, is counted."""
    good = [Each(100, 1.0, 1.0, 50.0), Each(80, 0.8, 0.9, 50.0)]
    for run, factor in ((1, 1.5), (1, 0.5)):
        runs: list[Sequence[Each]] = [good, good, good]
        worse = list(good[1])
        worse[place] *= factor
        runs[run] = [good[0], Each(*worse)]  # type: ignore[arg-type]
        found = brackets(runs)
        assert [row.outside for row in found] == [int(i == place) for i in range(4)]
        assert bool(broken(found)) is (place != 2)


def test_requests_come_in_the_order_of_the_trace() -> None:
    """One row over all sessions, by time, each after the one before it."""
    trees = trees_of(open_trace("synth:sessions=3,turns=4,max_context=8k,seed=1"))
    row = in_one_row(trees)

    times = [turn.request.t for turn in row.turns]
    assert times == sorted(times)
    assert len(times) == sum(len(tree.turns) for tree in trees)
    assert [turn.after for turn in row.turns] == [(), *((i,) for i in range(len(times) - 1))]


def test_report_says_which_figures_are_outside() -> None:
    """The report names what of the closed loop is not between its controls; without controls it claims nothing."""
    trace = open_trace("synth:sessions=2,turns=3,max_context=8k,subagents=0,seed=1")
    options = SessionOptions(Schedule(2, 0.0), True, device_blocks=140, host_blocks=100)
    report = run_sessions(trace, options)
    body = report.to_dict()

    assert report.ok, report.broken()
    assert [row["figure"] for row in body["one_by_one"]] == [
        "computed tokens",
        "prefill, s",
        "TTFT, s",
        "tokens/s",
    ]
    assert set(body["one_by_one"][0]) == {"figure", "outside", "claimed", *CONTROLS}
    assert "hits" not in body["outside"]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(session_table(report))
    text = console.export_text()
    assert "one by one" in text
    assert ("Not between" in text) is bool(body["outside"])
    assert max(map(len, text.splitlines())) <= 80

    bare = run_sessions(trace, SessionOptions(Schedule(2, 0.0), True, device_blocks=140, controls=False))
    assert bare.alone == ()
    assert bare.outside() == []
