"""Figures of a replay: counted as it runs, checked against each other, shown as a table or a dict.

What each figure means is in docs/replay.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Group
from rich.table import Table

from kvoffload.replay.oracle_lru import OracleResult

TIERS = ("hbm", "host", "disk")
SERIES_PARTS = 20
SAMPLES = 5


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks that tiers took so far, and those that were meant for a tier and did not get there, by reason."""

    host: int = 0
    disk: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class RequestCount:
    """One finished request. Blocks; `hits` by TIERS; `arrived`: blocks that loads brought; `tokens`: prompt."""

    session: str
    ids: NDArray[np.uint64]
    tokens: int
    hits: tuple[int, int, int]
    produced: int
    arrived: int
    stored: int
    block_tokens: int


class Tally:
    """Counters of a running replay. One thread."""

    def __init__(self, requests: int) -> None:
        """requests: how many are to come, for the series."""
        self.loads = 0
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

    def mismatch(self, where: str) -> None:
        """One block came back with wrong bytes."""
        self._mismatches += 1
        if len(self._samples) < SAMPLES:
            self._samples.append(where)

    def report(self, setup: Setup, stored: Stored, seconds: float, oracle: OracleResult | None = None) -> Report:
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

    offered: blocks that store jobs took from the device, all requests. oracle: the brute-force answer, where one
    was asked for. series: (hbm, host, disk, all blocks) of each twentieth of the requests.
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
        result["stored"] = {"host": self.stored.host, "disk": self.stored.disk}
        result["dropped"] = dict(self.stored.dropped)
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


def table(report: Report) -> Group:
    """The report for people, within 80 columns."""
    parts = [_figures(report), _by_tier(report)]
    if report.oracle is not None:
        parts.append(_against(report.oracle, report))
    notes = [f"broken: {text}" for text in report.broken()]
    notes += [f"wrong bytes: {text}" for text in report.samples]
    return Group(*parts, *notes)


def _figures(report: Report) -> Table:
    setup = report.setup
    grid = Table(title=f"replay of {setup.trace}", show_header=False, width=76)
    grid.add_column("figure")
    grid.add_column("value", justify="right")
    mode = f"{setup.lanes} lanes" if setup.lanes else "sequential"
    rows = [
        ("mode", mode + (", index only" if setup.index_only else "")),
        ("block", f"{setup.block_tokens} tokens, {_bytes(setup.block_bytes)} ({setup.rule} rule)"),
        ("requests", f"{report.requests:,} of {report.sessions:,} sessions"),
        ("blocks", f"{report.total:,}, distinct {report.distinct:,}"),
        ("produced", f"{report.produced:,} ({_percent(report.produced, report.total)})"),
        ("loads", f"{report.loads:,} of {report.arrived:,} blocks"),
        ("written per turn, p50 / p90", f"{_bytes(report.turn_p50)} / {_bytes(report.turn_p90)}"),
        ("wrong blocks", "not checked" if setup.index_only else f"{report.mismatches:,}"),
        ("seconds", f"{report.seconds:.1f}"),
    ]
    rows += [(f"dropped: {reason}", f"{count:,}") for reason, count in sorted(report.stored.dropped.items())]
    for name, value in rows:
        grid.add_row(name, value)
    return grid


def _by_tier(report: Report) -> Table:
    setup = report.setup
    grid = Table(width=76)
    for name in ("tier", "size", "hits", "blocks", "tokens", "stored", "write ampl.", "rewrite"):
        grid.add_column(name, justify="left" if name == "tier" else "right")
    sizes = (setup.device_blocks, setup.host_blocks, setup.disk_blocks)
    written = ("-", f"{report.stored.host:,}", f"{report.stored.disk:,}")
    amplification = ("-", *(f"{x:.3f}" for x in report.amplification()))
    factors = ("-", *(f"{x:.1f}" if x else "-" for x in report.rewrite_factor()))
    for i, name in enumerate(TIERS):
        grid.add_row(
            name,
            "no limit" if sizes[i] is None else f"{sizes[i]:,}",
            f"{report.hits[i]:,}",
            _percent(report.hits[i], report.total),
            _percent(report.hit_tokens[i], report.tokens),
            written[i],
            amplification[i],
            factors[i],
        )
    grid.add_row(
        "all",
        "",
        f"{sum(report.hits):,}",
        _percent(sum(report.hits), report.total),
        _percent(sum(report.hit_tokens), report.tokens),
        *[""] * 3,
    )
    return grid


def _against(oracle: OracleResult, report: Report) -> Table:
    grid = Table(title="brute-force LRU beside it", width=76)
    for name in ("", *TIERS, "produced"):
        grid.add_column(name, justify="right")
    tiers = len(oracle.hits)
    grid.add_row("oracle", *(f"{h:,}" for h in oracle.hits), *["-"] * (3 - tiers), f"{oracle.produced:,}")
    grid.add_row("replay", *(f"{h:,}" for h in report.hits), f"{report.produced:,}")
    return grid


def _ratio(a: int, b: int) -> float:
    return a / b if b else 0.0


def _percent(part: int, whole: int) -> str:
    return f"{100 * _ratio(part, whole):.2f}%"


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} B"
