"""A reader of KV events as a router keeps one: what it believes to be where, by applying events in order."""

from __future__ import annotations

from collections.abc import Iterable

from kvoffload.events import MEDIA, Cleared, Event, Removed, Stored
from kvoffload.index import EntryFlag, Index
from kvoffload.layout import Layout

Place = tuple[str, int, bytes]
"""(medium, group, key)."""


class EventReader:
    """places: all blocks it believes in. Raises AssertionError for an event that cannot be true of `layout`."""

    def __init__(self, layout: Layout) -> None:
        self._groups = layout.groups
        self.places: set[Place] = set()

    def apply(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Cleared):
                self.places.clear()
            elif isinstance(event, Removed):
                assert event.keys, event
                self.places -= {(event.medium, event.group, key) for key in event.keys}
            else:
                self._stored(event)

    def _stored(self, event: Stored) -> None:
        size = self._groups[event.group].tokens_per_block
        assert event.keys, event
        assert event.tokens_per_block == size, event
        assert len(event.tokens) in (0, size * len(event.keys)), event
        assert event.first > 0 or event.parent is None, event
        self.places |= {(event.medium, event.group, key) for key in event.keys}


def visible(index: Index, disk_on: bool) -> set[Place]:
    """What an index shows: the truth that a reader is held against."""
    found = set()
    for entry in index.entries():
        flags, block = int(entry["flags"]), (int(entry["group"]), entry["key"].tobytes())
        if flags & EntryFlag.HOST_VALID:
            found.add((MEDIA[0], *block))
        if flags & EntryFlag.DISK_VALID and disk_on:
            found.add((MEDIA[1], *block))
    return found
