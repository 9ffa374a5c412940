"""What vLLM shows of a connector: its log line and its Prometheus metrics, from kvoffload's counters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvoffload.stats import FAMILIES, Sample, Stats

PREFIX = "vllm:"
"""vLLM shows, and takes back when an engine ends, the metrics whose name has this."""

SPENT = f"{PREFIX}kvoffload_engine_seconds"
"""Seconds that the engine's threads spent inside the connector, by what for: calls, or copies that are waited for."""

EVERY_S = 1.0
"""Between two looks at all counters."""


class OffloadStats(KVConnectorStats):
    """data: "counters" = by (metric, label value) as "metric|label|value" what was counted since the last look;
    "gauges" = values of now; "spent" = by "side|what" seconds."""

    @classmethod
    def of(
        cls, counters: Mapping[str, int], gauges: Mapping[str, int], spent: Mapping[str, float]
    ) -> OffloadStats:
        return cls({"counters": dict(counters), "gauges": dict(gauges), "spent": dict(spent)})

    def reset(self) -> None:
        self.data = {"counters": {}, "gauges": {}, "spent": {}}

    def is_empty(self) -> bool:
        return not any(self.data.get(part) for part in ("counters", "spent"))

    def aggregate(self, other: KVConnectorStats) -> OffloadStats:
        for part in ("counters", "spent"):
            mine = self.data.setdefault(part, {})
            for name, value in other.data.get(part, {}).items():
                mine[name] = mine.get(name, 0) + value
        self.data.setdefault("gauges", {}).update(other.data.get("gauges", {}))
        return self

    def reduce(self) -> dict[str, int | float]:
        """The counters that moved, for the log."""
        moved = {
            name.rstrip("|").replace("|", "_"): n for name, n in self.data.get("counters", {}).items() if n
        }
        spent = {f"{name.replace('|', '_')}_s": round(s, 4) for name, s in self.data.get("spent", {}).items()}
        return {**moved, **spent}


class Deltas:
    """Turns totals into what was added since the last look."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}

    def of(self, stats: Stats) -> tuple[dict[str, int], dict[str, int]]:
        """(counters that moved, gauges)."""
        moved: dict[str, int] = {}
        gauges: dict[str, int] = {}
        for sample in stats.samples():
            if sample.kind == "gauge":
                gauges[sample.metric] = sample.value
                continue
            name = _name(sample)
            added = sample.value - self._last.get(name, 0)
            if added:
                moved[name] = added
                self._last[name] = sample.value
        return moved, gauges


def _name(sample: Sample) -> str:
    label, value = next(iter(sample.labels.items()), ("", ""))
    return f"{sample.metric}|{label}|{value}"


class OffloadPromMetrics(KVConnectorPromMetrics):
    """Counters and gauges under PREFIX and the names of docs/metrics.md, with vLLM's own labels beside ours."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._families: dict[str, tuple[Any, str]] = {}
        for family in FAMILIES:
            name = f"kvoffload_{family.metric}"
            labels = [*labelnames, family.label] if family.label else labelnames
            self._families[name] = (self._counter_cls(f"{PREFIX}{name}", family.text, labels), family.label)
        gauges = (s for s in Stats().samples() if s.kind == "gauge")
        self._gauges = {s.metric: self._gauge_cls(f"{PREFIX}{s.metric}", s.text, labelnames) for s in gauges}
        self._spent = self._counter_cls(
            SPENT, "Seconds of the engine's threads inside kvoffload.", [*labelnames, "side", "what"]
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        own = self.per_engine_labelvalues[engine_idx]
        for name, added in transfer_stats_data.get("counters", {}).items():
            metric, _, value = name.split("|")
            counter, label = self._families[metric]
            counter.labels(*own, *([value] if label else [])).inc(added)
        for name, value in transfer_stats_data.get("gauges", {}).items():
            self._gauges[name].labels(*own).set(value)
        for name, seconds in transfer_stats_data.get("spent", {}).items():
            self._spent.labels(*own, *name.split("|")).inc(seconds)
