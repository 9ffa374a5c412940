"""What crosses between the scheduler's part and the workers' parts, carried by vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvoffload.keys import Namespace
from kvoffload.layout import Layout
from kvoffload.messages import Inventory, Outcome, Plans


@dataclass(frozen=True, slots=True)
class Ended:
    """A request's asynchronous load is over: a worker that has not said so yet says it now. failed: something did not
    arrive."""

    request: str
    failed: bool


@dataclass(frozen=True, slots=True)
class StepPlans(KVConnectorMetadata):
    """Scheduler -> workers, one per step.

    sync: jobs that the step's forward waits for. ended: as above, in order. invalid: by request, pages that the forward
    needs and nothing will fill. settled: requests whose failed load the scheduler knows of by now.
    """

    plans: Plans = field(default_factory=Plans)
    sync: tuple[int, ...] = ()
    ended: tuple[Ended, ...] = ()
    invalid: tuple[tuple[str, tuple[int, ...]], ...] = ()
    settled: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Report(KVConnectorWorkerMetadata):
    """Workers -> scheduler: outcomes of any ranks and steps, in any order. Each names its rank and job, so joining
    reports is plain concatenation, however many there are."""

    outcomes: tuple[Outcome, ...]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Report:
        assert isinstance(other, Report)
        return Report(self.outcomes + other.outcomes)


@dataclass(frozen=True, slots=True)
class Handshake(KVConnectorHandshakeMetadata):
    """One worker at start. layout, namespace: as this rank sees them; inventory: what it can give."""

    layout: Layout
    namespace: Namespace
    inventory: Inventory
