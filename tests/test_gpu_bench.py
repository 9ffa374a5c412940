"""The device benchmark runs whole on the simulated runtime; its numbers mean nothing there and are not looked at."""

from __future__ import annotations

import json

from kvoffload import native
from kvoffload.bench import gpu_copy
from kvoffload.copying.modes import CopyMode


def test_every_mode_and_direction_has_a_row():
    """Each fragment size gives a row per mode and direction; pages in order are shown for DMA from one slot page on."""
    rows = list(
        gpu_copy.bench_device_copy(
            native.simulation(), fragments=(1 << 10, 64 << 10), nbytes=1 << 20, rounds=1
        )
    )
    directions = ("to host", "to device", "both")
    expected = {(1 << 10, d, m.name.lower()) for d in directions for m in CopyMode}
    expected |= {(64 << 10, d, m.name.lower()) for d in directions for m in CopyMode}
    cases = [(r.case.fragment, r.case.direction, r.case.mode) for r in rows if not r.case.merged]
    merged = [(r.case.fragment, r.case.direction, r.case.mode) for r in rows if r.case.merged]
    assert sorted(cases) == sorted(expected)
    assert sorted(merged) == sorted((64 << 10, d, "dma") for d in directions)
    assert all(r.figure.low > 0 and r.limit.low > 0 and r.cpu.low >= 0 for r in rows)


def test_only_staged_copies_of_4_kib_and_more_are_judged():
    """Targets stand where they were promised and nowhere else."""
    rows = list(
        gpu_copy.bench_device_copy(
            native.simulation(),
            fragments=(1 << 10, 4 << 10),
            modes=(CopyMode.STAGED,),
            nbytes=1 << 20,
            rounds=1,
        )
    )
    assert {(r.case.fragment, r.case.direction): str(r.target or "") for r in rows} == {
        (1 << 10, "to host"): "",
        (1 << 10, "to device"): "",
        (1 << 10, "both"): "",
        (4 << 10, "to host"): ">= 0.95x",
        (4 << 10, "to device"): ">= 0.95x",
        (4 << 10, "both"): ">= 0.9x",
    }


def test_command(tmp_path, capsys):
    """The command prints a table and keeps the rows; without a device it says why and measures nothing."""
    path = tmp_path / "rows.json"
    arguments = ["--fragments", "65536", "--bytes", "1048576", "--rounds", "1", "--json", str(path)]
    assert gpu_copy.main([*arguments, "--simulate"]) == 0
    assert "64KiB both" in capsys.readouterr().out
    assert {row["mode"] for row in json.loads(path.read_text())} == {"staged", "dma", "kernel"}


def test_command_without_a_device(monkeypatch, capsys):
    """Where no device can be used the command says why, and that is no error."""
    monkeypatch.setattr(gpu_copy, "device_module", lambda: native.Found("", None, 0, "_cuda: no driver"))
    assert gpu_copy.main([]) == 0
    assert "no device (_cuda: no driver)" in capsys.readouterr().out
