"""Replay plots: pictures with what the report says in them; a clear word where matplotlib is missing."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from kvoffload.cli import app
from kvoffload.errors import ConfigError
from kvoffload.replay import plots
from kvoffload.replay.base import Stored
from kvoffload.replay.report import RequestCount, Setup, Tally
from kvoffload.replay.run import Options, run_replay
from kvoffload.traces.load import open_trace

TRACE = "synth:sessions=2,seed=1,turns=6,max_context=20000"
PNG = b"\x89PNG\r\n\x1a\n"


def test_without_matplotlib_the_extra_is_named(monkeypatch, tmp_path):
    """One line that names what to install, before the replay and not after it; nothing is left behind."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(
        "kvoffload.replay.commands.run_replay", lambda *a, **k: pytest.fail("replayed for nothing")
    )
    folder = tmp_path / "plots"
    result = CliRunner().invoke(app, ["replay", TRACE, "--index-only", "--plot", str(folder)])

    assert result.exit_code == 2
    assert "pip install 'kvoffload[report]'" in result.stderr
    assert result.stderr.count("\n") == 1
    assert not folder.exists()
    with pytest.raises(ConfigError, match=r"kvoffload\[report\]"):
        plots.need_matplotlib()


def test_importing_the_replay_needs_no_matplotlib():
    """Only drawing imports it."""
    import subprocess

    program = "import sys, kvoffload.cli; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_report_has_the_turns_in_their_order():
    """What each turn wrote stands in the report in the order in which turns finished."""
    tally = Tally()
    for stored in (3, 1, 2):
        tally.add(RequestCount("s", np.arange(4), 64, (0, 0, 0), 4, 0, stored, 16))
    report = tally.report(Setup("t", 0, True, 16, 4096, "floor", 0, None, 0), Stored(), 0.0)

    assert report.written == (3, 1, 2)
    assert "written" not in report.to_dict()


@pytest.fixture
def drawn(monkeypatch):
    """Axes by file name, as they were saved."""
    pytest.importorskip("matplotlib", reason="the extra [report] is not installed")
    found = {}
    save = plots._save

    def keep(figure, path):
        found[path.name] = figure.axes[0]
        return save(figure, path)

    monkeypatch.setattr(plots, "_save", keep)
    return found


def test_plots_of_a_replay(drawn, tmp_path):
    """The command draws hits and bytes per turn as PNG; every turn is a point, every part of the run a column."""
    folder = tmp_path / "made" / "here"
    result = CliRunner().invoke(
        app,
        [
            "replay",
            TRACE,
            "--index-only",
            "--host-blocks",
            "100",
            "--disk-blocks",
            "500",
            "--plot",
            str(folder),
        ],
    )

    assert result.exit_code == 0, result.stderr
    assert sorted(p.name for p in folder.iterdir()) == ["hits.png", "written.png"]
    for path in folder.iterdir():
        assert path.read_bytes().startswith(PNG)
        assert str(path) in result.stdout.replace("\n", "")
    report = run_replay(open_trace(TRACE), Options(index_only=True, host_blocks=100, disk_blocks=500))
    turns = drawn["written.png"].lines[0].get_ydata()
    assert [round(y * plots.MIB) for y in turns] == [n * (16 << 10) for n in report.written]
    assert sum(report.written) > 0


def test_hits_are_stacked_to_a_hundred(drawn, tmp_path):
    """Each column shows HBM, host, disk and computed blocks of its part; together they are all of it."""
    plots.hits_over_time([(1, 2, 3, 10), (0, 0, 0, 5)], tmp_path / "hits.png", "x" * 200, "blocks")
    axes = drawn["hits.png"]
    columns = [[bar.get_height() for bar in stack] for stack in axes.containers]

    assert columns == [[10, 0], [20, 0], [30, 0], [40, 100]]
    assert [bar.get_y() for bar in axes.containers[3]] == [60, 0]
    assert [t.get_text() for t in axes.get_legend().get_texts()] == ["hbm", "host", "disk", "produced"]
    assert len(axes.get_title()) <= plots.TITLE


def test_distribution_of_first_tokens(drawn, tmp_path):
    """A curve per series rises from the first value to all of them."""
    curves = {"kvoffload": [0.2, 0.1, 0.4, 0.3], "no offload": [2.0, 1.0]}
    plots.distribution(curves, tmp_path / "ttft.png", "first tokens", "seconds")
    lines = drawn["ttft.png"].lines

    assert list(lines[0].get_xdata()) == [0.1, 0.2, 0.3, 0.4]
    assert list(lines[0].get_ydata()) == [25, 50, 75, 100]
    assert lines[1].get_label() == "no offload (2)"
    assert drawn["ttft.png"].get_xlabel() == "seconds"


def test_plots_of_sessions(drawn, tmp_path):
    """A session replay draws hits of the replay and the first tokens of all its runs."""
    result = CliRunner().invoke(
        app,
        [
            "replay",
            TRACE,
            "--sessions",
            "2",
            "--index-only",
            "--window",
            "0",
            "--json",
            "--plot",
            str(tmp_path),
        ],
    )
    assert result.exit_code == 0, (result.stderr, result.exception)
    runs = json.loads(result.stdout)["runs"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hits.png", "ttft.png"]
    assert [line.get_label() for line in drawn["ttft.png"].lines] == [
        f"{run['name']} ({len(run['ttfts'])})" for run in runs
    ]
    assert len(drawn["hits.png"].containers[0]) == len(runs[0]["series"])


def test_plots_of_nothing(drawn, tmp_path):
    """A replay without turns or a curve without values draws empty axes instead of failing."""
    plots.hits_over_time([], tmp_path / "hits.png", "none", "blocks")
    plots.written_per_turn([], 16384, tmp_path / "written.png", "none")
    plots.distribution({"none": []}, tmp_path / "ttft.png", "none", "seconds")
    assert len(drawn) == 3
