"""What vLLM shows of kvoffload: its log line, its Prometheus metrics, the sources of hits."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

from kvoffload.connectors.vllm.connector import KVOffloadConnector
from kvoffload.connectors.vllm.metrics import Deltas, OffloadPromMetrics, OffloadStats
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from runner import Engine, prompts, restorable
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvoffload.stats import Stats


def stats(counters=(), gauges=(), spent=()):
    return OffloadStats.of(dict(counters), dict(gauges), dict(spent))


def test_stats_add_up():
    """Counters and seconds of two sides are summed, a gauge is the later one; the log shows what moved."""
    a = stats(
        {"kvoffload_used_blocks||": 3, "kvoffload_dropped|reason|refused": 1},
        {"g": 1},
        {"worker|copies": 0.5},
    )
    b = stats({"kvoffload_used_blocks||": 4}, {"g": 7}, {"worker|copies": 0.25, "scheduler|calls": 1.0})
    both = a.aggregate(b)

    assert both.data["counters"] == {"kvoffload_used_blocks||": 7, "kvoffload_dropped|reason|refused": 1}
    assert both.data["gauges"] == {"g": 7}
    assert both.reduce() == {
        "kvoffload_used_blocks": 7,
        "kvoffload_dropped_reason_refused": 1,
        "worker_copies_s": 0.75,
        "scheduler_calls_s": 1.0,
    }


def test_stats_cross_processes():
    """They are pickled, and rebuilt from their data; a reset empties them."""
    one = stats({"c||": 1}, {}, {"worker|calls": 0.1})
    copy = pickle.loads(pickle.dumps(one))
    again = KVOffloadConnector.build_kv_connector_stats(copy.data)

    assert copy.data == again.data == one.data
    assert not one.is_empty()
    one.reset()
    assert one.is_empty()
    assert stats(gauges={"g": 1}).is_empty()


def test_deltas_are_what_was_added():
    """The second look shows the difference, a third one nothing; gauges are shown each time."""
    deltas, totals = Deltas(), dict(Stats().totals)
    name = next(n for n in totals if n == "used")
    first, _ = deltas.of(Stats({**totals, name: 5}))
    second, _ = deltas.of(Stats({**totals, name: 8}))
    third, gauges = deltas.of(Stats({**totals, name: 8}))

    assert (first, second, third) == ({"kvoffload_used_blocks||": 5}, {"kvoffload_used_blocks||": 3}, {})
    assert "kvoffload_host_used_bytes" in gauges


def prom():
    """The Prometheus side over a registry of its own, for engines 0 and 1."""
    registry = CollectorRegistry()
    kinds = {
        kind: lambda *args, kind=kind, **more: kind(*args, registry=registry, **more)
        for kind in (Counter, Gauge, Histogram)
    }
    config = SimpleNamespace(kv_transfer_config=None)
    values = {0: ["m", "0"], 1: ["m", "1"]}
    return OffloadPromMetrics(config, kinds, ["model_name", "engine"], values), registry


def test_prometheus_shows_every_engine_apart():
    """Counters add, gauges are set, labels are vLLM's and ours."""
    shown, registry = prom()
    moved = {"kvoffload_loaded_blocks|tier|disk": 2, "kvoffload_used_blocks||": 5}
    shown.observe(stats(moved, {"kvoffload_host_used_bytes": 10}, {"worker|copies": 0.5}).data, 0)
    shown.observe(stats(moved, {"kvoffload_host_used_bytes": 20}, {"worker|copies": 0.5}).data, 0)
    shown.observe(stats({"kvoffload_used_blocks||": 1}).data, 1)

    def value(name, engine, **labels):
        return registry.get_sample_value(f"vllm:{name}", {"model_name": "m", "engine": engine, **labels})

    assert value("kvoffload_loaded_blocks_total", "0", tier="disk") == 4
    assert value("kvoffload_used_blocks_total", "0") == 10
    assert value("kvoffload_used_blocks_total", "1") == 1
    assert value("kvoffload_host_used_bytes", "0") == 20
    assert value("kvoffload_engine_seconds_total", "0", side="worker", what="copies") == 1.0


def _seconds(**labels):
    """Of the counter of engine seconds; vLLM's own list of metrics has whole numbers only."""
    name = "vllm:kvoffload_engine_seconds_total"
    samples = [s for family in REGISTRY.collect() for s in family.samples]
    return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())


def test_an_engine_shows_its_metrics_and_takes_them_back(model, tmp_path):
    """Counters of a running engine are the planner's; hits are told by source; the next engine begins at zero."""
    options = {"host_bytes": "4MiB", "disk_path": str(tmp_path), "disk_bytes": "64MiB"}
    seen = []
    with Engine(model("llama"), options) as engine:
        sources = engine.scheduler.get_external_cache_hit_sources
        engine.scheduler.get_external_cache_hit_sources = lambda *args: (
            seen.append(sources(*args)) or seen[-1]
        )
        engine.generate(prompts())
        engine.forget_pages()
        engine.generate(prompts())
        engine.settle()

        assert engine.metric("kvoffload_loaded_blocks", tier="host") == engine.counter("loaded_host") == 33
        assert engine.metric("kvoffload_stored_blocks", tier="disk") == engine.counter("stored_disk")
        assert engine.metric("kvoffload_host_capacity_bytes") > 0
        assert engine.metric("external_prefix_cache_hits") == sum(restorable())
        assert _seconds(side="worker", what="copies") > 0
        assert sum(s.get(CacheHitSource.HOST, 0) + s.get(CacheHitSource.DISK, 0) for s in seen) == sum(
            restorable()
        )
        assert engine.llm.llm_engine.engine_core is not None
    with Engine(model("llama"), options) as engine:
        engine._show_counters()
        assert engine.metric("kvoffload_loaded_blocks", tier="host") == 0
        assert engine.metric("kvoffload_restored_blocks") == engine.counter("restored") > 0
