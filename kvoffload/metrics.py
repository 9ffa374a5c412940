"""Stats as Prometheus metrics: text without any library, or a collector for `prometheus_client` where it is there.

Several instances in one process (data parallel ranks, two engines) share every metric name; each has its own labels.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from kvoffload.stats import Sample, Stats

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from prometheus_client.registry import CollectorRegistry

Labels = tuple[tuple[str, str], ...]
Grouped = dict[str, list[tuple[Mapping[str, str], Sample]]]


def to_text(instances: Iterable[tuple[Mapping[str, str], Stats]]) -> str:
    """The Prometheus text format of (labels, stats) pairs."""
    lines = []
    for metric, rows in _grouped(instances).items():
        sample = rows[0][1]
        name = f"{metric}_total" if sample.kind == "counter" else metric
        lines += [f"# HELP {name} {sample.text}", f"# TYPE {name} {sample.kind}"]
        for labels, row in rows:
            inside = ",".join(f'{k}="{_escaped(v)}"' for k, v in labels.items())
            lines.append(f"{name}{{{inside}}} {row.value}" if inside else f"{name} {row.value}")
    return "\n".join(lines) + "\n"


class Exporter:
    """All instances of this process in one registry; `exporter_for` makes it.

    Thread: `collect` runs on the registry's thread, so sources must be safe to call from there; they hand out
    snapshots.
    """

    def __init__(self) -> None:
        self._sources: dict[Labels, Callable[[], Stats]] = {}

    def add(self, labels: Mapping[str, str], source: Callable[[], Stats]) -> None:
        """Export `source()` under `labels`. Raises ValueError where an instance has them already, or others' names."""
        key = tuple(sorted(labels.items()))
        if key in self._sources:
            raise ValueError(
                f"an instance with the labels {dict(labels)} is exported already; give each its own"
            )
        names = next(iter(self._sources), key)
        if [k for k, _ in names] != [k for k, _ in key]:
            raise ValueError(
                f"labels {sorted(labels)} differ from {[k for k, _ in names]}, which others here have"
            )
        self._sources[key] = source

    def remove(self, labels: Mapping[str, str]) -> None:
        """Stop exporting the instance with these labels."""
        del self._sources[tuple(sorted(labels.items()))]

    def collect(self) -> Iterator[Metric]:
        """What prometheus_client asks a collector for."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for metric, rows in _grouped((dict(k), source()) for k, source in self._sources.items()).items():
            kind = CounterMetricFamily if rows[0][1].kind == "counter" else GaugeMetricFamily
            family = kind(metric, rows[0][1].text, labels=list(rows[0][0]))
            for labels, row in rows:
                family.add_metric(list(labels.values()), row.value)
            yield family


_EXPORTERS: weakref.WeakKeyDictionary[CollectorRegistry, Exporter] = weakref.WeakKeyDictionary()


def exporter_for(registry: CollectorRegistry) -> Exporter:
    """The one exporter of a registry: a second instance joins it, where registering again would be an error."""
    exporter = _EXPORTERS.get(registry)
    if exporter is None:
        exporter = _EXPORTERS[registry] = Exporter()
        registry.register(exporter)
    return exporter


def _grouped(instances: Iterable[tuple[Mapping[str, str], Stats]]) -> Grouped:
    """Samples of all instances by metric, each with its instance's labels before its own."""
    grouped: Grouped = {}
    for labels, stats in instances:
        for sample in stats.samples():
            grouped.setdefault(sample.metric, []).append(({**labels, **sample.labels}, sample))
    return grouped


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
