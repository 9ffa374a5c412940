"""Counters never lie downwards, gauges add up, and several instances export side by side."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvoffload.metrics import exporter_for, to_text
from kvoffload.stats import FAMILIES, NAMES, REASONS, Counters, Stats, TierUsage

SLOTS = (4096, 8192)


class FakeIndex:
    """The two calls that Stats makes of an index: two groups, the second with larger slots."""

    def usage(self, tier: int) -> dict[str, object]:
        small = {"capacity_slots": 10 * (tier + 1), "used": 4, "pinned": tier, "pending": 2}
        return {"groups": [small, {"capacity_slots": 2, "used": 1, "pinned": 0, "pending": 0}]}

    def policy(self, tier: int) -> dict[str, object]:
        return {"classes": []}

    def counters(self) -> dict[str, int]:
        return {"write_failed": 3, "dropped_disk_full": 2, "dedup": 1, "splits": 99}


def counted(**amounts: int) -> Counters:
    """Counters with the given totals."""
    counters = Counters()
    for name, amount in amounts.items():
        counters.add(name, amount)
    return counters


def scraped(text: str) -> dict[tuple, float]:
    """(name, sorted labels) -> value, read by the library's own parser."""
    return {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


def test_OBS_02_counters_refuse_to_go_down():
    """100 blocks found outside and 60 of them already inside: each is counted; a negative difference is an error."""
    counters = counted(matched_host=60, matched_disk=100)
    with pytest.raises(ValueError, match="matched_disk cannot go down by 40"):
        counters.add("matched_disk", 60 - 100)

    assert (counters["matched_host"], counters["matched_disk"]) == (60, 100)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(sorted(Counters().as_dict())), st.integers(-3, 9)), max_size=40))
def test_OBS_02_every_counter_is_monotone(steps):
    """Whatever is counted, in whatever order, no total of any snapshot is below the one before or below 0."""
    counters, before = Counters(), Counters().as_dict()
    for name, amount in steps:
        try:
            counters.add(name, amount)
        except ValueError:
            assert amount < 0
        after = counters.as_dict()
        assert all(after[n] >= before[n] >= 0 for n in after)
        assert after[name] - before[name] == max(amount, 0)
        before = after


def test_unknown_counters_are_errors():
    """A misspelt counter, or one that the index owns, is found at once and not counted apart."""
    with pytest.raises(KeyError):
        Counters().add("write_failed")
    with pytest.raises(KeyError):
        Counters().add("matched")
    with pytest.raises(KeyError):
        Counters()["matched"]


def test_OBS_06_matched_loaded_and_used_are_separate():
    """Match 10, load 6, use 6: three numbers, none made of another, and the reason of the rest beside them."""
    stats = Stats.collect(counted(matched_host=10, loaded_host=6, used=6, refused=4), None)
    body = stats.as_dict()

    assert body["matched_blocks"] == {"host": 10, "disk": 0}
    assert body["loaded_blocks"] == {"host": 6, "disk": 0}
    assert body["used_blocks"] == 6
    assert stats.dropped == {**dict.fromkeys(REASONS, 0), "refused": 4}


def test_OBS_01_gauges_add_up():
    """Every tier shows capacity, used, pinned and pending as numbers, and used + free = capacity."""
    stats = Stats.collect(Counters(), FakeIndex(), SLOTS)

    for tier, usage in stats.as_dict()["tiers"].items():
        assert set(usage) == {"capacity", "used", "pinned", "pending", "free"}
        assert usage["used"] + usage["free"] == usage["capacity"]
        assert stats.tiers[tier].free == usage["free"]
    assert stats.tiers == {
        "host": TierUsage(10 * 4096, 4 * 4096 + 8192, 0, 2 * 4096),
        "disk": TierUsage(20 * 4096, 4 * 4096 + 8192, 4096, 2 * 4096),
    }
    values = {s.metric: s.value for s in stats.samples() if s.kind == "gauge"}
    assert values["kvoffload_disk_capacity_bytes"] == 20 * 4096
    assert len(values) == 8


@pytest.mark.parametrize("bad", [(4, 5, 0, 0), (4, -1, 0, 0), (4, 1, -1, 0), (4, 1, 0, -1)])
def test_OBS_01_impossible_gauges_are_errors(bad):
    """A gauge that could not be true is refused where it is made."""
    with pytest.raises(ValueError, match=r"used must lie in \[0, capacity\]"):
        TierUsage(*bad)


def test_collect_adds_the_index_and_is_a_snapshot():
    """The index counts its own names only, and later counting does not reach a snapshot."""
    counters = counted(dedup=5)
    stats = Stats.collect(counters, FakeIndex(), SLOTS, {"host_bytes": 7})
    counters.add("dedup", 10)

    assert (stats.totals["dedup"], stats.dropped["write_failed"], stats.dropped["disk_full"]) == (5, 3, 2)
    assert set(stats.totals) == NAMES == set(Stats().totals)
    assert json.loads(json.dumps(stats.as_dict()))["config"] == {"host_bytes": 7}
    with pytest.raises(FrozenInstanceError):
        stats.config = {}


def test_every_counter_is_exported_once():
    """Each name belongs to one metric and label."""
    names = [name for family in FAMILIES for name in family.counters.values()]

    assert len(names) == len(set(names)) == len(NAMES)
    assert len({f.metric for f in FAMILIES}) == len(FAMILIES)


def test_text_format_reads_back():
    """What is written without the library is read by the library: names, labels with odd characters, values."""
    stats = Stats.collect(counted(loaded_disk=7, used=3), FakeIndex(), SLOTS)
    odd = 'a "b"\\c\nd'
    values = scraped(to_text([({"engine": odd}, stats)]))

    assert values["kvoffload_loaded_blocks_total", (("engine", odd), ("tier", "disk"))] == 7
    assert values["kvoffload_used_blocks_total", (("engine", odd),)] == 3
    assert values["kvoffload_dropped_total", (("engine", odd), ("reason", "write_failed"))] == 3
    assert values["kvoffload_disk_capacity_bytes", (("engine", odd),)] == 20 * 4096
    assert scraped(to_text([({}, stats)]))["kvoffload_used_blocks_total", ()] == 3


def test_OBS_03_two_instances_in_one_process():
    """Two instances export to one registry under their labels, the same as the text format says."""
    registry = CollectorRegistry(auto_describe=True)
    one = Stats.collect(counted(used=1), FakeIndex(), SLOTS)
    two = Stats.collect(counted(used=2), None)
    exporter_for(registry).add({"engine": "a", "dp": "0"}, lambda: one)
    exporter_for(registry).add({"dp": "1", "engine": "a"}, lambda: two)
    values = scraped(generate_latest(registry).decode())

    assert values["kvoffload_used_blocks_total", (("dp", "0"), ("engine", "a"))] == 1
    assert values["kvoffload_used_blocks_total", (("dp", "1"), ("engine", "a"))] == 2
    assert values == scraped(to_text([({"engine": "a", "dp": "0"}, one), ({"engine": "a", "dp": "1"}, two)]))


def test_OBS_03_instances_have_their_own_labels():
    """The same labels twice, or other label names, are errors; a removed instance makes room again."""
    exporter = exporter_for(CollectorRegistry())
    stats = Stats()
    exporter.add({"engine": "a"}, lambda: stats)
    with pytest.raises(ValueError, match="exported already"):
        exporter.add({"engine": "a"}, lambda: stats)
    with pytest.raises(ValueError, match="differ"):
        exporter.add({"replica": "a"}, lambda: stats)
    exporter.remove({"engine": "a"})
    exporter.add({"replica": "a"}, lambda: stats)

    assert exporter is not exporter_for(CollectorRegistry())


def test_scrape_sees_the_present():
    """Each scrape asks the source anew."""
    registry, counters = CollectorRegistry(), Counters()
    exporter_for(registry).add({}, lambda: Stats.collect(counters, None))
    seen = []
    for _ in range(3):
        counters.add("produced", 4)
        seen.append(scraped(generate_latest(registry).decode())["kvoffload_produced_blocks_total", ()])

    assert seen == [4, 8, 12]
