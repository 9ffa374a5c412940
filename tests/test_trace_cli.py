"""`kvoffload trace`: one JSON object, 80 columns, one-line errors with status 2."""

from __future__ import annotations

import json
from pathlib import Path

from trace_files import ids_of, write_lines
from typer.testing import CliRunner, Result

from kvoffload.cli import app
from kvoffload.traces import open_trace, summarize, synthesize
from kvoffload.traces.synth_spec import SynthSpec, parse_spec, shown

ROWS = [
    {"timestamp": 0, "input_length": 1000, "output_length": 7, "hash_ids": [4, 9]},
    {"timestamp": 9000, "input_length": 1100, "output_length": 9, "hash_ids": [4, 5, 6]},
]


def run(*arguments: object) -> Result:
    """The command's result; streams apart."""
    return CliRunner().invoke(app, ["trace", *map(str, arguments)])


def test_info_as_json_is_one_object(tmp_path: Path) -> None:
    """--json prints the summary as one JSON object and nothing else."""
    path = write_lines(tmp_path / "t.jsonl", ROWS)
    result = run("info", path, "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert (found["blocks"], found["unique_blocks"], found["hit_blocks"], found["sessions"]) == (
        5,
        4,
        1,
        None,
    )
    assert (found["block_tokens"], found["partial_tail"], found["form"]) == (512, "ceil", "full")
    assert result.stdout.count("\n") == 1
    assert result.stderr == ""


def test_info_fits_80_columns(tmp_path: Path) -> None:
    """The table is at most 80 columns wide, for long names too, and shows the figures."""
    folder = tmp_path / ("long" * 20)
    folder.mkdir()
    result = run("info", write_lines(folder / "t.jsonl", ROWS))
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 80
    for text in (
        "1 (20.00 %)",
        "not named",
        "partial tail listed (ceil)",
        "1,050 / 8",
        "1.25 (blocks / unique",
    ):
        assert text in result.stdout


def test_notes_are_shown(tmp_path: Path) -> None:
    """What reading changed is said below the table."""
    result = run("info", write_lines(tmp_path / "t.jsonl", ROWS), "--rekey")
    assert "note: ids re-keyed by (parent, id), as asked" in result.stdout


def test_errors_are_one_line_and_status_2(tmp_path: Path) -> None:
    """A TraceError goes to stderr as one line; nothing is printed, no traceback; the status is 1."""
    for arguments in (["info", tmp_path / "none.jsonl", "--json"], ["info", "synth:x=1"]):
        result = run(*arguments)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1


def test_convert_block_size_and_force(tmp_path: Path) -> None:
    """convert writes larger blocks, refuses to replace a file, and replaces it with --force."""
    path, out = write_lines(tmp_path / "t.jsonl", ROWS), tmp_path / "o.jsonl.gz"
    result = run("convert", path, out, "--to", "full", "--block-size", 1024)
    assert (result.exit_code, "2 requests in blocks of 1024 tokens" in result.stdout) == (0, True)
    assert ids_of(open_trace(out)) == [[], [5]]
    before = out.read_bytes()
    assert run("convert", path, out).exit_code == 2
    assert out.read_bytes() == before
    assert run("convert", path, out, "--force").exit_code == 0
    assert ids_of(open_trace(out)) == [[4, 9], [4, 5, 6]]
    assert run("convert", path, tmp_path / "w.jsonl", "--to", "weka").exit_code == 2


def test_convert_reads_the_form_asked_for(tmp_path: Path) -> None:
    """--form reaches the reader: a full trace given as delta is an error."""
    rows = [{**row, "session_id": "s"} for row in ROWS]
    result = run("convert", write_lines(tmp_path / "t.jsonl", rows), tmp_path / "o.jsonl", "--form", "delta")
    assert result.exit_code == 2
    assert "--form full" in result.stderr


def test_synth_writes_what_the_function_makes(tmp_path: Path) -> None:
    """The file has the ids of the spec, and is the same every time; every option is reachable."""
    out = tmp_path / "s.jsonl"
    options = [
        "--sessions",
        2,
        "--seed",
        5,
        "--max-context",
        "50k",
        "--shared-prefix",
        "1k",
        "--set",
        "turns=5",
    ]
    result = run("synth", out, *options)
    assert result.exit_code == 0
    spec = SynthSpec(sessions=2, seed=5, max_context=50_000, shared_prefix=1_000, turns=5)
    trace = synthesize(spec)
    said = result.stdout.splitlines()[-1].strip()
    assert parse_spec(said) == spec
    assert max(map(len, result.stdout.splitlines()[1:])) <= 80
    assert ids_of(open_trace(out)) == ids_of(trace)
    first, second = summarize(open_trace(out)), summarize(trace)
    assert (first.hit_blocks, first.input_tokens, first.agents) == (
        second.hit_blocks,
        second.input_tokens,
        second.agents,
    )
    assert run("synth", tmp_path / "x.jsonl", "--set", "colour=red").exit_code == 2


def test_convert_says_that_tokens_stay_behind(tmp_path: Path) -> None:
    """A synthetic trace has token ids and a file has none: convert says so, and only then."""
    made = run("convert", "synth:sessions=1,turns=2,max_context=8k,subagents=0", tmp_path / "a.jsonl")
    assert "token ids are left out" in made.stdout
    assert "token ids" not in run("convert", tmp_path / "a.jsonl", tmp_path / "b.jsonl").stdout


def test_a_form_that_cannot_hold_a_trace_says_why(tmp_path: Path) -> None:
    """Prompts whose blocks go on over turns have no delta form: the error says so, gives a way out, writes nothing."""
    out = tmp_path / "d.jsonl"
    done = run("convert", "synth:sessions=1,turns=2,max_context=8k,subagents=0", out, "--to", "delta")
    assert done.exit_code == 2
    assert "each turn starts a new block" in done.stderr
    assert "--block-size" not in done.stderr
    assert "use --to full or runs" in done.stderr
    assert not out.exists()


def test_a_synthetic_trace_is_shown_by_what_is_not_the_default() -> None:
    """One short name, which stands for the same trace, and a file's name as it is."""
    name = str(SynthSpec(sessions=3, turns=5))
    assert shown(name) == "synth:sessions=3,seed=0,turns=5"
    assert str(parse_spec(shown(name))) == name
    assert shown("some/file.jsonl") == "some/file.jsonl"
    assert "synth:sessions=1,seed=0,turns=2" in run("info", "synth:sessions=1,turns=2").stdout
