"""The planner against ranks that disagree, late and malformed reports, resets beside running jobs, reused names."""

from __future__ import annotations

import random
from pathlib import Path

import msgpack
import numpy as np
import pytest

from kvoffload.config import Config
from kvoffload.errors import TierError
from kvoffload.index import Index
from kvoffload.inflight import InFlight
from kvoffload.layout import CacheGroup, GroupKind, Layout
from kvoffload.messages import (
    COPY_DTYPE,
    RECORD_DTYPE,
    Geometry,
    Inventory,
    Job,
    JobKind,
    Outcome,
    Plans,
    Status,
    decode,
    encode,
)
from kvoffload.null_mover import NullMover
from kvoffload.planner import ExactSlots, Planner
from kvoffload.requests import RequestInfo
from kvoffload.stores import WriteBudget
from kvoffload.testing.faults import Failing, Gated, Op
from kvoffload.testing.rig import Keys, Rig, Sizes, one_group


def ids(count: int, start: int = 0) -> list[int]:
    return list(range(start, start + count))


def on_disk(ranks: int = 1) -> tuple[Planner, Keys]:
    """A planner of which 4 blocks are on disk only, and nothing runs."""
    planner = Planner(one_group(), Config(), ranks=ranks, exact=ExactSlots(host=4))
    movers = [NullMover(rank) for rank in range(ranks)]
    for rank in range(ranks):
        planner.attach(rank, Inventory((8,), 1, 1, 4))
    chain = Keys.of(ids(4))
    for number, keys in enumerate((chain, Keys.of(ids(4, 100)))):
        planner.offer(RequestInfo(-1 - number), keys, 64, [np.arange(4, dtype=np.int32)])
        while not planner.idle or planner.backlog()[0]:
            plans = planner.tick(0.0)
            for mover in movers:
                mover.submit(plans)
            planner.complete([o for m in movers for o in m.poll()])
        planner.finish(-1 - number, "end_turn", 0.0)
    return planner, chain


def begin_load(planner: Planner, chain: Keys) -> Job:
    request = RequestInfo("r")
    assert planner.match(request, chain).disk == 4
    assert planner.load(request, chain, 64, [np.arange(4, dtype=np.int32)]).blocks == 4
    (job,) = planner.tick(0.0).jobs
    return job


def host_blocks(planner: Planner, chain: Keys) -> int:
    return planner.match(RequestInfo("later"), chain).host


def test_a_block_that_one_rank_never_read_is_not_in_host() -> None:
    """Past the deadline rank 0 reports a failed device copy after a good read, rank 1 that it had not begun."""
    for first, second in ((0, 1), (1, 0)):
        planner, chain = on_disk(ranks=2)
        job = begin_load(planner, chain)
        assert planner.tick(1000.0).cancels == (job.id,)
        status = [np.full(4, Status.COPY_FAILED, np.uint8), np.full(4, Status.NOT_DONE, np.uint8)]
        planner.complete([Outcome(job.id, first, status[first])])
        (finished,) = planner.complete([Outcome(job.id, second, status[second])])
        assert (finished.boundary, finished.expired) == (0, True)
        assert host_blocks(planner, chain) == 0
        planner.check_integrity()
        assert planner.pinned() == 0


@pytest.mark.parametrize("status", [[0], [0, 0, 0, 0, 0], [], [0, 0, 0, 4], [255] * 4, [[0, 0], [0, 0]]])
def test_a_report_that_does_not_fit_its_job_is_a_failure(status: list[int]) -> None:
    """A status of another length, shape or value: the job ends, no block becomes visible, nothing stays pinned."""
    for both in (True, False):
        planner, chain = on_disk(ranks=2)
        job = begin_load(planner, chain)
        bad = np.array(status, np.uint8)
        reports = [Outcome(job.id, 0, np.full(4, Status.COPY_FAILED, np.uint8) if both else None)]
        (finished,) = planner.complete([*reports, Outcome(job.id, 1, bad)])
        assert finished.boundary == 0
        assert "rank 1" in finished.error
        assert host_blocks(planner, chain) == 0
        planner.check_integrity()
        assert planner.pinned() == 0


def test_a_report_counts_for_its_rank_only_once_also_after_a_retry() -> None:
    """Both ranks report a failure; late copies of these reports do not end the retry."""
    planner, chain = on_disk(ranks=2)
    job = begin_load(planner, chain)
    failed = [Outcome(job.id, rank, np.full(4, Status.COPY_FAILED, np.uint8)) for rank in (0, 1)]
    assert planner.complete(failed) == []
    assert planner.complete(failed * 2) == []
    (again,) = planner.tick(0.0).jobs
    assert again.id != job.id
    (finished,) = planner.complete(
        [Outcome(again.id, 1), Outcome(again.id, 1), *failed, Outcome(again.id, 0)]
    )
    assert (finished.boundary, finished.failed) == (64, 0)
    planner.check_integrity()
    assert planner.pinned() == 0


def test_a_load_of_which_nothing_could_begin_ends() -> None:
    """The engine gives no page for a window: the load has nothing to copy and finishes with the next step."""
    layout = Layout(16, (CacheGroup(0, GroupKind.SLIDING, 16, 4096, lookback=32, layers=("a",)),))
    with Rig(layout=layout) as rig:
        chain = Keys.of(ids(4))
        rig.store(chain)
        info = rig.info()
        assert rig.planner.match(info, chain).boundary == 64
        plan = rig.planner.load(info, chain, 64, [np.empty(0, np.int32)])
        finished = rig.local.step()
        assert [f.request for f in finished if f.id == plan.id] == ([info.id] if plan.id else [])
        assert rig.planner.finish(info.id, "end_turn", 0.0) == ()
        rig.check()


def test_a_gone_request_begins_no_further_burst(tmp_path: Path) -> None:
    """The fifth load of a chain longer than host waits for transit and is aborted: no page of its rest is written."""
    gate = Gated([Op.TO_DEVICE])
    with Rig(Sizes(host=1, transit=1, disk=16), path=tmp_path, copy_faults=[gate]) as rig:
        chain = Keys.of(ids(40))
        rig.store(chain)
        rig.wipe()
        infos, plans = [rig.info() for _ in range(5)], []
        for number, info in enumerate(infos):
            found = rig.planner.match(info, chain)
            plans.append(rig.planner.load(info, chain, found.boundary, rig.pages(chain, 40 * number)))
        assert plans[0].blocks == 40
        assert 0 < plans[4].blocks < 40
        rig.local.step()
        assert plans[4].id in rig.planner.finish(infos[4].id, "abort", 0.0)
        gate.release()
        finished = {f.id: f for f in rig.local.drain()}
        assert finished[plans[4].id].request is None
        assert [finished[p.id].boundary for p in plans[:4]] == [640] * 4
        assert rig.memory[0].arrays[0][0][160:200].any(axis=1).sum() == plans[4].blocks
        rig.check()


def test_a_failed_store_is_offered_again_in_every_group() -> None:
    """All copies of a first store fail: the next offer names the same blocks, in groups of 1, 2 and 3 base blocks."""
    groups = tuple(CacheGroup(g, GroupKind.FULL, 16 * (g + 1), 4096, layers=("a",)) for g in range(3))
    fault = Failing(calls={1}, ops=[Op.TO_HOST])
    with Rig(layout=Layout(16, groups), copy_faults=[fault]) as rig:
        chain = Keys.of(ids(12))
        info, pages = rig.info(), rig.pages(chain)
        rig.paint(chain, pages)
        assert rig.planner.offer(info, chain, 96, pages).blocks == 6 + 3 + 2
        (finished,) = rig.local.drain()
        assert finished.failed == 11
        assert rig.planner.offer(info, chain, 192, pages).blocks == 12 + 6 + 4
        rig.local.drain()
        rig.planner.finish(info.id, "end_turn", 0.0)
        assert rig.load(chain)[2] == 0
        assert rig.match(chain).boundary == 192
        rig.check()


def test_a_preempted_request_loads_from_its_start() -> None:
    """What was computed before a preemption is gone: without another match a load covers all of the prefix."""
    with Rig() as rig:
        chain = Keys.of(ids(8))
        rig.store(chain)
        rig.wipe()
        info, pages = rig.info(), rig.pages(chain, 64)
        rig.planner.match(info, chain, computed=64)
        assert rig.planner.preempt(info.id) == ()
        assert rig.planner.load(info, chain, 128, pages).blocks == 8
        rig.local.drain()
        assert rig.mismatches(chain, pages, 0, 8) == 0
        rig.planner.finish(info.id, "end_turn", 0.0)


def test_the_store_of_an_ended_request_is_not_told_to_its_namesake() -> None:
    """A request ends while its store runs, and its id is used again: the store finishes for nobody."""
    planner = Planner(one_group(), Config())
    planner.attach(0, Inventory((8,), 1, 1, 0))
    pages = [np.arange(4, dtype=np.int32)]
    old, new = Keys.of(ids(4)), Keys.of(ids(4, 50))
    planner.offer(RequestInfo("r"), old, 64, pages)
    (job,) = planner.tick(0.0).jobs
    assert planner.finish("r", "abort", 0.0) == (job.id,)
    planner.match(RequestInfo("r"), new)
    (finished,) = planner.complete([Outcome(job.id, 0)])
    assert finished.request is None


def test_a_reset_before_the_ranks_attach_forgets_what_disk_holds(tmp_path: Path) -> None:
    """Blocks of an earlier process are not visible after a reset that came before the last attach, and stay gone."""
    sizes = Sizes(host=2, transit=1, disk=4)
    chain = Keys.of(ids(4))
    with Rig(sizes, path=tmp_path) as rig:
        rig.store(chain)
        rig.local.drain()
    with Rig(sizes, path=tmp_path) as rig:
        assert rig.match(chain).boundary == 64
        inventory = Inventory((8,), 2, 1, 4, rig.movers[0]._tier.records())  # type: ignore[union-attr]
    planner = Planner(one_group(), Config())
    planner.reset(("disk",))
    planner.attach(0, inventory)
    assert planner.match(RequestInfo(1), chain).boundary == 0
    assert planner.tick(0.0).reset_disk


@pytest.mark.parametrize("when", ["store held", "write held", "write unsent"])
def test_after_a_reset_no_older_block_reaches_the_disk(tmp_path: Path, when: str) -> None:
    """Reset while a store by transit, or its write, is under way: a later start finds none of its blocks."""
    sizes = Sizes(host=1, transit=2, disk=8)
    gate = Gated([Op.TO_HOST if when == "store held" else Op.WRITE], is_open=when == "write unsent")
    faults = {"copy_faults" if when == "store held" else "tier_faults": [gate]}
    chain = Keys.of(ids(20))
    with Rig(sizes, path=tmp_path, **faults) as rig:  # type: ignore[arg-type]
        info, pages = rig.info(), rig.pages(chain)
        rig.paint(chain, pages)
        assert rig.planner.offer(info, chain, 320, pages).blocks == 20
        plans, (mover,) = rig.planner.tick(0.0), rig.movers
        mover.submit(plans)
        if when == "write unsent":
            assert mover.wait([job.id for job in plans.jobs], 30.0)
            assert rig.planner.complete(mover.poll())
        while when != "write unsent" and not gate.arrived(0.01):
            rig.local.step()
        rig.planner.reset(("host", "disk"))
        rig.local.step()
        gate.release()
        rig.local.drain()
        rig.planner.finish(info.id, "end_turn", 0.0)
        assert not rig.codes(chain).any()
        rig.check()
    with Rig(sizes, path=tmp_path) as rig:
        assert not rig.codes(chain).any()


def test_a_reset_that_could_not_be_saved_does_not_bring_its_blocks_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks written after a reset without durable manifest stay invalid, also after the next reset."""
    sizes, chain = Sizes(host=2, transit=1, disk=4), Keys.of(ids(4))
    with Rig(sizes, path=tmp_path) as rig:
        tier = rig.movers[0]._tier
        assert tier is not None

        def full(*args: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("kvoffload.tiers.disk.save_manifest", full)
            with pytest.raises(TierError, match="will not outlive"):
                tier.reset()
        rig.store(chain)
        assert rig.match(chain).boundary == 64
    with Rig(sizes, path=tmp_path) as rig:
        rig.planner.reset(("disk",))
        rig.local.drain()
    with Rig(sizes, path=tmp_path) as rig:
        assert not rig.codes(chain).any()


def test_pins_do_not_overflow_when_a_block_with_all_its_pins_is_written() -> None:
    """4,095 loads of one block, which then is due for its write: the write waits for one of them to end."""
    index = Index([(0, 1, 0)], 16, [8], 1, 1, 1)
    keys, pages = Keys.of([1]).keys, [np.zeros(1, np.int32)]
    segment = index.open_segment(0.0)
    copies = index.offer(segment, keys, [0], [1], pages)[0]
    index.complete_store(copies, None)
    loads = [index.begin_load(segment, keys, [0], [1], pages, 1)[0] for _ in range(4095)]
    assert all(len(c) == 1 for c in loads)
    assert len(index.begin_load(segment, keys, [0], [1], pages, 1)[0]) == 0
    assert len(index.next_writes(8)) == 0
    index.check_integrity()
    index.complete_load(loads.pop(), None)
    write = index.next_writes(8)
    assert len(write) == 1
    for copies in loads:
        index.complete_load(copies, None)
    index.complete_write(write, None)
    index.check_integrity()
    assert index.usage(0)["groups"][0]["pinned"] == 0


def test_unsent_jobs_can_be_taken_back_by_kind() -> None:
    """Only unsent jobs of the kind go; reports about them are reports of unknown jobs."""
    inflight = InFlight(1)
    empty = np.empty(0, COPY_DTYPE)
    sent = inflight.add(JobKind.WRITE, empty, 1.0)
    inflight.take_unsent(0.0)
    store, write = inflight.add(JobKind.STORE, empty, 1.0), inflight.add(JobKind.WRITE, empty, 1.0)
    assert inflight.drop_unsent(JobKind.WRITE) == [write]
    assert [j.id for j in inflight.take_unsent(0.0)] == [store.job.id]
    assert inflight.report(Outcome(write.job.id, 0)) is None
    assert [r.job.id for r in inflight.expired(2.0)] == [sent.job.id, store.job.id]


def test_a_block_in_another_slot_on_another_rank_is_not_restored() -> None:
    """After a start only what lies in the same slot, under the same key and group, on every rank is visible."""
    chain = Keys.of(ids(4))
    records = np.zeros(4, RECORD_DTYPE)
    records["key"], records["slot"], records["depth"], records["seq"] = chain.keys, range(4), range(4), 7
    moved = records.copy()
    moved["slot"][2:] = [3, 2]
    planner = Planner(one_group(), Config(), ranks=2)
    planner.attach(0, Inventory((8,), 1, 1, 1, records))
    planner.attach(1, Inventory((8,), 1, 1, 1, moved))
    assert planner.match(RequestInfo(1), chain).disk == 2
    planner.check_integrity()


def test_an_overdrawn_write_budget_allows_no_block() -> None:
    """Writes by transit are spent after the fact: below zero nothing may be written, and nothing is asked for."""
    budget = WriteBudget(1 << 20)
    budget.refill(0.0)
    budget.spend(3 << 20)
    assert budget.blocks(4096) == 0
    budget.refill(3600.0 * 2.5)
    assert budget.blocks(4096) == 128
    assert WriteBudget(1 << 20).blocks(0) > 0


def test_deadlines_of_ended_jobs_do_not_pile_up() -> None:
    """10,000 jobs end long before their deadlines: what is remembered stays small."""
    inflight, empty = InFlight(1), np.empty(0, COPY_DTYPE)
    for number in range(10_000):
        running = inflight.add(JobKind.WRITE, empty, 1e9)
        assert inflight.report(Outcome(running.job.id, 0)) is None, "not sent yet"
        inflight.take_unsent(0.0)
        assert inflight.report(Outcome(running.job.id, 0)) is running
        if number % 10 == 0:
            assert inflight.expired(0.0) == []
    assert len(inflight._deadlines) <= 80


def _messages(chance: random.Random) -> list[object]:
    n = chance.randrange(4)
    copies = np.frombuffer(chance.randbytes(n * COPY_DTYPE.itemsize), COPY_DTYPE).copy()
    records = np.frombuffer(chance.randbytes(n * RECORD_DTYPE.itemsize), RECORD_DTYPE).copy()
    job = Job(chance.randrange(1 << 40), chance.choice(list(JobKind)), copies)
    geometry = Geometry((1, 65536), 3, 1, 32768)
    status = chance.choice([None, np.frombuffer(chance.randbytes(n), np.uint8).copy()])
    return [
        job,
        geometry,
        Plans((job,) * n, (1, 2)[:n], chance.choice([None, geometry]), chance.random() < 0.5),
        Outcome(7, 3, status, chance.choice(["", "\u00e9\n"]), chance.random() < 0.5),
        Inventory((1,), 2, 3, 4, records),
    ]


def test_every_message_survives_its_encoding() -> None:
    """decode(encode(m)) says the same, whatever is empty or None in it; arrays come back writeable."""
    for seed in range(50):
        for message in _messages(random.Random(seed)):
            data = encode(message)  # type: ignore[arg-type]
            again = decode(data)
            assert type(again) is type(message)
            assert encode(again) == data
            if isinstance(again, Job):
                assert again.copies.dtype == COPY_DTYPE
                assert again.copies.flags.writeable


def test_data_of_another_kind_is_a_value_error() -> None:
    """Truncated, foreign and half-right data: ValueError, never another exception or a value of another type."""
    good = [encode(m) for m in _messages(random.Random(1))]  # type: ignore[arg-type]
    foreign: list[object] = [
        5,
        None,
        [],
        {},
        {"_": "Job"},
        {"_": ["x"]},
        {"_": "Outcome", "x": 1},
        {1: 2},
        b"x",
        "x",
        [1, {"_": "Job"}],
    ]
    foreign += [
        {"_": "Job", "id": 1, "kind": 9, "copies": b""},
        {"_": "Job", "id": 1, "kind": 0, "copies": b"xyz"},
    ]
    bad = [b"", b"\xc1", *(msgpack.packb(f) for f in foreign)]
    bad += [data[:cut] for data in good for cut in range(0, len(data), 7)] + [data + b"\x00" for data in good]
    for data in bad:
        with pytest.raises(ValueError, match=r"\w"):
            decode(data)
