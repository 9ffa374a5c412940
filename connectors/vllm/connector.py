"""KVOffloadConnector: vLLM's KVConnectorBase_V1 over kvoffload's halves.

vLLM makes one object per role, in the scheduler and in each worker, maybe in processes of their own.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvoffload.stats import Stats

from .metrics import EVERY_S, Deltas, OffloadPromMetrics, OffloadStats
from .scheduler import SchedulerPart
from .scheduler_calls import SchedulerCalls
from .settings import Settings
from .worker import WorkerPart
from .worker_calls import WorkerCalls


class KVOffloadConnector(WorkerCalls, SchedulerCalls):
    """What is wrong with a configuration or a model it says at start, by ConfigError, LayoutError or TierError."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = Settings.of(vllm_config, kv_cache_config)
        self._deltas = Deltas()
        self._looked = 0.0
        self._shown: dict[str, float] = {}
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerPart(settings, kv_cache_config)
        else:
            from vllm.distributed.parallel_state import get_pp_group, get_tp_group

            rank = settings.rank(get_pp_group().rank_in_group, get_tp_group().rank_in_group)
            self._worker = WorkerPart(settings, rank)

    def engine_seconds(self) -> dict[str, float]:
        """Seconds of the engine's thread inside this object since start, as "side|what": calls, and for a worker the
        copies that it waited for."""
        if self._worker is None:
            return {"scheduler|calls": self.spent_ns / 1e9}
        copies = self._worker.copy_ns
        return {"worker|calls": (self.spent_ns - copies) / 1e9, "worker|copies": copies / 1e9}

    def stats(self) -> Stats:
        """Counters since start and gauges of now; all 0 in a worker."""
        return Stats() if self._scheduler is None else self._scheduler.stats()

    def get_kv_connector_stats(self) -> OffloadStats | None:
        """What happened since the last look; looked at every EVERY_S at most."""
        now = time.monotonic()
        if now - self._looked < EVERY_S:
            return None
        self._looked = now
        total = self.engine_seconds()
        spent = {name: seconds - self._shown.get(name, 0.0) for name, seconds in total.items()}
        self._shown = total
        if self._scheduler is None:
            return OffloadStats.of({}, {}, spent)
        return OffloadStats.of(*self._deltas.of(self.stats()), spent)

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

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
