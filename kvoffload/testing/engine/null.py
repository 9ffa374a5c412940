"""The connector of an engine without offload."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvoffload.connector import EngineRequest, Hit, Scheduled, SchedulerConnector, Update
from kvoffload.messages import RequestId
from kvoffload.requests import Pages


class NullConnector(SchedulerConnector):
    """Stores nothing and finds nothing."""

    def match(self, request: EngineRequest, computed: int) -> Hit:
        return Hit()

    def allocated(self, request: EngineRequest, pages: Pages, computed: int, taken: int) -> int:
        return 0  # nothing was offered, so nothing was taken

    def step(self, scheduled: Sequence[Scheduled], now: float) -> Any:
        return None

    def update(self, reports: Iterable[Any]) -> Update:
        return Update()

    def release(self, request_id: RequestId, reason: str) -> int:
        return 0

    def reset(self) -> bool:
        return True
