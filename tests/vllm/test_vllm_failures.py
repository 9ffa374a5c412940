"""What fails is a miss: requests end with the right tokens, and the counters tell.

Beside them the control: the same bytes spoilt where nothing checks them change the tokens, so equal tokens mean
something. One model has one group, the other one several: vLLM hears of failed loads by another way there.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import numpy as np
import pytest
from kvoffload.connectors.vllm import device, rank_tiers
from runner import LENGTHS, Engine, prompts, restorable

from kvoffload.copying.cpu import CpuCopyEngine
from kvoffload.keys import Chain
from kvoffload.layout import SLOT_ALIGN
from kvoffload.testing.faults import Fault, FaultyEngine, FaultyTier, Op
from kvoffload.tiers.disk import DiskTier

MODELS = ("llama", "gemma3odd")
HOST, DISK = "4MiB", "64MiB"
FLOOD = (900,) * 6


class Breaking(Fault):
    """Copies of one kind fail while `on`; `keys`: only these, None = all. struck: how many did."""

    def __init__(self, op: Op) -> None:
        self._op = op
        self.on = False
        self.keys: set[bytes] | None = None
        self.struck = 0

    def begin(self, op, copies):
        hit = np.full(len(copies), op is self._op and self.on, np.bool_)
        if self.keys is not None:
            hit &= np.array([k.tobytes() in self.keys for k in copies["key"]], np.bool_)
        self.struck += int(hit.sum())
        return hit


@pytest.fixture(scope="session")
def plain(model):
    """The answers of a model without a connector, by name."""
    known = {}

    def answers(name):
        if name not in known:
            with Engine(model(name)) as engine:
                known[name] = engine.generate(prompts())
        return known[name]

    return answers


@pytest.fixture
def read_fault(monkeypatch):
    """A disk whose reads can be made to fail."""
    fault = Breaking(Op.READ)
    monkeypatch.setattr(
        rank_tiers, "DiskTier", lambda *args, **more: FaultyTier(DiskTier(*args, **more), fault)
    )
    return fault


@pytest.fixture
def load_fault(monkeypatch):
    """Copies from host to the device that can be made to fail."""
    fault = Breaking(Op.TO_DEVICE)
    monkeypatch.setattr(device, "CpuCopyEngine", lambda: FaultyEngine(CpuCopyEngine(), fault))
    return fault


def options(folder: Path, **more):
    return {"host_bytes": HOST, "disk_path": str(folder), "disk_bytes": DISK, **more}


def fill(engine):
    """Store the usual prompts in host and on disk."""
    engine.generate(prompts())
    engine.settle()


def empty_host(engine):
    """Let other prompts push them out of host, and empty the page pool."""
    engine.generate(prompts(2, FLOOD), 1)
    engine.settle()
    engine.forget_pages()


def slot_file(folder: Path) -> Path:
    (found,) = folder.rglob("slots")
    return found


def spoil(data: bytes) -> bytes:
    """The same numbers in other places: what a wrong block looks like."""
    return np.frombuffer(data, np.uint32)[::-1].tobytes()


def spoil_host(engine):
    """Every slot of the host tier holds other bytes than it should."""
    arena = engine.worker._worker._mover.arena
    ctypes.memmove(arena.base, spoil(ctypes.string_at(arena.base, arena.nbytes)), arena.nbytes)


def spoil_disk(folder: Path):
    """Every slot of the disk tier likewise."""
    file = slot_file(folder)
    with file.open("r+b") as slots:
        data = slots.read()
        slots.seek(0)
        slots.write(spoil(data[: len(data) // SLOT_ALIGN * SLOT_ALIGN]))
        slots.flush()
        os.fsync(slots.fileno())


def keys_of(engine, prompt):
    """The keys of a prompt's blocks in this engine."""
    chain = Chain(engine.scheduler._scheduler._namespace)
    chain.extend(prompt)
    return {key.tobytes() for key in chain.keys}


@pytest.mark.parametrize("name", MODELS)
def test_spoilt_bytes_change_the_tokens(name, model, plain, tmp_path):
    """The control: other bytes in host slots, and in an unchecked slot file, make every loaded prompt go wrong."""
    right = plain(name)
    with Engine(model(name), options(tmp_path, checksum=False)) as engine:
        fill(engine)
        engine.forget_pages()
        spoil_host(engine)
        from_host = engine.generate(prompts())
        empty_host(engine)
        spoil_disk(tmp_path)
        from_disk = engine.generate(prompts())

    for answers in (from_host, from_disk):
        assert list(answers.cached) == restorable()
        assert not [n for n, a, b in zip(LENGTHS, answers.tokens, right.tokens, strict=True) if a == b]


@pytest.mark.parametrize("name", MODELS)
def test_a_checked_disk_never_serves_a_wrong_byte(name, model, plain, tmp_path):
    """One flipped bit, then a slot file cut short while the engine runs, then every slot spoilt: right tokens each
    time, fewer tokens from the tiers, and the blocks are counted as read errors."""
    right = plain(name).tokens
    with Engine(model(name), options(tmp_path)) as engine:
        fill(engine)
        empty_host(engine)
        with slot_file(tmp_path).open("r+b") as slots:
            head = slots.read(SLOT_ALIGN * 2)
            at = next(i for i, byte in enumerate(head) if byte)
            slots.seek(at)
            slots.write(bytes([head[at] ^ 4]))
        flipped = engine.generate(prompts())
        one = engine.counter("read_failed")

        empty_host(engine)
        os.truncate(slot_file(tmp_path), slot_file(tmp_path).stat().st_size // 64)
        cut = engine.generate(prompts())
        some = engine.counter("read_failed")

        empty_host(engine)
        spoil_disk(tmp_path)
        spoilt = engine.generate(prompts())
        many = engine.counter("read_failed")

        engine.forget_pages()
        again = engine.generate(prompts())

    assert flipped.tokens == cut.tokens == spoilt.tokens == again.tokens == right
    assert one == 1
    assert one < some <= many
    assert sum(flipped.cached) < sum(restorable())
    assert sum(cut.cached) < sum(flipped.cached)


@pytest.mark.parametrize("name", MODELS)
def test_a_disk_that_fails_is_a_miss(name, model, plain, tmp_path, read_fault):
    """Every read fails: the prompts are computed, the failures counted; when the disk is back it serves again."""
    right = plain(name).tokens
    with Engine(model(name), options(tmp_path)) as engine:
        fill(engine)
        empty_host(engine)
        read_fault.on = True
        broken = engine.generate(prompts())
        failed = engine.counter("read_failed")
        read_fault.on = False
        engine.settle()
        empty_host(engine)
        back = engine.generate(prompts())
        free = engine.free_blocks

        assert broken.tokens == back.tokens == right
        assert sum(broken.cached) < sum(restorable())
        assert read_fault.struck > 0
        assert failed > 0
        assert list(back.cached) == restorable()
        engine.forget_pages()
        assert engine.free_blocks == free


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("name", MODELS)
def test_a_load_that_fails_follows_the_policy(name, policy, model, plain, load_fault):
    """The blocks of one prompt do not reach the device. `recompute`: right tokens. `fail`: that request ends with an
    error and the others go on. Later loads are right."""
    right = plain(name)
    asked = prompts()
    with Engine(model(name), {"host_bytes": "64MiB"}, policy=policy) as engine:
        engine.generate(asked)
        engine.forget_pages()
        load_fault.keys = keys_of(engine, asked[1])
        load_fault.on = True
        answers = engine.generate(asked)
        load_fault.on = False
        engine.forget_pages()
        later = engine.generate(asked)

    ended = policy == "fail"
    reasons = ["length"] * len(asked)
    if ended:
        reasons[1] = "error"
    assert list(answers.reasons) == reasons
    assert [t for i, t in enumerate(answers.tokens) if not (ended and i == 1)] == [
        t for i, t in enumerate(right.tokens) if not (ended and i == 1)
    ]
    assert load_fault.struck > 0
    assert later.tokens == right.tokens
    assert later.reasons == right.reasons
