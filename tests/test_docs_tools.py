"""docs/metrics.md, docs/operating-disk.md and docs/benchmarks.md say what the code has."""

from __future__ import annotations

import re
from pathlib import Path

from kvoffload.config import Config
from kvoffload.stats import FAMILIES, REASONS, TIERS, Stats

DOCS = Path(__file__).parents[1] / "docs"


def text(name):
    """A document."""
    return (DOCS / name).read_text()


def test_every_metric_is_documented_with_its_label():
    """The table of counters has each family once, with the label that it has, and no other."""
    rows = re.findall(r"^\| `kvoffload_(\w+)` \| (\w*) ?\|", text("metrics.md"), re.MULTILINE)

    assert sorted(rows) == sorted((f.metric, f.label) for f in FAMILIES)


def test_every_reason_and_gauge_is_documented():
    """Reasons of `dropped` and gauges of a tier are all there."""
    body = text("metrics.md")
    for reason in REASONS:
        assert f"| `{reason}` |" in body
    for name in {s.metric for s in Stats().samples() if s.kind == "gauge"}:
        what = re.fullmatch(rf"kvoffload_({'|'.join(TIERS)})_(\w+)_bytes", name).group(2)
        assert f"`{what}`" in body


def test_what_is_named_exists():
    """Metrics, options and reasons that the operator is pointed at are real."""
    body = text("operating-disk.md")
    metrics = {f.metric for f in FAMILIES} | {s.metric.removeprefix("kvoffload_") for s in Stats().samples()}
    for name in re.findall(r"`kvoffload_(\w+?)(?:\{.*?\})?`", body):
        assert name in metrics or f"{name}_times" in metrics, name
    for reason in re.findall(r'reason="(\w+)"', body):
        assert reason in REASONS
    for option in re.findall(r"`(disk_\w+|checksum)(?:: .*?)?`", body):
        assert option in Config.__dataclass_fields__, option


def test_messages_that_are_explained_are_in_the_code():
    """The fixed words of each message in the table stand in a source, so an operator who searches finds them."""
    rows = re.findall(
        r"^\| `(.+?)` \|", text("operating-disk.md").partition("## What messages mean")[2], re.MULTILINE
    )
    sources = " ".join(p.read_text() for p in (DOCS.parent / "kvoffload").rglob("*.py"))
    joined = re.sub(r'"\s*\n\s*f?"', "", sources)
    for row in rows:
        for words in re.split(r"\.\.\.|; | N\b| M\b|\(|\)", row):
            if len(words.split()) > 2:
                assert words.strip() in joined, words

    assert len(rows) >= 7
