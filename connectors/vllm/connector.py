"""KVOffloadConnector: vLLM's KVConnectorBase_V1 over kvoffload's halves. Every method hands over; no logic lives here.

vLLM makes one object per role: in the scheduler and in each worker. Per-layer hooks do nothing: they do not run under
full CUDA graphs, and no load or store depends on them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from .metrics import EVERY_S, Deltas, OffloadPromMetrics, OffloadStats
from .scheduler import SchedulerPart
from .settings import Settings
from .wire import Handshake, Report, StepPlans

P = ParamSpec("P")
R = TypeVar("R")
Self = TypeVar("Self", bound="KVOffloadConnector")


def _timed(method: Callable[Concatenate[Self, P], R]) -> Callable[Concatenate[Self, P], R]:
    """Count the time that the engine's thread spends in a method."""

    @wraps(method)
    def counted(self: Self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        begun = time.perf_counter_ns()
        try:
            return method(self, *args, **kwargs)
        finally:
            self.spent_ns += time.perf_counter_ns() - begun

    return counted


class KVOffloadConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module. Raises ConfigError, LayoutError or TierError at start, never later."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.spent_ns = 0
        """Time inside this object's methods, copies that the engine waits for included."""
        self._settings = Settings.of(vllm_config)
        self._scheduler: Any = None
        self._worker: Any = None
        self._deltas = Deltas()
        self._looked = 0.0
        self._shown: dict[str, float] = {}
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerPart(self._settings)
        else:
            self._worker = _worker_part(self._settings)

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # ---- worker ----

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        from .compat import engine_facts
        from .pools import layout_of

        layout, pools = layout_of(self._kv_cache_config, kv_caches)
        facts = engine_facts(self._vllm_config, self._kv_cache_config, kv_caches)
        first = next(iter(kv_caches.values()))
        device = (first[0] if isinstance(first, list | tuple) else first).device
        self._worker.register(layout, pools, facts, device)

    def get_handshake_metadata(self) -> Handshake | None:
        return None if self._worker is None else self._worker.handshake

    @_timed
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._worker.start(self._told())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: loads that the forward needs have ended before it."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: blocks are stored whole, after the forward."""

    @_timed
    def wait_for_save(self) -> None:
        self._worker.save(self._told())

    @_timed
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        received, failed = self._worker.ended()
        return KVConnectorTransferResults(finished_recving=received, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.errors()  # type: ignore[no-any-return]

    @_timed
    def build_connector_worker_meta(self) -> Report | None:
        return self._worker.report()  # type: ignore[no-any-return]

    def _told(self) -> StepPlans:
        told = self._get_connector_metadata()
        assert isinstance(told, StepPlans)
        return told

    # ---- scheduler ----

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        self._scheduler.attach(metadata)

    @_timed
    def on_new_request(self, request: Any) -> None:
        self._scheduler.new(request)

    @_timed
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.match(request, num_computed_tokens)  # type: ignore[no-any-return]

    @_timed
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.allocated(request, blocks.get_block_ids, num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        host, disk = self._scheduler.sources(request, num_external_tokens)
        counts = {CacheHitSource.HOST: host, CacheHitSource.DISK: disk}
        return {source: tokens for source, tokens in counts.items() if tokens}

    @_timed
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self._scheduler.step(scheduler_output)  # type: ignore[no-any-return]

    @_timed
    def update_connector_output(self, connector_output: Any) -> None:
        report = connector_output.kv_connector_worker_meta
        self._scheduler.update(() if report is None else (report,))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    @_timed
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        reason = request.get_finished_reason()
        self._scheduler.finished(request, "" if reason is None else str(reason))
        return False, None

    def reset_cache(self) -> bool | None:
        return self._scheduler.reset()  # type: ignore[no-any-return]

    # ---- both ----

    def engine_seconds(self) -> dict[str, float]:
        """Seconds of the engine's thread inside this object since start, as "side|what": calls, and for a worker the
        copies that it waited for."""
        if self._worker is None:
            return {"scheduler|calls": self.spent_ns / 1e9}
        copies = self._worker.copy_ns
        return {"worker|calls": (self.spent_ns - copies) / 1e9, "worker|copies": copies / 1e9}

    def get_kv_connector_stats(self) -> OffloadStats | None:
        now = time.monotonic()
        if now - self._looked < EVERY_S:
            return None
        self._looked = now
        total = self.engine_seconds()
        spent = {name: seconds - self._shown.get(name, 0.0) for name, seconds in total.items()}
        self._shown = total
        if self._scheduler is None or self._scheduler.core is None:
            return OffloadStats.of({}, {}, spent)
        return OffloadStats.of(*self._deltas.of(self._scheduler.core.planner.stats()), spent)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> OffloadStats | None:
        return None if data is None else OffloadStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> OffloadPromMetrics:
        return OffloadPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """No: copies may run while the memory of the cache goes away."""
        return False

    def take_events(self) -> Iterable[Any]:
        return ()

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()


def _worker_part(settings: Settings) -> Any:
    """The worker's part of this process."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    from .worker import WorkerPart

    return WorkerPart(settings, settings.rank(get_pp_group().rank_in_group, get_tp_group().rank_in_group))
