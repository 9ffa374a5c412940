"""Several requests in flight over one page pool, as an engine with continuous batching has them.

A request goes waiting -> loading -> prefill -> finished. It is admitted with pages for its whole prompt or
not at all, and holds nothing while it waits: requests that hold pages need nothing from those that wait, so
the replay always ends.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Iterable

from kvoffload.errors import ConfigError
from kvoffload.replay.base import ReplayRequest
from kvoffload.replay.driver import Engine, Turn

PREFILL_TOKENS = 2048
"""Tokens computed in one step, over all requests."""

PATIENCE_S = 2.0
"""Seconds a request waits for blocks that are on their way for another one; then it goes on without."""

STORE_PATIENCE_S = 10.0
"""Seconds a computed request waits for room for the rest of its blocks; then it ends without storing them."""


class Streams:
    """Which request may start: file order, and within one (session, agent) only after the one before has
    ended.

    Requests without a session depend on nothing.
    """

    def __init__(self, requests: Iterable[ReplayRequest]) -> None:
        self._later: defaultdict[tuple[str, str], deque[ReplayRequest]] = defaultdict(deque)
        self._busy: set[tuple[str, str]] = set()
        self._ready: list[tuple[int, ReplayRequest]] = []
        for request in requests:
            name = (request.session, request.agent)
            if request.session and name in self._busy:
                self._later[name].append(request)
            else:
                self._busy.add(name)
                heapq.heappush(self._ready, (request.index, request))

    def next(self) -> ReplayRequest | None:
        """The first request of the file that may start now, taken out."""
        return heapq.heappop(self._ready)[1] if self._ready else None

    def ended(self, request: ReplayRequest) -> None:
        """Let the request after this one start."""
        later = self._later[(request.session, request.agent)]
        if request.session and later:
            following = later.popleft()
            heapq.heappush(self._ready, (following.index, following))
        else:
            self._busy.discard((request.session, request.agent))


class Lanes:
    """The step loop. `count`: requests in flight at most, waiting ones included."""

    def __init__(self, engine: Engine, count: int, prefill_tokens: int = PREFILL_TOKENS) -> None:
        if count < 1:
            raise ConfigError(f"--lanes {count}: at least one request must be in flight")
        if prefill_tokens < engine.block_tokens:
            raise ConfigError(
                f"a step of {prefill_tokens} tokens is shorter than a block of {engine.block_tokens} tokens"
            )
        self._engine = engine
        self._count = count
        self._prefill_tokens = prefill_tokens
        self._waiting: list[Turn] = []
        self._running: list[Turn] = []

    def run(self, requests: Iterable[ReplayRequest]) -> None:
        """Replay all requests and wait for the last copy and disk write."""
        streams = Streams(requests)
        while self._draw(streams):
            self._engine.pump()
            self._admit()
            self._prefill()
            self._finish(streams)
        self._engine.drain()

    def _draw(self, streams: Streams) -> bool:
        """Fill the lanes; False when all requests have ended."""
        while len(self._waiting) + len(self._running) < self._count:
            request = streams.next()
            if request is None:
                break
            self._waiting.append(self._engine.open(request))
        return bool(self._waiting or self._running)

    def _protected(self) -> bool:
        """True when no block that waits for its disk write can be evicted: then new blocks may take room."""
        if self._engine.tiers.backlog().exposed:
            self._engine.pump()
        return not self._engine.tiers.backlog().exposed

    def _admit(self) -> None:
        """Admit in order; one that is short of pages keeps those behind it waiting, so that it is not
        starved."""
        still: list[Turn] = []
        open_door = True
        for turn in self._waiting:
            open_door = open_door and self._protected()
            if not open_door:
                still.append(turn)
                continue
            hits, found = self._engine.look(turn)
            if found.wait and self._engine.clock() < turn.moved_at + PATIENCE_S:
                still.append(turn)
            elif self._engine.admit(turn, hits, found):
                self._running.append(turn)
            else:
                open_door = False
                still.append(turn)
        self._waiting = still

    def _prefill(self) -> None:
        """Share one step's tokens in order of admission."""
        budget = self._prefill_tokens
        for turn in self._running:
            if turn.load == 0:
                budget -= self._engine.compute(turn, budget)

    def _finish(self, streams: Streams) -> None:
        """Offer what is computed and end the turns that have nothing left to do."""
        still: list[Turn] = []
        for turn in self._running:
            if turn.load == 0 and self._protected() and self._offered(turn):
                self._engine.finish(turn)
                streams.ended(turn.request)
            else:
                still.append(turn)
        self._running = still

    def _offered(self, turn: Turn) -> bool:
        """Offer what is computed; True when that is the whole prompt and no more of it will be stored."""
        settled = self._engine.offer(turn)
        if turn.computed < len(turn.request.ids) * self._engine.block_tokens:
            return False
        return settled or self._engine.clock() > turn.moved_at + STORE_PATIENCE_S
