"""The block pool of the small vLLM in fake_engine.py: who holds which page, and what its content is known as."""

from __future__ import annotations

from collections import deque

from fake_parts import SIZE, Request

from kvoffload.layout import GroupKind, Layout


class FakePool:
    """Pages 1 to `pages`; 0 is the block of nothing.

    owner: by page, the serial number of its allocation. uses: how many hold it. cached: by hash, the page known to
    hold it. fresh: pages that were given out since the last step.
    """

    def __init__(self, layout: Layout, pages: int) -> None:
        self.layout, self.pages = layout, pages
        self.free = deque(range(1, pages + 1))
        self.fresh: list[int] = []
        self.owner: dict[int, int] = {}
        self.uses: dict[int, int] = {}
        self.cached: dict[bytes, int] = {}
        self.serial = 0

    def _give_back(self, pages: list[int]) -> None:
        for page in reversed(pages):
            self.uses[page] -= 1
            if not self.uses[page]:
                del self.owner[page]
                self.free.append(page)

    def _take(self, page: int) -> None:
        """One more holder of a page that is cached."""
        if not self.uses.get(page, 0):
            self.free.remove(page)
            self._own(page)
        self.uses[page] = self.uses.get(page, 0) + 1

    def _own(self, page: int) -> None:
        self.serial += 1
        self.owner[page] = self.serial

    def _grow(self, request: Request, tokens: int, loaded: int = 0) -> bool:
        """Pages for so many tokens, or none. loaded: windows below that boundary need no page."""
        wanted = -(-tokens // SIZE)
        plan: list[tuple[list[int], int, int]] = []
        for group, table in zip(self.layout.groups, request.table, strict=True):
            sliding = group.kind is GroupKind.SLIDING
            first = max(0, loaded - group.lookback) // SIZE if sliding else 0
            plan.append((table, max(0, first - len(table)), wanted))
        need = sum(max(0, end - len(table) - nulls) for table, nulls, end in plan)
        if need > len(self.free):
            return False
        for table, nulls, end in plan:
            table.extend([0] * nulls)
            while len(table) < end:
                page = self.free.popleft()
                self.cached = {key: mine for key, mine in self.cached.items() if mine != page}
                self.uses[page] = 1
                self._own(page)
                self.fresh.append(page)
                table.append(page)
        return True

    def _local(self, request: Request) -> list[int]:
        """Pages that hold a prefix of the request already; models of several groups keep none here."""
        found: list[int] = []
        if len(self.layout.groups) == 1:
            for key in request.block_hashes[: (request.num_tokens - 1) // SIZE]:
                if key not in self.cached:
                    break
                found.append(self.cached[key])
        return found

    def _cache(self, request: Request, tokens: int) -> None:
        if len(self.layout.groups) == 1:
            for key, page in zip(request.block_hashes[: tokens // SIZE], request.table[0], strict=False):
                self.cached.setdefault(key, page)
