"""What crosses between the scheduler's part and the workers' parts, carried by vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvoffload.keys import Namespace
from kvoffload.layout import Layout
from kvoffload.messages import Inventory, Outcome, Plans

Gap: TypeAlias = tuple[int, int]
"""(rank, number) of one step's pages that a forward needed and that were not filled on that rank."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A request's asynchronous load is over: a worker that has not said so yet says it now. failed: something did not
    arrive."""

    request: str
    failed: bool


@dataclass(frozen=True, slots=True)
class StepPlans(KVConnectorMetadata):
    """Scheduler -> workers, one per step.

    sync: jobs that the step's forward waits for. ended: as above, in order. invalid: pages that the forward needs and
    nothing will fill. settled: gaps (see Report) that the scheduler knows of by now. rest: stores of requests that have
    ended; their pages may be others' from this step's forward on.
    """

    plans: Plans = field(default_factory=Plans)
    sync: tuple[int, ...] = ()
    ended: tuple[Ended, ...] = ()
    invalid: tuple[int, ...] = ()
    settled: tuple[Gap, ...] = ()
    rest: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Report(KVConnectorWorkerMetadata):
    """Workers -> scheduler: outcomes and gaps of any ranks and steps, in any order. Each names its rank, so joining
    reports is plain concatenation, however many there are."""

    outcomes: tuple[Outcome, ...]
    gaps: tuple[Gap, ...] = ()

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Report:
        assert isinstance(other, Report)
        return Report(self.outcomes + other.outcomes, self.gaps + other.gaps)


@dataclass(frozen=True, slots=True)
class Handshake(KVConnectorHandshakeMetadata):
    """One worker at start. layout, namespace: as this rank sees them; inventory: what it can give. memory: names the
    host memory that it shares with the other ranks of its set, "" where it has its own."""

    layout: Layout
    namespace: Namespace
    inventory: Inventory
    memory: str = ""
