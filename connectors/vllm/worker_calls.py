"""vLLM's calls on the worker's connector, handed to a WorkerPart. No logic lives here."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
)

from .compat import engine_facts, forward_mode
from .pools import layer_places, layout_of
from .timing import timed
from .wire import Handshake, Report, StepPlans
from .worker import WorkerPart


class WorkerCalls(KVConnectorBase_V1):
    """Thread: the worker's; per-layer hooks maybe on others, during a forward. Under full CUDA graphs they do not run:
    a load depends on them only where they have been seen to run (layers.py), and no store does."""

    spent_ns = 0
    _worker: WorkerPart | None = None

    @property
    def _mine(self) -> WorkerPart:
        assert self._worker is not None
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        layout, pools = layout_of(self._kv_cache_config, kv_caches, self._mine.copies)
        facts = engine_facts(self._vllm_config, self._kv_cache_config, kv_caches)
        first = next(iter(kv_caches.values()))
        device = (first[0] if isinstance(first, list | tuple) else first).device
        places = layer_places(self._kv_cache_config, kv_caches, pools)
        self._mine.register(layout, pools, facts, device, places)

    def get_handshake_metadata(self) -> Handshake | None:
        return None if self._worker is None else self._worker.handshake

    @timed
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """vLLM's first call of every step, whether or not there are preemptions."""
        assert isinstance(kv_connector_metadata, StepPlans)
        self._mine.begin(kv_connector_metadata)

    @timed
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._mine.start(self._told(), forward_mode(forward_context))

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._mine.layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: blocks are stored whole, after the forward."""

    @timed
    def wait_for_save(self) -> None:
        self._mine.save(self._told())

    @timed
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        received, failed = self._mine.ended()
        return KVConnectorTransferResults(finished_recving=received, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._mine.errors()

    @timed
    def build_connector_worker_meta(self) -> Report | None:
        return self._mine.report()

    def _told(self) -> StepPlans:
        told = self._get_connector_metadata()
        assert isinstance(told, StepPlans)
        return told
