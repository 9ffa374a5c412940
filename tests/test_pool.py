"""The page pool against a model that is nothing but lists and a dict."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffload.errors import ConfigError
from kvoffload.layout import CacheGroup, GroupKind, Layout
from kvoffload.testing.pool import PageMemory, PagePool, ScratchPool, key_list


def make_keys(ids):
    return np.array([[i % 256, i // 256] + [0] * 14 for i in ids], np.uint8).reshape(-1, 16)


class Model:
    """Free pages as a list, front first; content as a dict page -> id; references as a dict."""

    def __init__(self, pages):
        self.queue = list(range(pages))
        self.content = {}
        self.refs = dict.fromkeys(range(pages), 0)

    def match(self, ids):
        run = []
        for i in ids:
            pages = [p for p, c in self.content.items() if c == i]
            if not pages:
                break
            run.append(pages[0])
        return run

    def allocate(self, count, hits):
        left = [p for p in self.queue if p not in hits]
        if len(left) < count:
            return None
        self.queue = left[count:]
        for page in left[:count]:
            self.content.pop(page, None)
        for page in [*hits, *left[:count]]:
            self.refs[page] += 1
        return left[:count]

    def publish(self, pages, ids):
        for page, i in zip(pages, ids, strict=True):
            if i not in self.content.values():
                self.content[page] = i

    def release(self, pages):
        for page in pages[::-1]:
            self.refs[page] -= 1
            if self.refs[page] == 0:
                self.queue = [*self.queue, page] if page in self.content else [page, *self.queue]


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.integers(1, 12), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30)), max_size=60))
def test_pool_equals_the_model(pages, steps):
    """Any mix of admissions, publications and releases gives the pages that the model gives."""
    pool, model = PagePool(pages), Model(pages)
    live = []
    for action, number in steps:
        if action < 2:
            ids = [number // 4 * 10 + j for j in range(number % 7)]
            hits = pool.match(make_keys(ids))

            assert model.match(ids) == hits.tolist()

            fresh = pool.allocate(len(ids) - len(hits), hits)

            assert model.allocate(len(ids) - len(hits), hits.tolist()) == (
                None if fresh is None else fresh.tolist()
            )

            if fresh is not None:
                live.append((np.concatenate((hits, fresh)), ids))
        elif live:
            held, ids = live[number % len(live)]
            if action == 2:
                pool.publish(held, make_keys(ids))
                model.publish(held.tolist(), ids)
            else:
                live.pop(number % len(live))
                pool.release(held)
                model.release(held.tolist())
        pool.check_integrity()

        assert len(model.queue) == pool.free


def test_tail_is_reused_before_the_head():
    """After a release the last page of the chain is handed out first, so a prefix never loses its head
    first."""
    pool = PagePool(4)
    pages = pool.allocate(4)
    pool.publish(pages, make_keys(range(4)))
    pool.release(pages)
    taken = pool.allocate(2)

    assert [pages[3], pages[2]] == taken.tolist()
    assert pages[:2].tolist() == pool.match(make_keys(range(4))).tolist()


def test_hits_are_never_handed_out_as_new_pages():
    """Pages named as hits count as taken: with 4 pages and 2 hits, 3 new ones are refused and nothing
    changes."""
    pool = PagePool(4)
    pages = pool.allocate(2)
    pool.publish(pages, make_keys([1, 2]))
    pool.release(pages)

    assert pool.allocate(3, pages) is None
    assert pool.free == 4
    assert set(pool.allocate(2, pages).tolist()).isdisjoint(pages.tolist())


def test_uncached_pool_finds_nothing():
    """With cached=False pages serve the running request only."""
    pool = PagePool(4, cached=False)
    pages = pool.allocate(2)
    pool.publish(pages, make_keys([1, 2]))

    assert len(pool.match(make_keys([1, 2]))) == 0


def test_wrong_use_is_refused():
    """Releasing or publishing what nobody holds, a second key for a page, and an empty pool raise."""
    pool = PagePool(2)
    page = pool.allocate(1)
    pool.publish(page, make_keys([1]))
    with pytest.raises(ValueError, match="second key"):
        pool.publish(page, make_keys([2]))
    pool.release(page)
    with pytest.raises(ValueError, match="nobody holds"):
        pool.release(page)
    with pytest.raises(ValueError, match="nobody holds"):
        pool.publish(page, make_keys([1]))
    with pytest.raises(ConfigError, match="at least 1"):
        PagePool(0)


def test_forget_drops_content_but_no_reference():
    """After forget nothing is found, held pages stay held, and the pool is sound."""
    pool = PagePool(3)
    pages = pool.allocate(2)
    pool.publish(pages, make_keys([1, 2]))
    pool.forget()
    pool.check_integrity()

    assert len(pool.match(make_keys([1]))) == 0
    assert pool.free == 1


def test_integrity_check_finds_planted_damage():
    """check_integrity raises when a held page is also in the free queue."""
    pool = PagePool(2)
    pool.allocate(1)
    pool._free[0] = None
    with pytest.raises(RuntimeError, match="references"):
        pool.check_integrity()


def test_key_list_keeps_zero_bytes():
    """Keys that end in zero bytes stay 16 bytes long."""
    rows = np.zeros((2, 16), np.uint8)
    rows[1, 0] = 7

    assert [bytes(16), b"\x07" + bytes(15)] == key_list(rows)


@pytest.mark.parametrize("interleaved", [False, True])
def test_regions_point_at_the_arrays(interleaved):
    """Byte b of page p of a region is the byte that the array shows there, also with a stride over all
    layers."""
    import ctypes

    layout = Layout(16, (CacheGroup(0, GroupKind.FULL, 16, 1003, layers=("a", "b", "c")),))
    memory = PageMemory(layout, [5], interleaved=interleaved)
    rng = random.Random(3)
    for array, region in zip(memory.arrays[0], memory.pools[0], strict=True):
        array[:] = np.frombuffer(rng.randbytes(array.size), np.uint8).reshape(array.shape)
        for page in range(region.pages):
            found = ctypes.string_at(region.base + page * region.stride, region.page_bytes)

            assert array[page].tobytes() == found
    assert [r.page_bytes for r in memory.pools[0]] == [335, 334, 334]
    assert memory.nbytes == 5 * 1003


def test_rank_without_the_group_has_no_region():
    """A group of 0 bytes on this rank gives no region at all."""
    layout = Layout(16, (CacheGroup(0, GroupKind.FULL, 16, 0, layers=("a", "b")),))

    assert PageMemory(layout, [5]).pools == ((),)


def test_a_scratch_pool_hands_each_page_to_one_holder():
    """Random takes and gives against a set: pages are distinct, none is taken twice, what is given comes back."""
    chance = random.Random(3)
    pool, held = ScratchPool(50), []
    for _ in range(500):
        if held and chance.random() < 0.5:
            pool.release(held.pop(chance.randrange(len(held))))
        else:
            count = chance.randint(0, 20)
            taken = pool.allocate(count)
            assert (taken is None) == (count > 50 - sum(len(h) for h in held))
            if taken is not None:
                held.append(taken)
        flat = [page for h in held for page in h.tolist()]
        assert len(set(flat)) == len(flat) == 50 - pool.free
        assert set(flat) <= set(range(50))
        pool.check_integrity()
    assert len(pool.match(np.zeros((2, 16), np.uint8))) == 0
    with pytest.raises(ValueError, match="nobody holds it"):
        pool.release(np.array([0, 0], np.int32))
