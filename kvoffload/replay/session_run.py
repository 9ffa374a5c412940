"""A session replay and its controls, put together from the parts."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvoffload.connector import SchedulerConnector, WorkerConnector
from kvoffload.errors import ConfigError
from kvoffload.planner import Planner
from kvoffload.replay.bracket import CONTROLS, Bracket, brackets, in_one_row
from kvoffload.replay.cost import Channels, CostModel
from kvoffload.replay.report import percentile
from kvoffload.replay.session_report import Figures, SessionReport, SessionSetup, Written, figures
from kvoffload.replay.sessions import Measured, Schedule, SessionReplay
from kvoffload.replay.tiers import LRU, Capacity, Policies, counting_parts, moving_parts, replay_layout
from kvoffload.replay.timed import TimedMover
from kvoffload.replay.trees import KeyMaker, Tree, trees_of
from kvoffload.replay.working_set import BlockLog
from kvoffload.scheduler_side import PlannerConnector
from kvoffload.testing.engine import Device, Engine, Limits, NullConnector, Sequence
from kvoffload.testing.pool import PageMemory
from kvoffload.testing.rig import Clock
from kvoffload.traces.record import Trace
from kvoffload.worker_side import MoverConnector

RUNS = ("offload", "no offload", "infinite", "rewrite all")
LRU_RUN = "offload lru"
"""Where a policy learns: the same tiers under LRU, beside it."""

COUNTS = (
    *("dedup", "in_flight_dedup", "loaded_host", "loaded_disk", "used"),
    *("declined", "vanished", "refused", "overdue"),
)
"""Counters of the planner that the report shows; blocks, but for the jobs of the last one."""

FREE = 1e18
"""Bytes per second of a link that takes no time."""


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """What a session replay was asked. Blocks; device 0 = as many as the longest request of every lane, host None = no
    limit. controls: whether to run them. policies: of host and disk, in the first run."""

    schedule: Schedule
    index_only: bool = False
    block_bytes: int = 16 << 10
    device_blocks: int = 0
    host_blocks: int | None = None
    disk_blocks: int = 0
    disk_path: Path | None = None
    cost: CostModel = field(default_factory=CostModel)
    controls: bool = True
    policies: tuple[str, str] = ("lru", "lru")

    @property
    def runs(self) -> tuple[str, ...]:
        """Names of the runs asked for, the replay itself first."""
        learns = self.policies != ("lru", "lru")
        return (RUNS[0], *((LRU_RUN,) if learns else ()), *(RUNS[1:] if self.controls else ()))


@dataclass(slots=True, eq=False)
class World:
    """One run: an engine over one kind of tiers. planner, mover: None without offload."""

    engine: Engine
    channels: Channels
    planner: Planner | None
    mover: TimedMover | None

    def next_end(self) -> float | None:
        """When the next copy ends."""
        return self.mover.next_end() if self.mover else None

    def written(self) -> Written:
        """Totals so far."""
        if self.planner is None:
            return Written(dict(self.channels.moved), {"host": 0, "disk": 0}, {}, {})
        stats = self.planner.stats()
        counts = {name: stats.totals[name] for name in COUNTS}
        return Written(dict(self.channels.moved), stats.family("stored_blocks"), stats.dropped, counts)


class SessionRuns:
    """Builds and plays the runs of one report."""

    def __init__(
        self,
        trace: Trace,
        options: SessionOptions,
        progress: Callable[[str], None],
        trees: list[Tree] | None = None,
        label: str = "",
    ) -> None:
        """trees: what is played, the sessions of the trace without it. label: before the names that progress gets."""
        self._trace = trace
        self._options = options
        self._progress = progress
        self._label = label
        self._trees = trees_of(trace) if trees is None else trees
        self._pages = _pages(self._trees, trace.block_tokens, options)
        self._all = _all_blocks(self._trees, trace.block_tokens, options.schedule)

    def play(self, name: str) -> Figures:
        """One run by its name in RUNS."""
        options, cost = self._options, self._options.cost
        with ExitStack() as stack:
            if name == "no offload":
                world = self._world(None, cost, stack)
            elif name == "infinite":
                free = replace(cost, link_in=FREE, link_out=FREE, job_s=0.0)
                world = self._world(Capacity(self._all, 0), free, stack)
            else:
                host = options.host_blocks or self._all
                real = name in (RUNS[0], LRU_RUN) and not options.index_only
                policies = Policies(*options.policies) if name == RUNS[0] else LRU
                path = options.disk_path if name == RUNS[0] else None
                capacity = Capacity(host, options.disk_blocks)
                world = self._world(capacity, cost, stack, policies, path, real=real)
            stack.callback(world.engine.close)
            return self._measure(name, world)

    def alone(self) -> tuple[Bracket, ...]:
        """The requests one by one, in the order of the trace, with and without offload and with an infinite cache."""
        options = replace(
            self._options, schedule=Schedule(1, 0.0), index_only=True, device_blocks=self._pages
        )
        row = SessionRuns(self._trace, options, self._progress, [in_one_row(self._trees)], "one by one, ")
        return brackets([row.play(name).each for name in CONTROLS])

    def _world(
        self,
        capacity: Capacity | None,
        cost: CostModel,
        stack: ExitStack,
        policies: Policies = LRU,
        path: Path | None = None,
        *,
        real: bool = False,
    ) -> World:
        """path: where the disk tier lies; a temporary folder without it."""
        options, clock = self._options, Clock()
        layout = replay_layout(self._trace.block_tokens, options.block_bytes)
        channels = Channels(cost, cost.kv_bytes * self._trace.block_tokens)
        memories = [PageMemory(layout, [self._pages])] if real else []
        scheduler: SchedulerConnector = NullConnector()
        workers: list[WorkerConnector] = []
        planner = mover = None
        if capacity is not None:
            if real:
                if path is None and capacity.disk:
                    path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvoffload-replay-")))
                planner, inner = moving_parts(
                    layout, capacity, memories[0], path, self._trace.namespace, policies
                )
                mover = TimedMover(inner, channels, clock)
            else:
                planner, counted = counting_parts(layout, capacity, policies)
                mover = TimedMover(counted, channels, clock)
            scheduler = PlannerConnector(planner)
            workers.append(MoverConnector(mover))
            scheduler.attach(0, workers[0].register(memories[0].pools if memories else ()))
        device = Device(layout, [self._pages], memories)
        limits = Limits(attend_at_end=False)
        engine = Engine(device, scheduler, workers, limits=limits, cost=cost, clock=clock)
        return World(engine, channels, planner, mover)

    def _measure(self, name: str, world: World) -> Figures:
        begin = time.monotonic()
        keys = KeyMaker(self._trace)
        replay = SessionReplay(world.engine, self._trees, keys, self._options.schedule, world.next_end)
        before: list[Written] = []
        log, stores = BlockLog(), Counter[object]()
        if isinstance(world.engine.scheduler, PlannerConnector):
            world.engine.scheduler.on_store = lambda request, blocks: stores.update({request: blocks})

        def begin_window() -> None:
            before.append(world.written())
            log.mark()

        replay.at_begin, replay.after_each = begin_window, self._after(name, world, log)
        measured: Measured = replay.run()
        if self._options.schedule.window_s == 0:
            replay.drain()
        written = _since(before[0], world.written()) if before else world.written()
        per_turn = [stores[seq.info.id] * world.channels.block_bytes for seq in measured.requests]
        return figures(
            name,
            measured.requests,
            measured.seconds,
            written,
            blocks=log.blocks(),
            new=int(log.new_by_request().sum()),
            per_turn=(percentile(per_turn, 50), percentile(per_turn, 90)),
            working_set=log.working_sets(),
            growth=log.growth(),
            preemptions=world.engine.totals.preemptions,
            failed_loads=world.engine.totals.failed_loads,
            mismatches=world.engine.device.mismatches,
            samples=tuple(world.engine.device.samples),
            unkept=_unkept(world, drained=self._options.schedule.window_s == 0),
            wall_s=time.monotonic() - begin,
        )

    def _after(self, name: str, world: World, log: BlockLog) -> Callable[[Sequence, bool], None]:
        """What happens when a request has ended: the one control that stores its whole text again does so."""

        def after(seq: Sequence, measured: bool) -> None:
            if measured:
                self._progress(self._label + name)
            blocks = seq.computed // self._trace.block_tokens
            log.add(world.engine.clock.now, seq.chain.keys[:blocks])
            if name == "rewrite all":
                world.channels.move("out", blocks, world.engine.clock.now)
                if self._options.disk_blocks:
                    world.channels.move("write", blocks, world.engine.clock.now)

        return after


def _unkept(world: World, *, drained: bool) -> tuple[str, ...]:
    """What does not hold in the index at the end; with every job ended, no slot is pinned either."""
    if world.planner is None:
        return ()
    found = []
    try:
        world.planner.check_integrity()
    except RuntimeError as error:
        found.append(str(error))
    if drained and world.planner.idle and world.planner.pinned():
        found.append(f"{world.planner.pinned()} slots are pinned although no job runs")
    return tuple(found)


def run_sessions(
    trace: Trace, options: SessionOptions, progress: Callable[[str], None] = lambda name: None
) -> SessionReport:
    """The replay and, where asked for, its controls. Raises ConfigError where it cannot run at all."""
    runs = SessionRuns(trace, options, progress)
    setup = SessionSetup(
        trace=trace.name,
        sessions=options.schedule.lanes,
        window_s=options.schedule.window_s,
        think=options.schedule.think,
        index_only=options.index_only,
        block_tokens=trace.block_tokens,
        block_bytes=options.block_bytes,
        device_blocks=options.device_blocks,
        host_blocks=options.host_blocks,
        disk_blocks=options.disk_blocks,
        cost=options.cost.to_dict(),
    )
    played = tuple(runs.play(name) for name in options.runs)
    return SessionReport(setup, played, runs.alone() if options.controls else ())


def _pages(trees: list[Tree], size: int, options: SessionOptions) -> int:
    """Device pages, at least those of the longest request."""
    longest = max(
        _blocks(t.request.input_tokens + t.request.output_tokens, size) for x in trees for t in x.turns
    )
    if not options.device_blocks:
        return longest * options.schedule.lanes
    if options.device_blocks < longest:
        raise ConfigError(
            f"the longest request has {longest} blocks and the device {options.device_blocks}:"
            f" raise --device-blocks to at least {longest}"
        )
    return options.device_blocks


def _blocks(tokens: int, size: int) -> int:
    return -(-max(tokens, 1) // size)


def _all_blocks(trees: list[Tree], size: int, schedule: Schedule) -> int:
    """More blocks than the sessions come to have: the capacity of a tier without limit."""
    new = 0
    for tree in trees:
        last: dict[str, int] = {}
        for turn in tree.turns:
            length = turn.request.input_tokens + turn.request.output_tokens
            before = last.get(turn.request.agent, 0)
            new += _blocks(length if length < before else length - before, size) + 1
            last[turn.request.agent] = length
    plays = 1 if schedule.window_s == 0 else 4
    return plays * 4 * new


def _since(before: Written, now: Written) -> Written:
    def less(a: dict[str, int], b: dict[str, int]) -> dict[str, int]:
        return {name: value - a.get(name, 0) for name, value in b.items()}

    return Written(
        less(dict(before.moved), dict(now.moved)),
        less(dict(before.stored), dict(now.stored)),
        less(dict(before.dropped), dict(now.dropped)),
        less(dict(before.counts), dict(now.counts)),
    )
