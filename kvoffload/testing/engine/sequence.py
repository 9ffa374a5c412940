"""One request of the reference engine: what it says, how far it is, which pages it has."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from kvoffload.keys import KeyArray
from kvoffload.requests import Pages, RequestInfo


class State(Enum):
    """waiting: holds nothing. loading: has pages, and a load writes to them. running. ended: finished or aborted."""

    WAITING = 0
    LOADING = 1
    RUNNING = 2
    ENDED = 3


@dataclass(slots=True)
class Keys:
    """The keys that an engine has made of a sequence so far."""

    keys: KeyArray


@dataclass(slots=True, eq=False)
class Sequence:
    """An EngineRequest. What it will answer is known from the start, but counts only once it is generated.

    all_keys: keys of the base blocks of prompt and answer, as many as there are (an answer may have none).
    prompt, output: tokens; output >= 1. computed: tokens whose bytes are in pages. generated: confirmed answer tokens.
    table: by group, the pages. hbm, loaded, disk: tokens that the present admission found in pages, got from loads,
    and got from loads out of disk; expected: what its load was to bring. made: prompt tokens computed since then.
    Fixed with the first answer token: hits by tier, and prompt_made. prefill_s: seconds of all prompt work.
    lost: prompt tokens whose work a preemption threw away before that. Times in seconds: arrived, admitted (first
    pages), first token, ended.
    """

    info: RequestInfo
    all_keys: KeyArray
    base_tokens: int
    prompt: int
    output: int = 1
    reason: str = "length"
    state: State = State.WAITING
    computed: int = 0
    generated: int = 0
    table: Pages = ()
    seen: tuple[int, tuple[Pages, int]] | None = None
    hbm: int = 0
    expected: int = 0
    expected_disk: int = 0
    loaded: int = 0
    disk: int = 0
    made: int = 0
    prompt_made: int = 0
    prefill_s: float = 0.0
    lost: int = 0
    preempted: int = 0
    arrived: float = 0.0
    admitted: float | None = None
    first: float | None = None
    ended: float | None = None
    hits: tuple[int, int, int] | None = None
    chain: Keys = field(init=False)

    def __post_init__(self) -> None:
        self.chain = Keys(self.all_keys[: self.prompt // self.base_tokens])

    @property
    def tokens(self) -> int:
        """Confirmed tokens."""
        return self.prompt + self.generated

    @property
    def total(self) -> int:
        """Tokens at the end."""
        return self.prompt + self.output

    def sample(self) -> None:
        """One more token is confirmed; the key of the block that it completes is made."""
        self.generated += 1
        if self.tokens % self.base_tokens == 0:
            self.chain = Keys(self.all_keys[: self.tokens // self.base_tokens])

    def advance(self, count: int) -> None:
        """So many steps of one token each have computed the last token and made one more."""
        self.computed += count
        self.generated += count
        if len(self.chain.keys) < self.tokens // self.base_tokens:
            self.chain = Keys(self.all_keys[: self.tokens // self.base_tokens])

    def rewind(self) -> None:
        """The pages are gone: everything is to be computed again, the answer so far as well."""
        if self.first is None:
            self.lost += self.made
        self.computed = self.hbm = self.loaded = self.disk = self.made = 0
        self.expected = self.expected_disk = 0
        self.table = ()
        self.state = State.WAITING
        self.seen = None


def random_keys(count: int, seed: int) -> KeyArray:
    """Keys of a text that no other seed makes."""
    return np.random.default_rng(seed).integers(0, 256, (count, 16), np.uint8)
