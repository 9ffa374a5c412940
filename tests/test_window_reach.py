"""How far back a window reaches, at every place that decides it: what is stored, what is found, what is loaded."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvoffload.config import Config
from kvoffload.layout import CacheGroup, GroupKind, Layout
from kvoffload.messages import JobKind
from kvoffload.testing.rig import Keys, Rig, Sizes

FULL, SLIDING, STATE = GroupKind
BASE = 8


def draw(rng: random.Random) -> Layout:
    """A full group, a window and a state of random sizes."""
    sizes = [BASE * rng.choice((1, 2, 3)) for _ in range(3)]
    groups = (
        CacheGroup(0, FULL, sizes[0], 4096, layers=("a",)),
        CacheGroup(1, SLIDING, sizes[1], 4096, rng.randint(1, 70), ("b",)),
        CacheGroup(2, STATE, sizes[2], 4096, layers=("c",)),
    )
    return Layout(BASE, groups)


def reach(layout: Layout, boundary: int) -> list[set[int]]:
    """By group the blocks that resuming at the boundary takes, token by token."""
    full, window, state = layout.groups
    return [
        {t // full.tokens_per_block for t in range(boundary)},
        {t // window.tokens_per_block for t in range(max(0, boundary - window.lookback), boundary)},
        {(boundary - 1) // state.tokens_per_block} if boundary else set(),
    ]


@pytest.mark.parametrize("rule", ["boundaries", "dense"])
@pytest.mark.parametrize("seed", range(25))
def test_a_boundary_takes_exactly_what_its_window_reaches(seed: int, rule: str) -> None:
    """Stored in steps while pages of windows go: the end of prompt and of turn are found; a load of the end names
    exactly the blocks that its tokens reach; without the window's first block the boundary is not found."""
    rng = random.Random(seed)
    layout = draw(rng)
    step = layout.alignment
    total = rng.randint(2 * step, 40 * BASE + 2 * step) // BASE
    prompt = rng.randint(1, total)
    chain = Keys.of(range(total))
    with Rig(Sizes(host=60), layout=layout, config=Config(retention=rule)) as rig:
        info, pages = rig.info(), rig.pages(chain)
        rig.planner.match(info, Keys(chain.keys[:prompt]))
        done = 0
        while done < total * BASE:
            limit = prompt * BASE if done < prompt * BASE else total * BASE
            begin, done = done, min(limit, done + rng.choice((BASE, 5 * BASE, 300)))
            live = [p.copy() for p in pages]
            for group, mine in zip(layout.groups, live, strict=True):
                if group.kind is not FULL:
                    mine[: max(0, begin - group.lookback) // group.tokens_per_block] = -1
            rig.planner.offer(info, Keys(chain.keys[: max(prompt, done // BASE)]), done, live)
            rig.local.drain()
        rig.planner.finish(info.id, "end_turn", 0.0)
        end = total * BASE // step * step
        assert rig.match(Keys(chain.keys[:prompt])).boundary == prompt * BASE // step * step
        again = rig.info()
        assert rig.planner.match(again, chain).boundary == end
        rig.planner.load(again, chain, end, pages)
        (job,) = rig.planner.tick(0.0).jobs
        assert job.kind is JobKind.LOAD
        named = [set(job.copies["depth"][job.copies["group"] == g].tolist()) for g in range(3)]
        assert named == reach(layout, end)
        for mover in rig.movers:
            mover.submit(rig.planner.tick(0.0))


@pytest.mark.parametrize("seed", range(25))
def test_without_the_first_block_that_a_window_reaches_there_is_no_boundary(seed: int) -> None:
    """All is stored but that one block: the boundary is not found; with all but the one before it, it is."""
    rng = random.Random(seed)
    layout = draw(rng)
    end = layout.alignment * rng.randint(2, 6)
    needed = reach(layout, end)[1]
    for missing, there in ((min(needed), False), (min(needed) - 1, True)):
        chain = Keys.of(range(end // BASE))
        with Rig(Sizes(host=60), layout=layout, config=Config(retention="dense")) as rig:
            info, pages = rig.info(), rig.pages(chain)
            if missing >= 0:
                pages[1][missing] = -1
            rig.planner.offer(info, chain, end, pages)
            rig.local.drain()
            assert (rig.match(chain).boundary == end) is there
            assert np.count_nonzero(rig.codes(chain, 1)) == len(pages[1]) - (missing >= 0)
