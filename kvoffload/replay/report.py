"""Figures of a replay: counted as it runs, and checked against each other.

What each figure means is in docs/replay.md.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from kvoffload.replay.base import Stored
from kvoffload.replay.oracle_lru import OracleResult
from kvoffload.traces.record import Ids

TIERS = ("hbm", "host", "disk")
SERIES_PARTS = 20
SAMPLES = 5
WORST_SHARE = 10
"""The worst decile: the tenth of the sessions, at least one, with the lowest hit rates."""


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

    def hit_tokens(self) -> tuple[int, int, int]:
        """The hits in tokens; of a partial last block (ceil rule) only those that the prompt really has."""
        first, second, third = (
            min(sum(self.hits[: i + 1]) * self.block_tokens, self.tokens) for i in range(len(self.hits))
        )
        return first, second - first, third - second


class Tally:
    """What a running replay notes down. One thread.

    loads: load jobs that have ended. after_each: called when a request has finished.
    """

    def __init__(self, after_each: Callable[[], None] = lambda: None) -> None:
        self.loads = 0
        self._after_each = after_each
        self._counts: list[RequestCount] = []
        self._mismatches = 0
        self._samples: list[str] = []

    def add(self, count: RequestCount) -> None:
        """One more request has finished."""
        self._counts.append(count)
        self._after_each()

    def mismatch(self, where: str) -> None:
        """One block came back with wrong bytes."""
        self._mismatches += 1
        if len(self._samples) < SAMPLES:
            self._samples.append(where)

    def report(
        self,
        setup: Setup,
        stored: Stored,
        seconds: float,
        oracle: OracleResult | None = None,
        unequal: Sequence[str] | None = None,
    ) -> Report:
        """Everything so far. REQUIRES: the replay has drained."""
        counts = self._counts
        distinct: set[int] = set()
        for count in counts:
            distinct.update(count.ids.tolist())
        written = [count.stored for count in counts]
        return Report(
            setup=setup,
            requests=len(counts),
            sessions=len({count.session for count in counts if count.session}),
            total=sum(len(count.ids) for count in counts),
            distinct=len(distinct),
            tokens=sum(count.tokens for count in counts),
            hits=_sums(count.hits for count in counts),
            hit_tokens=_sums(count.hit_tokens() for count in counts),
            produced=sum(count.produced for count in counts),
            arrived=sum(count.arrived for count in counts),
            loads=self.loads,
            offered=sum(written),
            stored=stored,
            turn_p50=percentile(written, 50) * setup.block_bytes,
            turn_p90=percentile(written, 90) * setup.block_bytes,
            mismatches=self._mismatches,
            samples=tuple(self._samples),
            series=_series(counts),
            written=tuple(written),
            seconds=seconds,
            oracle=oracle,
            unequal=None if unequal is None else tuple(unequal),
        )


def _sums(rows: Iterable[tuple[int, int, int]]) -> tuple[int, int, int]:
    """Column by column."""
    first = second = third = 0
    for row in rows:
        first, second, third = first + row[0], second + row[1], third + row[2]
    return first, second, third


def _series(counts: Sequence[RequestCount]) -> tuple[tuple[int, int, int, int], ...]:
    """(hbm, host, disk, all blocks) of each part of the requests, in the order in which they finished."""
    parts = min(SERIES_PARTS, len(counts))
    borders = [len(counts) * i // parts for i in range(parts + 1)] if parts else []
    spans = [counts[begin:end] for begin, end in pairwise(borders)]
    return tuple((*_sums(c.hits for c in span), sum(len(c.ids) for c in span)) for span in spans)


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
    one was asked for; unequal: identities 1 to 4 that other replays of the trace do not bear out, None = not asked.
    series: (hbm, host, disk, all blocks) of each twentieth of the requests. written: blocks that the store jobs of each
    request took from the device, in the order in which they finished.
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
    written: tuple[int, ...]
    seconds: float
    oracle: OracleResult | None = None
    unequal: tuple[str, ...] | None = None

    @property
    def stored_by_tier(self) -> tuple[int, int]:
        """(host, disk)."""
        return self.stored.host, self.stored.disk

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
            (min(self.hits) >= 0, f"hits {self.hits} are negative"),
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
        return [text for holds, text in checks if not holds] + list(self.unequal or ())

    def amplification(self) -> tuple[float, float]:
        """(host, disk) blocks stored per distinct block."""
        return _ratio(self.stored.host, self.distinct), _ratio(self.stored.disk, self.distinct)

    def rewrite_factor(self) -> tuple[float, float]:
        """(host, disk) how often as much storing every full prompt would write."""
        return _ratio(self.total, self.stored.host), _ratio(self.total, self.stored.disk)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, fit for JSON; of `written` only the percentiles."""
        result = asdict(self)
        del result["written"]
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


def worst_decile(requests: Iterable[tuple[str, int, int]]) -> float | None:
    """From (session, hits, of how many) by request: hits over all of the tenth of the sessions, at least one, that
    fare worst; None without sessions."""
    sessions: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    for session, hits, count in requests:
        if session:
            sessions[session][0] += hits
            sessions[session][1] += count
    rates = sorted((hits / count, hits, count) for hits, count in sessions.values() if count)
    worst = rates[: max(1, len(rates) // WORST_SHARE)]
    return sum(w[1] for w in worst) / sum(w[2] for w in worst) if worst else None
