"""`kvoffload bench`: rows compare like with like, and say what they compare; no test asserts a time."""

from __future__ import annotations

import json
import os
import re

import numpy as np
import pytest
from typer.testing import CliRunner

from kvoffload.bench import disk, hash, index, planner, requests, start
from kvoffload.bench.rows import (
    MILLISECONDS,
    Limit,
    Row,
    Target,
    at_most,
    compare,
    constant,
    each,
    rate,
    ratio_at_least,
    ratio_at_most,
)
from kvoffload.bench.show import number, table
from kvoffload.bench.timing import Measure, interleaved, timed
from kvoffload.bench.world import World
from kvoffload.cli import app
from kvoffload.console import show
from kvoffload.keys import HASHES


def shape(row):
    """A row without its numbers."""
    return row.name, row.unit, row.beside, str(row.target or "")


def sound(rows):
    """Every figure is above 0 and lies between its lowest and highest round."""
    for row in rows:
        for measure in (row.figure, row.limit):
            if measure is not None:
                assert 0 < measure.low <= measure.median <= measure.high, row
    return rows


def test_things_are_timed_in_turns():
    """Each thing warms up once, then all run in turns; only what they say counts."""
    calls = []

    def thing(name, seconds):
        def run():
            calls.append(name)
            return seconds

        return run

    assert interleaved([thing("a", 1.0), thing("b", 2.0)], 3) == [[1.0] * 3, [2.0] * 3]
    assert "".join(calls) == "ab" * 4
    assert timed(lambda: sum(range(1000)))() > 0


def test_measure_is_median_and_spread():
    """The median counts; the spread is the distance of the extremes as a part of it."""
    measure = Measure.of([4.0, 1.0, 2.0])

    assert (measure.median, measure.low, measure.high, measure.spread) == (2.0, 1.0, 4.0, 1.5)


def test_units():
    """A round's seconds become a rate, nanoseconds for each item, or milliseconds."""
    assert rate(2 * 10**9).of(4.0) == 0.5
    assert each(1000, "key").of(2e-6) == pytest.approx(2.0)
    assert each(1000, "key").name == "ns/key"
    assert MILLISECONDS.of(0.25) == 250


@pytest.mark.parametrize(
    ("target", "met", "text"),
    [
        (at_most(10), True, "<= 10"),
        (at_most(9.9), False, "<= 9.9"),
        (ratio_at_least(0.5), True, ">= 0.5x"),
        (ratio_at_least(0.51), False, ">= 0.51x"),
        (ratio_at_most(0.5), True, "<= 0.5x"),
        (ratio_at_most(0.49), False, "<= 0.49x"),
    ],
)
def test_targets(target, met, text):
    """A target bounds the figure itself or its ratio to the limit, from above or below."""
    row = Row("x", "u", Measure(10, 10, 10), "limit", Measure(20, 20, 20), target)

    assert (row.ratio, row.met, str(row.target)) == (0.5, met, text)


def test_each_limit_has_a_row_with_its_target():
    """Ours is measured once for all limits; its own target stands in the first row that has none."""
    rows = compare(
        "x", MILLISECONDS, lambda: 2.0, [Limit("a", lambda: 1.0, ratio_at_most(3)), Limit("b", lambda: 4.0)], 2,
        at_most(1),
    )  # fmt: skip

    assert [(r.beside, r.ratio, str(r.target), r.met) for r in rows] == [
        ("a", 2.0, "<= 3x", True),
        ("b", 0.5, "<= 1", False),
    ]
    (alone,) = compare("x", MILLISECONDS, lambda: 2.0, [], 1, at_most(3000))
    assert (alone.beside, alone.limit, alone.ratio, alone.met) == ("", None, 0.0, True)


def test_table_is_80_wide_and_names_what_is_missed():
    """Long names fold, nothing is cut, and a missed target is said in words below."""
    long = Measure(123456.7, 100000, 150000)
    rows = [
        Row(
            "a name that is much longer than its column",
            "us/call",
            long,
            "a peer of many words",
            long,
            at_most(1),
        ),
        constant("counted", "B/key", 79.5, at_most(80)),
    ]
    with_text = capture(table("bench x", rows, 7))

    assert max(map(len, with_text.splitlines())) <= 80
    assert "123,457" in with_text
    assert " NO" in with_text
    assert "yes" in with_text
    assert "missed: a name that is much longer than its column beside a peer of many words" in " ".join(
        with_text.split()
    )
    assert "median of 7 rounds" in with_text


def capture(content):
    """What `show` prints."""
    import contextlib
    import io

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        show(content)
    return out.getvalue()


def test_numbers_are_short():
    """Three digits that count."""
    assert [number(x) for x in (0.1234, 9.87, 12.34, 99.96, 123.4, 12345.6)] == [
        "0.12",
        "9.87",
        "12.3",
        "100.0",
        "123",
        "12,346",
    ]


def test_hash_rows():
    """Every hash, a cold chain and one block a call, beside the library alone."""
    rows = sound(list(hash.bench_hash(tokens=330, block=16, rounds=2)))
    limit = "bare loop over the library"

    assert [shape(r) for r in rows] == [
        row
        for name in HASHES
        for row in (
            (f"{name}, 330 tokens at 16", "ms", limit, "<= 1.15x"),
            (f"{name}, one block a call", "ns/block", limit, ""),
        )
    ]


def test_different_keys_are_not_compared(monkeypatch):
    """If the bare loop made other keys than the chain, the comparison would be worthless and is refused."""
    monkeypatch.setattr(hash, "_bare", lambda namespace, ids: b"")
    with pytest.raises(RuntimeError, match="different keys"):
        list(hash.bench_hash(tokens=64, block=16, rounds=1))


def test_index_rows():
    """Match beside a plain table and a dict, pins beside the table, memory: with the targets at the agreed size."""
    rows = sound(list(index.bench_match(sizes=(index.SMALL, 300), rounds=1)))

    assert [shape(r) for r in rows[:4]] == [
        ("match, 62,500 keys", "ns/key", "plain table", "<= 30"),
        ("match, 62,500 keys", "ns/key", "Python dict", ""),
        ("pin + unpin, 62,500 keys", "ns/key", "plain table", "<= 50"),
        ("memory, 62,500 keys", "B/key", "", "<= 80"),
    ]
    assert [r.name.partition(", ")[2] for r in rows[4:]] == ["300 keys"] * 4


def test_the_plain_table_finds_its_keys_alone():
    """The peer really looks up: its keys are found, others are not, and every pin is taken back."""
    from kvoffload import _C

    keys, others = index.random_keys(500), index.random_keys(700, seed=1)
    both = _C.PlainTable(keys)

    assert both.find(keys) == 500
    assert both.find(others) == 0
    assert both.find(np.concatenate((keys[100:200], others))) == 100
    assert both.pin_unpin(keys) == 0
    with pytest.raises(ValueError, match="keys"):
        both.find(np.zeros((3, 8), np.uint8))


def test_planner_rows(monkeypatch):
    """Stores into free and full hosts and to disk, one key a call, matches and a load."""
    monkeypatch.setattr(planner, "SINGLES", 20)
    rows = sound(list(planner.bench_planner(blocks=2048, rounds=2)))

    assert [shape(r) for r in rows] == [
        ("offer + complete, 512 keys a call", "ns/key", "dict, list in Python", "<= 150"),
        ("the same, each evicting one", "ns/key", "", ""),
        ("the same, and written to disk", "ns/key", "", ""),
        ("offer + complete, 1 key a call", "us/call", "", "<= 20"),
        ("match, new request", "ns/key", "", ""),
        ("match asked again, nothing new", "us/call", "", ""),
        ("match + load + complete", "ns/key", "", ""),
        ("request, 128 new keys", "us/req", "", "<= 50"),
        ("request, 128 keys loaded", "us/req", "", "<= 50"),
    ]


def test_the_world_stores_and_loads_what_it_says():
    """What is timed really happens: blocks stored, evicted, written and loaded, nothing left over."""
    world = World(1024, disk=2048)
    first = world.prompt(world.new_keys(1000))
    world.store(first, 300)
    world.end(first)
    again = world.prompt(first.keys)
    assert world.load(again) == 1000
    world.end(again)
    second = world.prompt(world.new_keys(1000))
    world.store(second, 1000)
    world.end(second)
    totals = world.planner.stats().totals

    assert (totals["stored_host"], totals["stored_disk"], totals["loaded_host"]) == (2000, 2000, 1000)
    assert totals["evicted_host"] == 2000 - 1024
    assert world.planner.pinned() == 0
    world.planner.check_integrity()


def test_disk_rows(tmp_path, monkeypatch):
    """Write and read beside a raw loop; what was made on the disk is gone afterwards."""
    monkeypatch.setattr(disk.shutil, "which", lambda name: None)
    rows = sound(list(disk.bench_disk(tmp_path, block_bytes=1 << 16, nbytes=1 << 20, rounds=1)))

    assert [(r.name, r.unit, str(r.target)) for r in rows] == [
        (f"{way} 64 KiB blocks, checksum, 4 threads", "GB/s", ">= 0.9x") for way in ("write", "read")
    ]
    assert all(re.fullmatch(r"raw (O_DIRECT|buffered) loop", r.beside) for r in rows)
    assert list(tmp_path.iterdir()) == []


def test_fio_stands_beside_reads_where_it_is_installed(tmp_path, monkeypatch):
    """Its rate is read from its report, at the bytes of our rounds; it has no target."""
    tools, place = tmp_path / "tools", tmp_path / "place"
    tools.mkdir()
    place.mkdir()
    fio = tools / "fio"
    fio.write_text('#!/bin/sh\necho \'{"jobs": [{"read": {"bw_bytes": 1000000}}]}\'\n')
    fio.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    rows = list(disk.bench_disk(place, block_bytes=1 << 16, nbytes=1 << 20, rounds=1))

    assert [(r.name.split()[0], r.beside) for r in rows][2] == ("read", "fio")
    assert rows[2].limit.median == pytest.approx(0.001)
    assert (len(rows), rows[2].target) == (3, None)
    assert list(place.iterdir()) == []


def test_start_rows(tmp_path):
    """Opening beside reading the table; it reads 64 bytes a slot and some, so no payload of 4096."""
    rows = sound(list(start.bench_start(tmp_path, slots=500, rounds=1)))

    assert shape(rows[0]) == ("open with 500 blocks", "ms", "reading the table", "")
    assert rows[1].unit == "B/slot"
    assert 64 <= rows[1].figure.median * 500 / (8192 + 1) < 2 * 64
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["index", "hash", "copy", "disk"])
def test_commands(command, tmp_path, monkeypatch):
    """Each prints a table of 80 columns or one JSON object with the same rows."""
    rows = [constant("counted", "B/key", 100, Target(80)), constant("free", "B", 1)]
    names = ("bench_match", "bench_planner", "bench_hash", "bench_copy", "bench_disk", "bench_start")
    for name in names:
        monkeypatch.setattr(f"kvoffload.bench.commands.{name}", lambda *a, **k: iter(rows))
    place = ["--path", str(tmp_path)] if command == "disk" else []
    printed = CliRunner().invoke(app, ["bench", command, "--quick", *place])
    as_json = CliRunner().invoke(app, ["bench", command, "--json", *place])

    assert (printed.exit_code, as_json.exit_code) == (0, 0)
    assert max(map(len, printed.stdout.splitlines())) <= 80
    assert "median of 3 rounds" in printed.stdout
    body = json.loads(as_json.stdout)
    assert as_json.stdout.count("\n") == 1
    assert body["rows"][:2] == [row.to_dict() for row in rows]
    assert body["rows"][0]["met"] is False
    assert set(body["missed"]) == {"counted"}
    assert body["rounds"] == 7


def test_too_little_room_is_said_before_the_work(tmp_path, monkeypatch):
    """A disk or a memory that is too small is named with what is needed, and nothing is measured."""
    monkeypatch.setattr("kvoffload.bench.commands.available_host_bytes", lambda: 1000)
    for command in (["bench", "copy"], ["bench", "disk", "--path", str(tmp_path)]):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 2
        assert "768MiB" in result.stderr or "512MiB" in result.stderr


def test_requests_are_counted_and_memory_is_bounded():
    """Every drawn request is loaded or produced whole, half of them each, and a longer run takes no more memory."""
    found = requests.bench_requests(2 * requests.PART + 7)

    assert found.count == 2 * requests.PART + 7
    assert found.loaded + found.produced == found.count * planner.PROMPT
    assert 0.45 < found.loaded / (found.loaded + found.produced) < 0.55
    assert 0 < found.per_request.low <= found.per_request.median <= found.per_request.high
    first, last, most = found.resident
    assert 0 < last <= most <= first + (8 << 20)


def test_requests_command_says_rate_and_memory(monkeypatch):
    """The figure that is asked for stands beside its target, in 80 columns, and `--json` has the same."""
    monkeypatch.setattr(requests, "PART", 50)
    out = CliRunner().invoke(app, ["bench", "requests", "--count", "120"]).output
    assert "requests/s" in out
    assert "target >= 20,000" in out
    assert "resident" in out
    assert max(map(len, out.splitlines())) <= 80
    body = json.loads(CliRunner().invoke(app, ["bench", "requests", "--count", "120", "--json"]).stdout)
    assert body["count"] == 120
    assert body["loaded"] % planner.PROMPT == 0
