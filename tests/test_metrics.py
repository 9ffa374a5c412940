"""The exporter: one per registry, and label values of any text."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvoffload.metrics import exporter_for, to_text
from kvoffload.stats import Stats


def test_one_exporter_per_registry():
    """A registry has one exporter whoever asks, so every metric is described once however many instances there are."""
    registry = CollectorRegistry()
    exporter_for(registry).add({"dp": "0"}, Stats)
    exporter_for(registry).add({"dp": "1"}, Stats)
    text = generate_latest(registry).decode()

    assert exporter_for(registry) is exporter_for(registry)
    assert text.count("# TYPE kvoffload_used_blocks_total") == 1
    assert text.count("\nkvoffload_used_blocks_total{") == 2


@pytest.mark.parametrize(
    "label", ["plain", 'a "quoted" one', "back\\slash", "\\n is not a new line", "two\nlines", ""]
)
def test_labels_of_any_text(label):
    """Quotes, backslashes and line breaks in a label come back as they were."""
    families = text_string_to_metric_families(to_text([({"engine": label}, Stats())]))

    assert {s.labels["engine"] for family in families for s in family.samples} == {label}
