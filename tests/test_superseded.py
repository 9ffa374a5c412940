"""Whose window goes when there is no room: brute force over drawn sessions, in the plainest words."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

import numpy as np
import pytest

from kvoffload.index import Index

SLIDING, WINDOW, RANGE = 1, 3, 64
SESSIONS = 5


def keys_of(session: int) -> np.ndarray:
    """The chain of a session that never shares a block with another."""
    names = [hashlib.sha256(f"{session} {i}".encode()).digest()[:16] for i in range(RANGE * (session + 1))]
    return np.frombuffer(b"".join(names), np.uint8).reshape(-1, 16)


CHAINS = [keys_of(session) for session in range(SESSIONS)]
Name = tuple[int, int]
"""(session, depth). Sessions lie at depths of their own, so that no two blocks lie at one."""


@dataclass
class Block:
    """turn: when it was last used. superseded: a boundary was left behind, and nobody has used it since."""

    turn: int
    superseded: bool = False
    pinned: bool = False


class Plain:
    """The rule: of what is superseded the deepest goes; then of the turn that is longest ago its deepest block. Never
    one that is being copied, nor what the newcomer continues."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.blocks: dict[Name, Block] = {}
        self.turn = 0

    def use(self, session: int, begin: int, end: int, again: int = 0) -> list[Name]:
        """A turn that has these blocks on the device; those that are stored. again: it is the turn of that number,
        which goes on, with all that it used before; not so if nothing may go for its first block but what it used
        itself, for then it has been longest ago and is refused as it stands."""
        names = [(session, depth) for depth in range(begin, end)]
        full = len(self.blocks) == self.room and names[0] not in self.blocks
        self.turn += 1
        if full and self.victim(names[0], again or self.turn) is None:
            return []
        for block in self.blocks.values():
            if block.turn == again and not block.superseded:
                block.turn = self.turn
        for name in names:
            if name in self.blocks:
                self.blocks[name].turn, self.blocks[name].superseded = self.turn, False
        stored: list[Name] = []
        for name in names:
            if name in self.blocks:
                continue
            if len(self.blocks) == self.room:
                victim = self.victim(name, self.turn)
                if victim is None:
                    break
                del self.blocks[victim]
            self.blocks[name] = Block(self.turn, pinned=True)
            stored.append(name)
        return stored

    def victim(self, newcomer: Name, its_turn: int) -> Name | None:
        return self.first_superseded(newcomer) or self.longest_ago(newcomer, its_turn)

    def may_go(self, name: Name, newcomer: Name) -> bool:
        continued = name[0] == newcomer[0] and name[1] <= newcomer[1]
        return not self.blocks[name].pinned and not continued

    def first_superseded(self, newcomer: Name) -> Name | None:
        left = [n for n, block in self.blocks.items() if block.superseded and self.may_go(n, newcomer)]
        return max(left, key=lambda n: n[1], default=None)

    def longest_ago(self, newcomer: Name, its_turn: int) -> Name | None:
        """The end of a turn's blocks stands for it: what lies before is not given up before it."""
        kept = {n: block.turn for n, block in self.blocks.items() if not block.superseded}
        for turn in sorted(set(kept.values())):
            end = max((n for n in kept if kept[n] == turn), key=lambda n: n[1])
            if turn == its_turn:
                return end if not self.blocks[end].pinned and end[1] > newcomer[1] else None
            if self.may_go(end, newcomer):
                return end
        return None


class Real:
    """The same calls on the index."""

    def __init__(self, room: int) -> None:
        self.index = Index([(SLIDING, 1, WINDOW)], 1, [8], -(-room // 8), 0, 0, host_slots=room)

    def use(self, session: int, begin: int, end: int, segment: int | None) -> tuple[int, np.ndarray]:
        segment = self.index.open_segment(0.0) if segment is None else segment
        pages = [np.arange(end, dtype=np.int32)]
        copies, *_ = self.index.offer(segment, CHAINS[session], [begin], [end], pages)
        return segment, copies

    def there(self) -> set[bytes]:
        return {e["key"].tobytes() for e in self.index.entries() if e["host"] >= 0}


class Both:
    """Index and rule, call by call; every difference is an AssertionError."""

    def __init__(self, room: int) -> None:
        self.plain, self.real = Plain(room), Real(room)
        self.running: list[tuple[int, np.ndarray, list[Name]]] = []

    def use(self, session: int, end: int, again: tuple[int, int] | None = None) -> int:
        """A turn that ends there and has its window on the device; its segment, still open. again: (segment, number)
        of a turn that goes on."""
        begin = max(end - WINDOW, 0)
        segment, copies = self.real.use(session, begin, end, again[0] if again else None)
        stored = self.plain.use(session, begin, end, again[1] if again else 0)
        assert [c["key"].tobytes() for c in copies] == [CHAINS[s][d].tobytes() for s, d in stored]
        self.running.append((session, copies, stored))
        self.compare()
        return segment

    def supersede(self, segment: int, session: int, begin: int, end: int) -> None:
        count = self.real.index.supersede(segment, CHAINS[session], [begin], [end])
        names = [(session, depth) for depth in range(begin, end)]
        left = [n for n in names if n in self.plain.blocks and not self.plain.blocks[n].superseded]
        for name in left:
            self.plain.blocks[name].superseded = True
        assert count == len(left)

    def close(self, segment: int) -> None:
        self.real.index.close_segment(segment, 0, 0.0)

    def end_copies(self, number: int) -> None:
        """One of the running stores ends."""
        _, copies, stored = self.running.pop(number)
        self.real.index.complete_store(copies, None)
        for name in stored:
            self.plain.blocks[name].pinned = False
        self.compare()

    def compare(self) -> None:
        assert self.real.there() == {CHAINS[s][d].tobytes() for s, d in self.plain.blocks}


def play(seed: int, turns: int) -> Plain:
    """Sessions whose turns grow, leave boundaries behind, come back to earlier ones, with stores under way."""
    draw = random.Random(seed)
    both = Both(draw.randint(4, 24))
    ends: list[list[int]] = [[] for _ in range(SESSIONS)]
    open_turns: dict[int, tuple[int, int]] = {}
    for _ in range(turns):
        session = draw.randrange(SESSIONS)
        for number in reversed(range(len(both.running))):
            if both.running[number][0] == session or draw.random() < 0.5:
                both.end_copies(number)
        mine = ends[session]
        if session in open_turns:  # its answer grows
            mine[-1] = min(mine[-1] + draw.randint(0, 2), RANGE * (session + 1))
            segment = both.use(session, mine[-1], open_turns.pop(session))
            both.close(segment)
            continue
        if mine and draw.random() < 0.3:
            both.close(both.use(session, draw.choice(mine)))
            continue
        low = mine[-1] if mine else RANGE * session
        end = min(low + draw.randint(1, 6), RANGE * (session + 1))
        segment = both.use(session, end)
        number = both.plain.turn
        if mine and draw.random() < 0.8:
            begin, last = max(mine[-1] - WINDOW, 0), mine[-1]
            both.supersede(segment, session, begin, max(min(last, end - WINDOW), begin))
        elif draw.random() < 0.2:  # its own, while they are copied
            both.supersede(segment, session, max(end - WINDOW, 0), end)
        mine.append(end)
        if draw.random() < 0.5:
            open_turns[session] = segment, number
        else:
            both.close(segment)
    while both.running:
        both.end_copies(0)
    both.real.index.check_integrity()
    return both.plain


@pytest.mark.parametrize("seed", range(200))
def test_what_is_superseded_goes_first_and_then_what_was_used_longest_ago(seed: int) -> None:
    """After every turn and every copy the index holds exactly the blocks that the plain rule holds."""
    play(seed, 60)
