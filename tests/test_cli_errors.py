"""Whatever is wrong with what a user gave: one line on standard error that says so, status 2, no traceback."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from disk_world import open_tier
from typer.testing import CliRunner

from kvoffload.cli import app

ROWS = [{"timestamp": 0, "input_length": 1100, "output_length": 7, "hash_ids": [4, 9, 5]}]

BAD = {
    "no such command": (["nothing"], "No such command 'nothing'; see kvoffload --help"),
    "a typo": (["replya"], "Did you mean 'replay'"),
    "no argument": (["replay"], "Missing argument 'TRACE'; see kvoffload replay --help"),
    "no such option": (["replay", "{trace}", "--nope"], "--nope"),
    "an argument too much": (["trace", "info", "{trace}", "{trace}"], "unexpected extra argument"),
    "an option without value": (["replay", "{trace}", "--lanes"], "requires an argument"),
    "no trace": (["replay", "{tmp}/none.jsonl"], "no such file; give a trace file"),
    "a negative number": (["replay", "{trace}", "--lanes", "-1"], "'--lanes'"),
    "no number": (["replay", "{trace}", "--lanes", "x"], "'--lanes'"),
    "no host": (["replay", "{trace}", "--host-blocks", "0"], "'--host-blocks'"),
    "a size without unit": (
        ["replay", "{trace}", "--block-bytes", "16"],
        "has no unit; write for example 16GiB",
    ),
    "no size": (["replay", "{trace}", "--block-bytes", "big"], "is not a size; write for example"),
    "an empty block": (["replay", "{trace}", "--block-bytes", "0"], "a block has at least 1 byte"),
    "a negative size": (["replay", "{trace}", "--block-bytes", "-4KiB"], "a block has at least 1 byte"),
    "both modes": (["replay", "{trace}", "--sequential", "--lanes", "2"], "leave one of them out"),
    "check with lanes": (["replay", "{trace}", "--check", "--lanes", "2"], "only --sequential is exact"),
    "a path for nothing": (["replay", "{trace}", "--disk-path", "{tmp}"], "say how many blocks"),
    "a path without bytes": (
        ["replay", "{trace}", "--index-only", "--disk-blocks", "9", "--disk-path", "{tmp}"],
        "leave one of them out",
    ),
    "a small device": (["replay", "{trace}", "--device-blocks", "1"], "raise --device-blocks to at least"),
    "a host beyond memory": (
        ["replay", "{trace}", "--host-blocks", "99999999", "--block-bytes", "1MiB"],
        "lower --host-blocks",
    ),
    "a disk beyond the drive": (
        ["replay", "{trace}", "--disk-blocks", "99999999", "--block-bytes", "1MiB", "--disk-path", "{tmp}"],
        "lower disk_bytes or make room",
    ),
    "a file as disk path": (
        ["replay", "{trace}", "--disk-blocks", "9", "--disk-path", "{trace}"],
        "is a file, not a folder: give another path",
    ),
    "a file as folder of plots": (["replay", "{trace}", "--index-only", "--plot", "{trace}"], "{trace}: "),
    "a block size that does not fit": (["replay", "{trace}", "--block-size", "100"], "100"),
    "a form that is none": (["trace", "info", "{trace}", "--form", "long"], "'--form'"),
    "an empty trace": (["trace", "info", "{empty}"], "{empty}"),
    "a trace that is no text": (["trace", "info", "{binary}"], "{binary}"),
    "a trace of other lines": (["trace", "info", "{other}"], "{other}"),
    "a broken line": (["trace", "info", "{broken}"], "{broken}"),
    "a cut archive": (["trace", "info", "{cut}"], "{cut}"),
    "an empty folder": (["trace", "info", "{tmp}/folder"], "{tmp}/folder"),
    "an unknown option of synth": (["trace", "info", "synth:colour=red"], "colour"),
    "a bad value of synth": (["trace", "info", "synth:sessions=many"], "sessions"),
    "no sessions": (["trace", "synth", "{tmp}/s.jsonl", "--sessions", "0"], "sessions"),
    "a context of nothing": (["trace", "synth", "{tmp}/s.jsonl", "--max-context", "wide"], "wide"),
    "half an option": (["trace", "synth", "{tmp}/s.jsonl", "--set", "turns"], "turns"),
    "a target that is there": (["trace", "convert", "{trace}", "{trace}"], "--force"),
    "a target of no kind": (["trace", "convert", "{trace}", "{tmp}/out.txt"], "out.txt"),
    "a target in no folder": (["trace", "convert", "{trace}", "{tmp}/no/out.jsonl"], "{tmp}/no"),
    "a target that cannot say it": (
        ["trace", "convert", "{trace}", "{tmp}/w.json", "--to", "weka"],
        "use --to full",
    ),
    "no such bench": (["bench", "gpus"], "No such command 'gpus'; see kvoffload bench --help"),
    "a bench nowhere": (["bench", "disk", "--path", "{tmp}/none"], "no such folder; give one"),
    "a bench on a file": (["bench", "disk", "--path", "{trace}"], "no such folder; give one"),
    "a listing of nothing": (["disk", "ls", "{tmp}/none"], "no such folder; give the disk_path"),
    "a listing of a file": (["disk", "ls", "{trace}"], "is not a folder; give the disk_path"),
    "a name of two lines": (["disk", "ls", "{tmp}/two\nlines"], "two lines: no such folder"),
    "a check of nothing": (["disk", "verify", "{tmp}/none"], "no such folder; give the disk_path"),
    "no such namespace": (
        ["disk", "clear", "{used}", "--namespace", "zz", "--yes"],
        "there are 6e6e6e6e6e6e",
    ),
    "a clearing unasked": (["disk", "clear", "{used}"], "say --yes"),
    "a clearing unasked, for programs": (["disk", "clear", "{used}", "--json"], "say --yes"),
    "a clearing under an engine": (["disk", "clear", "{used}", "--yes"], "is in use by process {pid}"),
    "a check under an engine": (["disk", "verify", "{used}"], "is in use by process {pid}"),
    "a doctor for nowhere": (["doctor", "--path", "{tmp}/none"], "no such folder; give an existing one"),
}
"""What a user gave, and a part of the answer. {tmp}, {trace}, ...: see `world`."""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Paths by name: a good trace, bad ones, a folder that an engine has open."""
    tmp = tmp_path_factory.mktemp("cli")
    (tmp / "folder").mkdir()
    names = {"tmp": tmp, "pid": os.getpid(), "used": tmp / "used"}
    contents = {
        "trace": "".join(json.dumps(row) + "\n" for row in ROWS).encode(),
        "empty": b"",
        "binary": bytes(range(256)) * 9,
        "other": b'{"a": 1}\n{"a": 2}\n',
        "broken": json.dumps(ROWS[0]).encode() + b"\n{" + b'"timestamp": 1,\n',
    }
    for name, content in contents.items():
        names[name] = tmp / f"{name}.jsonl"
        names[name].write_bytes(content)
    names["cut"] = tmp / "cut.jsonl.gz"
    names["cut"].write_bytes(gzip.compress(contents["trace"] * 50)[:-30])
    tier = open_tier(tmp / "used" / (b"n" * 16).hex() / "dp0")
    folder = tier.directory
    assert folder.name == "rank"
    tier.close()
    folder.rename(folder.with_name("rank0"))
    tier = open_rank(folder.with_name("rank0"))
    yield {name: str(value) for name, value in names.items()}
    tier.close()


def open_rank(folder):
    """The directory as an engine has it."""
    from disk_world import LAYOUT, NAMESPACE, SLAB_BYTES, SLABS

    from kvoffload.tiers import DiskTier

    return DiskTier(folder, LAYOUT, SLAB_BYTES, SLABS, NAMESPACE)


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(name, world):
    """Every mistake ends with status 2, nothing on standard output, and one line that names it and the way out."""
    arguments, part = BAD[name]
    result = CliRunner().invoke(app, [a.format(**world) for a in arguments], prog_name="kvoffload")

    assert result.stderr.startswith("error: "), (result.stderr, result.exception)
    assert result.stderr.count("\n") == 1
    assert part.format(**world) in result.stderr
    assert result.stdout == ""
    assert result.exit_code == 2


def test_every_command_is_in_the_table():
    """No command is left out, so a new one cannot forget its errors."""
    commands = {
        ("replay",), ("doctor",), *((a, b) for a, bs in (
            ("trace", ("info", "convert", "synth")), ("bench", ("disk",)), ("disk", ("ls", "verify", "clear"))
        ) for b in bs),
    }  # fmt: skip
    tried = {tuple(arguments[: len(c)]) for arguments, _ in BAD.values() for c in commands}

    assert commands <= tried
    assert {info.name for info in app.registered_groups} == {"trace", "bench", "disk"}


def test_no_command_shows_help():
    """Without a command, help is shown and not an error; the status says that nothing was done."""
    for arguments in ([], ["trace"], ["bench"], ["disk"]):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 2
        assert "error:" not in result.stderr
        assert "Usage" in result.stdout + result.stderr


def test_a_defect_shows_its_traceback(monkeypatch):
    """An error that no user can mend is not dressed up as one."""
    monkeypatch.setattr("kvoffload.doctor.commands.look_at_build", lambda: 1 / 0)
    result = CliRunner().invoke(app, ["doctor"])

    assert isinstance(result.exception, ZeroDivisionError)


def test_the_installed_command_behaves_the_same(tmp_path):
    """The same from a shell: one line, status 2; and a reader that goes away early is no error message."""
    program = "import sys; from kvoffload.cli import app; sys.argv[0] = 'kvoffload'; app()"
    done = subprocess.run(
        [sys.executable, "-c", program, "disk", "ls", str(tmp_path / "none")],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[1],
    )

    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr
        == f"error: {tmp_path}/none: no such folder; give the disk_path that the engines were given\n"
    )
