"""`kvoffload bench index`, the planner's half: what an engine's scheduler pays, through the calls that it makes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

from kvoffload.bench.index import SMALL, STEP, Keys, random_keys
from kvoffload.bench.rows import Limit, Row, Unit, at_most, compare, each
from kvoffload.bench.timing import ROUNDS
from kvoffload.bench.world import World

STORE_NS = 150.0
SINGLE_US = 20.0
"""Targets, those of design.md."""

SINGLES = 2000

PROMPT = 128
"""Blocks of a whole request, as in a replay that only counts."""

REQUEST_US = 50.0
"""20,000 such requests a second on one core."""


def bench_planner(blocks: int = SMALL, rounds: int = ROUNDS) -> Iterator[Row]:
    """Rows of stores, loads and matches through the planner. blocks: keys of a round."""
    per_key = each(blocks, "key")
    free = World(blocks)
    peer = Limit("dict, list in Python", partial(_dict_store, blocks))
    name = f"offer + complete, {STEP} keys a call"
    yield from compare(
        name, per_key, partial(_store, free, blocks, STEP, True), [peer], rounds, at_most(STORE_NS)
    )
    full = World(blocks)
    evicting = partial(_store, full, blocks, STEP, False)
    yield from compare("the same, each evicting one", per_key, evicting, [], rounds)
    disk = partial(_store, World(blocks, disk=blocks), blocks, STEP, True)
    yield from compare("the same, and written to disk", per_key, disk, [], rounds)
    single = partial(_store, World(SINGLES), SINGLES, 1, True)
    per_call = Unit("us/call", lambda seconds: seconds * 1e6 / SINGLES)
    yield from compare("offer + complete, 1 key a call", per_call, single, [], rounds, at_most(SINGLE_US))
    stored = World(blocks)
    keys = stored.new_keys(blocks)
    _store_keys(stored, keys, STEP)
    yield from compare("match, new request", per_key, partial(_match, stored, keys), [], rounds)
    again = Unit("us/call", lambda seconds: seconds * 1e6 / SINGLES)
    yield from compare("match asked again, nothing new", again, partial(_rematch, stored, keys), [], rounds)
    yield from compare("match + load + complete", per_key, partial(_load, stored, keys), [], rounds)
    yield from _requests(blocks // PROMPT, rounds)


def _requests(count: int, rounds: int) -> Iterator[Row]:
    """Whole requests of PROMPT blocks, from match to finish: every block new, and every block loaded."""
    per_request = Unit("us/req", lambda seconds: seconds * 1e6 / count)
    world = World(count * PROMPT)
    fresh = partial(_whole, world, lambda: world.new_keys(count * PROMPT))
    yield from compare(f"request, {PROMPT} new keys", per_request, fresh, [], rounds, at_most(REQUEST_US))
    held = World(count * PROMPT)
    keys = held.new_keys(count * PROMPT)
    again = partial(_whole, held, lambda: keys)
    yield from compare(f"request, {PROMPT} keys loaded", per_request, again, [], rounds, at_most(REQUEST_US))


def _whole(world: World, make: Callable[[], Keys]) -> float:
    """Requests one after the other, each matched, loaded, offered and finished."""
    keys = make()
    prompts = [world.prompt(keys[at : at + PROMPT]) for at in range(0, len(keys), PROMPT)]
    begin = time.thread_time()
    for prompt in prompts:
        world.load(prompt)
        world.store(prompt, PROMPT)
        world.planner.finish(prompt.info.id, "end_turn", 0.0)
    return time.thread_time() - begin


def _store(world: World, blocks: int, step: int, empty: bool) -> float:
    """Seconds to store a prompt of new keys. empty: host is emptied first, so that nothing is evicted."""
    if empty:
        world.planner.reset()
    return _store_keys(world, world.new_keys(blocks), step)


def _store_keys(world: World, keys: Keys, step: int) -> float:
    prompt = world.prompt(keys)
    before = world.planner.counters["stored_host"]
    begin = time.thread_time()
    world.store(prompt, step)
    seconds = time.thread_time() - begin
    world.end(prompt)
    stored = world.planner.counters["stored_host"] - before
    if stored != len(keys) or world.planner.pinned():
        raise RuntimeError(
            f"{stored} of {len(keys)} blocks stored, {world.planner.pinned()} slots still pinned"
        )
    return seconds


def _match(world: World, keys: Keys) -> float:
    prompt = world.prompt(keys)
    begin = time.thread_time()
    world.planner.match(prompt.info, prompt)
    seconds = time.thread_time() - begin
    world.end(prompt)
    return seconds


def _rematch(world: World, keys: Keys) -> float:
    """A waiting request: the engine asks every step, and nothing has changed."""
    prompt = world.prompt(keys)
    world.planner.match(prompt.info, prompt)
    begin = time.thread_time()
    for _ in range(SINGLES):
        world.planner.match(prompt.info, prompt)
    seconds = time.thread_time() - begin
    world.end(prompt)
    return seconds


def _load(world: World, keys: Keys) -> float:
    prompt = world.prompt(keys)
    begin = time.thread_time()
    blocks = world.load(prompt)
    seconds = time.thread_time() - begin
    world.end(prompt)
    if blocks != len(keys):
        raise RuntimeError(f"{blocks} of {len(keys)} blocks were loaded")
    return seconds


def _dict_store(blocks: int) -> float:
    """The least that a block manager in Python does: drop what is there, take a slot, mark it done afterwards."""
    rows = [row.tobytes() for row in random_keys(blocks, 1)]
    table: dict[bytes, list[int]] = {}
    free = list(range(blocks))
    begin = time.thread_time()
    for at in range(0, blocks, STEP):
        part = [key for key in rows[at : at + STEP] if key not in table]
        for key in part:
            table[key] = [free.pop(), 0]
        for key in part:
            table[key][1] = 1
    return time.thread_time() - begin
