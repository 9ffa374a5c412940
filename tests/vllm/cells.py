"""Cells of the matrix: one model, number format, block size and kind of engine each, through every way a block can come
back. As a program it runs one half of given cells in a process of its own.

    python cells.py MODELS FOLDER first,second NAME...      prints one line of JSON per cell
"""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import runner
import tiny
from runner import Answers, Engine, prompts

MODELS = tuple(name for name in tiny.MODELS if name != "deepseek")
"""Not latent attention: its tokens on a CPU depend on what else is in the batch, without a connector too."""

DTYPES = ("float32", "bfloat16")
BLOCKS = (32, 64)
PROCESSES = ("one", "two")

HOST = {"float32": 4, "bfloat16": 2}
"""MiB: room for the usual prompts of any model in blocks of 32 tokens, and not for much more. Twice that for 64: a slab
has eight slots at least and belongs to one group."""

HASHES = {"float32": "sha256", "bfloat16": "sha256_cbor"}
"""Both ways to a key: kvoffload's own, since vLLM's default does not last, and vLLM's."""

DISK = "64MiB"
FLOOD = (900,) * 12 + (130,) * 24
"""Prompts that are several times what the host tier holds: long ones for full groups, many ends for windows, whose
slabs keep old blocks beside new ones until the group needs the slots."""


@dataclass(frozen=True, slots=True)
class Cell:
    """processes: "one" = scheduler and worker in the process of the caller, "two" = in another one."""

    model: str
    dtype: str
    block: int
    processes: str

    @property
    def name(self) -> str:
        return f"{self.model}-{self.dtype}-{self.block}-{self.processes}"

    @classmethod
    def of(cls, name: str) -> Cell:
        model, dtype, block, processes = name.split("-")
        return cls(model, dtype, int(block), processes)


ALL = tuple(Cell(*values) for values in itertools.product(MODELS, DTYPES, BLOCKS, PROCESSES))


def pairwise(cells: tuple[Cell, ...] = ALL) -> tuple[Cell, ...]:
    """Few cells that hold every pair of values that any of the cells holds: greedily, the one with most new pairs."""
    missing = set().union(*map(_pairs, cells))
    chosen: list[Cell] = []
    while missing:
        best = max(cells, key=lambda c: len(_pairs(c) & missing))
        chosen.append(best)
        missing -= _pairs(best)
    return tuple(chosen)


def _pairs(cell: Cell) -> set[tuple[Any, ...]]:
    return set(itertools.combinations(asdict(cell).items(), 2))


@dataclass(frozen=True, slots=True)
class Stage:
    """tokens and cached as in runner.Answers; host, disk: bytes read from these."""

    tokens: list[list[int]]
    cached: list[int]
    host: int = 0
    disk: int = 0


def first(cell: Cell, models: Path, folder: Path) -> dict[str, Stage]:
    """Without a connector, then with one: cold, from host, and from disk after host has lost everything."""
    stages = {"plain": _stage(_plain(tiny.model(cell.model, models), cell.dtype, cell.block))}
    with _engine(cell, models, folder) as engine:
        stages["cold"] = _asked(engine)
        engine.forget_pages()
        stages["host"] = _asked(engine)
        engine.settle()
        engine.generate(prompts(2, FLOOD), 1)
        engine.settle()
        engine.forget_pages()
        stages["disk"] = _asked(engine)
    return stages


def second(cell: Cell, models: Path, folder: Path) -> dict[str, Stage]:
    """A new engine over the disk of the first one."""
    with _engine(cell, models, folder) as engine:
        return {"new": _asked(engine)}


@cache
def _plain(model: Path, dtype: str, block: int) -> Answers:
    with Engine(model, dtype=dtype, block=block) as engine:
        return engine.generate(prompts())


def _engine(cell: Cell, models: Path, folder: Path) -> Engine:
    host = f"{HOST[cell.dtype] * cell.block // min(BLOCKS)}MiB"
    options = {"host_bytes": host, "disk_path": str(folder / cell.name), "disk_bytes": DISK}
    return Engine(
        tiny.model(cell.model, models),
        options,
        dtype=cell.dtype,
        block=cell.block,
        multiprocess=cell.processes == "two",
        prefix_caching_hash_algo=HASHES[cell.dtype],
    )


def _asked(engine: Engine) -> Stage:
    before = engine.bytes_read()
    answers = engine.generate(prompts())
    after = engine.bytes_read()
    return _stage(answers, *(after[tier] - before[tier] for tier in ("host", "disk")))


def _stage(answers: Answers, host: int = 0, disk: int = 0) -> Stage:
    return Stage([list(t) for t in answers.tokens], list(answers.cached), host, disk)


def main(models: str, folder: str, halves: str, *names: str) -> None:
    runner.import_vllm()
    for name in names:
        stages: dict[str, Stage] = {}
        for half in halves.split(","):
            stages |= HALVES[half](Cell.of(name), Path(models), Path(folder))
        print(json.dumps({name: {stage: asdict(s) for stage, s in stages.items()}}), flush=True)


HALVES = {"first": first, "second": second}

if __name__ == "__main__":
    main(*sys.argv[1:])
