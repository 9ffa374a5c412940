"""Identities that sequential replays of one trace owe each other, checked on real planners, none of them an oracle.

Prompts only, one group, one request after the other, no page cached on the device: what docs/replay.md calls the rule.
C1 and C2 are capacities, C1 <= C2; every tier is given every access.

1. Hits never fall as capacity grows; no limit = a capacity above all distinct blocks.
2. Hits + blocks stored = all blocks, where no prompt is longer than the tier.
3. Host C1 over disk C2: hits of host = those of host C1 alone; hits of both, and what is stored on disk = those of a
   tier of C2 alone.
4. A second tier that holds only what the first gave up: hits of both = those of a tier of C1 + C2, where no prompt is
   longer than C1. kvoffload has no such mode, so a model of it stands beside a planner of C1 + C2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kvoffload.replay.oracle_lru import victim_hits


class Counts(Protocol):
    """What a replay has to tell: kvoffload.replay.report.Report does. Blocks; hits by (HBM, host, disk)."""

    @property
    def total(self) -> int: ...
    @property
    def distinct(self) -> int: ...
    @property
    def hits(self) -> tuple[int, int, int]: ...
    @property
    def stored_by_tier(self) -> tuple[int, int]: ...


Replay = Callable[[int | None, int], Counts]
"""Replays the trace over (host slots, None = no limit; disk slots)."""


def broken_identities(replay: Replay, prompts: Sequence[Sequence[int]], first: int, second: int) -> list[str]:
    """Those of 1 to 4 that do not hold at C1 = first, C2 = second, in words. REQUIRES: 1 <= first <= second."""
    small, large, both_sizes = (replay(size, 0) for size in (first, second, first + second))
    endless = replay(None, 0)
    above = replay(endless.distinct + 1, 0)
    tiers = replay(first, second)
    longest = max(map(len, prompts))
    hits = [sum(run.hits) for run in (small, large, both_sizes, endless)]
    checks = [
        (hits == sorted(hits), f"1: hits {hits} fall as capacity grows"),
        (
            sum(above.hits) == hits[3],
            f"1: {sum(above.hits)} hits above all distinct blocks, {hits[3]} without a limit",
        ),
        (
            tiers.hits[1] == hits[0],
            f"3: host hits {tiers.hits[1]} over a disk of {second}, {hits[0]} alone",
        ),
        (sum(tiers.hits) == hits[1], f"3: hits {sum(tiers.hits)} of both tiers, {hits[1]} of {second} alone"),
    ]
    if longest <= second:
        stored = tiers.stored_by_tier[1], large.stored_by_tier[0]
        checks.append((stored[0] == stored[1], f"3: disk stored {stored[0]}, {second} alone {stored[1]}"))
    for size, run in ((first, small), (second, large), (first + second, both_sizes), (None, endless)):
        if size is None or longest <= size:
            whole = sum(run.hits) + run.stored_by_tier[0]
            checks.append((whole == run.total, f"2: hits + stored {whole} at {size}, blocks {run.total}"))
    if longest <= first:
        victim = victim_hits(prompts, first, second)
        checks.append((victim == hits[2], f"4: victim tiers hit {victim}, {first + second} alone {hits[2]}"))
    return [f"identity {text}" for holds, text in checks if not holds]
