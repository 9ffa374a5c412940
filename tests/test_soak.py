"""Random traffic of several requests over two ranks with real bytes, tiny tiers and a medium that fails in every way.

Invariants hold after every step, whatever is in flight; at every rest nothing is held. `--soak SECONDS` runs longer.
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvoffload.config import POLICIES, Config
from kvoffload.layout import CacheGroup, GroupKind, Layout
from kvoffload.messages import Copies, JobKind
from kvoffload.requests import Finished, RequestInfo
from kvoffload.testing.event_reader import EventReader, visible
from kvoffload.testing.faults import Fault, Op
from kvoffload.testing.paint import paint, verify
from kvoffload.testing.rig import Clock, Keys, Rig, Sizes, one_group

PAGES = 160
TOKENS = 16
NAMES = 6
"""Request ids in use at once; an ended request's id comes back for another chain."""

HYBRID = Layout(
    TOKENS,
    (
        CacheGroup(0, GroupKind.FULL, 16, 8192, layers=("a", "b")),
        CacheGroup(1, GroupKind.SLIDING, 16, 4096, lookback=49, layers=("c",)),
        CacheGroup(2, GroupKind.STATE, 32, 12288, layers=("d",)),
    ),
)


class Chaos(Fault):
    """Copies fail, calls raise and are late, with chances that change while it runs."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self.calm()

    def calm(self) -> None:
        """From now on everything works at once."""
        self.fail, self.crash, self.go, self.healthy = 0.0, 0.0, 1.0, True

    def stir(self, chance: random.Random) -> None:
        """Another mood."""
        self.fail = chance.choice([0.0, 0.0, 0.02, 0.3])
        self.crash = chance.choice([0.0, 0.0, 0.05])
        self.go = chance.choice([1.0, 0.3, 0.05])
        self.healthy = chance.random() > 0.1

    def begin(self, op: Op, copies: Copies) -> NDArray[np.bool_]:
        with self._lock:
            if self._random.random() < self.crash:
                raise RuntimeError("drawn to raise")
            return np.array([self._random.random() < self.fail for _ in copies], np.bool_)

    def released(self, op: Op, since: float) -> bool:
        with self._lock:
            return self._random.random() < self.go


@dataclass(slots=True, eq=False)
class Live:
    """A request of the engine. held: by group, which blocks' pages have their bytes; pages -1 elsewhere."""

    info: RequestInfo
    chain: Keys
    pages: list[NDArray[np.int32]]
    held: list[NDArray[np.bool_]]
    computed: int = 0
    load: int = 0
    asked: int = 0


@dataclass(slots=True)
class World:
    """An engine of few pages in front of one rig."""

    rig: Rig
    chance: random.Random
    free: list[set[int]] = field(default_factory=list)
    live: dict[int, Live] = field(default_factory=dict)
    zombies: list[tuple[set[int], Live]] = field(default_factory=list)
    running: dict[int, JobKind] = field(default_factory=dict)
    loaded: int = 0
    reader: EventReader = field(init=False)

    def __post_init__(self) -> None:
        self.reader = EventReader(self.rig.layout)
        self.free = [set(range(PAGES)) for _ in self.rig.layout.groups]

    # ---- pages ----

    def take(self, live: Live) -> bool:
        """A page for every block of the chain, or none."""
        needs = [live.chain.blocks // m for m in self.rig.layout.multiples]
        if any(len(f) < n for f, n in zip(self.free, needs, strict=True)):
            return False
        live.pages = [
            np.array([f.pop() for _ in range(n)], np.int32) for f, n in zip(self.free, needs, strict=True)
        ]
        live.held = [np.zeros(n, np.bool_) for n in needs]
        return True

    def give_back(self, live: Live) -> None:
        """The engine reuses pages at once: what still reads or writes them meets other bytes."""
        for group, pages in enumerate(live.pages):
            for memory in self.rig.memory:
                for array in memory.arrays[group]:
                    array[pages] = 0xEE
            self.free[group] |= set(pages.tolist())

    def leave(self, live: Live, jobs: tuple[int, ...]) -> None:
        """Its pages stay until these jobs have finished."""
        waiting = {job for job in jobs if job in self.running}
        assert waiting == set(jobs), "a job that has finished is named again"
        if waiting:
            self.zombies.append((waiting, live))
        else:
            self.give_back(live)

    # ---- bytes ----

    def _keys(self, live: Live, group: int) -> NDArray[np.uint8]:
        multiple = self.rig.layout.multiples[group]
        return live.chain.keys[multiple - 1 :: multiple]

    def compute(self, live: Live, tokens: int) -> None:
        """The engine computes up to `tokens`: pages of these blocks are painted."""
        for group, spec in enumerate(self.rig.layout.groups):
            begin, end = live.computed // spec.tokens_per_block, tokens // spec.tokens_per_block
            for memory in self.rig.memory:
                paint(memory, group, live.pages[group][begin:end], self._keys(live, group)[begin:end])
            live.held[group][begin:end] = True
        live.computed = tokens

    def arrived(self, live: Live, boundary: int) -> None:
        """A load has ended: the blocks that the boundary needs are there."""
        for group, spec in enumerate(self.rig.layout.groups):
            size = spec.tokens_per_block
            begin = {
                GroupKind.FULL: 0,
                GroupKind.SLIDING: max(0, boundary - spec.lookback) // size,
                GroupKind.STATE: max(0, boundary // size - 1),
            }[spec.kind]
            live.held[group][begin : boundary // size] = True
        live.computed = boundary
        self.loaded += boundary // TOKENS

    def check_bytes(self, live: Live) -> None:
        """Every page that the request holds has exactly its key's bytes, on every rank."""
        for group, held in enumerate(live.held):
            for memory in self.rig.memory:
                wrong = verify(
                    memory, group, live.pages[group][held], self._keys(live, group)[: len(held)][held]
                )
                assert not len(wrong), f"request {live.info.id} rank {memory.rank} group {group}: {wrong}"

    # ---- what an engine does ----

    def arrive(self) -> None:
        name = self.chance.randrange(NAMES)
        if name in self.live:
            return
        trunk, length = self.chance.randrange(4), self.chance.randrange(1, 33)
        fork = self.chance.choice([length, length, self.chance.randrange(length + 1)])
        chain = Keys.of(
            [trunk * 1000 + i for i in range(fork)] + [9000 + self.chance.randrange(3)] * (length - fork)
        )
        live = Live(RequestInfo(name), chain, [], [])
        if self.take(live):
            self.live[name] = live
            self.admit(live)

    def admit(self, live: Live) -> None:
        """Ask what is there, and load it, or less, or nothing."""
        found = self.rig.planner.match(live.info, live.chain)
        assert found.boundary <= found.pending <= live.chain.blocks * TOKENS
        if self.chance.random() < 0.2:
            self.rig.planner.prefetch(
                live.info, live.chain, self.rig.clock.now + self.chance.choice([0.0, 1.0, 20.0])
            )
        wanted = found.boundary if self.chance.random() < 0.8 else self.chance.randrange(0, 520)
        plan = self.rig.planner.load(live.info, live.chain, wanted, live.pages)
        assert plan.boundary <= max(wanted, 0)
        live.load, live.asked = plan.id, plan.boundary
        if plan.id:
            self.running[plan.id] = JobKind.LOAD

    def proceed(self, live: Live) -> None:
        """Compute some more and offer it; a request that is at its end finishes."""
        if live.load:
            return None
        end = live.chain.blocks * TOKENS
        if live.computed >= end and self.chance.random() < 0.3:
            return self.end(live, "end_turn")
        self.compute(live, min(end, live.computed + self.chance.choice([0, 5, 16, 64, 512])))
        pages = [np.where(h, p, -1).astype(np.int32) for h, p in zip(live.held, live.pages, strict=True)]
        offer = self.rig.planner.offer(live.info, live.chain, live.computed, pages)
        assert offer.cursor <= live.computed
        if offer.job:
            self.running[offer.job] = JobKind.STORE
        return None

    def end(self, live: Live, reason: str) -> None:
        del self.live[int(live.info.id)]
        self.leave(live, self.rig.planner.finish(live.info.id, reason, self.rig.clock.now))

    def preempt(self, live: Live) -> None:
        """Its pages go; it starts anew with others, or ends where there are none."""
        jobs = self.rig.planner.preempt(live.info.id)
        again = Live(live.info, live.chain, [], [])
        self.leave(live, jobs)
        if self.take(again):
            self.live[int(live.info.id)] = again
            self.admit(again)
        else:
            del self.live[int(live.info.id)]
            assert set(self.rig.planner.finish(live.info.id, "abort", self.rig.clock.now)) == set(jobs)

    def settle(self, finished: list[Finished]) -> None:
        """Each job finishes once; loads are looked at byte by byte."""
        for done in finished:
            kind = self.running.pop(done.id, None)
            assert kind is done.kind or (kind is None and done.kind is JobKind.READ), (
                f"finished twice: {done}"
            )
            for live in self.live.values():
                if live.load == done.id:
                    assert done.request == live.info.id
                    assert done.boundary <= live.asked
                    live.load = 0
                    self.arrived(live, done.boundary)
                    self.check_bytes(live)
            for waiting, _ in self.zombies:
                waiting.discard(done.id)
        for waiting, live in self.zombies:
            if not waiting:
                self.give_back(live)
        self.zombies = [z for z in self.zombies if z[0]]

    def step(self) -> None:
        self.settle(self.rig.local.step())
        self.rig.planner.check_integrity()
        self.reader.apply(self.rig.planner.take_events())
        tiers = self.rig.planner._tiers
        assert tiers is not None
        online = all(self.rig.planner._disk_ok.values())
        assert self.reader.places == visible(tiers.index, online), "events do not tell what is visible"
        if self.live and self.chance.random() < 0.1:
            self.check_bytes(self.chance.choice(list(self.live.values())))

    def act(self) -> None:
        """One thing that an engine, its users or its operator do."""
        draw = self.chance.random()
        live = self.chance.choice(list(self.live.values())) if self.live else None
        if live is None or draw < 0.25:
            self.arrive()
        elif draw < 0.9:
            self.proceed(live)
        elif draw < 0.93:
            self.end(live, "abort")
        elif draw < 0.96:
            self.preempt(live)
        elif draw < 0.98:
            self.rig.clock.now += self.chance.choice([0.1, 4.0, 30.0])
        elif draw < 0.985:
            self.rig.planner.reset(self.chance.choice([("host",), ("disk",), ("host", "disk")]))

    def rest(self) -> None:
        """Everything ends; then nothing is pinned, transit is whole and every page is accounted for."""
        self.settle(self.rig.local.drain(30.0))
        self.rig.check()
        assert not self.running
        assert not self.zombies
        tiers = self.rig.planner._tiers
        assert tiers is not None
        assert not tiers.loads._held
        assert not tiers.loads._short
        assert not tiers.loads._parts
        for live in self.live.values():
            self.check_bytes(live)


def episode(path: Path, layout: Layout, seed: int, steps: int) -> int:
    """A process's life on a disk path that the one before has left; the blocks that were loaded."""
    chance = random.Random(seed)
    chaos = Chaos(seed)
    sizes = Sizes(host=chance.choice([2, 3, 6]), transit=chance.choice([1, 2, 3]), disk=8, pages=PAGES)
    config = Config(
        host_bytes=1,  # sizes here are said in slabs
        disk_path=path,
        disk_bytes=1,
        model_id="soak",
        deadline_s=5.0,
        host_policy=chance.choice(POLICIES),
        disk_policy=chance.choice(POLICIES),
        disk_admission=chance.choice([1, 1, 2]),
        disk_write_budget=chance.choice([None, None, 1 << 20]),
    )
    with Rig(
        sizes, layout, path, 2, config, [chaos], [chaos], chance.choice([None, 0, 1]), Clock(), True
    ) as rig:
        world = World(rig, chance)
        for number in range(steps):
            if number % 40 == 0:
                chaos.stir(chance)
            for _ in range(chance.randrange(4)):
                world.act()
            world.step()
            if number % 150 == 149:
                chaos.calm()
                world.rest()
        if chance.random() < 0.7:
            chaos.calm()
            world.rest()
        chaos.go = 1.0
        return world.loaded


@pytest.mark.parametrize("layout", [one_group(TOKENS), HYBRID], ids=["one group", "hybrid"])
def test_soak(
    layout: Layout, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No wrong byte, no job without an end, nothing left over, over as many drawn lives as the time allows."""
    monkeypatch.setattr("kvoffload.mover.PROBE_SECONDS", 0.01)
    end = time.monotonic() + float(request.config.getoption("--soak"))
    loaded = seed = 0
    while time.monotonic() < end or not loaded:
        loaded += episode(tmp_path / str(seed // 3), layout, seed, 300)
        seed += 1
