"""Planner and movers in one process: for custom schedulers, tests and the replay."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Protocol

from kvoffload.arena import HostArena
from kvoffload.config import Config
from kvoffload.copying.cpu import CpuCopyEngine
from kvoffload.identity import namespace_of
from kvoffload.keys import Namespace
from kvoffload.layout import Layout, Pools, joined
from kvoffload.messages import Outcome, Plans
from kvoffload.mover import Mover
from kvoffload.planner import Planner
from kvoffload.requests import Finished
from kvoffload.sharing import equal_copies
from kvoffload.sizing import size_ranks
from kvoffload.tiers.disk import DiskTier, rank_directory
from kvoffload.tiers.lent import LentTier

IDLE_SECONDS = 0.0005
"""Between two looks at jobs that run, while draining."""


class MoverLike(Protocol):
    """What Local needs of a mover."""

    def submit(self, plans: Plans, after: object = None) -> None: ...
    def poll(self) -> list[Outcome]: ...
    def wait(self, job_ids: Iterable[int], timeout: float) -> bool: ...
    def close(self) -> None: ...


class Local:
    """One planner and one mover per rank. Every method is called from one thread."""

    def __init__(
        self,
        planner: Planner,
        movers: Sequence[MoverLike],
        clock: Callable[[], float] = time.monotonic,
        *,
        held: Sequence[HostArena | DiskTier] = (),
        point: Callable[[int], object] | None = None,
    ) -> None:
        """held: what movers share; closed after them. point: for devices with streams, asked for each mover (by its
        place) in each step that has jobs: the point behind which their copies may start (Mover.submit), recorded by
        then. REQUIRES: every mover has registered its pools and attached to the planner."""
        self.planner = planner
        self.movers = movers
        self._clock = clock
        self._held = held
        self._point = point

    @classmethod
    def open(
        cls,
        config: Config,
        layout: Layout | Sequence[Layout],
        pools: Sequence[Pools],
        *,
        namespace: Namespace | None = None,
    ) -> Local:
        """Tiers on this machine's CPU and disk for device pages in host memory: one mover per entry of `pools`.

        layout: of every rank, or one per rank where they differ. Neighbouring ranks whose groups all have as many
        `replicas` share host memory and disk. Raises ConfigError for sizes that do not fit, TierError when the disk
        path cannot be used.
        """
        config = config.resolve()
        layouts = [layout] * len(pools) if isinstance(layout, Layout) else list(layout)
        ranks = len(pools)
        copies = equal_copies(layouts)
        planner = Planner(joined(layouts, copies=copies), config, ranks=ranks, joined=True)
        assert config.host_bytes is not None
        slabs = size_ranks(layouts, config.host_bytes, config.disk_bytes, copies)
        name = namespace or namespace_of(config, layouts[0], (ranks,))
        movers: list[Mover] = []
        held: list[HostArena | DiskTier] = []
        try:
            for rank, (mine, own, size) in enumerate(zip(pools, layouts, slabs, strict=True)):
                if rank % copies == 0:
                    tier, arena = None, None
                    if config.disk_path is not None:
                        path = rank_directory(config.disk_path, name.digest, 0, rank)
                        tier = DiskTier(
                            path, own, size.slab_bytes, size.disk, name.digest, checksum=config.checksum
                        )
                    if copies > 1:
                        held += [tier] if tier else []
                        transit = size.transit * (copies if tier else 1)
                        arena = HostArena(size.slab_bytes, size.host + transit, own)
                        held.append(arena)
                given = tier if tier is None or copies == 1 else LentTier(tier, writer=rank % copies == 0)
                movers.append(Mover(rank, own, size, CpuCopyEngine(), given, arena=arena))
                planner.attach(rank, movers[-1].register(mine))
        except BaseException:
            for item in (*movers, *held):
                item.close()
            raise
        return cls(planner, movers, held=held)

    def step(self) -> list[Finished]:
        """Send what the planner has decided, take in what the movers have done. Never blocks."""
        plans = self.planner.tick(self._clock())
        outcomes: list[Outcome] = []
        for place, mover in enumerate(self.movers):
            if plans:
                mover.submit(plans, self._point(place) if plans.jobs and self._point is not None else None)
            outcomes += mover.poll()
        return self.planner.complete(outcomes)

    def drain(self, timeout: float = 60.0) -> list[Finished]:
        """Step until no job runs or waits. Raises TimeoutError after `timeout` seconds."""
        end = time.monotonic() + timeout
        finished: list[Finished] = []
        while True:
            finished += self.step()
            if self.planner.idle:
                return finished
            if time.monotonic() > end:
                raise TimeoutError(f"jobs still run after {timeout} s: {self.planner.describe()}")
            time.sleep(IDLE_SECONDS)

    def close(self) -> None:
        """End every job and release memory, threads and files. Idempotent."""
        for item in (*self.movers, *self._held):
            item.close()

    def __enter__(self) -> Local:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
