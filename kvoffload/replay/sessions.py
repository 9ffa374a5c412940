"""N live sessions in a closed loop over the reference engine, in virtual time: AgentX's way of replaying."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from kvoffload.errors import ConfigError
from kvoffload.replay.trees import KeyMaker, Tree, Turn
from kvoffload.requests import RequestInfo
from kvoffload.testing.engine import Engine, Sequence
from kvoffload.traces.record import MAIN

WARM_UP = 10
"""Requests of every lane between its primers and the measured window."""

TREE_IDLE_S = 300.0
SYSTEM_IDLE_S = 10.0
"""Longest pause of a session, and of the whole system when nothing runs."""

IDLE_STEP_S = 0.05
"""Virtual seconds until a request that waits with nothing under way is looked at again."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """How sessions are played. lanes: live sessions. window_s: measured seconds after the warm-up; 0 = play every
    session once from its first turn to its last and measure all of it. think: factor on the pauses. seed: of the
    points at which the first sessions are joined, between `begin` and `end` of their turns."""

    lanes: int
    window_s: float = 3600.0
    think: float = 1.0
    seed: int = 42
    begin: float = 0.25
    end: float = 0.75

    def __post_init__(self) -> None:
        if self.lanes < 1:
            raise ConfigError(f"--sessions {self.lanes}: at least one session must be live")
        if self.think < 0 or self.window_s < 0:
            raise ConfigError(f"--think {self.think}, --window {self.window_s}: both must be at least 0")


@dataclass(slots=True, eq=False)
class Play:
    """One session being played by a lane. open: turns not ended yet; missing: by turn, how many it still waits for."""

    lane: int
    number: int
    tree: Tree
    open: set[int]
    missing: dict[int, int]
    primers: frozenset[int] = frozenset()


@dataclass(slots=True, eq=False)
class Job:
    """One request of a play on its way."""

    play: Play
    turn: int
    primer: bool


@dataclass(slots=True)
class Measured:
    """What the window holds: requests that ended in it, its borders in seconds."""

    requests: list[Sequence] = field(default_factory=list)
    begin: float = 0.0
    end: float = 0.0

    @property
    def seconds(self) -> float:
        return self.end - self.begin


class SessionReplay:
    """Plays trees on an engine. `next_end`: when the next copy ends, None = none runs. Thread: one."""

    def __init__(
        self,
        engine: Engine,
        trees: list[Tree],
        keys: KeyMaker,
        schedule: Schedule,
        next_end: Callable[[], float | None],
    ) -> None:
        self._engine = engine
        self._trees = trees
        self._keys = keys
        self._schedule = schedule
        self._next_end = next_end
        self._base = engine.device.layout.base_tokens
        self._arrivals: list[tuple[float, int, Job]] = []
        self._live: dict[int, Job] = {}
        self._plays: dict[int, int] = {}
        self._drawn = 0
        self._numbers = 0
        self._lane_ended: list[int] = [0] * schedule.lanes
        self._measuring = schedule.window_s == 0
        self.measured = Measured()
        self.at_begin: Callable[[], None] = lambda: None
        self.after_each: Callable[[Sequence, bool], None] = lambda seq, measured: None
        """Called when a request has ended, with whether it is measured."""

    def run(self) -> Measured:
        """Until the window ends or, with window 0, until every session has been played."""
        for lane in range(self._schedule.lanes):
            self._draw(lane, fresh=self._schedule.window_s == 0)
        if self._measuring:
            self.at_begin()
        while (self._arrivals or self._live) and not self._over():
            self._admit()
            for seq in self._engine.step():
                self._ended(seq)
            if not self._engine.worked:
                self._skip()
            else:
                self._engine.glide(self._horizon())
        self.measured.end = self._engine.clock.now
        return self.measured

    def drain(self) -> None:
        """Abort what still runs, and let every job end."""
        for seq in [*self._engine.waiting, *self._engine.loading.values(), *self._engine.running]:
            self._engine.abort(seq)
        while not self._engine.idle or self._next_end() is not None:
            self._engine.step()
            self._skip()

    def _over(self) -> bool:
        window = self._schedule.window_s
        return bool(window) and self._measuring and self._engine.clock.now >= self.measured.begin + window

    # ---- drawing sessions ----

    def _draw(self, lane: int, *, fresh: bool) -> None:
        """The lane's next session: from its first turn, or from a point inside it after primers."""
        if self._schedule.window_s == 0 and self._drawn >= len(self._trees):
            return
        number = self._drawn % len(self._trees)
        tree = self._trees[number]
        play_number = self._drawn // len(self._trees)
        self._drawn += 1
        cut = 0
        if not fresh:
            rng = random.Random(self._schedule.seed * 1_000_003 + lane)
            share = self._schedule.begin + (self._schedule.end - self._schedule.begin) * rng.random()
            cut = int(len(tree.turns) * share)
        primers = _primers(tree, cut)
        kept = set(range(cut, len(tree.turns))) | primers
        missing = {
            i: sum(1 for other in tree.turns[i].after if other in kept) if i >= cut else 0 for i in kept
        }
        play = Play(lane, play_number, tree, kept, missing, frozenset(primers))
        for turn in sorted(kept):
            if not missing[turn]:
                # A root of a fresh session waits as the trace has it; others have been waited for already.
                self._arrive(play, turn, self._pause(tree.turns[turn]) if cut == 0 else 0.0)

    def _pause(self, turn: Turn) -> float:
        return min(turn.delay * self._schedule.think, TREE_IDLE_S)

    def _arrive(self, play: Play, turn: int, delay: float) -> None:
        self._numbers += 1
        job = Job(play, turn, turn in play.primers)
        heapq.heappush(self._arrivals, (self._engine.clock.now + delay, self._numbers, job))

    # ---- one request ----

    def _admit(self) -> None:
        """Hand over what has arrived by now."""
        while self._arrivals and self._arrivals[0][0] <= self._engine.clock.now:
            when, number, job = heapq.heappop(self._arrivals)
            request = job.play.tree.turns[job.turn].request
            output = 1 if job.primer else max(request.output_tokens, 1)
            seq = Sequence(
                RequestInfo(number, f"{job.play.number}/{request.session}", request.agent),
                self._keys.keys(request, job.play.number),
                self._base,
                request.input_tokens,
                output,
                request.finish_reason,
            )
            self._engine.add(seq)
            seq.arrived = when
            self._live[number] = job

    def _ended(self, seq: Sequence) -> None:
        """Count a request that has ended, and let those that waited for it arrive."""
        number = seq.info.id
        assert isinstance(number, int)
        job = self._live.pop(number)
        play = job.play
        self.after_each(seq, self._measuring)
        if self._measuring:
            self.measured.requests.append(seq)
        elif not job.primer:
            self._lane_ended[play.lane] += 1
            if min(self._lane_ended) >= WARM_UP:
                self._measuring = True
                self.measured.begin = self._engine.clock.now
                self.at_begin()
        play.open.discard(job.turn)
        for turn in sorted(play.open):
            if play.missing[turn] and job.turn in play.tree.turns[turn].after:
                play.missing[turn] -= 1
                if not play.missing[turn]:
                    self._arrive(play, turn, self._pause(play.tree.turns[turn]))
        if not play.open:
            self._draw(play.lane, fresh=True)

    # ---- time ----

    def _horizon(self) -> float:
        """Before this nothing happens but what the engine does by itself."""
        times = [self._arrivals[0][0]] if self._arrivals else []
        times += [t for t in (self._next_end(),) if t is not None]
        if self._measuring and self._schedule.window_s:
            times.append(self.measured.begin + self._schedule.window_s)
        return min(times, default=math.inf)

    def _skip(self) -> None:
        """Nothing could be computed: jump to what happens next."""
        clock = self._engine.clock
        times = [t for t in (self._next_end(),) if t is not None]
        if self._arrivals:
            if not self._live:
                self._shorten(clock.now)
            times.append(self._arrivals[0][0])
        if self._engine.waiting or not times:
            times.append(clock.now + IDLE_STEP_S)
        clock.now = max(clock.now, min(times))

    def _shorten(self, now: float) -> None:
        """The whole system is idle: let the next request come within SYSTEM_IDLE_S, and all others as much earlier."""
        excess = self._arrivals[0][0] - now - SYSTEM_IDLE_S
        if excess > 0:
            self._arrivals = [(max(now, when - excess), number, job) for when, number, job in self._arrivals]


def _primers(tree: Tree, cut: int) -> set[int]:
    """Of each agent that is active at the cut, the last turn before it: played with one token of answer."""
    last: dict[str, int] = {}
    for position, turn in enumerate(tree.turns[:cut]):
        last[turn.request.agent] = position
    active = {turn.request.agent for turn in tree.turns[cut:]}
    return {position for agent, position in last.items() if agent in active or agent == MAIN}
