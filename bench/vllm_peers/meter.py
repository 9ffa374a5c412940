"""Time inside a connector's methods, by engine step, on the scheduler's side and on the worker's; tokens it served.

Time is CPU time of the engine's thread: what other processes take of the machine is left out, and so is waiting for
copies. The model computes on that thread too, since it is given no other.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ledger import Ledger

SCHEDULER = [
    "on_new_request",
    "get_num_new_matched_tokens",
    "get_loaded_kv_cache_group_ids",
    "update_state_after_alloc",
    "get_external_cache_hit_sources",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
    "take_events",
    "has_pending_block_frees",
    "has_pending_push_work",
    "get_kv_connector_stats",
]
WORKER = [
    "handle_preemptions",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_transfer_results",
    "get_finished",
    "get_block_ids_with_load_errors",
    "get_kv_connector_stats",
    "get_kv_connector_kv_cache_events",
    "build_connector_worker_meta",
    "clear_connector_metadata",
]


@dataclass(slots=True)
class Clock:
    """Nanoseconds in a set of methods; a method that calls another of the set counts once."""

    ns: int = 0
    inside: bool = False

    def timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self.inside:
                return method(*args, **kwargs)
            self.inside = True
            begun = time.thread_time_ns()
            try:
                return method(*args, **kwargs)
            finally:
                self.ns += time.thread_time_ns() - begun
                self.inside = False

        return counted


@dataclass(frozen=True, slots=True)
class Step:
    """One engine step in nanoseconds of the engine's thread. worker: without copies."""

    total: int
    scheduler: int
    worker: int


@dataclass(slots=True)
class Meter:
    """Of one engine. served: tokens taken from outside the engine's own cache; disk: those from disk of them. steps:
    those that computed something; a step that only waits for loads costs little and would hide the others."""

    ledger: Ledger | None = None
    steps: list[Step] = field(default_factory=list)
    served: int = 0
    disk: int = 0
    scheduled: int = 0
    on: bool = True
    _scheduler: Clock = field(default_factory=Clock)
    _worker: Clock = field(default_factory=Clock)
    _mark: tuple[int, int, int] = (0, 0, 0)
    _computes: int = 0

    def attach(self, engine: Any, ledger: Callable[[Any, Any], Ledger] | None) -> None:
        """Watch this engine from here on. ledger: None for an engine without a connector."""
        core = engine.engine_core.engine_core
        schedule, step = core.scheduler.schedule, engine.step

        def counted(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self._computes = output.total_num_scheduled_tokens
            self.scheduled += self._computes * self.on
            return output

        def timed() -> Any:
            self._mark, self._computes = self._now(), 0
            begun = time.thread_time_ns()
            outputs = step()
            self._step(time.thread_time_ns() - begun)
            return outputs

        core.scheduler.schedule, engine.step = counted, timed
        if ledger is None:
            return
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        connector, worker = core.scheduler.connector, get_kv_transfer_group()
        self.ledger = ledger(connector, worker)
        self._watch(connector)
        for names, clock, owner in ((SCHEDULER, self._scheduler, connector), (WORKER, self._worker, worker)):
            for name in names:
                if name in dir(owner):
                    setattr(owner, name, clock.timed(getattr(owner, name)))

    def _watch(self, connector: Any) -> None:
        plan, allocated, sources = (
            connector.build_connector_meta,
            connector.update_state_after_alloc,
            connector.get_external_cache_hit_sources,
        )

        def planned(output: Any) -> Any:
            plans = plan(output)
            with_clock_off(self._scheduler, self.ledger.planned, plans)
            return plans

        def taken(request: Any, blocks: Any, tokens: int) -> None:
            self.served += tokens * self.on
            allocated(request, blocks, tokens)

        def by_source(request: Any, tokens: int) -> Any:
            found = sources(request, tokens)
            self.disk += self.on * sum(n for source, n in found.items() if source.name == "DISK")
            return found

        connector.build_connector_meta = planned
        connector.update_state_after_alloc = taken
        connector.get_external_cache_hit_sources = by_source

    def _now(self) -> tuple[int, int, int]:
        copies = 0 if self.ledger is None else self.ledger.copy_ns()
        return self._scheduler.ns, self._worker.ns, copies

    def _step(self, total: int) -> None:
        scheduler, worker, copies = (now - then for now, then in zip(self._now(), self._mark, strict=True))
        if self.on and self._computes:
            self.steps.append(Step(total, scheduler, max(0, worker - copies)))


def with_clock_off(clock: Clock, method: Callable[..., Any], *args: Any) -> None:
    """Call what is ours inside a connector's method without counting it as the connector's time."""
    begun = time.thread_time_ns()
    method(*args)
    clock.ns -= time.thread_time_ns() - begun
