"""The scheduler's part: vLLM's calls in terms of a PlannerConnector.

A request, in vLLM's order: new -> match (every step while it waits) -> allocated -> [async: the load ends -> allocated
again, with nothing to take] -> step ... -> finished. A load is asynchronous, except where the model has one group and
all comes from host: then the step's forward waits for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvoffload.connector import PREEMPT, Scheduled
from kvoffload.errors import ConfigError
from kvoffload.keys import Namespace
from kvoffload.layout import joined
from kvoffload.messages import Job, JobKind, Plans
from kvoffload.planner import Planner
from kvoffload.scheduler_side import PlannerConnector
from kvoffload.stats import Stats

from .adapters import Adapters
from .events import EventTranslator
from .requests import LazyPages, Tracked, pages_of
from .settings import Settings
from .wire import Ended, Gap, Handshake, Report, StepPlans

log = logging.getLogger(__name__)

REASONS = {"stop": "end_turn", "length": "length", "abort": "abort"}
"""vLLM's finish reasons in the planner's words."""

COMPLETE = ("stop", "length")
"""Reasons after which all of a request's tokens but the last have been computed."""

ARRIVALS = ("stored_host", "stored_disk", "prefetched", "loaded_host", "loaded_disk")
"""Counters of blocks that have come to where they were to go, on all ranks."""


class SchedulerPart:
    """Before every worker has shaken hands, everything is a miss. Thread: the scheduler's."""

    def __init__(
        self, settings: Settings, kv_cache_config: Any = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """kv_cache_config: vLLM's, needed where it publishes events."""
        self.settings = settings
        self._events = EventTranslator(kv_cache_config) if settings.events else None
        self.core: PlannerConnector | None = None
        self._clock = clock
        self._namespace: Namespace | None = None
        self._adapters = Adapters()
        self._requests: dict[str, Tracked] = {}
        self._holds: dict[int, str] = {}
        self._ended: list[Ended] = []
        self._invalid: list[int] = []
        self._settled: list[Gap] = []
        self._rest: list[int] = []
        self._step = 0
        self._arrived = -1
        self._lively = 0.0
        self._sync_allowed = False

    # ---- start ----

    def attach(self, hands: Mapping[tuple[int, int], Handshake]) -> None:
        """hands: by (pipeline rank, tensor rank). Raises ConfigError where a rank is missing or differs."""
        settings = self.settings
        ranked = {settings.rank(*place): hand for place, hand in hands.items()}
        if sorted(ranked) != list(range(settings.ranks)):
            raise ConfigError(f"workers {sorted(ranked)} have started; ranks 0 to {settings.ranks - 1} must")
        first = ranked[0]
        facts = {hand.namespace.dtype for hand in ranked.values()}
        if len(facts) > 1:
            raise ConfigError(f"the workers differ in what their blocks are made of: {sorted(facts)}")
        layout = joined([ranked[r].layout for r in range(settings.ranks)], copies=settings.copies)
        _check_sets(ranked, settings.copies)
        self._namespace = first.namespace
        planner = Planner(layout, settings.config, ranks=settings.ranks, joined=True, events=settings.events)
        self.core = PlannerConnector(planner, whole=True)
        for rank in range(settings.ranks):
            self.core.attach(rank, ranked[rank].inventory)
        self._sync_allowed = sum(not g.transient for g in layout.groups) == 1 == len(layout.groups)
        log.info("%s", settings.config)

    # ---- one request ----

    def new(self, request: Any) -> None:
        """The request has arrived: bring what is slow nearer while it waits for its turn."""
        if self.core is None:
            return
        tracked = self._tracked(request)
        if self.settings.config.disk_path is not None:
            self.core.prefetch(tracked, self._clock() + self.settings.config.deadline_s)

    def match(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """(tokens that can be loaded beyond `computed`, whether asynchronously); None = ask again next step."""
        if self.core is None:
            return 0, False
        tracked = self._tracked(request)
        if tracked.chain.broken:
            tracked = self._renewed(tracked)
        if tracked.step >= 0:
            self._preempted(tracked)
        hit = self.core.match(tracked, computed)
        tracked.computed, tracked.disk = computed, hit.disk
        if hit.wait:
            return None, False
        whole = computed + hit.tokens >= tracked.tokens
        # vLLM takes the last token back after an asynchronous load, and after no other.
        tracked.sync = self._sync_allowed and hit.disk == 0 and not whole
        return hit.tokens, hit.tokens > 0 and not tracked.sync

    def sources(self, request: Any, tokens: int) -> tuple[int, int]:
        """Of `tokens` that were taken, those from host and those from disk."""
        tracked = self._requests.get(request.request_id)
        disk = 0 if tracked is None else min(tracked.disk, tokens)
        return tokens - disk, disk

    def allocated(self, request: Any, table: Any, taken: int) -> None:
        """The request has pages, and vLLM counts on `taken` tokens beyond those it had when it was matched. table: its
        blocks by group, as a function: most calls do not need them."""
        if self.core is None:
            return
        tracked = self._tracked(request)
        tracked.step = self._step
        if not taken:
            if not tracked.wanted:
                self.core.allocated(tracked, (), tracked.computed, 0)
            return
        pages = pages_of(table())
        tracked.wanted = tracked.computed + taken
        begun = self.core.allocated(tracked, pages, tracked.computed, taken, retry=not tracked.sync)
        tracked.loading = not tracked.sync
        tracked.short = begun < taken
        if tracked.sync and begun < taken:
            base = self.core.planner.layout.base_tokens
            missing = slice((tracked.computed + begun) // base, -(-tracked.wanted // base))
            self._invalid += pages[0][missing].tolist()

    def finished(self, request: Any, reason: str, table: Sequence[Sequence[int]] = ()) -> None:
        """The request has ended for any reason. table: its blocks by group, () = it has none. vLLM keeps the pages of a
        load that it still waits for; stores have left theirs when their step ended, or before the next forward."""
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None or self.core is None:
            return
        if table and reason in COMPLETE and not (tracked.loading or tracked.chain.broken):
            self._store_rest(tracked, table)
        hold = self.core.release(request.request_id, REASONS.get(reason, reason))
        if tracked.loading and hold:
            self._holds[hold] = request.request_id
        elif tracked.loading:
            self._ended.append(Ended(request.request_id, True))

    def _store_rest(self, tracked: Tracked, table: Sequence[Sequence[int]]) -> None:
        """Blocks whose last token was not known when the step was built that computed it: vLLM builds steps ahead."""
        assert self.core is not None
        request = tracked.request
        computed = min(request.num_computed_tokens, tracked.tokens - 1)
        job = self.core.store_rest(Scheduled(tracked, computed, pages_of(table)))
        if job:
            self._rest.append(job)

    def _tracked(self, request: Any) -> Tracked:
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            assert self._namespace is not None
            tracked = Tracked.of(request, self._namespace, self._events, self._adapters)
            self._requests[request.request_id] = tracked
        return tracked

    def _preempted(self, tracked: Tracked) -> None:
        """The request lost its pages. Of jobs that touch them only stores can run, and these have left the pages."""
        assert self.core is not None
        self.core.release(tracked.info.id, PREEMPT)
        tracked.step, tracked.wanted, tracked.loading = -1, 0, False

    def _renewed(self, tracked: Tracked) -> Tracked:
        """Its tokens are not what they were: nothing that is known of it holds."""
        assert self.core is not None
        self.finished(tracked.request, "abort")
        return self._tracked(tracked.request)

    # ---- steps ----

    def step(self, output: Any) -> StepPlans:
        """What the workers are to be told. output: vLLM's SchedulerOutput, before it counts the step as computed."""
        if self.core is None:
            return StepPlans()
        self.update(())  # loads that ended without a report: vLLM hands on only what a worker had to say
        for request_id in output.preempted_req_ids or ():
            tracked = self._requests.get(request_id)
            if tracked is not None and 0 <= tracked.step < self._step:
                self._preempted(tracked)
        plans = self._honest(self.core.step(self._scheduled(output), self._clock()))
        sync = tuple(job.id for job in plans.jobs if job.kind is JobKind.LOAD and self._waits_for(job))
        told = StepPlans(
            plans, sync, tuple(self._ended), tuple(self._invalid), tuple(self._settled), tuple(self._rest)
        )
        self._ended, self._invalid, self._settled, self._rest = [], [], [], []
        self._step += 1
        return told

    def _honest(self, plans: Plans) -> Plans:
        """No worker may call a load a success by itself that brings less than vLLM counts on."""
        if not any(job.whole and self._is_short(job) for job in plans.jobs):
            return plans
        jobs = [replace(job, whole=False) if self._is_short(job) else job for job in plans.jobs]
        return replace(plans, jobs=tuple(jobs))

    def _is_short(self, job: Job) -> bool:
        tracked = self._requests.get(str(job.request))
        return tracked is not None and tracked.loading and tracked.short

    def _waits_for(self, job: Job) -> bool:
        """Whether the step's forward needs what the job loads. Such a load takes nothing but host slots that are there,
        so it is one job."""
        tracked = self._requests.get(str(job.request))
        if tracked is None or not tracked.sync:
            return False
        if not job.whole:
            raise RuntimeError(f"{job.request}: a load that the forward waits for came in parts")
        return True

    def _scheduled(self, output: Any) -> list[Scheduled]:
        """What runs this step. Drafts are left out: whether their tokens stay is not known yet."""
        drafts = output.scheduled_spec_decode_tokens
        found = []
        for request_id, count in output.num_scheduled_tokens.items():
            tracked = self._requests.get(request_id)
            if tracked is None or tracked.chain.broken:
                continue
            computed = tracked.request.num_computed_tokens + count - len(drafts.get(request_id, ()))
            found.append(Scheduled(tracked, computed, LazyPages(output.kv_connector_block_state, request_id)))
        return found

    def update(self, reports: Iterable[Report]) -> None:
        """Take in what the workers reported."""
        if self.core is None:
            return
        reports = list(reports)
        self._settled += [gap for report in reports for gap in report.gaps]
        news = self.core.update(outcome for report in reports for outcome in report.outcomes)
        for loaded in news.loaded:
            tracked = self._requests.get(str(loaded.request))
            if tracked is None:
                continue
            if tracked.loading:
                tracked.loading = False
                self._ended.append(Ended(tracked.info.id, loaded.boundary < tracked.wanted))
        for hold in news.freed:
            request_id = self._holds.pop(hold, None)
            if request_id is not None:
                self._ended.append(Ended(request_id, True))

    def going_on(self) -> bool:
        """Whether steps without any request are of use: blocks are on their way to a tier, or wait for those that are.
        When none has arrived in `deadline_s` nothing is waited for until one does: that is left to requests' steps."""
        if self.core is None or self.core.planner.idle:
            return False
        counters, now = self.core.planner.counters, self._clock()
        arrived = sum(counters[name] for name in ARRIVALS)
        if arrived != self._arrived:
            self._arrived, self._lively = arrived, now
        return now < self._lively + self.settings.config.deadline_s

    def stats(self) -> Stats:
        """Counters since start, and gauges of now."""
        return Stats() if self.core is None else self.core.planner.stats()

    def reset(self) -> bool:
        """Forget every tier."""
        self._adapters.forget()
        return self.core is None or self.core.reset()

    def take_events(self) -> list[Any]:
        """What became visible and what went away in the tiers, as vLLM's events; [] where it publishes none."""
        if self.core is None or self._events is None:
            return []
        return self._events.translate(self.core.take_events())


def _check_sets(ranked: Mapping[int, Handshake], copies: int) -> None:
    """Raise ConfigError unless each `copies` neighbouring ranks have one memory: a block is stored by one of them."""
    for rank in range(0, len(ranked), copies):
        mates = [ranked[r] for r in range(rank, rank + copies)]
        found = {(hand.memory, g.replicas) for hand in mates for g in hand.layout.groups}
        if len(found) != 1 or found.pop()[1] != copies or bool(mates[0].memory) != (copies > 1):
            raise ConfigError(
                f"ranks {rank} to {rank + copies - 1} have equal bytes and do not share one host memory: have they all "
                "been started on one machine, by one engine?"
            )
