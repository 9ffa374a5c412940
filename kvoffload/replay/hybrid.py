"""`kvoffload replay --model`: a trace over the groups of a known model, real bytes, a host tier that holds half.

One request after the other. The engine here has no prefix cache and frees window pages as its window moves: an offer
shows only the pages of its own step and of the window before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kvoffload.config import Config
from kvoffload.copying.cpu import CpuCopyEngine
from kvoffload.errors import ConfigError
from kvoffload.layout import MIN_SLOTS_PER_SLAB, GroupKind, Layout
from kvoffload.local import Local, MoverLike
from kvoffload.memory import read_memory
from kvoffload.messages import Inventory, JobKind, Outcome, Plans
from kvoffload.models import Model
from kvoffload.mover import Mover
from kvoffload.null_mover import NullMover
from kvoffload.planner import Planner
from kvoffload.replay.base import ReplayRequest, TraceChain
from kvoffload.requests import RequestInfo
from kvoffload.sizing import Slabs
from kvoffload.testing.paint import paint, verify
from kvoffload.testing.pool import PageMemory, Pages
from kvoffload.units import format_size

STEP_TOKENS = 8192
"""Computed and offered at once."""

UNLIMITED_SLABS = 1 << 14


@dataclass(frozen=True, slots=True)
class GroupFigures:
    """One group at the end. stored: bytes per produced token that host took; dense: if it took every block."""

    name: str
    block_tokens: int
    block_bytes: int
    slot_bytes: int
    stored: float
    dense: float
    resident: int
    free: int
    slabs: int


@dataclass(frozen=True, slots=True)
class ModelReport:
    """Bytes, tokens. working_set: slot bytes that a host tier without limit comes to hold; payload: block bytes that
    host holds at the end; padding: what its slots have beyond that, as a share of it; full: something had to be
    evicted; broken: identities that do not hold."""

    model: str
    scale: int
    retention: str
    requests: int
    tokens: int
    hit_tokens: int
    working_set: int
    budget: int
    mapped: int
    payload: int
    padding: float
    full: bool
    slabs_moved: int
    mismatches: int
    groups: tuple[GroupFigures, ...]
    broken: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """No wrong byte, every slot accounted for, no more mapped than was to be, and full means full."""
        fits = self.mapped <= 1.02 * self.budget and (not self.full or self.payload >= 0.95 * self.budget)
        return not self.mismatches and not self.broken and fits

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}


class HybridReplay:
    """Requests through one planner and mover. memory: None = count only. Thread: one."""

    def __init__(self, layout: Layout, local: Local, memory: PageMemory | None, counting: _Counting) -> None:
        self.counting = counting
        self.layout = layout
        self.local = local
        self.memory = memory
        self.tokens = self.hits = self.mismatches = 0

    def play(self, request: ReplayRequest) -> None:
        """Match, load, compare, compute step by step, offer, end; everything settles in between."""
        planner, base = self.local.planner, self.layout.base_tokens
        info = RequestInfo(request.index, request.session, request.agent)
        chain = request.chain()
        tokens = len(chain.keys) * base
        head = TraceChain(chain.keys[: max(tokens - 1, 0) // base])
        pages = [np.arange(len(chain.keys) // m, dtype=np.int32) for m in self.layout.multiples]
        found = planner.match(info, head)
        plan = planner.load(info, head, found.boundary, pages)
        reached = plan.boundary
        for item in self.local.drain():
            reached = item.boundary if item.id == plan.id else reached
        self._each(chain, pages, 0, reached, self._compare)
        self.tokens += tokens
        self.hits += reached
        for begin in range(reached, tokens, STEP_TOKENS):
            end = min(begin + STEP_TOKENS, tokens)
            shown = self._live(pages, begin)
            self._each(chain, shown, begin, end, self._write)
            planner.offer(info, chain, end, shown)
            self.local.drain()
        planner.finish(info.id, request.reason, 0.0)

    def _live(self, pages: Sequence[Pages], begin: int) -> list[Pages]:
        """The pages that a step from `begin` on has: those of earlier windows and states are gone."""
        shown = []
        for group, mine in zip(self.layout.groups, pages, strict=True):
            live = mine.copy()
            if group.kind is not GroupKind.FULL:
                live[: max(0, begin - group.lookback) // group.tokens_per_block] = -1
            shown.append(live)
        return shown

    def _each(
        self,
        chain: TraceChain,
        pages: Sequence[Pages],
        begin: int,
        end: int,
        work: Callable[[int, Pages, np.ndarray[Any, np.dtype[np.uint8]]], None],
    ) -> None:
        """The blocks that tokens [begin, end) complete; to compare, those that resuming at `end` takes."""
        if self.memory is None:
            return
        for group, multiple in zip(self.layout.groups, self.layout.multiples, strict=True):
            first, last = begin // group.tokens_per_block, end // group.tokens_per_block
            if work == self._compare:
                first, last = group.needs(begin, end)
            if first < last:
                keys = np.ascontiguousarray(chain.keys[multiple - 1 :: multiple][first:last])
                work(group.id, pages[group.id][first:last], keys)

    def _write(self, group: int, pages: Pages, keys: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        assert self.memory is not None
        paint(self.memory, group, pages, keys)

    def _compare(self, group: int, pages: Pages, keys: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        assert self.memory is not None
        self.mismatches += len(verify(self.memory, group, pages, keys))


class _Counting:
    """A mover that counts what stores take, by group."""

    def __init__(self, inner: MoverLike, groups: int) -> None:
        self._inner = inner
        self.stored = np.zeros(groups, np.int64)

    def submit(self, plans: Plans, after: object = None) -> None:
        for job in plans.jobs:
            if job.kind is JobKind.STORE:
                self.stored += np.bincount(job.copies["group"], minlength=len(self.stored))
        self._inner.submit(plans)

    def poll(self) -> list[Outcome]:
        return self._inner.poll()

    def wait(self, job_ids: Iterable[int], timeout: float) -> bool:
        return self._inner.wait(job_ids, timeout)

    def close(self) -> None:
        self._inner.close()


def slab_bytes_of(layout: Layout) -> int:
    """Small slabs: room is lost only in the last slab of each group."""
    return MIN_SLOTS_PER_SLAB * max(g.slot_bytes for g in layout.groups)


def replay_model(
    requests: Sequence[ReplayRequest],
    model: Model,
    block_tokens: int,
    scale: int,
    *,
    retention: str = "boundaries",
    share: float = 0.5,
    index_only: bool = False,
) -> ModelReport:
    """Once without a limit to learn the working set, then with `share` of it.

    Raises ConfigError where the scale does not divide the bytes or memory is short.
    """
    layout = model.layout(block_tokens, scale)
    slab_bytes = slab_bytes_of(layout)
    endless = _open(layout, Slabs(slab_bytes, UNLIMITED_SLABS, 1, 0), retention, None)
    for request in requests:
        endless.play(request)
    rows = endless.local.planner.usage("host")["groups"]
    working_set = sum(row["used"] * g.slot_bytes for row, g in zip(rows, layout.groups, strict=True))
    budget = int(working_set * share)
    slabs = Slabs(slab_bytes, max(1, budget // slab_bytes - 1), 1, 0)
    memory = None
    if not index_only:
        longest = max(len(r.ids) for r in requests)
        memory = PageMemory(layout, [longest // m + 1 for m in layout.multiples])
        if budget + memory.nbytes > read_memory().available:
            raise ConfigError(
                f"host tier {format_size(budget)} and device pages {format_size(memory.nbytes)} are more than the"
                f" {format_size(read_memory().available)} of memory that are free: raise --scale-bytes"
            )
    replay = _open(layout, slabs, retention, memory)
    try:
        for request in requests:
            replay.play(request)
        return _report(replay, model, scale, retention, (len(requests), working_set, budget), slabs)
    finally:
        replay.local.close()


def _open(layout: Layout, slabs: Slabs, retention: str, memory: PageMemory | None) -> HybridReplay:
    planner = Planner(layout, Config(host_bytes=0, retention=retention))
    inner: MoverLike
    if memory is None:
        inner = NullMover(0)
        per_slab = layout.slots_per_slab(slabs.slab_bytes)
        planner.attach(0, Inventory(per_slab, slabs.host, slabs.transit, slabs.disk))
    else:
        inner = mover = Mover(0, layout, slabs, CpuCopyEngine())
        planner.attach(0, mover.register(memory.pools))
    counting = _Counting(inner, len(layout.groups))
    return HybridReplay(layout, Local(planner, [counting]), memory, counting)


def _report(
    replay: HybridReplay,
    model: Model,
    scale: int,
    retention: str,
    totals: tuple[int, int, int],
    slabs: Slabs,
) -> ModelReport:
    layout, planner = replay.layout, replay.local.planner
    count, working_set, budget = totals
    usage = planner.usage("host")
    rows = usage["groups"]
    produced = replay.tokens - replay.hits
    per_slab = layout.slots_per_slab(slabs.slab_bytes)
    broken = [
        f"group {g}: free {row['free']} + resident {row['used']} are not the slots of {row['slabs']} slabs"
        for g, row in enumerate(rows)
        if row["free"] + row["used"] != row["slabs"] * per_slab[g]
    ]
    owned, unowned = sum(row["slabs"] for row in rows), usage["slabs_unowned"]
    if owned + unowned != slabs.host:
        broken.append(f"{owned} owned and {unowned} unowned slabs are not {slabs.host}")
    payload, slots = (
        sum(row["used"] * size for row, size in zip(rows, sizes, strict=True))
        for sizes in ([g.block_bytes for g in layout.groups], [g.slot_bytes for g in layout.groups])
    )
    totals_now = planner.stats().totals
    return ModelReport(
        model=model.name,
        scale=scale,
        retention=retention,
        requests=count,
        tokens=replay.tokens,
        hit_tokens=replay.hits,
        working_set=working_set,
        budget=budget,
        mapped=(slabs.host + slabs.transit) * slabs.slab_bytes,
        payload=payload,
        padding=slots / max(payload, 1) - 1,
        full=totals_now["evicted_host"] > 0,
        slabs_moved=totals_now["moved"],
        mismatches=replay.mismatches,
        groups=tuple(
            GroupFigures(
                name=model.groups[g.id].name,
                block_tokens=g.tokens_per_block,
                block_bytes=g.block_bytes,
                slot_bytes=g.slot_bytes,
                stored=int(replay.counting.stored[g.id]) * g.block_bytes / max(produced, 1),
                dense=g.block_bytes / g.tokens_per_block,
                resident=rows[g.id]["used"],
                free=rows[g.id]["free"],
                slabs=rows[g.id]["slabs"],
            )
            for g in layout.groups
        ),
        broken=tuple(broken),
    )
