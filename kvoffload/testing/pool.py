"""The device side of a small engine: numbered pages, a prefix cache over them, and the memory behind them.

`PagePool` is bookkeeping only and serves all ranks; `PageMemory` is one rank's memory. A replay that counts
blocks needs no memory at all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvoffload.errors import ConfigError
from kvoffload.layout import Layout, Pools, Region

Pages: TypeAlias = NDArray[np.int32]
KeyArray: TypeAlias = NDArray[np.uint8]


def key_list(keys: KeyArray) -> list[bytes]:
    """The rows of an (n, 16) array as bytes."""
    return np.ascontiguousarray(keys).view("V16").ravel().tolist()


class PagePool:
    """Pages of one group with reference counts and a prefix cache.

    A page is held (references > 0) or free. Free pages queue in the order in which they are given up; one
    that was published stays matchable until it is handed out again. Thread: one. With `cached=False` nothing
    is ever found: pages serve the running request only. stamp: grows whenever an answer of `match` may change.
    """

    def __init__(self, pages: int, *, cached: bool = True) -> None:
        if pages < 1:
            raise ConfigError(f"a pool of {pages} pages cannot hold anything; give it at least 1")
        self._cached = cached
        self._refs = [0] * pages
        self._keys: list[bytes | None] = [None] * pages
        self._page_of: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(pages))
        self.stamp = 0

    @property
    def pages(self) -> int:
        """All pages."""
        return len(self._refs)

    @property
    def free(self) -> int:
        """Pages that nobody holds, published or not."""
        return len(self._free)

    def match(self, keys: KeyArray) -> Pages:
        """Pages of the leading run of `keys` that are published. Pure: takes no reference, changes no
        order."""
        found: list[int] = []
        if self._page_of:
            for key in key_list(keys):
                page = self._page_of.get(key)
                if page is None:
                    break
                found.append(page)
        return np.array(found, np.int32)

    def lookup(self, keys: KeyArray) -> Pages:
        """By key its page, -1 where it is not published. Pure as `match`."""
        return np.array([self._page_of.get(key, -1) for key in key_list(keys)], np.int32)

    def allocate(self, count: int, hits: Sequence[int] | Pages = ()) -> Pages | None:
        """One reference to each of `hits` and to `count` other pages, whose content is forgotten; the latter.

        All or nothing: None, and nothing has changed, where fewer than `count` pages are free besides the
        hits.
        """
        shared = [int(page) for page in hits]
        if self.free - sum(1 for page in shared if self._refs[page] == 0) < count:
            return None
        for page in shared:
            if self._refs[page] == 0:
                del self._free[page]
            self._refs[page] += 1
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for page in taken:
            self._refs[page] = 1
            self._forget(page)
        return np.array(taken, np.int32)

    def publish(self, pages: Pages, keys: KeyArray) -> None:
        """Let `match` find the content of held pages. A key that another page has already stays with that
        page."""
        if not self._cached:
            return
        for page, key in zip(pages.tolist(), key_list(keys), strict=True):
            if self._refs[page] == 0:
                raise ValueError(f"page {page} is published but nobody holds it")
            if self._keys[page] not in (None, key):
                raise ValueError(f"page {page} is published under a second key")
            if self._page_of.setdefault(key, page) == page:
                self._keys[page] = key
                self.stamp += 1

    def release(self, pages: Pages) -> None:
        """Give one reference back for each page, in chain order; those that become free queue tail first.

        Pages that were never published hold nothing of use and go to the front of the queue.
        """
        for page in reversed(pages.tolist()):
            if self._refs[page] == 0:
                raise ValueError(f"page {page} is released but nobody holds it")
            self._refs[page] -= 1
            if self._refs[page] == 0:
                self._free[page] = None
                if self._keys[page] is None:
                    self._free.move_to_end(page, last=False)

    def forget(self) -> None:
        """Drop the prefix cache; references stay."""
        for page in list(self._page_of.values()):
            self._forget(page)

    def check_integrity(self) -> None:
        """Raise RuntimeError naming the first invariant that does not hold."""
        for page, refs in enumerate(self._refs):
            if refs < 0 or (refs == 0) != (page in self._free):
                raise RuntimeError(f"page {page} has {refs} references and free is {page in self._free}")
            key = self._keys[page]
            if key is not None and self._page_of.get(key) != page:
                raise RuntimeError(f"page {page} has a key that names page {self._page_of.get(key)}")
        named = sum(1 for key in self._keys if key is not None)
        if named != len(self._page_of) or not all(0 <= p < self.pages for p in self._free):
            raise RuntimeError(f"{named} pages have keys, {len(self._page_of)} keys have pages")

    def _forget(self, page: int) -> None:
        key = self._keys[page]
        if key is not None:
            del self._page_of[key]
            self._keys[page] = None
            self.stamp += 1


class ScratchPool(PagePool):
    """Pages that serve the running request only: no prefix cache, no sharing, whole arrays at a time."""

    def __init__(self, pages: int) -> None:
        super().__init__(pages, cached=False)
        self._stack = np.arange(pages, dtype=np.int32)
        self._left = pages
        self._held = np.zeros(pages, np.bool_)

    @property
    def free(self) -> int:
        return self._left

    def allocate(self, count: int, hits: Sequence[int] | Pages = ()) -> Pages | None:
        """As in PagePool; nothing can be shared, so that `hits` must be empty."""
        if len(hits):
            raise ValueError(f"{len(hits)} hits in a pool that finds nothing")
        if count > self._left:
            return None
        self._left -= count
        taken = self._stack[self._left : self._left + count].copy()
        self._held[taken] = True
        return taken

    def release(self, pages: Pages) -> None:
        """Give held pages back, each once."""
        if not self._held[pages].all() or len(np.unique(pages)) != len(pages):
            raise ValueError("a page is released but nobody holds it")
        self._held[pages] = False
        self._stack[self._left : self._left + len(pages)] = pages
        self._left += len(pages)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless every page is either held or free."""
        free = self._stack[: self._left]
        if (
            self._held[free].any()
            or len(np.unique(free)) != self._left
            or self._left + self._held.sum() != self.pages
        ):
            raise RuntimeError(f"{self._left} pages are free and {self._held.sum()} of {self.pages} held")


class PageMemory:
    """One rank's device memory: per group and layer an array of shape (pages, bytes of one page).

    interleaved: all layers of a page lie side by side, so that a region's stride exceeds its page bytes. overlaid: the
    groups lie over each other, page by page (of equal counts), as in an engine with one pool of pages.
    Lifetime: `pools` points into these arrays; keep the object as long as the mover they are registered with.
    """

    def __init__(
        self,
        layout: Layout,
        pages: Sequence[int],
        *,
        rank: int = 0,
        interleaved: bool = False,
        overlaid: bool = False,
    ) -> None:
        self.rank = rank
        if overlaid:
            whole = np.zeros((pages[0], max(g.block_bytes for g in layout.groups)), np.uint8)
            self.arrays: tuple[tuple[NDArray[np.uint8], ...], ...] = tuple(
                _cut(whole, _split(g.block_bytes, len(g.layers) or 1)) for g in layout.groups
            )
            return
        self.arrays = tuple(
            _layer_arrays(count, _split(group.block_bytes, len(group.layers) or 1), interleaved)
            for group, count in zip(layout.groups, pages, strict=True)
        )

    @property
    def pools(self) -> Pools:
        """The same memory as regions, for a mover."""
        return tuple(
            tuple(Region(a.ctypes.data, a.strides[0], a.shape[1], a.shape[0]) for a in layers)
            for layers in self.arrays
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return sum(a.size for layers in self.arrays for a in layers)


def _split(block_bytes: int, layers: int) -> list[int]:
    """Bytes per layer: equal, the remainder to the first layers; none where the rank lacks the group."""
    share, rest = divmod(block_bytes, layers)
    return [share + (i < rest) for i in range(layers) if share + (i < rest)]


def _layer_arrays(pages: int, sizes: list[int], interleaved: bool) -> tuple[NDArray[np.uint8], ...]:
    if not interleaved:
        return tuple(np.zeros((pages, size), np.uint8) for size in sizes)
    return _cut(np.zeros((pages, sum(sizes)), np.uint8), sizes)


def _cut(whole: NDArray[np.uint8], sizes: list[int]) -> tuple[NDArray[np.uint8], ...]:
    """The pages of each layer, side by side."""
    ends = np.cumsum(sizes).tolist()
    return tuple(whole[:, end - size : end] for size, end in zip(sizes, ends, strict=True))
