"""What the planner tells its callers, and what it remembers of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvoffload.index import Matcher
from kvoffload.messages import JobKind, RequestId

Pages = Sequence[NDArray[np.int32]]
"""By group: the device page of block i at [i]; -1 or beyond the end = no page."""


class ChainLike(Protocol):
    """Anything that shows the keys of a sequence's base blocks."""

    @property
    def keys(self) -> NDArray[np.uint8]:
        """(n, 16) uint8, C-contiguous; grows at the end only."""


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """Who asks. Session and agent let a policy learn; they are no part of any key."""

    id: RequestId
    session: str = ""
    agent: str = ""


class Match(NamedTuple):
    """What could be restored for a request, in tokens.

    boundary: the longest restorable boundary, >= the computed tokens asked with.
    pending: the boundary that in-flight jobs would make restorable, >= boundary.
    host, disk: base blocks of [computed, boundary) that would come from each tier.
    loading: some of these blocks are on their way to the device right now, for another request.
    """

    boundary: int
    pending: int
    host: int
    disk: int
    loading: bool

    @property
    def wait(self) -> bool:
        """True when asking again later will give more for less: an adapter that can wait should."""
        return self.loading or self.pending > self.boundary


class LoadPlan(NamedTuple):
    """A load that has begun: the job moves `blocks` blocks (all groups); boundary in tokens.

    shortfall: tokens asked for that no tier holds any more. id 0 = nothing to load.
    """

    id: int
    boundary: int
    blocks: int
    shortfall: int


class Offer(NamedTuple):
    """What became of an offer. job: id of the store job, 0 = none; blocks in it.

    cursor: tokens up to which every group is settled (stored, on its way, or refused for good).
    blocked: the cursor stands before `computed` because slots are busy now; offer again while the pages live.
    """

    job: int
    blocks: int
    cursor: int
    blocked: bool


class Finished(NamedTuple):
    """A load (its LoadPlan id) or store (its job id) that has ended on all ranks.

    request: who it was for; None after the request was finished or aborted.
    boundary: for a load, tokens that are really on the device, counted from the start of the sequence.
    failed: blocks that did not arrive. expired: the deadline ended it.
    """

    id: int
    kind: JobKind
    request: RequestId | None
    boundary: int
    failed: int
    expired: bool
    error: str = ""


@dataclass(slots=True, eq=False)
class RequestState:
    """What the planner remembers of one live request.

    cursors: by group, blocks settled. had: tokens that were not computed by this request (in HBM before, or loaded).
    seen: tokens ever offered, for the produced counter. prompt: tokens of the keys it came with. forks: boundaries up
    to which the full groups matched although nothing could be resumed there. jobs: running
    jobs that touch the request's pages.
    """

    info: RequestInfo
    segment: int
    matcher: Matcher | None
    cursors: list[int]
    chain: ChainLike | None = None
    computed: int = 0
    had: int = 0
    seen: int = 0
    prompt: int = 0
    forks: tuple[int, ...] = ()
    offered: bool = False
    matched: bool = False
    jobs: set[int] = field(default_factory=set)
