"""Counters that say what happened, and gauges of now.

Every counter is a total since start: it never goes down, and nothing is subtracted from another to make one. What was
found (`matched`), what was moved (`loaded`) and what the engine went on with (`used`) are counted where each happens,
so a load that was declined or failed is never credited.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, Protocol

TIERS = ("host", "disk")
"""In the order of the index's tier numbers."""

REASONS: dict[str, str] = {
    "refused": "no room that may be taken, or the policy refused it; without disk once per offer that was cut",
    "store_failed": "the copy from the device failed",
    "write_failed": "the write to disk failed",
    "read_failed": "the disk had no good bytes for the key",
    "disk_backlog": "evicted from host before its write to disk began",
    "disk_full": "the disk's policy refused it",
    "write_budget": "the bytes that may be written per hour were spent",
}
"""Why a block was dropped: a counter each."""


class Family(NamedTuple):
    """Counters that are one metric: the name, what it counts, its label, and per label value the counter."""

    metric: str
    text: str
    label: str
    counters: Mapping[str, str]


def _by_tier(metric: str, text: str, pattern: str) -> Family:
    return Family(metric, text, "tier", {tier: pattern.format(tier) for tier in TIERS})


def _single(name: str, text: str, unit: str = "blocks") -> Family:
    return Family(f"{name}_{unit}", text, "", {"": name})


FAMILIES: tuple[Family, ...] = (
    _by_tier("matched_blocks", "Blocks found beyond what the engine had, once per request.", "matched_{}"),
    _by_tier("loaded_blocks", "Blocks copied to the device, by the tier they came from.", "loaded_{}"),
    Family(
        "declined_blocks",
        "Blocks found and not loaded: the engine took less, or they were gone when it did.",
        "reason",
        {"engine": "declined", "gone": "vanished"},
    ),
    _single("used", "Blocks that requests went on with after a load, instead of computing them."),
    _single("produced", "Blocks that the engine computed and offered."),
    _by_tier("stored_blocks", "Blocks that became visible in a tier.", "stored_{}"),
    _single("dedup", "Offered blocks that a tier already had."),
    _single("in_flight_dedup", "Offered blocks that another transfer was already bringing."),
    _by_tier("evicted_blocks", "Blocks given up to make room in a tier.", "evicted_{}"),
    _single("pruned", "Window and state blocks given up at the end of a turn: no kept boundary needs them."),
    _single("superseded", "Window and state blocks of boundaries that a session has left behind."),
    _single("orphaned", "Window and state blocks given up with the end of the full groups before them."),
    _single("prefetched", "Blocks brought from disk to host ahead of a load."),
    _single("restored", "Blocks found on disk at start."),
    _single("retried", "Blocks whose load failed once and was tried again."),
    _by_tier("store_bytes", "Bytes written into a tier.", "store_bytes_{}"),
    _by_tier("load_bytes", "Bytes read: from disk, and from host memory to the device.", "load_bytes_{}"),
    Family("dropped", "Blocks not kept, by reason.", "reason", {reason: reason for reason in REASONS}),
    _single("moved", "Slabs that were emptied and given to another group.", "slabs"),
    _single("overdue", "Jobs that ran past their deadline.", "jobs"),
    _single("disk_lost", "Times that the disk tier was switched off after errors.", "times"),
    _single("disk_back", "Times that the disk tier came back.", "times"),
    _single("disk_hung", "Calls of the disk tier that did not return in time, over all ranks.", "calls"),
)
NAMES = frozenset(name for family in FAMILIES for name in family.counters.values())

INDEX_NAMES: dict[str, str] = {
    "write_failed": "write_failed",
    "read_failed": "read_failed",
    "dropped_disk_backlog": "disk_backlog",
    "dropped_disk_full": "disk_full",
    "evicted_host": "evicted_host",
    "evicted_disk": "evicted_disk",
    "slabs_moved": "moved",
    "orphaned": "orphaned",
}
"""Counters that the index keeps, by its name for them: a counter has one owner, so nothing is counted twice."""


class Counters:
    """Totals by name, of all that the index does not count; zero at first. Thread: one at a time."""

    __slots__ = ("_totals",)

    def __init__(self) -> None:
        self._totals = dict.fromkeys(sorted(NAMES - set(INDEX_NAMES.values())), 0)

    def add(self, name: str, amount: int = 1) -> None:
        """Count `amount` more. Raises KeyError for a name that is not kept here, ValueError below 0."""
        if amount < 0:
            raise ValueError(
                f"counter {name} cannot go down by {-amount}; count the other event under its own name"
            )
        self._totals[name] += int(amount)

    def __getitem__(self, name: str) -> int:
        return self._totals[name]

    def as_dict(self) -> dict[str, int]:
        """A copy of all totals."""
        return dict(self._totals)


@dataclass(frozen=True, slots=True)
class TierUsage:
    """One tier now, in bytes of slots over all ranks.

    capacity: all slabs, as slots of the group that wastes least of a slab. used: holds a visible block or is promised
    to one; pinned: held by running jobs; pending: bytes are on their way into it.
    """

    capacity: int = 0
    used: int = 0
    pinned: int = 0
    pending: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.used <= self.capacity or self.pinned < 0 or self.pending < 0:
            raise ValueError(f"{self}: used must lie in [0, capacity], and nothing may be negative")

    @property
    def free(self) -> int:
        """What can be taken without giving anything up."""
        return self.capacity - self.used


class Sample(NamedTuple):
    """One value of one metric."""

    metric: str
    kind: str
    text: str
    labels: Mapping[str, str]
    value: int


class UsageSource(Protocol):
    """What Stats needs of an index."""

    def usage(self, tier: int) -> dict[str, Any]: ...
    def counters(self) -> dict[str, int]: ...
    def policy(self, tier: int) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot of one instance: every counter, every tier's gauges, what the policies learned, the configuration
    in force."""

    totals: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(sorted(NAMES), 0))
    tiers: Mapping[str, TierUsage] = field(default_factory=lambda: {t: TierUsage() for t in TIERS})
    config: Mapping[str, object] = field(default_factory=dict)
    policies: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def collect(
        cls,
        counters: Counters,
        index: UsageSource | None,
        slot_bytes: Sequence[int] = (),
        config: Mapping[str, object] | None = None,
    ) -> Stats:
        """What is counted now, by the planner and by the index in INDEX_NAMES. Without an index nothing is stored.

        slot_bytes: by group, bytes of one slot over all ranks.
        """
        theirs = {} if index is None else index.counters()
        totals = {ours: theirs.get(name, 0) for name, ours in INDEX_NAMES.items()} | counters.as_dict()
        tiers = {tier: TierUsage() for tier in TIERS}
        if index is not None:
            tiers = {tier: _usage(index.usage(number), slot_bytes) for number, tier in enumerate(TIERS)}
        learned = {} if index is None else {tier: index.policy(n) for n, tier in enumerate(TIERS)}
        return cls(totals, tiers, config or {}, learned)

    def family(self, metric: str) -> dict[str, int]:
        """The counters of one metric by label value, for example family("loaded_blocks")["disk"]."""
        family = next(f for f in FAMILIES if f.metric == metric)
        return {value: self.totals[name] for value, name in family.counters.items()}

    @property
    def dropped(self) -> dict[str, int]:
        """Blocks not kept, by reason."""
        return self.family("dropped")

    def as_dict(self) -> dict[str, Any]:
        """Everything by name, for JSON: metrics without a label as a number, with one as a mapping."""
        body: dict[str, Any] = {}
        for family in FAMILIES:
            values = self.family(family.metric)
            body[family.metric] = values if family.label else values[""]
        body["tiers"] = {tier: {**asdict(usage), "free": usage.free} for tier, usage in self.tiers.items()}
        policies = {tier: dict(learned) for tier, learned in self.policies.items()}
        return {**body, "config": dict(self.config), "policies": policies}

    def samples(self) -> Iterator[Sample]:
        """Every value as a metric with labels."""
        for family in FAMILIES:
            for value, name in family.counters.items():
                labels = {family.label: value} if family.label else {}
                yield Sample(f"kvoffload_{family.metric}", "counter", family.text, labels, self.totals[name])
        for tier, usage in self.tiers.items():
            for name, value in asdict(usage).items():
                text = f"{name.capitalize()} bytes of the {tier} tier."
                yield Sample(f"kvoffload_{tier}_{name}_bytes", "gauge", text, {}, value)


def _usage(raw: Mapping[str, Any], slot_bytes: Sequence[int]) -> TierUsage:
    """What the index says by group, in bytes."""

    def total(name: str) -> int:
        return sum(row[name] * size for row, size in zip(raw["groups"], slot_bytes, strict=True))

    capacity = max(row["capacity_slots"] * size for row, size in zip(raw["groups"], slot_bytes, strict=True))
    return TierUsage(capacity, total("used"), total("pinned"), total("pending"))
