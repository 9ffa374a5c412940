"""vLLM's calls on the scheduler's connector, handed to a SchedulerPart. No logic lives here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from .scheduler import SchedulerPart
from .timing import timed


class SchedulerCalls(KVConnectorBase_V1, SupportsHMA):
    """Thread: the scheduler's."""

    spent_ns = 0
    _scheduler: SchedulerPart | None = None

    @property
    def _ours(self) -> SchedulerPart:
        assert self._scheduler is not None
        return self._scheduler

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        self._ours.attach(metadata)

    @timed
    def on_new_request(self, request: Any) -> None:
        self._ours.new(request)

    @timed
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._ours.match(request, num_computed_tokens)

    @timed
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._ours.allocated(request, blocks.get_block_ids, num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        host, disk = self._ours.sources(request, num_external_tokens)
        counts = {CacheHitSource.HOST: host, CacheHitSource.DISK: disk}
        return {source: tokens for source, tokens in counts.items() if tokens}

    @timed
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self._ours.step(scheduler_output)

    @timed
    def update_connector_output(self, connector_output: Any) -> None:
        report = connector_output.kv_connector_worker_meta
        self._ours.update(() if report is None else (report,))

    def has_pending_push_work(self) -> bool:
        """vLLM asks when it has no request left, and makes steps as long as this is so."""
        return self._ours.going_on()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    @timed
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Never holds the pages: stores have left them, and those of a running load vLLM holds itself."""
        reason = request.get_finished_reason()
        self._ours.finished(request, "" if reason is None else str(reason), block_ids)
        return False, None

    def reset_cache(self) -> bool | None:
        return self._ours.reset()

    @timed
    def take_events(self) -> Iterable[Any]:
        return self._ours.take_events()
