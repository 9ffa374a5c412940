"""The index against its model: any sequence of calls, several groups, tiny tiers, failures, resets."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvoffload.events import EventStream
from kvoffload.index import ChangeKind, Code, EntryFlag, Index, Matcher
from kvoffload.layout import CacheGroup, GroupKind, Layout
from kvoffload.messages import CopyFlag, Status
from kvoffload.testing.event_reader import EventReader, visible
from kvoffload.testing.index_model import IndexModel

LAYOUTS = (
    ((0, 1, 0),),
    ((0, 1, 0), (1, 2, 3)),
    ((0, 2, 0), (1, 1, 2), (2, 4, 0)),
)
BLOCKS = 12
TREE = (
    (0,) * BLOCKS,
    (0, 0, 0, 0, 1) + (0,) * 7,
    (0, 0, 1) + (0,) * 9,
    (1,) * BLOCKS,
    (1, 1, 1, 1, 1, 1, 0) + (1,) * 5,
)
PATHS = st.builds(lambda path, cut: path[: BLOCKS - cut], st.sampled_from(TREE), st.integers(0, BLOCKS - 1))


def chain(path):
    """Keys of a path through the prefix tree: each names everything before it."""
    names = [hashlib.sha256(bytes(path[: i + 1])).digest()[:16] for i in range(len(path))]
    return np.frombuffer(b"".join(names), np.uint8).reshape(-1, 16)


class IndexMachine(RuleBasedStateMachine):
    """Same calls on both; the model asserts inside, the invariant compares what is left."""

    @initialize(
        layout=st.sampled_from(LAYOUTS),
        data=st.data(),
        host=st.integers(1, 5),
        transit=st.integers(0, 3),
        disk=st.integers(0, 7),
        admission=st.sampled_from((1, 1, 1, 2, 0)),
        bound=st.integers(1, 6),
    )
    def start(self, layout, data, host, transit, disk, admission, bound):
        slots = [data.draw(st.integers(1, 3)) for _ in layout]
        self.layout = layout
        self.index = Index(
            layout, 1, slots, host, transit, disk, disk_admission=admission, max_pending_writes=bound
        )
        self.model = IndexModel(
            layout, slots, (host, transit, disk), disk_admission=admission, max_pending=bound
        )
        self.jobs = []
        self.stamp, self.codes = 0, {}
        groups = [CacheGroup(i, GroupKind(k), m, 64, lookback=b) for i, (k, m, b) in enumerate(layout)]
        self.stream = EventStream(Layout(1, tuple(groups)), self.index, listed=3)
        self.reader = EventReader(Layout(1, tuple(groups)))
        self.matchers = [Matcher(self.index) for _ in range(3)]

    def spans(self, data, path):
        """Begins, ends and pages of every group; mostly the whole chain."""
        begins, ends, pages = [], [], []
        for _, multiple, _ in self.layout:
            blocks = len(path) // multiple
            end = data.draw(st.integers(0, blocks)) if data.draw(st.booleans()) else blocks
            begins.append(data.draw(st.sampled_from((0, 0, min(1, end), end))))
            ends.append(end)
            absent = data.draw(st.sampled_from((0, 0, 0, 1, 5)))
            pages.append(np.array([-1 if absent >> i & 1 else 100 + i for i in range(end)], np.int32))
        return begins, ends, pages

    def segment(self, data):
        """An open segment, a new one now and then."""
        if not self.model.open or data.draw(st.integers(0, 3)) == 0:
            segment = self.index.open_segment(0.0)
            self.model.open_segment(segment)
            return segment
        return data.draw(st.sampled_from(sorted(self.model.open)))

    def began(self, kind, copies):
        if len(copies):
            self.jobs.append((kind, copies))

    @rule(data=st.data(), path=PATHS)
    def offer(self, data, path):
        segment, keys = self.segment(data), chain(path)
        begins, ends, pages = self.spans(data, path)
        copies, *answer = self.index.offer(segment, keys, begins, ends, pages)

        self.began("store", copies)
        self.stream.name_copies(SimpleNamespace(keys=keys), copies)

        assert tuple(answer) == self.model.offer(segment, keys, begins, ends, pages, copies)

    @rule(data=st.data(), path=PATHS, transit=st.integers(0, 3))
    def load(self, data, path, transit):
        segment, keys = self.segment(data), chain(path)
        begins, ends, pages = self.spans(data, path)
        copies, reach = self.index.begin_load(segment, keys, begins, ends, pages, transit)
        self.began("load", copies)

        assert reach == self.model.begin_load(segment, keys, (begins, ends), pages, transit, copies)

    @rule(data=st.data(), path=PATHS)
    def read(self, data, path):
        segment, keys = self.segment(data), chain(path)
        begins, ends, _ = self.spans(data, path)
        copies = self.index.begin_read(segment, keys, begins, ends)
        self.began("load", copies)

        self.model.begin_read(segment, keys, (begins, ends), copies)

    @rule(data=st.data(), path=PATHS)
    def retire(self, data, path):
        segment, keys = self.segment(data), chain(path)
        begins, ends, _ = self.spans(data, path)
        call = data.draw(st.sampled_from(("retire", "supersede", "supersede")))
        counts = [getattr(side, call)(segment, keys, begins, ends) for side in (self.index, self.model)]

        assert counts[0] == counts[1]

    @rule(limit=st.integers(0, 4))
    def write(self, limit):
        copies = self.index.next_writes(limit)
        self.began("write", copies)

        self.model.next_writes(limit, copies)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), fails=st.sampled_from((False, False, True)))
    def end_job(self, data, fails):
        which = data.draw(st.integers(0, len(self.jobs) - 1))
        count = len(self.jobs[which][1])
        self.end(which, [data.draw(st.sampled_from(Status)) for _ in range(count)] if fails else None)

    @rule()
    def end_all(self):
        """Everything in flight ends well, writes included: the way into states with room to evict."""
        while self.jobs:
            self.end(0, None)
            if not self.jobs:
                self.write(100)

    def end(self, which, statuses):
        kind, copies = self.jobs.pop(which)
        given = None if statuses is None else np.array(statuses, np.uint8)
        statuses = [Status.OK] * len(copies) if statuses is None else statuses
        for side, status in ((self.index, given), (self.model, statuses)):
            {"store": side.complete_store, "write": side.complete_write, "load": side.complete_load}[kind](
                copies, status
            )
        goes_on = (copies["flags"] & CopyFlag.TRANSIT != 0) & (np.array(statuses) == Status.OK)
        if kind == "store":
            self.began("write", copies[goes_on].copy())

    @precondition(lambda self: any(kind == "load" for kind, _ in self.jobs))
    @rule(data=st.data())
    def ready(self, data):
        _, copies = data.draw(st.sampled_from([j for j in self.jobs if j[0] == "load"]))
        before = copies.copy()

        assert self.index.ready(copies) == self.model.ready(before, copies)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def expire(self, data):
        _, copies = self.jobs[data.draw(st.integers(0, len(self.jobs) - 1))]
        self.index.expire(copies)
        self.model.expire(copies)

    @precondition(lambda self: self.model.open)
    @rule(data=st.data())
    def close(self, data):
        segment = data.draw(st.sampled_from(sorted(self.model.open)))
        self.index.close_segment(segment, 0, 0.0)
        self.model.close_segment(segment)

    @rule(tier=st.integers(0, 1), likely=st.integers(0, 5))
    def reset(self, tier, likely):
        if likely == 3:
            self.index.reset(tier)
            self.model.reset(tier)

    @rule(online=st.booleans())
    def switch(self, online):
        self.index.set_online(1, online)
        self.model.online = online

    @rule(which=st.integers(0, 2), path=PATHS, computed=st.integers(0, BLOCKS))
    def match(self, which, path, computed):
        computed = min(computed, len(path))
        keys = chain(path)
        matcher, fresh = self.matchers[which], Matcher(self.index)

        assert matcher.update(keys, computed) == fresh.update(keys, computed)
        for group, (_, multiple, _) in enumerate(self.layout):
            codes = [
                self.visible().get((group, keys[i].tobytes()), 0)
                for i in range(multiple - 1, len(keys), multiple)
            ]
            assert matcher.codes(group).tolist() == codes

    def visible(self):
        """(group, key) -> code of every block in the model."""
        return {name: self.code(block) for name, block in self.model.table.items()}

    def code(self, block):
        bits = {
            EntryFlag.HOST_VALID: Code.HOST,
            EntryFlag.DISK_VALID: Code.DISK if self.model.online else Code(0),
            EntryFlag.PENDING: Code.PENDING,
            EntryFlag.LOADING: Code.LOADING,
        }
        return int(sum(code for flag, code in bits.items() if flag in block.flags))

    @invariant()
    def same(self):
        self.index.check_integrity()
        names = ("host", "disk", "segment", "depth", "group", "pins", "flags")
        rows = [(e["key"].tobytes(), *(int(e[n]) for n in names)) for e in self.index.entries()]
        assert rows == self.model.rows()
        for tier in (0, 1):
            usage = self.index.usage(tier)
            arena = self.model.arena[tier]
            assert usage["slabs_unowned"] == arena.slabs - len(arena.owners())
            for group, row in enumerate(usage["groups"]):
                used = [b for b in arena.used.values() if b.group == group]
                assert row["used"] == len(used)
                assert row["free"] == arena.free(group)
                assert row["pinned"] == sum(b.pins > 0 for b in used)
        queued, writing = self.index.pending_writes()
        assert queued == len(self.model.queue)
        assert writing == sum(EntryFlag.DISK_BUSY in b.flags for b in self.model.arena[1].used.values())

    @invariant()
    def changes_tell_all(self):
        self.stamp, changes = self.index.changes(self.stamp)
        if changes is None:
            self.codes = {n: c for n, c in self.visible().items() if c}
        else:
            for c in changes:
                name, code = (int(c["group"]), c["key"].tobytes()), int(c["code"])
                if c["kind"] == ChangeKind.STORED:
                    assert code & (Code.HOST, Code.DISK)[c["tier"]] or not self.model.online
                self.codes[name] = code
        assert {n: c for n, c in self.codes.items() if c} == {n: c for n, c in self.visible().items() if c}

    @invariant()
    def events_tell_what_is_visible(self):
        self.reader.apply(self.stream.take(self.model.online))
        if not self.stream.listing:
            assert self.reader.places == visible(self.index, self.model.online)

    def teardown(self):
        """At idle nothing is pinned and every slot in use is visible."""
        for kind, copies in self.jobs:
            end = {"store": self.index.complete_store, "write": self.index.complete_write}
            status = np.full(len(copies), Status.NOT_DONE, np.uint8)
            end.get(kind, self.index.complete_load)(copies, status)
        if self.jobs:
            self.index.check_integrity()
            for tier in (0, 1):
                assert all(g["pinned"] == g["pending"] == 0 for g in self.index.usage(tier)["groups"])
            assert self.index.pending_writes()[1] == 0


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(
    max_examples=80,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
