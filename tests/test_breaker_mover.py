"""The mover under exceptions, shared transit slots, cancelled and stuck work: never wrong bytes, always an end."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection
from pathlib import Path

import numpy as np
import pytest

from kvoffload.chunks import load_chunks
from kvoffload.config import Config
from kvoffload.copying.base import Direction
from kvoffload.copying.cpu import CpuCopyEngine
from kvoffload.errors import ConfigError
from kvoffload.layout import CacheGroup, GroupKind, Layout
from kvoffload.local import Local
from kvoffload.messages import Copies, CopyFlag, Job, JobKind, Outcome, Plans, Status
from kvoffload.mover import Mover
from kvoffload.planner import Planner
from kvoffload.requests import RequestInfo
from kvoffload.sizing import Slabs
from kvoffload.testing.blocks import make_copies, make_key
from kvoffload.testing.faults import Failing, Fault, FaultyEngine, FaultyTier, Gated, Op
from kvoffload.testing.paint import paint, verify
from kvoffload.testing.pool import PageMemory
from kvoffload.testing.rig import BLOCK_BYTES, NAMESPACE, Keys, Rig, Sizes, one_group
from kvoffload.tiers.base import Tier
from kvoffload.tiers.disk import DiskTier
from kvoffload.tiers.memory import MemoryTier

SLAB = 8 * BLOCK_BYTES
LAYOUT = one_group()


class Raising(Fault):
    """Calls numbered from 1 in `calls` raise, as a medium never should."""

    def __init__(self, op: Op, calls: Collection[int]) -> None:
        self._op = op
        self.calls = calls
        self._seen = 0

    def begin(self, op: Op, copies: Copies) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        if op is self._op:
            self._seen += 1
            if self._seen in self.calls:
                raise RuntimeError("planted")
        return np.zeros(len(copies), np.bool_)


class Bench:
    """One mover over a memory tier, with hand-made jobs; blocks 0 to 15 are on disk in slots of two slabs."""

    def __init__(self, *, tier: tuple[Fault, ...] = (), copies: tuple[Fault, ...] = ()) -> None:
        self.memory = PageMemory(LAYOUT, [64])
        inner = MemoryTier(LAYOUT, SLAB, 2)
        self.tier: Tier = FaultyTier(inner, *tier)
        engine = FaultyEngine(CpuCopyEngine(), *copies)
        self.mover = Mover(0, LAYOUT, Slabs(SLAB, 2, 1, 2), engine, self.tier, chunk_bytes=8 * BLOCK_BYTES)
        self.mover.register(self.memory.pools)
        self.keys = Keys.of(range(16)).keys
        self.disk = [slab << 16 | i for slab in range(2) for i in range(8)]
        for number, key in enumerate(self.keys):
            paint(self.memory, 0, np.array([number]), key[None])
        stores = make_copies(
            0, [k.tobytes() for k in self.keys], page=range(16), host=self.disk, disk=self.disk
        )
        self._run(JobKind.STORE, stores)
        writes = stores.copy()
        self._run(JobKind.WRITE, writes)
        for array in self.memory.arrays[0]:
            array[:] = 0

    def _run(self, kind: JobKind, copies: Copies) -> None:
        self.mover.submit(Plans((Job(1000 + kind, kind, copies),)))
        assert self.mover.wait([1000 + kind], 30.0)
        assert [o.status is None or not o.status.any() for o in self.mover.poll()] == [True]

    def load(self, hosts: list[int], flags: CopyFlag = CopyFlag.READ | CopyFlag.TRANSIT) -> Copies:
        """Copies of blocks 0, 1, 2, ... from disk to pages 32, 33, ... through the given host slots."""
        n = len(hosts)
        copies = make_copies(
            0, [k.tobytes() for k in self.keys[:n]], page=range(32, 32 + n), host=hosts, disk=self.disk[:n]
        )
        copies["flags"] = flags
        return copies

    def wrong(self, n: int) -> int:
        return len(verify(self.memory, 0, np.arange(32, 32 + n), self.keys[:n]))


@pytest.mark.parametrize("ring", ["aabcd", "aaaab", "abcdabcdefghab", "abababcdefgh", "abacadaeafag"])
def test_copies_that_share_a_transit_slot_never_meet_in_one_read(ring: str) -> None:
    """Whatever the order in which slots come back, as retries and waiting copies mix them, every page is right."""
    bench = Bench()
    hosts = [2 << 16 | ord(c) - ord("a") for c in ring]
    bench.mover.submit(Plans((Job(1, JobKind.LOAD, bench.load(hosts)),)))
    assert bench.mover.wait([1], 30.0)
    (outcome,) = bench.mover.poll()
    assert outcome.status is None or not outcome.status.any()
    assert bench.wrong(len(ring)) == 0
    bench.mover.close()


def test_no_chunk_holds_a_transit_slot_twice() -> None:
    """Over drawn slots of two groups: chunks cover all copies in order, and a slot stands in each at most once."""
    import random

    for seed in range(200):
        chance = random.Random(seed)
        n = chance.randrange(1, 40)
        copies = make_copies(0, [make_key(i) for i in range(n)])
        copies["group"] = [chance.randrange(2) for _ in range(n)]
        copies["host"] = [chance.randrange(5) for _ in range(n)]
        copies["flags"] = [chance.choice([0, 1, 3]) for _ in range(n)]
        parts = list(load_chunks(copies, 4))
        assert [i for p in parts for i in range(p.start, p.stop)] == list(range(n))
        for part in parts:
            some = copies[part][copies["flags"][part] == 3]
            places = list(zip(some["group"].tolist(), some["host"].tolist(), strict=True))
            assert len(set(places)) == len(places)
            assert part.stop - part.start <= 4


def test_an_exception_in_a_read_leaves_no_block_visible(tmp_path: Path) -> None:
    """The tier raises in every read of a load: host must not show slots that no byte came into."""
    fault = Raising(Op.READ, range(1, 1000))
    with Rig(Sizes(host=2, transit=1, disk=8), path=tmp_path, tier_faults=[fault]) as rig:
        chain = Keys.of(range(6))
        rig.store(chain)
        for start in (100, 200, 300):
            rig.store(Keys.of(range(start, start + 8)))
        assert rig.match(chain).disk == 6
        _, finished, wrong = rig.load(chain)
        assert [f.boundary for f in finished] == [0]
        assert (rig.codes(chain) & 1).sum() == 0
        fault.calls = ()
        _, _, wrong = rig.load(chain)
        assert wrong == 0
        rig.check()


def test_a_load_that_breaks_ends_after_its_running_device_copies() -> None:
    """The second read raises while the first chunk is held on its way to the device: no outcome until that ended."""
    gate = Gated([Op.TO_DEVICE])
    bench = Bench(tier=(Raising(Op.READ, {2}),), copies=(gate,))
    bench.mover.submit(
        Plans(
            (
                Job(
                    1,
                    JobKind.LOAD,
                    bench.load(list(range(8)) + [1 << 16 | i for i in range(8)], CopyFlag.READ),
                ),
            )
        )
    )
    assert gate.arrived()
    assert not bench.mover.wait([1], 0.2)
    assert bench.mover.poll() == []
    gate.release()
    assert bench.mover.wait([1], 30.0)
    (outcome,) = bench.mover.poll()
    assert outcome.status is not None
    assert set(outcome.status.tolist()) == {Status.NOT_DONE}
    bench.mover.close()


@pytest.mark.parametrize("kind", [JobKind.STORE, JobKind.LOAD])
def test_a_copy_engine_that_refuses_a_job_does_not_reach_the_engine(kind: JobKind) -> None:
    """submit of the copy engine raises: the job ends COPY_FAILED with the reason, and the caller goes on."""
    op = Op.TO_HOST if kind is JobKind.STORE else Op.TO_DEVICE
    bench = Bench(copies=(Raising(op, {2 if kind is JobKind.STORE else 1}),))
    copies = bench.load([0, 1, 2], CopyFlag(0))
    bench.mover.submit(Plans((Job(1, kind, copies),)))
    (outcome,) = bench.mover.poll()
    assert outcome.status is not None
    assert outcome.status.tolist() == [Status.COPY_FAILED] * 3
    assert "planted" in outcome.error
    bench.mover.close()


def test_a_device_copy_that_fails_after_its_read_is_told() -> None:
    """Of blocks read from disk two do not reach the device: exactly these are COPY_FAILED, the others are right."""
    bench = Bench(copies=(fault := Failing(ops=[Op.TO_DEVICE]),))
    fault.keys = {bench.keys[n].tobytes() for n in (1, 9)}
    hosts = [2 << 16 | n % 4 for n in range(12)]
    bench.mover.submit(Plans((Job(1, JobKind.LOAD, bench.load(hosts)),)))
    assert bench.mover.wait([1], 30.0)
    (outcome,) = bench.mover.poll()
    assert outcome.status is not None
    assert outcome.status.tolist() == [Status.COPY_FAILED if n in (1, 9) else 0 for n in range(12)]
    assert bench.wrong(12) == 2
    bench.mover.close()


def test_a_cancelled_job_behind_a_stuck_read_ends_at_once() -> None:
    """Both load threads hang in the medium: a queued load that is cancelled ends NOT_DONE without them."""
    gate = Gated([Op.READ])
    bench = Bench(tier=(gate,))
    jobs = [Job(n, JobKind.LOAD, bench.load([3 * n, 3 * n + 1][:2], CopyFlag.READ)) for n in (0, 1)]
    jobs = [Job(n + 1, j.kind, j.copies) for n, j in enumerate(jobs)]
    bench.mover.submit(Plans((*jobs, Job(3, JobKind.LOAD, bench.load([1 << 16], CopyFlag.READ)))))
    assert gate.arrived()
    assert gate.arrived()
    bench.mover.submit(Plans((), (3, 3, 99)))
    bench.mover.submit(Plans((), (3,)))
    (outcome,) = bench.mover.poll()
    assert (outcome.job, outcome.status is not None and outcome.status.tolist()) == (3, [Status.NOT_DONE])
    assert bench.mover.poll() == []
    gate.release()
    assert bench.mover.wait([1, 2, 3], 30.0)
    assert sorted(o.job for o in bench.mover.poll()) == [1, 2]
    bench.mover.close()


def test_a_read_that_hangs_turns_the_disk_off_and_is_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read that hangs in the medium: the disk is off until it returns, is told and counted once, and comes back."""
    monkeypatch.setattr("kvoffload.tier_work.HUNG_SECONDS", 0.05)
    gate = Gated([Op.READ])
    bench = Bench(tier=(gate,))
    bench.mover.submit(Plans((Job(1, JobKind.LOAD, bench.load([0], CopyFlag.READ)),)))
    assert gate.arrived()
    told = [(o.job, o.disk_ok, o.disk_hung) for o in until(bench.mover, 1)]
    for _ in range(20):
        assert bench.mover.poll() == []
    assert told == [(0, False, 1)]
    assert bench.mover.hung_calls == 1
    assert caplog.text.count("has not returned") == 1
    gate.release()
    assert bench.mover.wait([1], 30.0)
    assert [(o.job, o.disk_ok, o.disk_hung) for o in until(bench.mover, 2)] == [(1, True, 0), (0, True, 0)]
    assert bench.mover.hung_calls == 1
    bench.mover.close()


def test_a_read_that_hangs_while_the_disk_is_off_is_counted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failures have switched the disk off, and a call of before hangs: it is told, though nothing changes by it."""
    monkeypatch.setattr("kvoffload.tier_work.HUNG_SECONDS", 0.05)
    gate = Gated([Op.READ])
    bench = Bench(tier=(gate,))
    bench.mover.submit(Plans((Job(1, JobKind.LOAD, bench.load([0], CopyFlag.READ)),)))
    assert gate.arrived()
    gate.healthy = False
    told = [(o.job, o.disk_ok, o.disk_hung) for o in until(bench.mover, 2)]
    assert told == [(0, False, 0), (0, False, 1)]
    gate.release()
    bench.mover.close()


def test_calls_that_hang_on_any_rank_are_counted_by_the_planner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads of both ranks hang in the medium: the counter says 2, the disk is off until they return, and what they
    bring is right."""
    monkeypatch.setattr("kvoffload.tier_work.HUNG_SECONDS", 0.05)
    gate = Gated([Op.READ], is_open=True)
    with Rig(Sizes(host=4, disk=8), path=tmp_path, ranks=2, tier_faults=[gate]) as rig:
        chain = Keys.of(range(4))
        rig.store(chain)
        rig.planner.reset(["host"])
        gate.hold()
        info, pages = rig.info(), rig.pages(chain, 64)
        plan = rig.planner.load(info, chain, rig.planner.match(info, chain).boundary, pages)
        end = time.monotonic() + 30.0
        while rig.planner.stats().totals["disk_hung"] < 2 and time.monotonic() < end:
            rig.local.step()
            time.sleep(0.001)
        for _ in range(20):
            rig.local.step()
        assert rig.planner.stats().totals["disk_hung"] == 2
        assert rig.planner.counters["disk_lost"] == 1
        assert rig.match(chain).boundary == 0
        gate.release()
        assert {f.id: f.boundary for f in rig.local.drain()}[plan.id] == 64
        assert rig.mismatches(chain, pages, 0, 4) == 0
        rig.local.step()
        assert rig.planner.stats().totals["disk_hung"] == 2
        assert rig.match(chain).boundary == 64


def until(mover: Mover, count: int) -> list[Outcome]:
    """Poll until there are so many outcomes."""
    outcomes: list[Outcome] = []
    end = time.monotonic() + 30.0
    while len(outcomes) < count and time.monotonic() < end:
        outcomes += mover.poll()
        time.sleep(0.001)
    return outcomes


def test_close_does_not_wait_for_ever_for_a_read_that_hangs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A close beside a read that never returns ends, and leaves the memory that is read into and the tier open."""
    monkeypatch.setattr("kvoffload.mover.CLOSE_SECONDS", 0.05)
    gate = Gated([Op.READ])
    bench = Bench(tier=(gate,))
    closed: list[int] = []
    monkeypatch.setattr(bench.tier, "close", lambda: closed.append(1))
    jobs = [Job(n, JobKind.LOAD, bench.load([n], CopyFlag.READ)) for n in range(1, 6)]
    bench.mover.submit(Plans(tuple(jobs)))
    assert gate.arrived()
    bench.mover.close()
    assert "are not released" in caplog.text
    assert closed == []
    bench.mover.arena.view(0, 0)[:] = 1
    gate.release()
    assert bench.mover.wait([1, 2, 3, 4, 5], 30.0)
    assert sorted(o.job for o in bench.mover.poll() if o.job) == [1, 2, 3, 4, 5]


def test_a_load_of_a_rank_without_disk_moves_nothing() -> None:
    """A copy that must be read first, sent to a mover without a disk, ends NOT_DONE; its page stays as it was."""
    memory = PageMemory(LAYOUT, [8])
    mover = Mover(0, LAYOUT, Slabs(SLAB, 1, 1, 0), CpuCopyEngine())
    mover.register(memory.pools)
    copies = make_copies(0, [make_key(1)], page=[3], host=[0], disk=[0])
    copies["flags"] = CopyFlag.READ
    mover.arena.view(0, 0)[:] = 7
    mover.submit(Plans((Job(1, JobKind.LOAD, copies),)))
    (outcome,) = mover.poll()
    assert outcome.status is not None
    assert outcome.status.tolist() == [Status.NOT_DONE]
    assert not any(array.any() for array in memory.arrays[0])
    mover.close()


def test_waiting_probes_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is off and whose thread hangs gets one probe, however often the engine polls."""
    monkeypatch.setattr("kvoffload.mover.PROBE_SECONDS", 0.0)
    stuck, probes = threading.Event(), []
    fault = Fault()
    bench = Bench(tier=(fault,))
    inner_probe = bench.tier.probe

    def probe() -> bool:
        probes.append(1)
        assert stuck.wait(30.0)
        return inner_probe()

    monkeypatch.setattr(bench.tier, "probe", probe)
    fault.healthy = False
    for _ in range(50):
        bench.mover.poll()
    assert bench.mover._writes.waiting <= 1
    stuck.set()
    fault.healthy = True
    bench.mover.close()
    assert len(probes) == 1


def test_a_reset_that_fails_is_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tier cannot make a reset durable: a warning names the rank and the reason."""
    bench = Bench()

    def reset() -> None:
        raise OSError("no space for the manifest")

    monkeypatch.setattr(bench.tier, "reset", reset)
    with caplog.at_level(logging.WARNING):
        bench.mover.submit(Plans(reset_disk=True))
        bench.mover.close()
    assert "rank 0" in caplog.text
    assert "no space for the manifest" in caplog.text


def test_a_mover_that_cannot_be_made_leaves_the_disk_unlocked(tmp_path: Path) -> None:
    """Host memory that is not there: the error leaves no lock, so a second try with less opens."""
    layout = one_group()
    config = Config(host_bytes=1 << 22, disk_path=tmp_path, disk_bytes=1 << 21, model_id="m")
    memory = PageMemory(layout, [4])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvoffload.arena.available_host_bytes", lambda: 4096)
        with pytest.raises(ConfigError):
            Local.open(config, layout, [memory.pools])
    with Local.open(config, layout, [memory.pools]):
        pass


def test_handles_of_several_threads_do_not_disturb_each_other() -> None:
    """Submits of one thread while another waits and queries: every handle of each ends OK."""
    memory = PageMemory(LAYOUT, [8])
    mover = Mover(0, LAYOUT, Slabs(SLAB, 1, 1, 0), engine := CpuCopyEngine())
    mover.register(memory.pools)
    bad: list[object] = []

    def work(first: int) -> None:
        copies = make_copies(0, [make_key(first)], page=[first], host=[first])
        for _ in range(2000):
            handle = engine.submit(copies, Direction.TO_HOST, None)
            if not engine.wait(handle, 30.0):
                bad.append("timeout")
            status = engine.query(handle)
            if status is None or status.any():
                bad.append(status)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    mover.close()
    assert bad == []


def _staged(first: int, second: int) -> Layout:
    """Two full groups of which a pipeline stage may lack one."""
    return Layout(
        16,
        (
            CacheGroup(0, GroupKind.FULL, 16, first, layers=("a",)),
            CacheGroup(1, GroupKind.FULL, 32, second, layers=("b",)),
        ),
    )


@pytest.mark.parametrize(
    "sizes", [((8192, 0), (0, 4096)), ((8192, 4096), (0, 4096)), ((8192, 0), (8192, 4096))]
)
def test_ranks_that_lack_a_group_are_left_out_of_it(
    tmp_path: Path, sizes: tuple[tuple[int, int], tuple[int, int]]
) -> None:
    """Pipeline stages: blocks are stored, written, found again after a restart and loaded where they exist."""
    chain, whole = Keys.of(range(4)), _staged(8192, 4096)
    pages = [np.arange(4, dtype=np.int32), np.arange(2, dtype=np.int32)]
    for life in range(2):
        memory = [PageMemory(whole, [8, 8], rank=rank) for rank in range(2)]
        planner, movers = Planner(whole, Config(), ranks=2), []
        for rank, (first, second) in enumerate(sizes):
            layout = _staged(first, second)
            pools = tuple(
                p if g.block_bytes else () for p, g in zip(memory[rank].pools, layout.groups, strict=True)
            )
            tier = DiskTier(tmp_path / str(rank), layout, SLAB, 2, NAMESPACE)
            movers.append(Mover(rank, layout, Slabs(SLAB, 2, 1, 2), CpuCopyEngine(), tier))
            planner.attach(rank, movers[-1].register(pools))
        with Local(planner, movers, lambda: 0.0) as local:
            info = RequestInfo(life)
            found = planner.match(info, chain)
            assert found.boundary == 64 * life
            if life:
                planner.load(info, chain, 64, pages)
                assert [(f.boundary, f.failed) for f in local.drain()] == [(64, 0)]
            for rank, group in [(r, g) for r in range(2) for g in range(2) if sizes[r][g]]:
                keys = chain.keys[group :: group + 1]
                if life:
                    assert not len(verify(memory[rank], group, pages[group], keys))
                else:
                    paint(memory[rank], group, pages[group], keys)
            planner.offer(info, chain, 64, pages)
            assert all(f.failed == 0 for f in local.drain())
