"""The prompts. Each workload is a function of a Player, which runs them on one engine after another."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. abort_after: engine steps after which it is given up, None for never."""

    id: str
    tokens: tuple[int, ...]
    new: int = 8
    abort_after: int | None = None


class Player(Protocol):
    """One engine. `batch` returns what an engine without a connector answered, so that prompts are the same for all."""

    def batch(self, asks: Sequence[Ask]) -> dict[str, tuple[int, ...]]: ...
    def forget(self) -> None:
        """The engine's own cache is emptied; what the connector holds stays."""


@dataclass(frozen=True, slots=True)
class Workload:
    """host, disk: bytes that each connector gets. pool: bytes of the engine's own cache."""

    text: str
    play: Callable[[Player], None]
    model: str = "llama"
    host: int = 64 * MIB
    disk: int = 512 * MIB
    pool: int = 32 * MIB
    longest: int = 1024


def _words(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(3, 500) for _ in range(count))


def repeat(player: Player) -> None:
    rng = random.Random(1)
    prompts = [_words(rng, n) for n in (200, 333, 64, 500)]
    for turn in range(3):
        player.batch([Ask(f"{turn}.{i}", p) for i, p in enumerate(prompts)])
        player.forget()


def heads(player: Player) -> None:
    rng = random.Random(2)
    long_heads = [_words(rng, n) for n in (256, 320, 416)]
    for turn in range(3):
        for h, head in enumerate(long_heads):
            player.batch([Ask(f"{turn}.{h}.{i}", head + _words(rng, 40 + 30 * i)) for i in range(4)])
        player.forget()


def sessions(player: Player) -> None:
    rng = random.Random(3)
    said = {s: _words(rng, 300 + 50 * s) for s in range(6)}
    for turn in range(5):
        for s in said:
            name = f"{turn}.{s}"
            answer = player.batch([Ask(name, said[s], new=12)])[name]
            said[s] += answer + _words(rng, 60)


def long_prompt(player: Player) -> None:
    prompt = _words(random.Random(4), 3000)
    for turn in range(3):
        player.batch([Ask(f"{turn}", prompt)])
        player.forget()


def aborts(player: Player) -> None:
    rng = random.Random(5)
    prompts = [_words(rng, 150 + 40 * i) for i in range(10)]
    for turn in range(3):
        gone = {i: rng.randrange(1, 6) for i in range(10) if (i + turn) % 3 == 0}
        player.batch([Ask(f"{turn}.{i}", p, 8, gone.get(i)) for i, p in enumerate(prompts)])
        player.forget()


def cold(player: Player) -> None:
    rng = random.Random(6)
    for turn in range(3):
        player.batch([Ask(f"{turn}.{i}", _words(rng, 300 + 100 * i), 48) for i in range(8)])


WORKLOADS: dict[str, Workload] = {
    "repeat": Workload("the same 4 prompts three times, the engine's cache emptied between", repeat),
    "heads": Workload("3 long heads, 4 new tails each, three times", heads, host=128 * MIB),
    "sessions": Workload(
        "6 growing sessions in turn, a pool for 2 of them", sessions, pool=3 * MIB, host=24 * MIB
    ),
    "tight": Workload("the same with host for 4 of the 6", sessions, pool=3 * MIB, host=5 * MIB),
    "long": Workload(
        "one prompt of 3000 tokens, host for 2000", long_prompt, pool=16 * MIB, host=4 * MIB, longest=4096
    ),
    "hybrid": Workload("repeat on 6 sliding + 2 full layers", repeat, model="gemma3"),
    "hybrid-sessions": Workload(
        "sessions on 6 sliding + 2 full layers", sessions, model="gemma3", pool=3 * MIB, host=32 * MIB
    ),
    "cold": Workload(
        "24 prompts that hit nothing, on the model of the demo",
        cold,
        model="demo",
        pool=512 * MIB,
        host=512 * MIB,
    ),
    "aborts": Workload("10 prompts, every third given up after 1 to 5 steps, three times", aborts),
}
