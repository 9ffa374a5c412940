"""Copies that wait for another job's bytes: what `ready` makes of them, whatever became of that job."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvoffload.index import Code, Index, Matcher
from kvoffload.messages import CopyFlag, Status

READ, WAIT, TRANSIT = CopyFlag.READ, CopyFlag.WAIT, CopyFlag.TRANSIT
BLOCKS = 2


def chain(seed):
    """Keys of two blocks."""
    return np.frombuffer(random.Random(seed).randbytes(16 * BLOCKS), np.uint8).reshape(-1, 16)


class Waiting:
    """A chain on disk, a first load that reads it, and a second one that waits for the first."""

    def __init__(self, *, host=2, transit=2):
        self.index = Index([(0, 1, 0)], 1, [2], -(-host // 2), 1, 4, host_slots=host, transit_slots=transit)
        self.keys = chain(0)
        self.store(self.keys)
        self.write_all()
        self.index.reset(0)
        self.first, self.second = self.load(), self.load()
        assert set(self.first["flags"]) == {READ}
        assert set(self.second["flags"]) == {WAIT}

    def store(self, keys):
        pages = [np.arange(len(keys), dtype=np.int32)]
        copies, *_ = self.index.offer(self.index.open_segment(0.0), keys, [0], [len(keys)], pages)
        assert len(copies) == len(keys)
        self.index.complete_store(copies, None)

    def write_all(self):
        while len(copies := self.index.next_writes(10)):
            self.index.complete_write(copies, None)

    def load(self, transit=0):
        pages = [np.arange(BLOCKS, dtype=np.int32)]
        return self.index.begin_load(self.index.open_segment(0.0), self.keys, [0], [BLOCKS], pages, transit)[
            0
        ]

    def end_first(self, status):
        self.index.complete_load(self.first, np.full(BLOCKS, status, np.uint8))

    def fill_host(self):
        """Host holds other blocks, all pinned."""
        other = chain(1)
        self.store(other)
        pages = [np.arange(BLOCKS, dtype=np.int32)]
        held, _ = self.index.begin_load(self.index.open_segment(0.0), other, [0], [BLOCKS], pages, 0)
        return held

    def codes(self):
        matcher = Matcher(self.index)
        matcher.update(self.keys, 0)
        return [Code(c) for c in matcher.codes(0).tolist()]

    def end_second(self):
        """Ends as it is; nothing is held afterwards."""
        self.index.complete_load(self.second, None)
        self.index.check_integrity()
        usage = self.index.usage(0)["groups"][0]
        assert (usage["pinned"], usage["pending"]) == (0, 0)
        assert self.index.transit_free() == 2


def test_while_the_bytes_are_on_their_way_nothing_changes():
    """Asked again and again, the copies keep waiting for the slots that the first load fills."""
    w = Waiting()
    for _ in range(3):
        assert not w.index.ready(w.second)
        assert set(w.second["flags"]) == {WAIT}
        assert w.second["host"].tolist() == w.first["host"].tolist()
        assert w.second["disk"].tolist() == [-1] * BLOCKS
    w.end_first(Status.OK)
    assert w.index.ready(w.second)
    w.end_second()


def test_a_read_taken_over_goes_to_host_and_says_so():
    """Host has room: the waiting load reads into slots of host, and a third one waits for it in turn."""
    w = Waiting()
    disk = w.first["disk"].tolist()
    w.end_first(Status.NOT_DONE)
    assert w.index.ready(w.second)
    assert set(w.second["flags"]) == {READ}
    assert w.second["disk"].tolist() == disk
    assert len(set(w.second["host"].tolist())) == BLOCKS
    assert all(c & Code.PENDING for c in w.codes())
    third = w.load()
    assert set(third["flags"]) == {WAIT}
    w.index.complete_load(third, np.full(BLOCKS, Status.NOT_DONE, np.uint8))
    w.end_second()
    assert all(c & Code.HOST for c in w.codes())


def test_a_read_taken_over_with_host_full_goes_through_transit():
    """Every slot of host is pinned: the waiting load reads into transit slots and host keeps what it has."""
    w = Waiting()
    w.end_first(Status.NOT_DONE)
    held = w.fill_host()
    disk = w.first["disk"].tolist()
    assert w.index.ready(w.second)
    assert set(w.second["flags"]) == {READ | TRANSIT}
    assert w.second["disk"].tolist() == disk
    assert w.index.transit_free() == 0
    w.index.complete_load(held, None)
    w.end_second()
    assert not any(c & Code.HOST for c in w.codes())


def test_without_any_slot_a_copy_waits_until_there_is_one():
    """Host pinned and transit of one slot: one copy reads, the other waits; with host free again it reads there."""
    w = Waiting(transit=1)
    w.end_first(Status.NOT_DONE)
    held = w.fill_host()
    assert not w.index.ready(w.second)
    assert sorted(w.second["flags"].tolist()) == sorted([READ | TRANSIT, WAIT])
    waits = w.second["flags"] == WAIT
    assert w.second["disk"][waits].tolist() == [-1]
    w.index.complete_load(held, None)
    assert not w.index.ready(w.second)  # these blocks wait for their write to disk: a load does not cost them
    w.write_all()
    assert w.index.ready(w.second)
    assert w.second["flags"][waits].tolist() == [READ]
    w.index.complete_load(w.second, None)
    w.index.check_integrity()
    assert w.index.usage(0)["groups"][0]["pinned"] == 0


@pytest.mark.parametrize("host", [2, 6])
def test_a_late_read_is_not_waited_for(host):
    """The first load is past its deadline and still holds the slots: the second reads into transit beside it, also
    where host has room, since a block has one place there."""
    w = Waiting(host=host)
    w.index.expire(w.first)
    assert w.index.ready(w.second)
    assert set(w.second["flags"]) == {READ | TRANSIT}
    assert not {*w.second["host"].tolist()} & {*w.first["host"].tolist()}
    w.end_first(Status.OK)
    w.end_second()
    assert all(c & Code.HOST for c in w.codes())


def test_a_late_read_is_waited_for_where_disk_has_gone():
    """Past its deadline, with the disk off, the first load's bytes are all that may still come."""
    w = Waiting()
    w.index.expire(w.first)
    w.index.set_online(1, False)
    assert not w.index.ready(w.second)
    assert set(w.second["flags"]) == {WAIT}
    w.end_first(Status.OK)
    assert w.index.ready(w.second)
    assert set(w.second["flags"]) == {0}
    assert w.second["host"].tolist() == w.first["host"].tolist()
    w.end_second()


@pytest.mark.parametrize("how", ["disk off", "bad bytes", "reset host", "reset disk"])
def test_what_no_tier_has_any_more_is_given_up(how):
    """No slot, no flag: the load leaves the block out, and ends like any other."""
    w = Waiting()
    if how == "disk off":
        w.index.set_online(1, False)
    elif how == "reset host":
        w.index.reset(0)
    elif how == "reset disk":
        w.index.reset(1)
    w.end_first(Status.READ_FAILED if how == "bad bytes" else Status.NOT_DONE)
    assert w.index.ready(w.second)
    assert set(w.second["flags"]) == {0}
    assert w.second["host"].tolist() == [-1] * BLOCKS
    w.end_second()


def test_a_copy_follows_its_block_to_another_slot():
    """The read is given up, other blocks take its slots, and a third load reads the block elsewhere: the second waits
    for that place and finds the bytes there."""
    w = Waiting(host=6)
    w.end_first(Status.NOT_DONE)
    w.store(chain(1))
    third = w.load()
    assert set(third["flags"]) == {READ}
    assert not {*third["host"].tolist()} & {*w.first["host"].tolist()}
    assert not w.index.ready(w.second)
    assert w.second["host"].tolist() == third["host"].tolist()
    w.index.complete_load(third, None)
    fourth = w.load()
    assert w.index.ready(w.second)
    assert w.second["host"].tolist() == fourth["host"].tolist()
    w.index.complete_load(fourth, None)
    w.end_second()


def test_a_copy_that_was_not_asked_in_between_finds_the_new_slot():
    """As above, but the third load has ended before the second one looks again."""
    w = Waiting(host=6)
    w.end_first(Status.NOT_DONE)
    w.store(chain(1))
    third = w.load()
    w.index.complete_load(third, None)
    assert w.index.ready(w.second)
    assert set(w.second["flags"]) == {0}
    assert w.second["host"].tolist() == third["host"].tolist()
    w.end_second()


def test_two_waiting_loads_read_once():
    """The first of two takes the read over, the second goes on waiting, for that one now."""
    w = Waiting()
    third = w.load()
    w.end_first(Status.NOT_DONE)
    assert w.index.ready(w.second)
    assert not w.index.ready(third)
    assert set(third["flags"]) == {WAIT}
    assert third["host"].tolist() == w.second["host"].tolist()
    w.index.complete_load(w.second, None)
    assert w.index.ready(third)
    assert set(third["flags"]) == {0}
    w.index.complete_load(third, None)
    w.index.check_integrity()
    assert w.index.usage(0)["groups"][0]["pinned"] == 0
