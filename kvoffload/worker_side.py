"""The worker's part of a connector over a Mover: what every engine plug-in shares on that side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from kvoffload.connector import WorkerConnector
from kvoffload.layout import Pools
from kvoffload.messages import Inventory, JobKind, Outcome, Plans


class MoverLike(Protocol):
    """What is needed of a mover."""

    def register(self, pools: Pools) -> Inventory: ...
    def submit(self, plans: Plans, after: object = None) -> None: ...
    def poll(self) -> list[Outcome]: ...
    def wait(self, job_ids: Iterable[int], timeout: float) -> bool: ...
    def close(self) -> None: ...


class MoverConnector(WorkerConnector):
    """Stores go out after the forward, everything else before it. The mover is this object's from here on.

    On a device with streams the engine's adapter gives both calls the point after which copies may start, as the copy
    engine wants it (kvoffload.copying.gpu.StreamPoint), recorded by then on the stream of the forward:

        before_forward  behind the last step that used the pages which loads of this step write
        after_forward   behind the forward of this step; its stream may then go on to overwrite the pages

    Without it such a device's copies are refused by a ValueError.
    """

    def __init__(self, mover: MoverLike, store_timeout_s: float = 0.0) -> None:
        """store_timeout_s: so long a step waits for its stores; 0 = not at all. Needed where the engine gives pages of
        windows back when the step ends and no stream orders the copies before their next use."""
        self._mover = mover
        self._timeout = store_timeout_s

    def register(self, pools: Pools) -> Inventory:
        return self._mover.register(pools)

    def before_forward(self, metadata: Plans, after: object = None) -> None:
        early = tuple(job for job in metadata.jobs if job.kind is not JobKind.STORE)
        plans = replace(metadata, jobs=early)
        if plans:
            self._mover.submit(plans, after)

    def after_forward(self, metadata: Plans, after: object = None) -> None:
        stores = tuple(job for job in metadata.jobs if job.kind is JobKind.STORE)
        if stores:
            self._mover.submit(Plans(stores), after)
            if self._timeout and not self._mover.wait([job.id for job in stores], self._timeout):
                raise TimeoutError(f"{len(stores)} stores have not ended in {self._timeout} s")

    def poll(self) -> Sequence[Outcome]:
        return self._mover.poll()

    def close(self) -> None:
        self._mover.close()
