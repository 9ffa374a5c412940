"""Policies side by side: one request after the other through the real planner and index, no bytes.

Requests start at the times of the trace, so that policies see its ages. A hit is a block that the tiers gave back.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from kvoffload.replay.base import ReplayRequest, Tiers
from kvoffload.replay.optimum import Future
from kvoffload.replay.report import percentile, worst_decile
from kvoffload.replay.tiers import Capacity, Policies, open_counting, replay_layout
from kvoffload.requests import RequestInfo
from kvoffload.testing.pool import Pages

MICRO = 1e6


@dataclass(frozen=True, slots=True)
class Result:
    """One policy at one capacity, in blocks. hits: (host, disk); stored: (host, disk); loads: blocks read, by tier.

    worst: hit rate of the worst decile of sessions, taken together; None without sessions. micros: planner time of a
    request, (p50, p90). learned: what the tiers' policies say of themselves.
    """

    name: str
    host_blocks: int
    disk_blocks: int
    total: int
    hits: tuple[int, int]
    stored: tuple[int, int]
    worst: float | None
    micros: tuple[int, int] = (0, 0)
    learned: dict[str, Any] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Hits of all tiers over all blocks."""
        return sum(self.hits) / self.total if self.total else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        return {
            "policy": self.name,
            "host_blocks": self.host_blocks,
            "disk_blocks": self.disk_blocks,
            "total": self.total,
            "hit_rate": self.rate,
            "hits": {"host": self.hits[0], "disk": self.hits[1]},
            "stored": {"host": self.stored[0], "disk": self.stored[1]},
            "worst_decile": self.worst,
            "planner_us": {"p50": self.micros[0], "p90": self.micros[1]},
            "learned": self.learned,
        }


class Sequential:
    """One replay: every copy and write of a request ends before the next one starts."""

    def __init__(self, tiers: Tiers, block_tokens: int, pages: Pages) -> None:
        self._tiers = tiers
        self._block_tokens = block_tokens
        self._pages = pages

    def replay(self, request: ReplayRequest, *, finish_reason: bool = True) -> tuple[int, int]:
        """(host, disk) hits of the request."""
        info = RequestInfo(request.index, request.session, request.agent)
        chain, pages = request.chain(), [self._pages[: len(request.ids)]]
        found = self._tiers.match(info, chain, 0)
        if found.boundary and not self._tiers.load(info, chain, found.boundary, pages).id:
            found = found._replace(host=0, disk=0)
        self._settle()
        cursor = -1
        while True:
            offer = self._tiers.offer(info, chain, len(request.ids) * self._block_tokens, pages)
            self._settle()
            if not offer.blocked or (offer.cursor == cursor and not offer.blocks):
                break
            cursor = offer.cursor
        self._tiers.finish(info, request.reason if finish_reason else "", request.t)
        self._settle()
        return found.host, found.disk

    def _settle(self) -> None:
        self._tiers.step(0.0)
        while not self._tiers.backlog().idle:
            self._tiers.step(0.0)


def run_policy(
    requests: Sequence[ReplayRequest],
    block_tokens: int,
    capacity: Capacity,
    policies: Policies,
    *,
    finish_reason: bool = True,
) -> Result:
    """Replay all requests under these policies, whose times are taken from the requests."""
    policies = replace(policies, times=[r.t for r in requests])
    longest = max(len(r.ids) for r in requests)
    hits, micros, counts = [0, 0], [], []
    with closing(open_counting(replay_layout(block_tokens, 1), capacity, policies)) as tiers:
        run = Sequential(tiers, block_tokens, np.arange(longest, dtype=np.int32))
        for request in requests:
            begin = time.perf_counter()
            found = run.replay(request, finish_reason=finish_reason)
            micros.append(round(MICRO * (time.perf_counter() - begin)))
            hits = [hits[0] + found[0], hits[1] + found[1]]
            counts.append((request.session, sum(found), len(request.ids)))
        stored, learned = tiers.stored(), dict(tiers.local.planner.stats().policies)
    return Result(
        name=policies.host if not capacity.disk else f"{policies.host}/{policies.disk}",
        host_blocks=capacity.host,
        disk_blocks=capacity.disk,
        total=sum(len(r.ids) for r in requests),
        hits=(hits[0], hits[1]),
        stored=(stored.host, stored.disk),
        worst=worst_decile(counts),
        micros=(percentile(micros, 50), percentile(micros, 90)),
        learned={tier: table for tier, table in learned.items() if table["classes"]},
    )


def run_optimum(requests: Sequence[ReplayRequest], future: Future, capacity: Capacity) -> Result:
    """The most hits that one tier of the host's size can give."""
    best = future.optimum(capacity.host)
    total = sum(len(r.ids) for r in requests)
    worst = worst_decile((r.session, hits, len(r.ids)) for r, hits in zip(requests, best.hits, strict=True))
    return Result("optimum", capacity.host, 0, total, (best.total, 0), (best.written, 0), worst)


def compare(
    requests: Sequence[ReplayRequest], block_tokens: int, capacities: Sequence[Capacity], policies: Policies
) -> Iterator[Result]:
    """At each capacity LRU, the policies asked for (RRI in host, if LRU was), and the optimum of host alone."""
    other = policies if policies.host != "lru" or policies.disk != "lru" else replace(policies, host="rri")
    future = Future([r.ids for r in requests])
    for capacity in capacities:
        yield run_policy(requests, block_tokens, capacity, Policies())
        yield run_policy(requests, block_tokens, capacity, other)
        yield run_optimum(requests, future, capacity)


LEGEND = (
    "hits: % of all blocks. gap: how much of the way from the hits of LRU in host to the optimum's is gone. worst 10%:"
    " hits of the tenth of the sessions that fare worst. p50 us: planner time of a request. stored, on disk: blocks"
    " written."
)


def table(results: Sequence[Result]) -> Table:
    """For people, within 80 columns."""
    grid = Table(
        title="policies side by side, in blocks",
        caption=LEGEND,
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=0,
        width=80,
    )
    for name in (
        "policy",
        "host",
        "hits",
        "gap",
        "from host",
        "from disk",
        "stored",
        "on disk",
        "worst 10%",
    ):
        grid.add_column(name, justify="left" if name == "policy" else "right")
    for result, closed in zip(results, gaps(results), strict=True):
        grid.add_row(
            result.name,
            f"{result.host_blocks:,}",
            f"{100 * result.rate:.2f}%",
            "" if closed is None else f"{100 * closed:.0f}%",
            f"{result.hits[0]:,}",
            f"{result.hits[1]:,}",
            f"{result.stored[0]:,}",
            f"{result.stored[1]:,}",
            "-" if result.worst is None else f"{100 * result.worst:.2f}%",
        )
    return grid


def times(results: Sequence[Result]) -> Table:
    """What the planner takes per request, and what learning takes beside it."""
    grid = Table(title="planner time per request; of it, rebuilds; state")
    for name in ("policy", "host", "p50 us", "p90 us", "rebuilds", "us each", "state"):
        grid.add_column(name, justify="left" if name == "policy" else "right")
    for result in results:
        if not result.micros[0]:
            continue
        learned = list(result.learned.values())
        rebuilds = sum(t["rebuilds"] for t in learned)
        micros = MICRO * sum(t["rebuild_seconds"] for t in learned)
        grid.add_row(
            result.name,
            f"{result.host_blocks:,}",
            f"{result.micros[0]:,}",
            f"{result.micros[1]:,}",
            f"{rebuilds:,}" if learned else "-",
            f"{micros / rebuilds:.0f}" if rebuilds else "-",
            f"{max(t['memory_bytes'] for t in learned) / 2**20:.1f} MiB" if learned else "-",
        )
    return grid


def gaps(results: Sequence[Result]) -> list[float | None]:
    """Per result of `compare`, how much of the way from LRU's host hits to the optimum's it goes; None of those."""
    shares: list[float | None] = []
    for lru, other, best in zip(results[::3], results[1::3], results[2::3], strict=True):
        room = best.hits[0] - lru.hits[0]
        shares += [None, (other.hits[0] - lru.hits[0]) / room if room else None, None]
    return shares
