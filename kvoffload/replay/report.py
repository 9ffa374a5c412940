"""Figures of a replay: counted as it runs, and checked against each other.

What each figure means is in docs/replay.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvoffload.replay.base import Stored
from kvoffload.replay.oracle_lru import OracleResult
from kvoffload.traces.record import Ids

TIERS = ("hbm", "host", "disk")
SERIES_PARTS = 20
SAMPLES = 5


@dataclass(frozen=True, slots=True, eq=False)
class RequestCount:
    """One finished request. Blocks; `hits` by TIERS; `arrived`: blocks that loads brought; `tokens`:
    prompt."""

    session: str
    ids: Ids
    tokens: int
    hits: tuple[int, int, int]
    produced: int
    arrived: int
    stored: int
    block_tokens: int


class Tally:
    """Counters of a running replay. One thread."""

    def __init__(self, requests: int, after_each: Callable[[], None] = lambda: None) -> None:
        """requests: how many are to come, for the series. after_each: called when one has finished."""
        self.loads = 0
        self._after_each = after_each
        self._expected = max(requests, 1)
        self._requests = self._total = self._tokens = self._produced = self._arrived = 0
        self._hits = [0, 0, 0]
        self._hit_tokens = [0, 0, 0]
        self._written: list[int] = []
        self._sessions: set[str] = set()
        self._seen: set[int] = set()
        self._mismatches = 0
        self._samples: list[str] = []
        self._series = [[0, 0, 0, 0] for _ in range(min(SERIES_PARTS, self._expected))]

    @property
    def requests(self) -> int:
        """Requests finished so far."""
        return self._requests

    def add(self, count: RequestCount) -> None:
        """One more request has finished."""
        blocks = len(count.ids)
        part = self._series[min(self._requests * len(self._series) // self._expected, len(self._series) - 1)]
        part[3] += blocks
        reached = 0
        for tier, hits in enumerate(count.hits):
            self._hits[tier] += hits
            part[tier] += hits
            # A partial last block (ceil rule) counts only the tokens that the prompt really has.
            until = min(reached + hits * count.block_tokens, count.tokens)
            self._hit_tokens[tier] += until - reached
            reached = until
        self._requests += 1
        self._total += blocks
        self._tokens += count.tokens
        self._produced += count.produced
        self._arrived += count.arrived
        self._written.append(count.stored)
        self._seen.update(count.ids.tolist())
        if count.session:
            self._sessions.add(count.session)
        self._after_each()

    def mismatch(self, where: str) -> None:
        """One block came back with wrong bytes."""
        self._mismatches += 1
        if len(self._samples) < SAMPLES:
            self._samples.append(where)

    def report(
        self, setup: Setup, stored: Stored, seconds: float, oracle: OracleResult | None = None
    ) -> Report:
        """Everything so far. REQUIRES: the replay has drained."""
        return Report(
            setup=setup,
            requests=self._requests,
            sessions=len(self._sessions),
            total=self._total,
            distinct=len(self._seen),
            tokens=self._tokens,
            hits=(self._hits[0], self._hits[1], self._hits[2]),
            hit_tokens=(self._hit_tokens[0], self._hit_tokens[1], self._hit_tokens[2]),
            produced=self._produced,
            arrived=self._arrived,
            loads=self.loads,
            offered=sum(self._written),
            stored=stored,
            turn_p50=percentile(self._written, 50) * setup.block_bytes,
            turn_p90=percentile(self._written, 90) * setup.block_bytes,
            mismatches=self._mismatches,
            samples=tuple(self._samples),
            series=tuple((p[0], p[1], p[2], p[3]) for p in self._series),
            seconds=seconds,
            oracle=oracle,
        )


@dataclass(frozen=True, slots=True)
class Setup:
    """What was replayed over what. Blocks; None = no limit. lanes 0 = sequential. rule: "floor" or "ceil"."""

    trace: str
    lanes: int
    index_only: bool
    block_tokens: int
    block_bytes: int
    rule: str
    device_blocks: int
    host_blocks: int | None
    disk_blocks: int


@dataclass(frozen=True, slots=True)
class Report:
    """Results of one replay, in blocks unless a name says otherwise; tuples of three are by TIERS.

    offered: blocks that store jobs took from the device, all requests. oracle: the brute-force answer, where
    one was asked for. series: (hbm, host, disk, all blocks) of each twentieth of the requests.
    """

    setup: Setup
    requests: int
    sessions: int
    total: int
    distinct: int
    tokens: int
    hits: tuple[int, int, int]
    hit_tokens: tuple[int, int, int]
    produced: int
    arrived: int
    loads: int
    offered: int
    stored: Stored
    turn_p50: int
    turn_p90: int
    mismatches: int
    samples: tuple[str, ...]
    series: tuple[tuple[int, int, int, int], ...]
    seconds: float
    oracle: OracleResult | None = None

    @property
    def ok(self) -> bool:
        """No wrong byte, and every identity holds."""
        return not self.mismatches and not self.broken()

    def broken(self) -> list[str]:
        """The identities that do not hold, in words; each compares figures that were counted apart."""
        computed = self.tokens - sum(self.hit_tokens)
        checks = [
            (
                sum(self.hits) + self.produced == self.total,
                f"hits {sum(self.hits)} + produced {self.produced} is not the total {self.total}",
            ),
            (
                self.hits[1] + self.hits[2] == self.arrived,
                f"hits of host {self.hits[1]} + disk {self.hits[2]} are not the {self.arrived} blocks loaded",
            ),
            (computed >= 0, f"hit tokens {sum(self.hit_tokens)} exceed the {self.tokens} prompt tokens"),
            (
                self.stored.host <= self.offered,
                f"host stored {self.stored.host} of {self.offered} blocks that left the device",
            ),
        ]
        if self.oracle is not None:
            right = (self.oracle.total, *self.oracle.hits, self.oracle.produced)
            mine = (self.total, *self.hits[: len(self.oracle.hits)], self.produced)
            checks.append((mine == right, f"(total, hits, produced) {mine} are not the oracle's {right}"))
        return [text for holds, text in checks if not holds]

    def amplification(self) -> tuple[float, float]:
        """(host, disk) blocks stored per distinct block."""
        return _ratio(self.stored.host, self.distinct), _ratio(self.stored.disk, self.distinct)

    def rewrite_factor(self) -> tuple[float, float]:
        """(host, disk) how often as much storing every full prompt would write."""
        return _ratio(self.total, self.stored.host), _ratio(self.total, self.stored.disk)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, fit for JSON."""
        result = asdict(self)
        result["dropped"] = result["stored"].pop("dropped")
        for name in ("hits", "hit_tokens"):
            result[name] = dict(zip(TIERS, result[name], strict=True))
        result["write_amplification"] = dict(zip(TIERS[1:], self.amplification(), strict=True))
        result["rewrite_factor"] = dict(zip(TIERS[1:], self.rewrite_factor(), strict=True))
        result["bytes_per_turn"] = {"p50": result.pop("turn_p50"), "p90": result.pop("turn_p90")}
        result["broken"] = self.broken()
        result["ok"] = self.ok
        return result


def percentile(values: Sequence[int], percent: int) -> int:
    """The smallest value that at least `percent` % of the values do not exceed; 0 of nothing."""
    if not values:
        return 0
    return sorted(values)[max(math.ceil(len(values) * percent / 100) - 1, 0)]


def _ratio(a: int, b: int) -> float:
    return a / b if b else 0.0
