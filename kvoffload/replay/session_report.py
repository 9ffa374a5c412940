"""Figures of a session replay: latencies, speed, hits by tier and bytes written, beside those of its controls.

What each figure means is in docs/replay.md. Times are virtual seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from kvoffload.replay.bracket import Bracket, Each, between, broken
from kvoffload.replay.report import percentile, worst_decile
from kvoffload.testing.engine import Sequence as Request

PERCENTS = (50, 90, 99)
BINS = 50


@dataclass(frozen=True, slots=True)
class SessionSetup:
    """What was replayed. Blocks; host None = no limit."""

    trace: str
    sessions: int
    window_s: float
    think: float
    index_only: bool
    block_tokens: int
    block_bytes: int
    device_blocks: int
    host_blocks: int | None
    disk_blocks: int
    cost: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Figures:
    """One run. Tokens unless a name says otherwise; tuples of three are HBM, host, disk.

    hits, made, lost: prompt tokens found by tier, computed, and computed in vain because of a preemption; counted by
    request, made_total by the engine. ttft, speed: by PERCENTS; speed is answer tokens per second of one user, the
    slow end (speed[1]: nine in ten are faster). admitted_s: seconds from first pages to first tokens, all requests.
    moved: modelled bytes by channel. blocks: full blocks of all requests, answers included; new: those that no
    request before had. stored: blocks by tier; counts: the planner's counters, in blocks. per_turn: modelled bytes
    stored per request, p50 and p90. working_set: by seconds, the most blocks touched in one such span, each counted
    once. growth: (seconds, new blocks so far). worst: share of prompt tokens hit of the tenth of the sessions that
    fare worst; None without sessions. unkept: what the index says of itself at the end and must not, in words.
    """

    name: str
    requests: int
    seconds: float
    prompt: int
    output: int
    hits: tuple[int, int, int]
    made: int
    prefill_s: float
    admitted_s: float
    ttft: tuple[float, ...]
    ttft_mean: float
    speed: tuple[float, ...]
    moved: Mapping[str, int]
    stored: Mapping[str, int]
    dropped: Mapping[str, int] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    blocks: int = 0
    new: int = 0
    per_turn: tuple[int, int] = (0, 0)
    working_set: Mapping[int, int] = field(default_factory=dict)
    growth: tuple[tuple[float, int], ...] = ()
    preemptions: int = 0
    failed_loads: int = 0
    mismatches: int = 0
    samples: tuple[str, ...] = ()
    worst: float | None = None
    unkept: tuple[str, ...] = ()
    wall_s: float = 0.0
    ttfts: tuple[float, ...] = ()
    series: tuple[tuple[float, int, int, int, int], ...] = ()
    each: tuple[Each, ...] = field(default=(), repr=False)

    @property
    def output_rate(self) -> float:
        """Answer tokens per second, all users."""
        return self.output / self.seconds if self.seconds else 0.0

    @property
    def total_rate(self) -> float:
        """Prompt and answer tokens served per second."""
        return (self.prompt + self.output) / self.seconds if self.seconds else 0.0

    def amplification(self) -> dict[str, float]:
        """By tier, blocks stored per new block."""
        return {tier: _ratio(blocks, self.new) for tier, blocks in self.stored.items()}

    def rewrite_factor(self) -> dict[str, float]:
        """By tier, how many times as much storing every text whole would write."""
        return {tier: _ratio(self.blocks, blocks) for tier, blocks in self.stored.items()}

    def useful_loads(self) -> float:
        """Blocks that requests went on with, of those loaded."""
        loaded = self.counts.get("loaded_host", 0) + self.counts.get("loaded_disk", 0)
        return _ratio(self.counts.get("used", 0), loaded)

    def dedup(self) -> float:
        """Blocks not stored because they were there or on their way, of all that were offered."""
        spared = self.counts.get("dedup", 0) + self.counts.get("in_flight_dedup", 0)
        return _ratio(spared, spared + self.stored.get("host", 0))

    def broken(self) -> list[str]:
        """Identities that do not hold: hits + computed = prompt tokens, nothing is negative, no slot is lost."""
        found = [f"{self.name}: {text}" for text in self.unkept]
        if sum(self.hits) + self.made != self.prompt:
            found.append(
                f"{self.name}: hits {sum(self.hits)} + computed {self.made} are not the {self.prompt} prompt tokens"
            )
        if min(*self.hits, self.made) < 0:
            found.append(f"{self.name}: hits {self.hits}, computed {self.made}: negative")
        return found

    def to_dict(self) -> dict[str, Any]:
        body = asdict(replace(self, each=()))
        del body["each"]
        body["hits"] = dict(zip(("hbm", "host", "disk"), self.hits, strict=True))
        for name in ("ttft", "speed"):
            body[name] = {f"p{p}": v for p, v in zip(PERCENTS, body[name], strict=True)}
        body["per_turn"] = dict(zip(("p50", "p90"), self.per_turn, strict=True))
        body |= {"output_rate": self.output_rate, "total_rate": self.total_rate}
        body |= {"write_amplification": self.amplification(), "rewrite_factor": self.rewrite_factor()}
        return {**body, "useful_loads": self.useful_loads(), "dedup_ratio": self.dedup()}


def _ratio(a: int, b: int) -> float:
    return a / b if b else 0.0


@dataclass(frozen=True, slots=True)
class Written:
    """What a run moved in its window. moved: modelled bytes by channel; stored: blocks by tier; dropped by reason;
    counts: other counters of the planner."""

    moved: Mapping[str, int]
    stored: Mapping[str, int]
    dropped: Mapping[str, int]
    counts: Mapping[str, int]


def figures(name: str, requests: Sequence[Request], seconds: float, written: Written, **more: Any) -> Figures:
    """The figures of the requests that ended in a window of so many seconds."""
    hits = [r.hits or (0, 0, 0) for r in requests]
    ttft = [r.first - r.arrived for r in requests if r.first is not None]
    speed = [_speed(r) for r in requests if r.output > 1]
    return Figures(
        name=name,
        requests=len(requests),
        seconds=seconds,
        prompt=sum(r.prompt for r in requests),
        output=sum(r.generated for r in requests),
        hits=(sum(h[0] for h in hits), sum(h[1] for h in hits), sum(h[2] for h in hits)),
        made=sum(r.prompt_made for r in requests),
        prefill_s=sum(r.prefill_s for r in requests),
        admitted_s=sum(
            r.first - r.admitted for r in requests if r.first is not None and r.admitted is not None
        ),
        ttft=tuple(_rank(ttft, p) for p in PERCENTS),
        ttft_mean=sum(ttft) / len(ttft) if ttft else 0.0,
        speed=tuple(_rank([-s for s in speed], p) * -1 for p in PERCENTS),
        moved=written.moved,
        stored=written.stored,
        dropped=written.dropped,
        counts=written.counts,
        worst=worst_decile((r.info.session, sum(h), r.prompt) for r, h in zip(requests, hits, strict=True)),
        ttfts=tuple(round(t, 6) for t in ttft),
        series=_series(requests),
        each=tuple(_each(r) for r in requests),
        **more,
    )


def _each(request: Request) -> Each:
    ttft = 0.0 if request.first is None else request.first - request.arrived
    return Each(request.prompt_made, request.prefill_s, ttft, _speed(request) if request.output > 1 else 0.0)


def _speed(request: Request) -> float:
    """Answer tokens per second between the first and the last one."""
    assert request.first is not None
    assert request.ended is not None
    return (request.output - 1) / max(request.ended - request.first, 1e-9)


def _rank(values: Sequence[float], percent: int) -> float:
    """The nearest-rank percentile, in whole microseconds."""
    return percentile([round(v * 1e6) for v in values], percent) / 1e6


def _series(requests: Sequence[Request]) -> tuple[tuple[float, int, int, int, int], ...]:
    """(time of the last, HBM, host, disk, prompt tokens) of equal parts of the requests, in the order they ended."""
    parts = min(BINS, len(requests))
    rows = []
    for part in range(parts):
        some = requests[len(requests) * part // parts : len(requests) * (part + 1) // parts]
        hits = [r.hits or (0, 0, 0) for r in some]
        by_tier = [sum(h[tier] for h in hits) for tier in range(3)]
        rows.append((some[-1].ended or 0.0, *by_tier, sum(r.prompt for r in some)))
    return tuple(rows)  # type: ignore[arg-type]


BRACKETED: dict[str, Callable[[Figures], float]] = {
    "seconds": lambda r: r.seconds,
    "hits": lambda r: sum(r.hits),
    "computed": lambda r: r.made,
    "prefill": lambda r: r.prefill_s,
    **{f"TTFT p{p}": lambda r, i=i: r.ttft[i] for i, p in enumerate(PERCENTS)},  # type: ignore[misc]
    **{f"tokens/s per user p{p}": lambda r, i=i: r.speed[i] for i, p in enumerate(PERCENTS)},  # type: ignore[misc]
    "answer tokens/s": lambda r: r.output_rate,
    "all tokens/s": lambda r: r.total_rate,
}
"""Figures that one would look for between those of no offload and of an infinite cache."""


@dataclass(frozen=True, slots=True)
class SessionReport:
    """A replay and its controls; the first of `runs` is the replay itself. alone: the same requests one by one."""

    setup: SessionSetup
    runs: tuple[Figures, ...]
    alone: tuple[Bracket, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.broken() and not any(run.mismatches for run in self.runs)

    def broken(self) -> list[str]:
        """Identities that do not hold, in words."""
        return [text for run in self.runs for text in run.broken()] + broken(self.alone)

    def outside(self) -> list[str]:
        """Figures of the closed loop that do not lie between those of the controls; () without controls."""
        runs = {run.name: run for run in self.runs}
        if not {"no offload", "infinite"} <= runs.keys():
            return []
        none, best = runs["no offload"], runs["infinite"]
        mine = self.runs[0]
        return [
            name for name, value in BRACKETED.items() if not between(value(none), value(mine), value(best))
        ]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, fit for JSON."""
        return {
            "setup": asdict(self.setup),
            "runs": [run.to_dict() for run in self.runs],
            "one_by_one": [row.to_dict() for row in self.alone],
            "outside": self.outside(),
            "broken": self.broken(),
            "ok": self.ok,
        }
