"""`kvoffload bench copy`: which cases are measured, beside what, and where it says that they ran; never how fast."""

from __future__ import annotations

import json
import sys
from itertools import pairwise

import pytest
from typer.testing import CliRunner

from kvoffload import native
from kvoffload.bench import commands, copy, gpu_copy
from kvoffload.bench.copy_cases import FRAGMENTS, FULL_FRAGMENTS, permuted, regions_of
from kvoffload.bench.rows import CopyCase, Row, ratio_at_least
from kvoffload.bench.show import table
from kvoffload.bench.timing import Measure, Metered
from kvoffload.cli import app
from kvoffload.copying import CpuCopyEngine

DIRECTIONS = ("to host", "to device", "both")
PNG = b"\x89PNG\r\n"


@pytest.fixture
def small(monkeypatch):
    """The command with two sizes, one round and a mebibyte, and no device."""
    monkeypatch.setattr(commands, "FRAGMENTS", (1 << 10, 16 << 10))
    monkeypatch.setattr(commands, "QUICK_MOVED", 1 << 20)
    monkeypatch.setattr(commands, "QUICK_ROUNDS", 1)
    missing = native.Found("", None, 0, "_cuda: no driver; _hip: not built")
    monkeypatch.setattr(commands, "device_module", lambda: missing)


def invoke(*arguments):
    """The command's result; it must have ended well."""
    result = CliRunner().invoke(app, ["bench", "copy", "--quick", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result


def test_sizes_are_those_that_were_agreed():
    """The sweep has seven sizes; the full one has them and more."""
    assert [size >> 10 for size in FRAGMENTS] == [1, 4, 16, 32, 256, 1024, 4096]
    assert set(FRAGMENTS) < set(FULL_FRAGMENTS)


@pytest.mark.parametrize("count", [1, 2, 3, 8, 1000])
def test_permuted_pages_have_runs_of_length_1(count):
    """Every page comes once, and none is followed by its successor."""
    order = permuted(count)

    assert sorted(order) == list(range(count))
    assert all(b != a + 1 for a, b in pairwise(order))


def test_cpu_rows():
    """Each direction and number of threads beside large copies; judged sizes in order, too; merged runs apart."""
    rows = list(copy.bench_copy(fragments=(1 << 10, 16 << 10), nbytes=1 << 20, rounds=1))
    few, many = ("1 thread", "large copy", ">= 0.65x"), ("2 threads", "large copies", ">= 0.75x")
    expected = []
    for size in ("1KiB", "16KiB"):
        judged = size == "16KiB"
        for threads, large, least in (few, many):
            for way in DIRECTIONS[:2]:
                name = f"{size} {way}, {threads}"
                expected += [(name, "memcpy in order", ">= 0.9x")] if judged else []
                expected.append((name, large, least if judged else ""))
            expected.append((f"{size} both, {threads}", "large copies", ""))
        if judged:
            expected += [(f"{size} {way}, merged, 2 threads", "large copies", "") for way in DIRECTIONS]

    assert [(r.name, r.beside, str(r.target or "")) for r in rows] == expected
    assert all(r.unit == "GB/s" and r.figure.low > 0 and r.limit.low > 0 and r.cpu.low >= 0 for r in rows)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_direction_moves_the_same_bytes(direction, monkeypatch):
    """Every block is moved once by one measurement; of both directions, half of them each, to places of their own."""
    seen = []
    real = CpuCopyEngine.submit

    def submit(self, copies, way, after):
        seen.append((way.name, copies.copy()))
        return real(self, copies, way, after)

    monkeypatch.setattr(CpuCopyEngine, "submit", submit)
    monkeypatch.setattr(copy, "DIRECTIONS", (direction,))
    rows = list(copy.bench_copy((4096,), threads=(1,), nbytes=4 << 20, rounds=1))
    ways = {"to host": ["TO_HOST"], "to device": ["TO_DEVICE"], "both": ["TO_HOST", "TO_DEVICE"]}[direction]
    jobs = seen[: len(ways)]
    blocks = (4 << 20) // (4096 * regions_of(4096))

    assert {row.case for row in rows} == {CopyCase(4096, direction, "1 thread", m) for m in (False, True)}
    assert [way for way, _ in jobs] == ways
    for field in ("page", "host"):
        assert sorted(int(c[field]) for _, copies in jobs for c in copies) == list(range(blocks))


def test_cpu_time_is_that_of_each_call():
    """Each call's CPU time is kept beside the seconds it gave, which it does not change."""
    metered = Metered(lambda: 2.5)

    assert [metered(), metered()] == [2.5, 2.5]
    assert len(metered.cpu) == 2
    assert min(metered.cpu) >= 0


def test_a_row_of_copies_shows_its_cpu_time_once(capsys):
    """The column stands only where a row has it, once per case, and 80 columns are enough."""
    of_case = {"case": CopyCase(256 << 10, "to device", "staged", True), "cpu": Measure(777, 777, 777)}
    ours = Measure(123, 100, 150)
    rows = [
        Row("256KiB to device, merged, staged", "GB/s", ours, beside, ours, ratio_at_least(0.95), **of_case)
        for beside in ("memcpy in order", "large copies")
    ]
    commands.show(table("bench copy", rows, 7))
    with_cpu = capsys.readouterr().out
    commands.show(table("bench x", [Row("x", "ms", ours)], 7))

    assert max(map(len, with_cpu.splitlines())) <= 80
    assert with_cpu.count(" 777") == 1
    assert "CPU" not in capsys.readouterr().out
    assert rows[0].to_dict()["cpu_us_per_fragment"]["median"] == 777
    assert rows[0].to_dict()["fragment"] == 256 << 10


def test_without_a_device_the_cpu_is_measured_and_why_is_said(small):
    """The table ends with a line that names the CPU's module and each runtime's reason."""
    lines = invoke().stdout.splitlines()

    assert max(map(len, lines)) <= 80
    said = "measured on the CPU, by _C: no device can be used (_cuda: no driver; _hip: not built)"
    assert " ".join(" ".join(lines).split()).endswith(said)


def test_json_has_the_cases(small):
    """One object: where it was measured, and for each row its size, direction, mode and CPU time."""
    body = json.loads(invoke("--json").stdout)

    assert body["where"].startswith("the CPU, by _C: no device")
    found = {(r["fragment"], r["direction"], r["mode"]) for r in body["rows"] if not r["merged"]}
    assert found == {(size, way, "2 threads") for size in (1 << 10, 16 << 10) for way in DIRECTIONS}
    assert all(r["cpu_us_per_fragment"]["median"] >= 0 for r in body["rows"])


def test_where_there_is_a_device_it_is_measured(small, monkeypatch):
    """A runtime with a device gets the sweep over all of its modes, and is named."""
    found = native.Found("_sim", native.simulation(), 1, "")
    monkeypatch.setattr(commands, "device_module", lambda: found)
    body = json.loads(invoke("--json").stdout)

    assert body["where"] == native.simulation().device_info(0)[0]
    assert {r["mode"] for r in body["rows"]} == {"staged", "dma", "kernel"}
    assert {r["direction"] for r in body["rows"]} == set(DIRECTIONS)


def test_full_takes_more_sizes(small, monkeypatch):
    """--full hands its own sizes to the sweep."""
    monkeypatch.setattr(commands, "FULL_FRAGMENTS", (2 << 10,))
    body = json.loads(invoke("--json", "--full").stdout)

    assert {r["fragment"] for r in body["rows"]} == {2 << 10}


def test_plot(small, tmp_path):
    """The rates become one picture in the folder, which is made; the JSON beside it stays alone on its stream."""
    pytest.importorskip("matplotlib")
    result = invoke("--json", "--plot", tmp_path / "new")

    json.loads(result.stdout)
    assert (tmp_path / "new" / "copy.png").read_bytes().startswith(PNG)


def test_plot_without_matplotlib_is_refused_before_the_work(small, tmp_path, monkeypatch):
    """The error names the extra, and nothing is measured."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(commands, "bench_copy", lambda *a, **k: pytest.fail("measured"))
    result = CliRunner().invoke(app, ["bench", "copy", "--plot", str(tmp_path)])

    assert result.exit_code == 2
    assert "kvoffload[report]" in result.stderr


def test_a_full_device_is_one_error(monkeypatch):
    """Too little memory on the device names the bytes asked for."""

    class Full:
        def memory_allocate(self, nbytes):
            raise RuntimeError("out of memory")

    with pytest.raises(gpu_copy.ConfigError, match=r"2MiB of device memory.*out of memory"):
        gpu_copy.Stage(Full(), 0, 4096, 1 << 20)
