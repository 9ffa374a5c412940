"""One request after the other, everything settled in between: the replay whose numbers are exact."""

from __future__ import annotations

from collections.abc import Iterable

from kvoffload.replay.base import ReplayRequest
from kvoffload.replay.driver import Engine, Turn

STORE_TRIES = 3
"""A store that fails so often is given up: the replay goes on, and the blocks are a miss later."""


def replay_sequential(engine: Engine, requests: Iterable[ReplayRequest]) -> None:
    """Replay in file order: match, load, compute, offer, wait for every copy and disk write, finish.

    No two requests overlap and no write is pending when the next one is matched, so that hits are those of
    the order alone (docs/replay.md).
    """
    for request in requests:
        turn = engine.open(request)
        hits, found = engine.look(turn)
        if not engine.admit(turn, hits, found):
            raise RuntimeError(f"request {request.index}: pages are held while nothing runs")
        while turn.load:
            engine.pump()
        engine.compute(turn, len(request.ids) * engine.block_tokens - turn.computed)
        _store(engine, turn)
        engine.finish(turn)
        engine.drain()


def _store(engine: Engine, turn: Turn) -> None:
    """Offer until every block is stored or refused; blocks whose copy fails are offered again a few times."""
    for _ in range(STORE_TRIES):
        turn.failed = 0
        while not engine.offer(turn):
            engine.pump()
        while turn.stores:
            engine.pump()
        if not turn.failed:
            return
