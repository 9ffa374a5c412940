"""AgentX-like sessions from a seed: ids and real tokens, so that generated tokens can be stored too.

Every draw comes from random.Random.random(), the same on every Python version; normals are Box-Muller.
A text is a list of runs of one global count; a token is a mix of the seed and its number. So texts are equal
where they are copies, and only there, and block ids follow from the copies without hashing.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from kvoffload.traces.record import MAIN, Ids, Request, Tokens, Trace, TurnCounter, mix64, seconds
from kvoffload.traces.synth_spec import SynthSpec

TOOL_USE, END_TURN = "tool_use", "end_turn"
_SUB_PREFIX = 9_728  # tokens that the sub-agents of a session share: tools and system prompt
_SUMMARY = 2_000  # tokens of context that a full one is cut to, beside its first prompt's


class Dice:
    """Draws that depend on nothing but Random.random() and libm."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def uniform(self, low: float, high: float) -> float:
        """In [low, high)."""
        return low + (high - low) * self._random.random()

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return self._random.random() < probability

    def lognormal(self, median: float, sigma: float) -> float:
        """exp of a normal with mean log(median)."""
        radius = math.sqrt(-2.0 * math.log(1.0 - self._random.random()))
        return median * math.exp(sigma * radius * math.cos(2.0 * math.pi * self._random.random()))

    def tokens(self, median: float, sigma: float, low: int, high: int) -> int:
        """A lognormal count within [low, high]."""
        return max(low, min(high, round(self.lognormal(median, sigma))))


@dataclass(slots=True, eq=False)
class _Context:
    """A text that grows at its end: runs of the global count, and the ids of its blocks once sealed.

    The first `shared` tokens are those of `origin`; so are the blocks that lie in them.
    """

    origin: _Context | None = None
    shared: int = 0
    runs: list[tuple[int, int]] = field(default_factory=list)
    length: int = 0
    ids: Ids | None = None
    tokens: Tokens | None = None

    def fork(self, length: int) -> _Context:
        """A new text that starts with `length` tokens of this one."""
        runs, left = [], length
        for start, count in self.runs:
            if left > 0:
                runs.append((start, min(count, left)))
            left -= count
        return _Context(self, length, runs, length)


@dataclass(frozen=True, slots=True)
class _Draft:
    """A request before its context is sealed."""

    t: float
    session: int
    order: int
    agent: str
    context: _Context
    tokens_in: int
    tokens_out: int
    finish_reason: str
    service_s: float


class _Writer:
    """Hands out the global count of tokens and of block ids."""

    def __init__(self, spec: SynthSpec) -> None:
        self.spec = spec
        self._tokens = 0
        self._blocks = 0

    def append(self, context: _Context, count: int) -> None:
        """Adds `count` tokens that occur nowhere else."""
        if count > 0:
            context.runs.append((self._tokens, count))
            context.length += count
            self._tokens += count

    def seal(self, context: _Context) -> None:
        """Gives a text its tokens and block ids, after its origin's; nothing may be added afterwards."""
        if context.ids is not None:
            return
        size, head = self.spec.block_size, np.empty(0, dtype=np.int64)
        if context.origin is not None:
            self.seal(context.origin)
            head = ids_of(context.origin)[: context.shared // size]
        fresh = context.length // size - len(head)
        context.ids = np.concatenate((head, np.arange(self._blocks, self._blocks + fresh, dtype=np.int64)))
        self._blocks += fresh
        numbers = [np.arange(start, start + count, dtype=np.uint64) for start, count in context.runs]
        salt = mix64(np.array([self.spec.seed], dtype=np.uint64))
        mixed = mix64(np.concatenate([*numbers, np.empty(0, dtype=np.uint64)]) + salt)
        context.tokens = (mixed % np.uint64(self.spec.vocabulary)).astype(np.uint32)
        context.tokens.flags.writeable = False


def ids_of(context: _Context) -> Ids:
    """REQUIRES: the context is sealed."""
    assert context.ids is not None
    return context.ids


class _Session:
    """Plays one session: the main agent's turns and the sub-agents that they start."""

    def __init__(self, writer: _Writer, number: int, prefix: _Context, sub_prefix: _Context) -> None:
        spec = writer.spec
        self.dice = Dice(spec.seed * 1_000_003 + number + 1)
        self.writer, self.spec, self.number = writer, spec, number
        self.prefix, self.sub_prefix = prefix, sub_prefix
        self.drafts: list[_Draft] = []
        self.started = 0
        has_subagents = self.dice.chance(spec.subagents)
        self.subagents_left = self.dice.tokens(4, 1.33, 1, 100) if has_subagents else 0

    def play(self) -> list[_Draft]:
        """All requests of the session, each agent's in order."""
        dice, spec = self.dice, self.spec
        t = dice.uniform(0.0, spec.spread_s)
        first = dice.tokens(44_800, 1.12, 2_048, spec.max_context // 2)
        context = self.prefix.fork(self.prefix.length)
        self.writer.append(context, max(first - context.length, 256))
        base, turns = context.length, dice.tokens(spec.turns, 1.0, min(20, spec.turns), 20 * spec.turns)
        spawn = 1.5 * self.subagents_left / turns
        for turn in range(turns):
            reason = END_TURN if turn == turns - 1 or not dice.chance(0.863) else TOOL_USE
            output = self._answer(MAIN, context, t, dice.tokens(444, 0.9, 1, 32_000), reason)
            t += self.drafts[-1].service_s + self._think(reason)
            if reason == TOOL_USE and self.subagents_left and dice.chance(spawn):
                t = self._spawn(t)
            context = self._grown(context, base, output, (683, 1.36) if reason == TOOL_USE else (565, 1.36))
        return self.drafts

    def _answer(self, agent: str, context: _Context, t: float, output: int, reason: str) -> int:
        """One request on the context as it stands; its answer is appended. Returns the answer's tokens."""
        output = min(output, self.spec.max_context - context.length)
        service = round(self.dice.lognormal(6.1, 0.857), 3)
        self.drafts.append(
            _Draft(t, self.number, len(self.drafts), agent, context, context.length, output, reason, service)
        )
        self.writer.append(context, output)
        return output

    def _think(self, reason: str) -> float:
        median, sigma = (12.3, 1.34) if reason == TOOL_USE else (130.3, 1.73)
        return min(self.dice.lognormal(median, sigma), self.spec.max_gap_s)

    def _grown(self, context: _Context, base: int, output: int, growth: tuple[float, float]) -> _Context:
        """The next turn's context: usually the same with more at its end, else a part of it and more.

        The sampled growth counts the answer, which is there already; at least 8 tokens are new.
        """
        dice, room = self.dice, self.spec.max_context // 2
        new = max(8, dice.tokens(*growth, 8, room) - output)
        if dice.chance(0.0276):
            kind = dice.uniform(0.0, 1.0)
            low, high = (0.9, 1.0) if kind < 0.33 else (0.1, 0.9) if kind < 0.72 else (0.0, 0.1)
            context = context.fork(int(context.length * dice.uniform(low, high)))
        if context.length + new >= self.spec.max_context:
            keep = base if base + _SUMMARY < room else room // 2
            context = context.fork(min(keep, context.length))
            new = min(_SUMMARY, room // 2)
        self.writer.append(context, new)
        return context

    def _spawn(self, t: float) -> float:
        """Starts up to 10 sub-agents. Returns when the main agent goes on: one time in five at once."""
        count = 1
        while count < min(self.subagents_left, 10) and self.dice.chance(0.4):
            count += 1
        self.subagents_left -= count
        ends = [self._subagent(t + self.dice.uniform(0.0, 2.0)) for _ in range(count)]
        return t if self.dice.chance(0.2) else max(ends)

    def _subagent(self, t: float) -> float:
        """A fresh context that starts as its siblings' do. Returns the time of its end."""
        dice = self.dice
        self.started += 1
        agent, context = f"agent_{self.started:03d}", self.sub_prefix.fork(self.sub_prefix.length)
        base = context.length
        self.writer.append(context, dice.tokens(576, 0.8, 64, min(8_192, self.spec.max_context // 4)))
        turns = dice.tokens(18, 0.8, 1, 100)
        for turn in range(turns):
            reason = END_TURN if turn == turns - 1 else TOOL_USE
            output = self._answer(agent, context, t, dice.tokens(235, 0.65, 1, 8_192), reason)
            t += self.drafts[-1].service_s + min(dice.lognormal(2.0, 1.0), self.spec.max_gap_s)
            context = self._grown(context, base, output, (2_300, 0.9))
        return t


def synthesize(spec: SynthSpec) -> Trace:
    """A trace in time order; prompts list full blocks only. `tokens` are views of one array a context."""
    writer = _Writer(spec)
    common, common_sub = _Context(), _Context()
    sub_length = min(_SUB_PREFIX, spec.max_context // 4)
    writer.append(common, spec.shared_prefix)
    if spec.shared_prefix:
        writer.append(common_sub, sub_length)
    drafts: list[_Draft] = []
    for number in range(spec.sessions):
        sub_prefix = common_sub
        if not spec.shared_prefix:
            sub_prefix = _Context()
            writer.append(sub_prefix, sub_length)
        drafts += _Session(writer, number, common, sub_prefix).play()
    drafts.sort(key=lambda draft: (draft.session, draft.order))
    return Trace(
        name=str(spec),
        source=str(spec),
        block_tokens=spec.block_size,
        partial_tail="floor",
        form="synth",
        aligned=True,
        requests=tuple(_requests(writer, drafts)),
    )


def _requests(writer: _Writer, drafts: list[_Draft]) -> Iterator[Request]:
    """The drafts by time. Contexts are sealed session by session: a session's ids are close together."""
    for draft in drafts:
        writer.seal(draft.context)
    turns, width = TurnCounter(), len(str(writer.spec.sessions - 1))
    for draft in sorted(drafts, key=lambda draft: (draft.t, draft.session, draft.order)):
        session = f"synth_{draft.session:0{width}d}"
        turn, parent = turns.take(session, draft.agent)
        context = draft.context
        assert context.tokens is not None
        yield Request(
            session=session,
            agent=draft.agent,
            turn=turn,
            t=seconds(round(draft.t, 3) * 1e6),
            parent=parent,
            ids=ids_of(context)[: draft.tokens_in // writer.spec.block_size],
            input_tokens=draft.tokens_in,
            output_tokens=draft.tokens_out,
            finish_reason=draft.finish_reason,
            service_s=draft.service_s,
            tokens=context.tokens[: draft.tokens_in + draft.tokens_out],
        )
