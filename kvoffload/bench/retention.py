"""`kvoffload bench retention`: long sessions over full and window groups, with the rules of retention and without.

Two sessions are at work at a time, turn by turn; one that has reached its length makes room for the next, which starts
from the trunk that all share. The pool holds two of them. Decisions only: no byte moves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvoffload.config import Config
from kvoffload.layout import CacheGroup, GroupKind, Layout
from kvoffload.messages import Inventory, JobKind
from kvoffload.null_mover import NullMover
from kvoffload.planner import Planner
from kvoffload.requests import RequestInfo

BLOCK = 16
"""Tokens."""

BLOCK_BYTES = 4096
"""Of either group, so that the figures compare."""

STEP_TOKENS = 8192
ANSWER_STEP = 64
"""Tokens computed and offered at once, of a prompt and of an answer."""

SLOTS_PER_SLAB = 16
WINDOW_SHARE = 50
"""Beside the slots for two sessions' full blocks, the pool has one in so many for windows."""

Keys = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Growth:
    """tokens: where a session ends; trunk: what all start with; prompt, answer: new tokens of each turn."""

    sessions: int = 14
    tokens: int = 1_000_000
    trunk: int = 200_000
    prompt: int = 16_384
    answer: int = 4_096

    @property
    def capacity(self) -> int:
        """Full blocks of two sessions."""
        return 2 * self.tokens // BLOCK


@dataclass(frozen=True, slots=True)
class Case:
    """window: tokens, 0 = a model of full groups only. forks, stored: False = the controls without fork tails, and with
    window pages freed before they are stored."""

    window: int
    rule: str = "boundaries"
    forks: bool = True
    stored: bool = True

    def __str__(self) -> str:
        if not self.window:
            return "full only"
        rule = self.rule if self.stored else "not stored"
        return f"{self.window} {rule if self.forks else 'no fork tails'}"


@dataclass(slots=True)
class Grown:
    """What a case came to. blocks: of windows; resident at the end, and the bound that kept boundaries give."""

    case: Case
    turns: int = 0
    tokens: int = 0
    hits: int = 0
    stored: int = 0
    dense: int = 0
    resident: int = 0
    boundaries: int = 0

    @property
    def hit_rate(self) -> float:
        return self.hits / max(self.tokens, 1)

    @property
    def bound(self) -> int:
        """Window blocks that the kept boundaries account for."""
        return self.boundaries * (-(-(self.case.window - 1) // BLOCK) + 1)


@dataclass(slots=True)
class _Chain:
    keys: Keys


@dataclass(slots=True)
class _Session:
    name: str
    keys: Keys
    done: int
    ends: list[int] = field(default_factory=list)


def bench_retention(growth: Growth, cases: tuple[Case, ...]) -> Iterator[Grown]:
    """One result per case, as it comes."""
    for case in cases:
        yield _World(growth, case).run()


class _World:
    """One case. Thread: one."""

    def __init__(self, growth: Growth, case: Case) -> None:
        self.growth, self.case = growth, case
        groups = [CacheGroup(0, GroupKind.FULL, BLOCK, BLOCK_BYTES)]
        window = 0
        if case.window:
            groups.append(CacheGroup(1, GroupKind.SLIDING, BLOCK, BLOCK_BYTES, lookback=case.window - 1))
            window = -(-growth.capacity // WINDOW_SHARE // SLOTS_PER_SLAB) + 1
        self.layout = Layout(BLOCK, tuple(groups))
        self.planner = Planner(self.layout, Config(host_bytes=0, retention=case.rule))
        self.planner.find_forks = case.forks
        slabs = -(-growth.capacity // SLOTS_PER_SLAB)
        self.planner.attach(0, Inventory((SLOTS_PER_SLAB,) * len(groups), slabs + window, 1, 0))
        self.mover = NullMover(0)
        self.result = Grown(case)
        self.requests = 0
        self.pages = np.arange(growth.tokens // BLOCK + 1, dtype=np.int32)
        self.random = np.random.default_rng(0)
        self.trunk = self._keys(growth.trunk // BLOCK)

    def _keys(self, count: int) -> Keys:
        return self.random.integers(0, 256, (count, 16), np.uint8)

    def run(self) -> Grown:
        growth = self.growth
        waiting = [self._session(i) for i in range(growth.sessions)]
        ended, active = [], [waiting.pop(0) for _ in range(min(2, len(waiting)))]
        while active:
            for session in list(active):
                if not self._turn(session):
                    active.remove(session)
                    ended.append(session)
                    if waiting:
                        active.append(waiting.pop(0))
        if self.case.window:
            self.result.resident = self.planner.usage("host")["groups"][1]["used"]
            self.result.boundaries = self._boundaries(ended)
        self.planner.check_integrity()
        return self.result

    def _session(self, number: int) -> _Session:
        own = self._keys(self.growth.tokens // BLOCK - len(self.trunk))
        return _Session(f"session {number}", np.concatenate((self.trunk, own)), self.growth.trunk)

    def _turn(self, session: _Session) -> bool:
        """One turn: a prompt of all before and some more, and an answer. False when the session is full."""
        growth = self.growth
        prompt, end = session.done + growth.prompt, session.done + growth.prompt + growth.answer
        if end > growth.tokens:
            return False
        self.requests += 1
        info = RequestInfo(self.requests, session.name)
        head = _Chain(session.keys[: prompt // BLOCK])
        found = self.planner.match(info, head)
        self.planner.load(info, head, found.boundary, self._pages(0))
        self._settle()
        self._compute(info, session.keys, (found.boundary, prompt), STEP_TOKENS)
        self._compute(info, session.keys, (prompt, end), ANSWER_STEP)
        self.planner.finish(info.id, "end_turn", 0.0)
        session.done = end
        session.ends += [prompt, end]
        result = self.result
        result.turns += 1
        result.tokens += prompt
        result.hits += found.boundary
        result.dense += (end - found.boundary) // BLOCK if self.case.window else 0
        return True

    def _compute(self, info: RequestInfo, keys: Keys, span: tuple[int, int], step: int) -> None:
        """Keys of a prompt are all there from the start, those of an answer as it grows."""
        for begin in range(span[0], span[1], step):
            end = min(begin + step, span[1])
            chain = _Chain(keys[: (span[1] if step == STEP_TOKENS else end) // BLOCK])
            self.planner.offer(info, chain, end, self._pages(begin))
            self._settle()

    def _pages(self, begin: int) -> list[NDArray[np.int32]]:
        """Pages of windows from before the step are gone; in the control without storing all of them."""
        if not self.case.window:
            return [self.pages]
        window = self.pages.copy()
        gone = max(0, begin - self.case.window + 1) // BLOCK
        window[: gone if self.case.stored else len(window)] = -1
        return [self.pages, window]

    def _settle(self) -> None:
        while True:
            plans = self.planner.tick(0.0)
            for job in plans.jobs:
                if job.kind is JobKind.STORE:
                    self.result.stored += int((job.copies["group"] == 1).sum())
            self.mover.submit(plans)
            self.planner.complete(self.mover.poll())
            if self.planner.idle:
                return

    def _boundaries(self, sessions: list[_Session]) -> int:
        """Different ends of prompts and turns, and the trunk's, whose last window block is resident."""
        found = set()
        for session in sessions:
            info = RequestInfo(f"look at {session.name}")
            self.planner.match(info, _Chain(session.keys))
            matcher = self.planner.requests[info.id].matcher
            assert matcher is not None
            codes = matcher.codes(1)
            for end in (self.growth.trunk, *session.ends):
                last = end // BLOCK - 1
                if codes[last]:
                    found.add(session.keys[last].tobytes())
            self.planner.finish(info.id, "abort", 0.0)
        return len(found)
