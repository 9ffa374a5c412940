"""A process killed in the middle of its disk writes, again and again, on one path."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from crash_child import chain_of, examine, open_rig, resident_depths

CHILD = Path(__file__).with_name("crash_child.py")
ROUNDS = 20
TORN_ROUND = 7


def run_and_kill(path: Path, number: int, chance: random.Random) -> dict[str, int]:
    """One life of the child; killed after a random number of write jobs, while one is unfinished."""
    child = subprocess.Popen(
        [sys.executable, str(CHILD), str(path), str(number)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert child.stdout is not None
    found: dict[str, int] = json.loads(child.stdout.readline() or "{}")
    wanted = chance.randint(3, 8)
    for line in child.stdout:
        if line == f"begin {wanted}\n":
            break
    child.send_signal(signal.SIGKILL)
    rest, errors = child.communicate(timeout=60)
    assert child.returncode == -signal.SIGKILL, errors
    found["unfinished"] = f"end {wanted}\n" not in rest
    return found


def gapless(depths: list[int]) -> bool:
    """Whether the blocks present are a prefix of their chain."""
    return depths == list(range(len(depths)))


def tear_a_record(path: Path) -> None:
    """Spoil the second half of the first record in use."""
    table = path / "rank0" / "table"
    data = bytearray(table.read_bytes())
    used = next(at for at in range(0, len(data), 64) if any(data[at + 24 : at + 40]))
    data[used + 32 : used + 64] = bytes(b ^ 0x5A for b in data[used + 32 : used + 64])
    table.write_bytes(data)


@pytest.mark.timeout(300)
def test_killed_twenty_times_on_the_same_path(tmp_path: Path) -> None:
    """Each life finds what earlier ones wrote, no byte is wrong, the torn record is a miss, and after all of it
    tails still go before the blocks they continue."""
    chance = random.Random(20)
    lives = []
    for number in range(ROUNDS):
        lives.append(run_and_kill(tmp_path, number, chance))
        if number == TORN_ROUND:
            tear_a_record(tmp_path)

    assert sum(life["wrong"] for life in lives) == 0
    assert all(life["restored"] > 0 and life["loaded"] > 0 for life in lives[1:])
    assert sum(life["unfinished"] for life in lives) >= ROUNDS - 2

    # A killed job may have written a block before the one that precedes it; chains without such a gap get none.
    with open_rig(tmp_path) as rig:
        chains = [chain_of(number, turn) for number in range(ROUNDS) for turn in range(4)]
        whole = [c for c in chains if gapless(resident_depths(rig, c))]
        assert len(whole) >= ROUNDS
        for number in range(100, 106):
            rig.store(chain_of(number, 0))
            assert all(gapless(resident_depths(rig, c)) for c in whole)
        assert examine(rig, ROUNDS, 4)["wrong"] == 0
        rig.check()


def test_after_a_restart_tails_go_first(tmp_path: Path) -> None:
    """A full disk opened anew: what a new chain displaces is the deepest blocks of the oldest chains, also where a
    shared prefix was written long before its continuation."""
    with open_rig(tmp_path) as rig:
        for number in range(3):
            rig.store(chain_of(number, 0))
        for number in range(3):
            for turn in range(1, 4):
                rig.store(chain_of(number, turn))
        left = rig.free_blocks("disk")
    with open_rig(tmp_path) as rig:
        assert rig.free_blocks("disk") == left
        for number in range(10, 10 + 12):
            rig.store(chain_of(number, 0))
            whole = examine(rig, 3, 4)
            assert (whole["holes"], whole["wrong"]) == (0, 0)
        rig.check()
