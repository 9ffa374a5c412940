"""The reference engine over windows and states: pages come back as windows move, and no byte is ever wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvoffload.layout import CacheGroup, GroupKind, Layout
from kvoffload.requests import RequestInfo
from kvoffload.testing.engine import Limits, Sequence
from kvoffload.testing.engine.drive import Traffic, engine_over, play, settle, unfinished
from kvoffload.testing.engine.sequence import random_keys
from kvoffload.testing.faults import Failing, Op
from kvoffload.testing.rig import Rig, Sizes

FULL, SLIDING, STATE = GroupKind


def group(number: int, kind: GroupKind, tokens: int, size: int = 4096, lookback: int = 0) -> CacheGroup:
    return CacheGroup(number, kind, tokens, size, lookback, ("a", "b"))


WINDOW = Layout(16, (group(0, FULL, 16), group(1, SLIDING, 16, 8192, 40)))
DRAFT = Layout(16, (group(0, FULL, 32), group(1, SLIDING, 16, 4096, 33), group(2, SLIDING, 16, 512, 33 + 4)))
STATES = Layout(16, (group(0, FULL, 16), group(1, STATE, 64, 12288)))
ONLY_WINDOW = Layout(16, (group(0, SLIDING, 16, 4096, 70),))


@pytest.mark.parametrize("transit", [1, 3])
@pytest.mark.parametrize("one_pool", [False, True], ids=["a pool per group", "one pool"])
@pytest.mark.parametrize(
    "layout", [WINDOW, DRAFT, STATES, ONLY_WINDOW], ids=["window", "draft", "state", "only"]
)
def test_random_traffic_over_hybrid_groups(
    layout: Layout, one_pool: bool, transit: int, tmp_path: Path
) -> None:
    """Aborts, preemptions, resets and failing copies with real bytes, pages of all groups over each other or apart: all
    requests end, also with transit for one group only; loads happen, no block is ever wrong, every page comes back."""
    sizes = Sizes(host=6, transit=transit, disk=16, pages=75 if one_pool else 30, overlaid=one_pool)
    fail = Failing(calls={5, 9}, ops={Op.TO_DEVICE})
    with Rig(sizes, layout=layout, path=tmp_path, copy_faults=[fail]) as rig:
        engine = engine_over(rig, limits=Limits(tokens=96, running=5), shared=one_pool)
        free = engine.device.free
        requests = play(engine, Traffic(120, texts=5, blocks=14, output=40, reset=0.005, seed=7))
        assert unfinished(requests) == []
        assert (engine.device.mismatches, engine.device.samples) == (0, [])
        assert sum(r.loaded for r in requests) > 0
        assert engine.device.free == free
        rig.local.drain()
        rig.check()


def test_pages_of_windows_come_back_while_the_request_runs() -> None:
    """A prompt of 40 blocks computed 4 blocks a step ends with pages for the window only; full pages stay."""
    with Rig(Sizes(host=20, pages=80), layout=WINDOW) as rig:
        engine = engine_over(rig, limits=Limits(tokens=64))
        seq = Sequence(RequestInfo(1), random_keys(60, 1), 16, 640, 20)
        engine.add(seq)
        while seq.first is None:
            engine.step()
        full, window = seq.table
        assert (full[:40] >= 0).all()
        assert (window[:37] == -1).all()
        assert (window[37:40] >= 0).all()
        settle(engine)
        assert engine.device.mismatches == 0


def test_only_confirmed_tokens_become_blocks() -> None:
    """While a request runs, its stored blocks are those of tokens it has computed and sampled, in every group."""
    with Rig(Sizes(host=20), layout=DRAFT) as rig:
        engine = engine_over(rig)
        seq = Sequence(RequestInfo(1), random_keys(30, 2), 16, 100, 200)
        engine.add(seq)
        for _ in range(150):
            engine.step()
            for g, row in enumerate(rig.planner.usage("host")["groups"]):
                assert row["used"] <= seq.tokens // DRAFT.groups[g].tokens_per_block
        settle(engine)
        assert engine.device.mismatches == 0
        again = Sequence(RequestInfo(2), random_keys(30, 2), 16, 300, 1)
        engine.device.forget()
        engine.add(again)
        settle(engine)
        assert again.hits is not None
        assert again.hits[1] == 288
        assert engine.device.mismatches == 0
