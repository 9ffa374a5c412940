"""A planner over an index of a wanted size whose jobs are done as soon as they are sent: decisions and nothing else."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvoffload.config import Config
from kvoffload.layout import CacheGroup, GroupKind, Layout
from kvoffload.messages import Inventory
from kvoffload.null_mover import NullMover
from kvoffload.planner import Planner
from kvoffload.requests import RequestInfo

BLOCK = 16
"""Tokens."""

SLOTS = 1024
"""Per slab; without bytes the size decides nothing."""


@dataclass(slots=True, eq=False)
class Prompt:
    """One request: its keys, and a page for every block."""

    info: RequestInfo
    keys: NDArray[np.uint8]
    pages: NDArray[np.int32]


class World:
    """REQUIRES: calls in the order of an engine's; one thread.

    blocks: host slots. disk: disk slots, 0 = no disk.
    """

    def __init__(self, blocks: int, disk: int = 0) -> None:
        layout = Layout(BLOCK, (CacheGroup(0, GroupKind.FULL, BLOCK, 4096),))
        self.planner = Planner(layout, Config(host_bytes=0))
        self.planner.attach(0, Inventory((SLOTS,), -(-blocks // SLOTS), 1, -(-disk // SLOTS)))
        self._mover = NullMover(0)
        self._source = random.Random(0)
        self._prompts = 0

    def prompt(self, keys: NDArray[np.uint8]) -> Prompt:
        """A request that nobody has seen, for keys that may be there already."""
        self._prompts += 1
        return Prompt(RequestInfo(self._prompts), keys, np.arange(len(keys), dtype=np.int32))

    def new_keys(self, count: int) -> NDArray[np.uint8]:
        """Keys that were never there."""
        return np.frombuffer(self._source.randbytes(16 * count), np.uint8).reshape(count, 16)

    def store(self, prompt: Prompt, blocks_a_call: int) -> None:
        """Offer the prompt in steps, each with what the engine does around it: tick, send, complete."""
        for end in range(blocks_a_call, len(prompt.keys) + blocks_a_call, blocks_a_call):
            self.planner.offer(prompt.info, prompt, end * BLOCK, [prompt.pages])
            self.step()

    def load(self, prompt: Prompt) -> int:
        """Match, load and step to the end; the blocks that came."""
        found = self.planner.match(prompt.info, prompt)
        plan = self.planner.load(prompt.info, prompt, found.boundary, [prompt.pages])
        while not self.planner.idle:
            self.step()
        return plan.blocks

    def step(self) -> None:
        """One step of jobs that are done at once."""
        self._mover.submit(self.planner.tick(0.0))
        self.planner.complete(self._mover.poll())

    def end(self, prompt: Prompt) -> None:
        """The request is over; what it stored stays."""
        while not self.planner.idle:
            self.step()
        self.planner.finish(prompt.info.id, "end_turn", 0.0)
