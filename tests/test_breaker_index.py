"""Rules of the index that planted bugs got past: one small case each."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvoffload.config import Config
from kvoffload.index import Index
from kvoffload.messages import Copies, CopyFlag, Inventory, Outcome
from kvoffload.planner import Planner
from kvoffload.requests import RequestInfo
from kvoffload.testing.rig import Keys, Rig, one_group

Pages = list[NDArray[np.int32]]


def ids(count: int, start: int = 0) -> list[int]:
    return list(range(start, start + count))


def store(index: Index, keys: NDArray[np.uint8], groups: int, write: bool = True) -> None:
    """All blocks of every group are in host, and on disk where `write`."""
    n = len(keys)
    segment = index.open_segment(0.0)
    pages = [np.arange(n, dtype=np.int32)] * groups
    copies = index.offer(segment, keys, [0] * groups, [n] * groups, pages)[0]
    index.complete_store(copies, None)
    while write and len(job := index.next_writes(64)):
        index.complete_write(job, None)
    index.close_segment(segment, 0, 0.0)


def load(index: Index, keys: NDArray[np.uint8], groups: int, transit: int) -> tuple[Copies, list[int]]:
    n = len(keys)
    pages = [np.arange(n, dtype=np.int32)] * groups
    copies, ends = index.begin_load(index.open_segment(0.0), keys, [0] * groups, [n] * groups, pages, transit)
    index.check_integrity()
    return copies, list(ends)


def test_a_load_ends_at_one_position_in_all_groups() -> None:
    """Group 1 lacks block 2: group 0 does not load its block 2 either, though it has it."""
    index = Index([(0, 1, 0), (0, 1, 0)], 16, [8, 8], 2, 1, 0)
    keys = Keys.of(ids(4)).keys
    pages = [np.arange(4, dtype=np.int32), np.arange(2, dtype=np.int32)]
    copies = index.offer(index.open_segment(0.0), keys, [0, 0], [4, 4], pages)[0]
    index.complete_store(copies, None)
    copies, ends = load(index, keys, 2, 1)
    assert ends == [2, 2]
    assert copies["depth"].tolist() == [0, 0, 1, 1]


def test_transit_is_shared_evenly_by_the_groups() -> None:
    """Two slots for two groups and nothing to spare in host: the one whose blocks come first leaves one slot over."""
    index = Index([(0, 1, 0), (0, 4, 0)], 16, [8, 8], 2, 2, 4)

    def spans(keys: NDArray[np.uint8]) -> tuple[list[int], list[int], Pages]:
        return [0, 0], [8, 2], [np.arange(8, dtype=np.int32), np.arange(2, dtype=np.int32)]

    first, second = Keys.of(ids(8)).keys, Keys.of(ids(8, 100)).keys
    for keys in (first, second):
        copies = index.offer(index.open_segment(0.0), keys, *spans(keys))[0]
        index.complete_store(copies, None)
        while keys is first and len(job := index.next_writes(64)):
            index.complete_write(job, None)
    copies, ends = index.begin_load(index.open_segment(0.0), first, *spans(first), 2)
    assert list(ends) == [8, 2]
    mine = copies[(copies["flags"] & CopyFlag.TRANSIT) != 0]
    assert len(np.unique(mine["host"][mine["group"] == 0])) == 1
    index.check_integrity()


def test_a_load_never_costs_a_block_that_waits_for_its_write() -> None:
    """Host is full of unwritten blocks: a load from disk goes through transit and none of them is dropped."""
    index = Index([(0, 1, 0)], 16, [8], 1, 1, 2)
    keys = Keys.of(ids(4)).keys
    store(index, keys, 1)
    store(index, Keys.of(ids(8, 100)).keys, 1, write=False)
    copies, ends = load(index, keys, 1, 4)
    assert ends == [4]
    assert (copies["flags"] == CopyFlag.READ | CopyFlag.TRANSIT).all()
    assert index.counters()["dropped_disk_backlog"] == 0


def test_a_waiting_request_is_not_shown_other_blocks_of_its_depths() -> None:
    """A request that missed asks again after another chain was stored: still a miss."""
    with Rig() as rig:
        mine, other = Keys.of(ids(4)), Keys.of(ids(4, 100))
        info = rig.info()
        assert rig.planner.match(info, mine).boundary == 0
        rig.store(other)
        assert rig.planner.match(info, mine).boundary == 0
        rig.store(mine)
        assert rig.planner.match(info, mine).boundary == 64


def test_a_reset_lets_running_requests_offer_everything_again() -> None:
    """After a reset of host a request that had stored its blocks stores them all anew."""
    with Rig() as rig:
        chain = Keys.of(ids(4))
        info, pages = rig.info(), rig.pages(chain)
        rig.paint(chain, pages)
        assert rig.planner.offer(info, chain, 64, pages).blocks == 4
        rig.local.drain()
        rig.planner.reset(("host",))
        assert rig.planner.offer(info, chain, 64, pages).blocks == 4
        rig.local.drain()
        rig.planner.finish(info.id, "end_turn", 0.0)


def test_a_disk_that_one_rank_has_lost_is_lost() -> None:
    """Of two ranks one reports its disk off, then on: blocks there are a miss in between."""
    planner = Planner(one_group(), Config(), ranks=2)
    for rank in range(2):
        planner.attach(rank, Inventory((8,), 1, 1, 2))
    index = planner._tiers.index if planner._tiers else None
    assert index is not None
    chain = Keys.of(ids(4))
    store(index, chain.keys, 1)
    store(index, Keys.of(ids(8, 100)).keys, 1)
    asker = RequestInfo("r")
    assert planner.match(asker, chain).disk == 4
    planner.complete([Outcome(0, 1, disk_ok=False)])
    assert planner.match(asker, chain).disk == 0
    planner.complete([Outcome(0, 0)])
    assert planner.match(asker, chain).disk == 0
    planner.complete([Outcome(0, 1)])
    assert planner.match(asker, chain).disk == 4
