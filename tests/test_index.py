"""The index call by call: pins, room, failures, errors."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from kvoffload.index import EntryFlag, Index, Matcher
from kvoffload.messages import CopyFlag, Status

MADE = []


def build(*args, **options):
    """An index that is checked when the test ends."""
    MADE.append(Index(*args, **options))
    return MADE[-1]


def full(host, disk=0, transit=0, **options):
    """One full group of one-token blocks, four slots to a slab, exact numbers of slots."""
    slabs = [-(-n // 4) for n in (host, transit, disk)]
    exact = {"host_slots": host, "transit_slots": transit, "disk_slots": disk}
    return build([(0, 1, 0)], 1, [4], *slabs, **exact, **options)


def chain(n, seed=0):
    return np.frombuffer(random.Random(seed).randbytes(16 * n), np.uint8).reshape(-1, 16)


def offer(index, keys, begin=0, segment=None):
    """Offers the chain from `begin` on, with a page for every block."""
    segment = index.open_segment(0.0) if segment is None else segment
    return index.offer(segment, keys, [begin], [len(keys)], [np.arange(len(keys), dtype=np.int32)])


def store(index, keys):
    """Offers once and completes; the number stored."""
    copies, *_ = offer(index, keys)
    index.complete_store(copies, None)
    index.complete_write(copies[copies["flags"] == CopyFlag.TRANSIT], None)
    return len(copies)


def load(index, keys, end=None, transit=0):
    end = len(keys) if end is None else end
    pages = [np.arange(len(keys), dtype=np.int32)]
    return index.begin_load(index.open_segment(0.0), keys, [0], [end], pages, transit)


def write_all(index):
    while len(copies := index.next_writes(1000)):
        index.complete_write(copies, None)


def pins(index):
    return int(index.entries()["pins"].sum())


def held(index, tier="host"):
    return {e["key"].tobytes() for e in index.entries() if e[tier] >= 0}


def names(keys):
    return {k.tobytes() for k in keys}


@pytest.fixture(autouse=True)
def sound():
    """Every index that a test built is walked at its end."""
    yield
    while MADE:
        MADE.pop().check_integrity()


def test_match_pins_nothing_and_load_only_what_it_takes():
    """After a match no block is pinned; a load of 4 of 10 blocks pins 4, its end none."""
    index, keys = full(16), chain(10)
    store(index, keys)
    assert Matcher(index).update(keys, 0)[0] == 10
    assert pins(index) == 0

    copies, ends = load(index, keys, 4)

    assert (len(copies), ends, pins(index)) == (4, [4], 4)
    index.complete_load(copies, None)
    assert pins(index) == 0


def test_a_job_ends_once():
    """Ending a job again is an error that changes nothing, for every kind of job."""
    index, keys = full(8, disk=8), chain(4)
    stored, *_ = offer(index, keys)
    index.complete_store(stored, None)
    written = index.next_writes(2)
    index.complete_write(written, None)
    loaded, _ = load(index, keys)
    index.complete_load(loaded, None)

    for again, copies in (
        (index.complete_store, stored),
        (index.complete_write, written),
        (index.complete_load, loaded),
    ):
        with pytest.raises(ValueError, match="no such job"):
            again(copies, None)
    assert pins(index) == 0


def test_a_store_cannot_be_ended_as_another_job():
    """Copies of a store in flight are refused by complete_write, and the store still ends well."""
    index = full(8, disk=8)
    copies, *_ = offer(index, chain(2))

    with pytest.raises(ValueError, match="no such job"):
        index.complete_write(copies, None)
    index.complete_store(copies, None)
    assert pins(index) == 0


def test_a_thousand_loads_leave_no_pin():
    """Loading the same blocks again and again keeps the pins at zero between loads."""
    index, keys = full(8), chain(8)
    store(index, keys)
    for _ in range(1000):
        index.complete_load(load(index, keys)[0], None)
        assert index.usage(0)["groups"][0]["pinned"] == 0


def test_pinned_blocks_survive_pressure():
    """Slots under a running load are not handed out, whatever is offered meanwhile."""
    index, keys = full(8), chain(4)
    store(index, keys)
    copies, _ = load(index, keys)
    for seed in range(1, 5):
        other, *_ = offer(index, chain(8, seed))
        assert not set(other["host"]) & set(copies["host"])
        index.complete_store(other, None)

    assert names(keys) <= held(index)
    index.complete_load(copies, None)


def test_full_and_pinned_tiers_refuse_and_recover():
    """With every slot pinned an offer is refused by value; when the pins go it is served."""
    index, old, new = full(4, disk=4, transit=1), chain(4), chain(4, 1)
    store(index, old)
    write_all(index)
    copies, _ = load(index, old)

    assert offer(index, new)[4] == 4
    index.complete_load(copies, None)
    assert store(index, new) == 4


def test_the_least_recently_used_goes_first():
    """Of A (stored, then loaded) and B (stored after that load) A is the victim."""
    index, a, b = full(2), chain(1, 1), chain(1, 2)
    store(index, a)
    index.complete_load(load(index, a)[0], None)
    store(index, b)

    store(index, chain(1, 3))

    assert held(index) == names(b) | names(chain(1, 3))


def test_hits_in_device_memory_are_touches():
    """A chain that is offered again, though all of it is there, outlives one that is not."""
    index, a, b = full(8), chain(4, 1), chain(4, 2)
    store(index, a)
    store(index, b)
    assert offer(index, a)[1:4] == ([4], 4, 0)

    store(index, chain(4, 3))

    assert held(index) == names(a) | names(chain(4, 3))


def test_only_the_shortfall_is_evicted():
    """Need 10, free 7: exactly the 3 last blocks of the older chain go."""
    index, old = full(20), chain(13)
    store(index, old)

    assert store(index, chain(10, 1)) == 10
    assert index.counters()["evicted_host"] == 3
    assert names(old[:10]) <= held(index)
    assert not names(old[10:]) & held(index)


def test_a_batch_gets_neighbouring_slots():
    """Slots freed for a batch are taken in ascending order, so that copies coalesce."""
    index = full(12)
    store(index, chain(12))
    copies, *_ = offer(index, chain(12, 1))

    slots = [(s >> 16) * 4 + (s & 0xFFFF) for s in copies["host"].tolist()]
    assert all(b == a + 1 for a, b in pairwise(slots))


def test_a_chain_longer_than_host_keeps_its_head():
    """Without disk the first blocks are stored, one is refused, and the cursor stays on it."""
    index, keys = full(4), chain(9)
    copies, cursors, *rest = offer(index, keys)

    assert copies["depth"].tolist() == [0, 1, 2, 3]
    assert (cursors, rest) == ([4], [0, 0, 1])


def test_a_saturated_offer_changes_nothing():
    """An offer whose first block is refused leaves order and cursor as they were."""
    index, keys = full(4), chain(9)
    segment = index.open_segment(0.0)
    index.complete_store(offer(index, keys, 0, segment)[0], None)
    before, stamp = index.entries().tobytes(), index.changes(0)[0]

    copies, cursors, *rest = offer(index, keys, 4, segment)

    assert (len(copies), cursors, rest) == (0, [4], [0, 0, 1])
    assert (index.entries().tobytes(), index.changes(0)[0]) == (before, stamp)


def test_a_long_chain_goes_to_disk_in_bursts():
    """Blocks that host refuses take transit slots; when these are out the cursor waits, nothing is refused."""
    index, keys = full(4, disk=16, transit=2), chain(9)
    segment, cursor, bursts = index.open_segment(0.0), 0, []
    while cursor < 9:
        copies, (cursor,), _, _, refused = offer(index, keys, cursor, segment)
        assert refused == 0
        index.complete_store(copies, None)
        index.complete_write(copies[copies["flags"] == CopyFlag.TRANSIT], None)
        bursts.append(copies["depth"].tolist())

    assert bursts == [[0, 1, 2, 3, 4, 5], [6, 7], [8]]
    assert held(index, "disk") == names(keys[4:])
    assert index.transit_free() == 2


def test_absent_pages_are_passed_over():
    """Blocks without a page are not stored and do not stop the walk."""
    index, keys = full(8), chain(6)
    pages = [np.array([5, -1, 7, -1], np.int32)]
    copies, cursors, *_ = index.offer(index.open_segment(0.0), keys, [0], [6], pages)

    assert (copies["depth"].tolist(), copies["page"].tolist(), cursors) == ([0, 2], [5, 7], [6])


def test_a_failed_store_is_a_miss():
    """Blocks whose copy failed are not there, their slots are free, and they can be offered again."""
    index, keys = full(8), chain(4)
    copies, *_ = offer(index, keys)
    index.complete_store(copies, np.array([0, 2, 0, 3], np.uint8))

    assert held(index) == names(keys[[0, 2]])
    assert index.usage(0)["groups"][0]["used"] == 2
    assert offer(index, keys)[0]["depth"].tolist() == [1, 3]


def test_a_chain_longer_than_host_loads_through_transit():
    """Disk 100, host 20: all 100 blocks load in one job, with no more transit slots than allowed."""
    index, keys = full(20, disk=100, transit=8), chain(100)
    segment, cursor = index.open_segment(0.0), 0
    while cursor < 100:
        copies, (cursor,), *_ = offer(index, keys, cursor, segment)
        index.complete_store(copies, None)
        index.complete_write(copies[copies["flags"] == CopyFlag.TRANSIT], None)
    write_all(index)

    copies, ends = load(index, keys, transit=3)

    through = copies[copies["flags"] & CopyFlag.TRANSIT != 0]
    assert (len(copies), ends) == (100, [100])
    assert (len(through), len(set(through["host"]))) == (80, 3)
    index.complete_load(copies, None)
    assert index.transit_free() == 8


def on_disk(keys, host=8, transit=2, **options):
    """An index with the chain on disk only."""
    index = full(host, disk=16, transit=transit, **options)
    store(index, keys)
    write_all(index)
    index.reset(0)
    return index


def test_a_block_is_read_once_for_two_loads():
    """The second load of a block on its way from disk waits for the first; both end with it in host."""
    keys = chain(3)
    index = on_disk(keys)
    first, _ = load(index, keys)
    second, _ = load(index, keys)
    assert set(first["flags"]) == {CopyFlag.READ}
    assert set(second["flags"]) == {CopyFlag.WAIT}
    assert not index.ready(second)

    index.complete_load(first, None)

    assert index.ready(second)
    assert set(second["flags"]) == {0}
    assert second["host"].tolist() == first["host"].tolist()
    index.complete_load(second, None)
    assert pins(index) == 0


def test_a_cancelled_read_is_taken_over():
    """When the job that was to read a block did not, the one that waited reads it itself."""
    keys = chain(2)
    index = on_disk(keys)
    first, _ = load(index, keys)
    second, _ = load(index, keys)
    index.complete_load(first, np.full(2, Status.NOT_DONE, np.uint8))

    assert index.ready(second)
    assert set(second["flags"]) == {CopyFlag.READ}
    index.complete_load(second, None)
    assert held(index) == names(keys)


def test_bad_bytes_on_disk_are_gone_for_all():
    """A block whose read failed leaves the index, also for the load that waits for it."""
    keys = chain(2)
    index = on_disk(keys)
    first, _ = load(index, keys)
    second, _ = load(index, keys)
    index.complete_load(first, np.array([Status.READ_FAILED, Status.OK], np.uint8))

    assert Matcher(index).update(keys, 0)[0] == 0
    assert index.ready(second)
    assert second["host"].tolist() == [-1, first["host"][1]]
    index.complete_load(second, None)
    assert index.usage(1)["groups"][0]["used"] == 1
    assert index.counters()["read_failed"] == 1


def test_a_failed_device_copy_keeps_what_was_read():
    """READ and then COPY_FAILED: the bytes in host are good and stay."""
    keys = chain(2)
    index = on_disk(keys)
    index.complete_load(load(index, keys)[0], np.full(2, Status.COPY_FAILED, np.uint8))

    assert held(index) == names(keys)


def test_prefetch_brings_the_front_to_host():
    """begin_read copies disk-only blocks as far as host has room for, and no page is touched."""
    keys = chain(6)
    index = on_disk(keys, host=4)
    copies = index.begin_read(index.open_segment(0.0), keys, [0], [6])

    assert (copies["depth"].tolist(), set(copies["page"])) == ([0, 1, 2, 3], {-1})
    index.complete_load(copies, None)
    assert held(index) == names(keys[:4])


def test_unwritten_blocks_that_are_evicted_are_counted():
    """Blocks that leave host before their disk write count as dropped, and are not written later."""
    index = full(4, disk=16)
    store(index, chain(4))
    store(index, chain(4, 1))

    assert index.counters()["dropped_disk_backlog"] == 4
    assert names(index.next_writes(100)["key"]) == names(chain(4, 1)[:1])


def test_running_writes_pin_a_quarter_of_host():
    """No more writes begin than the bound allows, until some have ended."""
    index = full(16, disk=16)
    store(index, chain(16))
    first = index.next_writes(100)

    assert (len(first), len(index.next_writes(100))) == (4, 0)
    assert index.pending_writes() == (12, 4)
    index.complete_write(first, None)
    assert index.next_writes(100)["depth"].tolist() == [4, 5, 6, 7]


def test_a_failed_write_leaves_the_block_in_host():
    """The disk slot comes back, the block stays readable."""
    index, keys = full(4, disk=4), chain(1)
    store(index, keys)
    index.complete_write(index.next_writes(1), np.array([Status.COPY_FAILED], np.uint8))

    assert (held(index), held(index, "disk")) == (names(keys), set())
    assert index.usage(1)["groups"][0]["used"] == 0
    assert index.counters()["write_failed"] == 1


def test_reset_during_a_store_shows_nothing():
    """A store that ends after a reset leaves nothing behind, and the key can be stored anew meanwhile."""
    index, keys = full(8), chain(3)
    copies, *_ = offer(index, keys)
    index.reset(0)
    again, *_ = offer(index, keys)
    assert not set(copies["host"]) & set(again["host"])

    index.complete_store(copies, None)

    assert Matcher(index).update(keys, 0)[0] == 0
    index.complete_store(again, None)
    assert Matcher(index).update(keys, 0)[0] == 3
    assert index.usage(0)["groups"][0]["used"] == 3


def test_a_group_in_need_takes_the_slab_unused_longest():
    """When the full group filled all slabs, the state group gets the slab that was used longest ago, whole."""
    index = build([(0, 1, 0), (2, 4, 0)], 1, [4, 2], 3, 0, 0)
    for seed in range(3):
        index.complete_store(offer_group(index, chain(4, seed), 0), None)
    copies = offer_group(index, chain(4, 9), 1)

    assert copies["host"].tolist() == [0]
    assert held(index) == names(chain(4, 1)) | names(chain(4, 2)) | names(chain(4, 9)[3:])
    assert index.counters()["slabs_moved"] == 1
    assert [g["slabs"] for g in index.usage(0)["groups"]] == [2, 1]


def offer_group(index, keys, group):
    """Offers the chain for one of two groups."""
    ends = [len(keys) if group == 0 else 0, len(keys) // 4 if group == 1 else 0]
    pages = [np.zeros(e, np.int32) for e in ends]
    return index.offer(index.open_segment(0.0), keys, [0, 0], ends, pages)[0]


def test_segment_ids_are_reused_when_closed_and_empty():
    """A closed segment keeps its id while blocks name it, and gives it back with the last."""
    index, keys = full(2), chain(2)
    first = index.open_segment(0.0)
    index.complete_store(offer(index, keys, 0, first)[0], None)
    index.close_segment(first, 0, 1.0)
    second = index.open_segment(2.0)
    assert second != first

    index.complete_store(offer(index, chain(2, 1), 0, second)[0], None)

    assert index.open_segment(3.0) == first


def test_entries_cost_little():
    """At 300,000 keys everything together stays under 80 bytes a key."""
    n = 300_000
    index = build([(0, 1, 0)], 1, [64], n // 64 + 1, 0, 0)
    for first in range(0, n, 1000):
        store(index, chain(1000, first))

    assert index.memory_bytes() / n <= 80
    assert index.entries()["flags"].tolist().count(EntryFlag.HOST_VALID) == n


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": np.zeros((4, 16), np.int8)}, "keys is not"),
        ({"keys": np.zeros((4, 8), np.uint8)}, "keys is not"),
        ({"keys": np.zeros((8, 16), np.uint8)[::2]}, "keys is not a C-contiguous"),
        ({"pages": [np.zeros(4, np.int64)]}, "pages is not"),
        ({"pages": []}, "pages has fewer"),
        ({"begins": [0, 0]}, "differ in length"),
        ({"ends": [5]}, "end 5 needs 5 keys, there are 4"),
        ({"segment": 7}, "segment 7 is not open"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    """Arrays of another form and numbers out of range raise ValueError that says which, and change nothing."""
    index = full(8)
    good = {
        "segment": index.open_segment(0.0),
        "keys": chain(4),
        "begins": [0],
        "ends": [4],
        "pages": [np.zeros(4, np.int32)],
    }
    with pytest.raises(ValueError, match=message):
        index.offer(**{**good, **change})
    assert len(index.entries()) == 0


def test_wrong_options_are_named():
    """An index that cannot be built says why."""
    with pytest.raises(ValueError, match="no policy is called 'best'; there are: lru, rri, rri-keep"):
        Index([(0, 1, 0)], 1, [4], 1, 0, 0, host_policy="best")
    with pytest.raises(ValueError, match="9 slots needs one group"):
        Index([(0, 1, 0)], 1, [4], 2, 0, 0, host_slots=9)
    with pytest.raises(ValueError, match="at most 32768 slabs"):
        Index([(0, 1, 0)], 1, [4], 30_000, 3_000, 0)
