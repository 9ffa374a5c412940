"""Runs over hybrid groups: phases that shift traffic between groups, long sessions, known models with real bytes."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

import numpy as np
import pytest
from typer.testing import CliRunner

from kvoffload.bench.retention import Case, Growth, bench_retention
from kvoffload.cli import app
from kvoffload.config import Config
from kvoffload.errors import ConfigError
from kvoffload.layout import CacheGroup, GroupKind, Layout
from kvoffload.messages import Inventory
from kvoffload.models import MODELS, find_model
from kvoffload.null_mover import NullMover
from kvoffload.planner import Planner
from kvoffload.replay.base import requests_of
from kvoffload.replay.hybrid import replay_model
from kvoffload.requests import RequestInfo
from kvoffload.testing.engine.sequence import Keys, random_keys
from kvoffload.traces.load import open_trace

LAYOUT = Layout(
    16,
    (CacheGroup(0, GroupKind.FULL, 16, 4096), CacheGroup(1, GroupKind.SLIDING, 16, 16384, lookback=511)),
)
SLAB = 8 * 16384


@dataclass(frozen=True)
class Mix:
    """Sessions that are asked for at random, again and again, each of so many blocks."""

    sessions: int
    blocks: int

    @property
    def working_set(self) -> int:
        return self.sessions * (self.blocks * 4096 + 32 * 16384)


FULL_HEAVY, WINDOW_HEAVY = Mix(60, 400), Mix(190, 40)


class Traffic:
    """One planner over a pool of half the working set; jobs are done at once."""

    def __init__(self) -> None:
        self.planner = Planner(LAYOUT, Config(host_bytes=0))
        slabs = min(m.working_set for m in (FULL_HEAVY, WINDOW_HEAVY)) // 2 // SLAB
        self.planner.attach(0, Inventory(LAYOUT.slots_per_slab(SLAB), slabs, 1, 0))
        self.mover = NullMover(0)
        self.requests = 0

    def phase(self, mix: Mix, seed: int, count: int = 500) -> float:
        """Token hit rate of the second half of a phase."""
        rng = random.Random(seed)
        texts = [random_keys(mix.blocks, seed * 1000 + i) for i in range(mix.sessions)]
        whole = mix.blocks * 16
        hits = [self.request(Keys(texts[rng.randrange(mix.sessions)])) / whole for _ in range(count)]
        self.planner.check_integrity()
        return float(np.mean(hits[count // 2 :]))

    def request(self, chain: Keys) -> int:
        self.requests += 1
        info, blocks = RequestInfo(self.requests), len(chain.keys)
        pages = [np.arange(blocks, dtype=np.int32)] * 2
        found = self.planner.match(info, chain)
        self.planner.load(info, chain, found.boundary, pages)
        for done in (found.boundary, blocks * 16):
            if done:
                self.planner.offer(info, chain, done, pages)
            while not self.planner.idle:
                self.mover.submit(self.planner.tick(0.0))
                self.planner.complete(self.mover.poll())
        self.planner.finish(info.id, "end_turn", 0.0)
        return found.boundary


def test_slabs_follow_the_traffic() -> None:
    """Full-heavy, window-heavy, full-heavy at half the working set: the second half of each phase hits within 2 points
    of a fresh start at that mix."""
    traffic = Traffic()
    for seed, mix in enumerate((FULL_HEAVY, WINDOW_HEAVY, FULL_HEAVY)):
        found = traffic.phase(mix, seed)
        fresh = Traffic().phase(mix, seed)
        assert fresh > 0.3
        assert abs(found - fresh) <= 0.02, (seed, found, fresh)
    usage = traffic.planner.usage("host")
    slots = LAYOUT.slots_per_slab(SLAB)
    for row, per_slab in zip(usage["groups"], slots, strict=True):
        assert row["free"] + row["used"] == row["slabs"] * per_slab


def test_long_sessions_keep_little_of_their_windows_and_lose_nothing_by_it() -> None:
    """Six sessions in a pool for two: hits are at least 0.99 of a model without windows; resident window blocks are
    within 1.1 of what kept boundaries need; without fork tails, and without storing windows, hits fall."""
    growth = Growth(5, 120_000, 30_000, 4096, 1024)
    plain, kept, no_forks, none = bench_retention(
        growth, (Case(0), Case(128), Case(128, forks=False), Case(128, stored=False))
    )
    assert plain.turns == kept.turns > 80
    assert kept.hit_rate >= 0.99 * plain.hit_rate
    assert 0 < kept.resident <= 1.1 * kept.bound
    assert kept.stored < 0.3 * kept.dense
    assert no_forks.hit_rate < kept.hit_rate - 0.005
    assert none.hits == 0


@pytest.mark.parametrize(
    ("name", "scale"),
    [("gemma-3-27b", 1024), ("gpt-oss-120b", 576), ("qwen3-next-80b", 384), ("deepseek-v4", 16)],
)
def test_a_model_is_replayed_with_real_bytes(name: str, scale: int) -> None:
    """A synthetic trace over the groups of a model in half its working set: no wrong block, all slots accounted for."""
    trace = open_trace("synth:sessions=3,seed=1", 64, "auto", False)
    report = replay_model(requests_of(trace)[:25], find_model(name), trace.block_tokens, scale)
    assert report.mismatches == 0
    assert report.broken == ()
    assert report.mapped <= 1.02 * report.budget
    assert report.full
    assert report.hit_tokens > 0
    assert report.groups[0].stored > report.groups[-1].stored / 100 > 0


def test_replay_tells_models_and_scales_that_do_not_fit() -> None:
    """An unknown model and a scale that does not divide some group's bytes are errors that name what fits or fails."""
    with pytest.raises(ConfigError, match=r"there are: llama-3\.1-8b, gemma-3-27b"):
        find_model("gpt-2")
    with pytest.raises(ConfigError, match="--scale-bytes 7 does not divide the 589824 bytes of group full"):
        find_model("gpt-oss-120b").layout(16, 7)
    run = CliRunner().invoke(
        app,
        ["replay", "synth:sessions=2,seed=1", "--model", "llama-3.1-8b", "--index-only", "--json"],
    )
    assert run.exit_code in (0, 1)
    assert json.loads(run.stdout)["model"] == "llama-3.1-8b"


def test_models_have_the_bytes_per_token_of_their_configurations() -> None:
    """Bytes per token and group, worked out by hand from the public configurations."""
    found = {name: [g.token_bytes for g in model.groups] for name, model in MODELS.items()}
    assert found["llama-3.1-8b"] == [131072]
    assert found["gemma-3-27b"] == [10 * 8192, 52 * 8192]
    assert found["gpt-oss-120b"] == [18 * 2048, 18 * 2048]
    assert found["qwen3-next-80b"] == [12 * 2048, 36 * (2097152 + 49152) / 256]
    entry, carry = 448 + 2 * 64 + 8, 8 * 4 * (4 * 512 + 4 * 128)
    for name, layers, per_4, per_128 in (("deepseek-v4", 43, 21, 20), ("deepseek-v4-pro", 61, 30, 31)):
        assert found[name] == [
            per_4 * entry / 4,
            per_4 * 132 / 4,
            per_128 * entry / 128,
            layers * entry,
            per_4 * carry / 256,
        ]
