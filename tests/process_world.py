"""Movers that are processes of their own over shared host memory, driven by a planner in the test's process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from hybrid_world import group, page_numbers

from kvoffload.config import Config
from kvoffload.copying.cpu import CpuCopyEngine
from kvoffload.layout import GroupKind, Layout, joined
from kvoffload.local import Local
from kvoffload.mover import Mover
from kvoffload.planner import Planner
from kvoffload.requests import RequestInfo
from kvoffload.shared import DiskPlace, Member, SharedTiers
from kvoffload.sizing import Slabs
from kvoffload.testing.paint import paint, verify
from kvoffload.testing.pool import PageMemory

PATIENCE = 60.0
PAGES = 400
SLAB = 8 * 8192
SLABS = Slabs(SLAB, 20, 2, 60)


def layout_of(copies):
    """Two groups whose bytes are the same on so many ranks."""
    full = group(0, GroupKind.FULL, 16, 8192, replicas=copies)
    return Layout(16, (full, group(1, GroupKind.SLIDING, 16, 4096, lookback=40, replicas=copies)))


@dataclass(frozen=True)
class Start:
    """What one member is started with. hold: it stops when it has joined and before it has arrived."""

    member: Member
    folder: Path
    disk: Path | None = None
    slabs: Slabs = SLABS
    timeout: float | None = None
    hold: bool = False


def run_member(pipe, start):
    """A member's process: what it is told, until it is told to end or killed."""
    layout = layout_of(start.member.count)
    if start.hold:
        Holding.install(pipe)
    try:
        disk = None if start.disk is None else DiskPlace(start.disk, b"namespace")
        slabs = start.slabs if start.disk else Slabs(SLAB, start.slabs.host, 0, 0)
        shared = SharedTiers(start.member, layout, slabs, disk, folder=start.folder, timeout=start.timeout)
    except Exception as error:  # noqa: BLE001
        pipe.send((type(error).__name__, str(error)))
        return
    memory = PageMemory(layout, [PAGES] * 2)
    rank = start.member.index
    mover = Mover(rank, layout, slabs, CpuCopyEngine(), shared.tier, arena=shared.arena, chunk_bytes=32768)
    pipe.send(("ready", mover.register(memory.pools), shared.token))
    part = Part(layout, memory, mover, shared)
    while True:
        what, *more = pipe.recv()
        pipe.send(getattr(part, what)(*more))
        if what == "close":
            return


class Holding:
    """Stops a member between joining and arriving, until it is killed."""

    @staticmethod
    def install(pipe):
        from kvoffload.rendezvous import Rendezvous

        def arrive(self, member, count):
            pipe.send(("held", "", ""))
            time.sleep(PATIENCE)

        Rendezvous.arrive = arrive


@dataclass
class Part:
    """What a member does when it is told."""

    layout: Layout
    memory: PageMemory
    mover: Mover
    shared: SharedTiers

    def submit(self, plans):
        self.mover.submit(plans)

    def poll(self):
        return self.mover.poll()

    def compute(self, chain):
        """Pages 0, 1, 2, ... hold the chain's bytes."""
        for number, pages in enumerate(page_numbers(self.layout, chain)):
            paint(self.memory, number, pages, chain.keys)

    def wipe(self):
        for arrays in self.memory.arrays:
            for array in arrays:
                array[:] = 0

    def wrong(self, chain):
        """Pages with wrong bytes, of those that resuming at the chain's end takes."""
        found = 0
        for number, pages in enumerate(page_numbers(self.layout, chain)):
            rows = slice(*self.layout.groups[number].needs(0, chain.blocks * 16))
            found += len(verify(self.memory, number, pages[rows], chain.keys[rows]))
        return found

    def mapping(self):
        """(bytes, device and number of the file) of the host memory."""
        arena = self.shared.arena
        for line in Path("/proc/self/maps").read_text().splitlines():
            begin, end = (int(x, 16) for x in line.split()[0].split("-"))
            if begin <= arena.base < end:
                return arena.nbytes, line.split()[3:5]
        raise AssertionError("not mapped")

    def close(self):
        self.mover.close()
        self.shared.close()


@dataclass
class Remote:
    """The test's end of a member; to Local it is a mover."""

    start: Start
    way: str = "spawn"
    said: tuple[object, ...] = ()
    _pipe: object = field(init=False)
    process: object = field(init=False)

    def __post_init__(self):
        context = multiprocessing.get_context(self.way)
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=run_member, args=(theirs, self.start), daemon=True)
        self.process.start()
        theirs.close()

    def hear(self):
        """What it says once it has started, or failed to."""
        assert self._pipe.poll(PATIENCE), "the member says nothing"
        self.said = self._pipe.recv()
        return self.said

    def quiet(self, seconds):
        """It has said nothing for so long."""
        return not self._pipe.poll(seconds)

    def ask(self, *what):
        self._pipe.send(what)
        assert self._pipe.poll(PATIENCE), f"no answer to {what[0]}"
        return self._pipe.recv()

    @property
    def token(self):
        assert self.said[0] == "ready", self.said
        return self.said[2]

    def submit(self, plans, after=None):
        self.ask("submit", plans)

    def poll(self):
        return self.ask("poll")

    def wait(self, job_ids, timeout):
        raise AssertionError("nobody waits here")

    def close(self):
        """In order; harmless after a kill."""
        if self.process.is_alive() and self.said and self.said[0] == "ready":
            self.ask("close")
        self.process.join(PATIENCE)
        assert not self.process.is_alive()

    def kill(self):
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(PATIENCE)


def starts(name, count, folder, **more):
    return [Start(Member(name, n, count), folder, **more) for n in range(count)]


def together(remotes):
    """A planner over members that have started."""
    layout = layout_of(len(remotes))
    ranks = len(remotes)
    planner = Planner(joined([layout] * ranks, copies=ranks), Config(), ranks=ranks, joined=True)
    for rank, remote in enumerate(remotes):
        if not remote.said:
            remote.hear()
        assert remote.said[0] == "ready", remote.said
        planner.attach(rank, remote.said[1])
    assert len({remote.token for remote in remotes}) == 1
    return Local(planner, remotes)


def store(local, chain):
    """A request that computes the chain on every member and ends."""
    for remote in local.movers:
        remote.ask("compute", chain)
    pages = page_numbers(layout_of(1), chain)
    offer = local.planner.offer(RequestInfo("a"), chain, chain.blocks * 16, pages)
    for _ in range(1000):
        local.drain()
        if not offer.blocked:
            break
        offer = local.planner.offer(RequestInfo("a"), chain, chain.blocks * 16, pages)
    local.drain()
    local.planner.finish("a", "end_turn", 0.0)


def fetch(local, chain):
    """A request that loads the chain into wiped pages; the pages with wrong bytes, over all members."""
    for remote in local.movers:
        remote.ask("wipe")
    found = local.planner.match(RequestInfo("b"), chain)
    local.planner.load(RequestInfo("b"), chain, found.boundary, page_numbers(layout_of(1), chain))
    assert [f.boundary for f in local.drain()] == [chain.blocks * 16]
    local.planner.finish("b", "end_turn", 0.0)
    return sum(remote.ask("wrong", chain) for remote in local.movers)
