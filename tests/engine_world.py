"""Worlds for the case tests that live on the reference engine."""

from __future__ import annotations

from kvoffload.config import Config
from kvoffload.layout import CacheGroup, GroupKind, Layout
from kvoffload.messages import Inventory
from kvoffload.planner import ExactSlots, Planner
from kvoffload.requests import RequestInfo
from kvoffload.scheduler_side import PlannerConnector
from kvoffload.testing.engine import Device, Engine, Sequence
from kvoffload.testing.engine.drive import step
from kvoffload.testing.engine.sequence import random_keys
from kvoffload.testing.late import LateMover
from kvoffload.testing.rig import Clock
from kvoffload.worker_side import MoverConnector


class GatedMover(LateMover):
    """Ends every job at once, or none while `held`."""

    held = False

    def poll(self):
        self._share = 0.0 if self.held else 1.0
        return super().poll()


def request(number, prompt, output=1, *, text=1, size=16):
    """A request over the text `text`, as long as prompt and answer. Its id is none of a Rig's."""
    return Sequence(
        RequestInfo(f"request {number}"), random_keys((prompt + output) // size, text), size, prompt, output
    )


def counting_engine(*, pages, host=4000, size=16, limits=None, config=None):
    """(engine, planner, mover) over tiers without bytes; the mover has a gate."""
    layout = Layout(size, (CacheGroup(0, GroupKind.FULL, size, 4096),))
    planner = Planner(layout, config or Config(), exact=ExactSlots(host, 64, 0))
    scheduler = PlannerConnector(planner)
    mover = GatedMover(0, Inventory((64,), -(-host // 64), 1, 0))
    worker = MoverConnector(mover)
    scheduler.attach(0, worker.register(()))
    return Engine(Device(layout, [pages]), scheduler, [worker], limits=limits, clock=Clock()), planner, mover


def feed(engine, *items):
    """By hand: one step in which these run, and a few in which nothing does; all that was Loaded."""
    loaded = []
    for number in range(4):
        metadata = engine.scheduler.step(items if number == 0 else [], engine.clock.now)
        for worker in engine.workers:
            worker.before_forward(metadata)
            worker.after_forward(metadata)
            loaded += engine.scheduler.update(worker.poll()).loaded
    return loaded


def until(engine, reached, idle_s=0.0, steps=20_000):
    """Step until `reached()`; AssertionError if it never is."""
    for _ in range(steps):
        if reached():
            return
        step(engine, idle_s)
    raise AssertionError("not reached")


def stored(engine, number, prompt, output=1, **more):
    """A request that has ended; its pages, what the device remembers, and their bytes are gone."""
    seq = request(number, prompt, output, **more)
    engine.add(seq)
    until(engine, lambda: engine.idle)
    forget(engine)
    return seq


def forget(engine):
    """The device forgets all keys, and its bytes are wiped."""
    engine.device.forget()
    for memory in engine.device.memories:
        for layers in memory.arrays:
            for array in layers:
                array[:] = 0
