"""Process that stores chains through a disk tier until it is killed: python crash_child.py PATH ROUND.

Prints a line of JSON about what it found at start, then `begin N` and `end N` around each disk write job.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from kvoffload.testing.rig import Keys, Rig, Sizes, one_group

BLOCK_BYTES = 64 << 10
BLOCKS = 40
SIZES = Sizes(host=24, transit=1, disk=50, pages=256)
"""Disk: 400 slots of 64 KiB, ten chains of BLOCKS."""


def chain_of(round_number: int, turn: int) -> Keys:
    """The chain that round stores in its turn: the first half is shared by the chains of a round."""
    half = BLOCKS // 2
    return Keys.of([round_number, *range(1, half), 1000 + turn, *range(half + 1, BLOCKS)])


def open_rig(path: Path) -> Rig:
    return Rig(SIZES, one_group(block_bytes=BLOCK_BYTES), path)


def resident_depths(rig: Rig, chain: Keys) -> list[int]:
    """Positions of the chain's blocks that some tier has, looked up one by one."""
    return [i for i, code in enumerate(rig.codes(chain)) if code & 3]


def examine(rig: Rig, rounds: int, turns: int) -> dict[str, int]:
    """Load whatever is left of every chain; holes: chains in which a block outlived one before it."""
    loaded = wrong = holes = 0
    for number in range(rounds):
        for turn in range(turns):
            chain = chain_of(number, turn)
            depths = resident_depths(rig, chain)
            holes += depths != list(range(len(depths)))
            plan, finished, bad = rig.load(chain)
            wrong += bad
            loaded += max((f.boundary for f in finished if f.id == plan.id), default=0) // 16
    return {"loaded": loaded, "wrong": wrong, "holes": holes}


def main() -> None:
    path, number = Path(sys.argv[1]), int(sys.argv[2])
    rig = open_rig(path)
    found = {"restored": rig.planner.counters["restored"], **examine(rig, number, 4)}
    print(json.dumps(found), flush=True)
    job = 0
    for turn in range(1_000_000):
        chain, info = chain_of(number, turn), rig.info()
        pages = rig.pages(chain)
        rig.paint(chain, pages)
        rig.planner.offer(info, chain, BLOCKS * 16, pages)
        while not rig.planner.idle:
            before = rig.planner.backlog()[1]
            if before:
                print(f"begin {job}", flush=True)
            rig.local.step()
            if before and not rig.planner.backlog()[1]:
                print(f"end {job}", flush=True)
                job += 1
        rig.planner.finish(info.id, "end_turn", 0.0)


if __name__ == "__main__":
    main()
