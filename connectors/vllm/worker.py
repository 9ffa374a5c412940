"""The part in one worker: vLLM's calls in terms of a Mover.

A step, in vLLM's order: begin -> start -> [the forward, with `layer` before each] -> save -> ended, errors, report;
with a draft model `save` comes last, and without loads that the forward needs `start` comes after it. On a CPU
stores are copied in `begin` and `save`, so that vLLM may give any page back when the step ends, and the forward
begins when its loads have ended. On a device stores are ordered on the forward's stream and the forward behind its
loads, where it can be layer by layer; the engine's thread waits for them once the forward is on its way, since what
failed must be told with the step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kvoffload.backing import Backing
from kvoffload.layout import Layout, Pools
from kvoffload.messages import Job, JobKind, Outcome, Plans, Status
from kvoffload.mover import Mover

from .device import CpuDevice, StreamDevice, device_of
from .layers import WHOLE, Hooks
from .rank_tiers import RankTiers
from .settings import Settings
from .wire import Gap, Handshake, Report, StepPlans

log = logging.getLogger(__name__)

PATIENCE_S = 10.0
"""Between two lines about copies that the engine waits for. They are memory to memory: they end."""


class WorkerPart:
    """Thread: the worker's."""

    def __init__(self, settings: Settings, rank: int) -> None:
        self._settings = settings
        self._rank = rank
        self._mover: Mover | None = None
        self._tiers: RankTiers | None = None
        self._backing: Backing | None = None
        self._device: CpuDevice | StreamDevice = CpuDevice()
        self._handshake: Handshake | None = None
        self._jobs: dict[int, Job] = {}
        self._hooks = Hooks({})
        self._sync: set[int] = set()
        self._by_layer: tuple[int, ...] = ()
        self._said: set[str] = set()
        self._gaps: set[Gap] = set()
        self._new_gaps: list[Gap] = []
        self._last_gap = 0
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._bad_pages: set[int] = set()
        self._outcomes: list[Outcome] = []
        self.copy_ns = 0
        """Time that the engine's thread waited for copies."""

    # ---- start ----

    def register(
        self, layout: Layout, pools: Pools, facts: str, device: Any, places: Mapping[str, int] | None = None
    ) -> None:
        """Open the tiers over these pages. device: torch's. places: see Hooks. Raises ConfigError or TierError where
        they do not fit."""
        name = self._settings.namespace(layout, facts)
        self._device = device_of(device)
        self._hooks = Hooks(places or {})
        tiers = self._tiers = RankTiers(self._settings, self._rank, layout, name)
        copier = self._device.copier(self._settings.config.copy_mode)
        self._mover = Mover(self._rank, layout, tiers.slabs, copier, tiers.tier, arena=tiers.arena)
        self._handshake = Handshake(layout, name, self._mover.register(pools), tiers.memory)
        if not self._device.streams:  # a device's arena is backed when it is page-locked
            self._backing = Backing(self._mover.arena)

    @property
    def copies(self) -> int:
        """Ranks that share one host memory with this one, itself counted."""
        return self._settings.copies

    @property
    def handshake(self) -> Handshake | None:
        """None before `register`."""
        return self._handshake

    # ---- a step ----

    def begin(self, told: StepPlans) -> None:
        """Before anything of this step: store what requests that have ended left in pages that are free now."""
        self._gaps.difference_update(told.settled)
        if told.rest:
            self._store([job for job in told.plans.jobs if job.id in told.rest])

    def start(self, told: StepPlans, mode: str = "") -> None:
        """Begin what the forward of this step does not produce; the forward comes behind what it needs. mode: of the
        forward, "" where no layer calls `layer`."""
        assert self._mover is not None
        by_layer = self._hooks.begin(mode) and self._device.streams
        for ended in told.ended:
            self._end(ended.request, ended.failed)
        if told.invalid:
            self._miss(told.invalid)
        early = tuple(job for job in told.plans.jobs if job.kind is not JobKind.STORE)
        plans = Plans(early, told.plans.cancels, told.plans.geometry, told.plans.reset_disk)
        if plans:
            self._jobs |= {job.id: job for job in early if job.kind is JobKind.LOAD}
            layered = told.sync if by_layer else ()
            self._mover.submit(plans, self._device.point() if early else None, layered)
        if not told.sync:
            return
        self._sync.update(told.sync)
        if by_layer:
            self._by_layer = told.sync
        elif self._device.streams:
            self._order(told.sync, WHOLE)
        else:
            self._settle()

    def layer(self, name: str) -> None:
        """The forward is about to read the pages of this layer: on its stream, not before they are loaded."""
        place = self._hooks.called(name)
        if self._by_layer:
            self._order(self._by_layer, place)

    def save(self, told: StepPlans) -> None:
        """Begin, and on a CPU end, the stores of this step."""
        self._settle()
        self._store([j for j in told.plans.jobs if j.kind is JobKind.STORE and j.id not in told.rest])

    def ended(self) -> tuple[set[str], set[str]]:
        """(requests whose asynchronous load is over, those of them that lack something), each once."""
        self._settle()
        self._poll()
        received, self._received = self._received, set()
        failed, self._failed = self._failed, set()
        return received, failed

    def errors(self) -> set[int]:
        """Pages that the forward needed and that were not filled, since the last call."""
        pages, self._bad_pages = self._bad_pages, set()
        return pages

    def report(self) -> Report | None:
        """Outcomes and gaps since the last call."""
        outcomes, self._outcomes = tuple(self._outcomes), []
        gaps, self._new_gaps = tuple(self._new_gaps), []
        return Report(outcomes, gaps) if outcomes or gaps else None

    def close(self) -> None:
        """Let writes to disk that have been asked for end, then release everything. Idempotent."""
        if self._backing is not None:
            self._backing.stop()
        if self._mover is not None:
            self._mover.drain(self._settings.config.deadline_s)
            self._mover.close()
            self._mover = None
        if self._tiers is not None:
            self._tiers.close()
            self._tiers = None

    # ---- inside ----

    def _order(self, jobs: Iterable[int], layer: int) -> None:
        """What comes next on the forward's stream comes behind this layer of the loads."""
        assert self._mover is not None
        for job in jobs:
            while not self._mover.wait_layer(job, layer, self._device.stream(), PATIENCE_S):
                log.warning("rank %d: load %d has not ended after %s s", self._rank, job, PATIENCE_S)

    def _settle(self) -> None:
        """Loads that the forward of this step needed have ended, and what is missing is known."""
        self._by_layer = ()
        if self._sync:
            self._wait(self._sync)
            self._poll()

    def _store(self, stores: Sequence[Job]) -> None:
        """Nothing is stored while there are gaps that the scheduler does not know of: any request of these steps may
        have been computed over them, since requests share pages, also pages that a load of the same step is to fill."""
        assert self._mover is not None
        if self._gaps:
            for job in stores:
                status = np.full(len(job.copies), Status.NOT_DONE, np.uint8)
                self._outcomes.append(Outcome(job.id, self._rank, status))
            return
        if not stores:
            return
        self._mover.submit(Plans(tuple(stores)), self._device.point())
        if not self._device.streams:
            self._wait([job.id for job in stores])

    def _wait(self, jobs: Any) -> None:
        """Until these copies have ended: what the engine does next would meet them."""
        assert self._mover is not None
        begun = time.perf_counter_ns()
        while not self._mover.wait(jobs, PATIENCE_S):
            log.warning("rank %d: jobs %s have not ended after %s s", self._rank, list(jobs), PATIENCE_S)
        self.copy_ns += time.perf_counter_ns() - begun

    def _poll(self) -> None:
        assert self._mover is not None
        for outcome in self._mover.poll():
            self._outcomes.append(outcome)
            job = self._jobs.pop(outcome.job, None)
            if job is None or job.request is None:
                continue
            request = str(job.request)
            if job.id in self._sync:
                self._sync.discard(job.id)
                if outcome.status is not None:
                    self._miss(job.copies["page"][outcome.status != Status.OK].tolist())
            elif outcome.status is None and job.whole:
                self._said.add(request)
                self._received.add(request)

    def _end(self, request: str, failed: bool) -> None:
        """The scheduler's word on a load; this worker may have given its own already."""
        if request in self._said:
            self._said.discard(request)
            return
        self._received.add(request)
        if failed:
            self._failed.add(request)

    def _miss(self, pages: Iterable[int]) -> None:
        """The forward goes on without what these pages should hold."""
        self._bad_pages.update(pages)
        self._last_gap += 1
        self._gaps.add((self._rank, self._last_gap))
        self._new_gaps.append((self._rank, self._last_gap))
