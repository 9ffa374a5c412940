"""KV events: a reader of the stream knows what every tier shows, and how blocks hang together."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import numpy as np
import pytest

from kvoffload.config import Config
from kvoffload.connector import EngineRequest, Scheduled
from kvoffload.events import NAMED, Cleared, Event, EventStream, Removed, Stored
from kvoffload.index import Index
from kvoffload.keys import Chain, Namespace
from kvoffload.layout import CacheGroup, GroupKind, Layout
from kvoffload.messages import Inventory, Outcome
from kvoffload.planner import Planner
from kvoffload.requests import RequestInfo
from kvoffload.scheduler_side import PlannerConnector
from kvoffload.testing.event_reader import EventReader, visible
from kvoffload.testing.rig import Rig, Sizes, one_group

WIDE = Layout(16, (CacheGroup(0, GroupKind.FULL, 16, 8192), CacheGroup(1, GroupKind.FULL, 32, 8192)))


def prompt(tokens: int, seed: int = 0) -> Chain:
    """A chain with its tokens."""
    chain = Chain(Namespace("m", 16))
    chain.extend(range(seed, seed + tokens))
    return chain


def rig(path: Path, layout: Layout | None = None, **sizes: int) -> Rig:
    disk = {"disk_path": path, "disk_bytes": 1} if sizes.get("disk") else {}
    config = Config(host_bytes=1, model_id="m", **disk)  # type: ignore[arg-type]
    return Rig(Sizes(**sizes), layout or one_group(), path, config=config, events=True)


def stored(events: list[Event], medium: str, group: int = 0) -> list[Stored]:
    return [e for e in events if isinstance(e, Stored) and (e.medium, e.group) == (medium, group)]


def test_OBS_04_stored_says_what_a_router_needs(tmp_path: Path) -> None:
    """Keys, parent, tokens, block size and number of the blocks of every group come from the chain, in both tiers."""
    chain = prompt(100)
    keys = [bytes(k) for k in chain.keys]
    with rig(tmp_path, WIDE, host=4, disk=8) as world:
        world.store(chain)
        events = world.planner.take_events()
        for medium in ("host", "disk"):
            (base,) = stored(events, medium)
            assert base == Stored(medium, 0, 0, tuple(keys), None, tuple(range(96)), 16)
            (wide,) = stored(events, medium, group=1)
            assert wide == Stored(medium, 1, 0, tuple(keys[1::2]), None, tuple(range(96)), 32)

        chain.extend(range(100, 132))
        world.store(chain)
        (more,) = stored(world.planner.take_events(), "host")
        keys = [bytes(k) for k in chain.keys]
        assert more == Stored("host", 0, 6, tuple(keys[6:]), keys[5], tuple(range(96, 128)), 16)


def test_promotion_is_told_with_tokens(tmp_path: Path) -> None:
    """What a load brings from disk into host is told as stored there, with parent and tokens after a restart too."""
    chain = prompt(96)
    with rig(tmp_path, host=4, disk=8) as world:
        world.store(chain)
    with rig(tmp_path, host=4, disk=8) as world:
        first = world.planner.take_events()
        assert not any(isinstance(e, Cleared) for e in first)
        assert {k for e in stored(first, "disk") for k in e.keys} == {bytes(k) for k in chain.keys}
        assert all(e.tokens == () and e.parent is None for e in stored(first, "disk"))
        world.load(chain)
        (event,) = stored(world.planner.take_events(), "host")
        assert event == Stored("host", 0, 0, tuple(bytes(k) for k in chain.keys), None, tuple(range(96)), 16)


def test_reset_clears_and_lists_what_is_left(tmp_path: Path) -> None:
    """After a reset of one tier the stream starts anew with what the other one still has."""
    chain = prompt(96)
    with rig(tmp_path, host=4, disk=8) as world:
        world.store(chain)
        world.planner.take_events()
        world.planner.reset(("host",))
        events = world.planner.take_events()
        assert events[0] == Cleared()
        assert not stored(events, "host")
        assert sum(len(e.keys) for e in stored(events, "disk")) == 6


def test_eviction_is_told(tmp_path: Path) -> None:
    """What gives way is told as removed from its tier, and the reader agrees with the index."""
    with rig(tmp_path, host=1) as world:
        reader = EventReader(world.layout)
        for seed in range(4):
            world.store(prompt(96, seed * 1000))
            reader.apply(world.planner.take_events())
            assert world.planner._tiers is not None
            assert reader.places == visible(world.planner._tiers.index, True)
            assert len(reader.places) <= 8


def test_more_than_the_log_keeps_is_listed_anew() -> None:
    """A reader that comes late is told to forget all and gets everything, in pieces, with changes between them."""
    count = 70_000
    keys = np.arange(2 * count * 2, dtype=np.uint64).view(np.uint8).reshape(-1, 16)
    layout = Layout(16, (CacheGroup(0, GroupKind.FULL, 16, 4096),))
    index = Index([(0, 1, 0)], 16, [1000], 100, 0, 0)
    stream, reader = EventStream(layout, index), EventReader(layout)
    pages = np.zeros(count, np.int32)

    def store(rows: np.ndarray) -> None:
        segment = index.open_segment(0.0)
        copies, *_ = index.offer(segment, rows, [0], [len(rows)], [pages[: len(rows)]])
        index.complete_store(copies, None)
        index.close_segment(segment, 0, 0.0)

    store(keys[:count])
    events = stream.take(True)
    assert events[0] == Cleared()
    reader.apply(events)
    rounds = 0
    while stream.listing:
        rounds += 1
        store(keys[count + 2000 * rounds : count + 2000 * (rounds + 1)])
        reader.apply(stream.take(True))
    assert rounds >= 10
    assert reader.places == visible(index, True)
    assert index.counters()["evicted_host"] > 0


def test_names_are_bounded() -> None:
    """However many blocks were named, no more than NAMED are remembered."""
    layout = Layout(16, (CacheGroup(0, GroupKind.FULL, 16, 4096),))
    stream = EventStream(layout, Index([(0, 1, 0)], 16, [8], 1, 0, 0))
    copies = np.zeros(1000, np.dtype([("group", "u2"), ("depth", "i4")]))
    copies["depth"] = np.arange(1000)
    for seed in range(NAMED // 1000 + 3):
        stream.name_copies(prompt(16_000, seed * 16_000), copies)
    assert len(stream._names) == NAMED


def test_no_event_unless_asked_for() -> None:
    """A planner that was made without events says nothing and keeps nothing."""
    planner = Planner(one_group(), Config(host_bytes=0))
    assert planner.take_events() == []
    planner.attach(0, Inventory((8,), 4, 1, 0))
    assert planner.take_events() == []
    assert PlannerConnector(planner).take_events() == []


class _Request:
    """An engine's request over a chain with tokens."""

    def __init__(self, world_request: object, chain: Chain) -> None:
        self.info, self.chain = world_request, chain
        self.tokens = self.prompt = chain.tokens


def test_connector_hands_on_events() -> None:
    """An engine drains the events of its connector after each step."""
    planner = Planner(one_group(), Config(host_bytes=0), events=True)
    connector = PlannerConnector(planner)
    connector.attach(0, Inventory((8,), 4, 1, 0))
    request: EngineRequest = _Request(RequestInfo("a"), prompt(96))  # type: ignore[assignment]
    plans = connector.step([Scheduled(request, 96, [np.arange(6, dtype=np.int32)])], 0.0)
    assert connector.take_events() == []
    connector.update([Outcome(job.id, 0) for job in plans.jobs])
    (event,) = connector.take_events()
    assert isinstance(event, Stored)
    assert event.tokens == tuple(range(96))


def test_events_are_values() -> None:
    """Events compare by content and cannot be changed."""
    event = Removed("host", 0, (b"k" * 16,))

    assert event == Removed("host", 0, (b"k" * 16,)) != replace(event, medium="disk")
    with pytest.raises(FrozenInstanceError):
        event.group = 1  # type: ignore[misc]


def test_what_reaches_a_disk_that_is_off_is_told_when_it_is_back() -> None:
    """A write that ends while disk is off makes nothing visible; the listing after the switch has it."""
    index = Index([(0, 1, 0)], 16, [8], 1, 1, 1)
    stream = EventStream(Layout(16, (CacheGroup(0, GroupKind.FULL, 16, 4096),)), index)
    segment, keys = index.open_segment(0.0), prompt(32).keys
    copies, *_ = index.offer(segment, keys, [0], [2], [np.arange(2, dtype=np.int32)])
    index.complete_store(copies, None)
    writes = index.next_writes(2)
    assert [type(e) for e in stream.take(True)] == [Stored, Stored]
    index.set_online(1, False)
    assert isinstance(stream.take(False)[0], Cleared)
    index.complete_write(writes, None)
    assert stream.take(False) == []
    index.set_online(1, True)
    back = stream.take(True)
    assert back[0] == Cleared()
    assert sum(len(e.keys) for e in stored(back, "disk")) == 2
