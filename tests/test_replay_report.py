"""Figures of a report: definitions by hand-made examples, identities that break when a figure is wrong."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import numpy as np
import pytest
from replay_fakes import TOKENS, make_setup
from rich.console import Console

from kvoffload.replay.base import Stored
from kvoffload.replay.oracle_lru import OracleResult
from kvoffload.replay.report import RequestCount, Tally, percentile
from kvoffload.replay.show import table


def count(first, blocks, hits=(0, 0, 0), *, tokens=None, stored=0, session="s"):
    """A request of ids first, first + 1, ...; what is not a hit is produced."""
    return RequestCount(
        session=session,
        ids=np.arange(first, first + blocks, dtype=np.int64),
        tokens=blocks * TOKENS if tokens is None else tokens,
        hits=hits,
        produced=blocks - sum(hits),
        arrived=hits[1] + hits[2],
        stored=stored,
        block_tokens=TOKENS,
    )


def example(oracle=None, **setup):
    """Three requests of two sessions: 30 blocks, 14 distinct, hits 2 + 7 + 3, 18 stored."""
    tally = Tally()
    tally.add(count(0, 10, stored=10))
    tally.add(count(0, 12, (2, 5, 3), stored=2))
    tally.add(count(6, 8, (0, 2, 0), tokens=8 * TOKENS - 5, stored=6, session="t"))
    stored = Stored(host=18, disk=17, dropped={"refused": 1})
    return tally.report(make_setup(**setup), stored, 1.5, oracle)


def test_figures_follow_their_definitions():
    """Totals, distinct blocks, amplification, rewrite factor and bytes per turn of an example counted by
    hand."""
    report = example()

    assert (report.requests, report.sessions, report.total, report.distinct) == (3, 2, 30, 14)
    assert (report.hits, report.produced, report.arrived) == ((2, 7, 3), 18, 10)
    assert report.amplification() == (18 / 14, 17 / 14)
    assert report.rewrite_factor() == (30 / 18, 30 / 17)
    assert (report.turn_p50, report.turn_p90) == (6 * 136, 10 * 136)
    assert report.ok


def test_token_hits_stop_at_the_prompt():
    """With the ceil rule a hit on the partial last block counts the prompt's tokens, not the block's."""
    tally = Tally()
    tally.add(count(0, 4, (1, 1, 2), tokens=4 * TOKENS - 10))
    report = tally.report(make_setup(), Stored(), 0.0)

    assert report.hit_tokens == (TOKENS, TOKENS, 2 * TOKENS - 10)
    assert report.ok


ORACLE = OracleResult(3, 30, 14, (2, 7, 3), 18, (0, 0, 0))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        ({"hits": (3, 7, 3)}, "is not the total 30"),
        ({"hits": (2, 11, -1)}, "are negative"),
        ({"produced": 17}, "is not the total 30"),
        ({"arrived": 9}, "are not the 9 blocks loaded"),
        ({"tokens": 100}, "exceed the 100 prompt tokens"),
        ({"stored": Stored(host=19)}, "host stored 19 of 18"),
        ({"oracle": replace(ORACLE, hits=(2, 8, 2))}, "are not the oracle's"),
        ({"oracle": replace(ORACLE, produced=19)}, "are not the oracle's"),
    ],
)
def test_each_identity_breaks_alone(spoil, words):
    """One spoiled figure makes the report not ok, with a sentence that has both numbers."""
    good = example(ORACLE)

    assert good.broken() == []
    bad = replace(good, **spoil)
    assert not bad.ok
    assert any(words in text for text in bad.broken())


def test_wrong_bytes_alone_make_it_fail():
    """A report with one mismatch is not ok though every identity holds; samples are bounded."""
    tally = Tally()
    for block in range(9):
        tally.mismatch(f"request 0 block {block} load")
    report = tally.report(make_setup(), Stored(), 0.0)

    assert report.broken() == []
    assert not report.ok
    assert (report.mismatches, len(report.samples)) == (9, 5)


def test_series_covers_every_request_once():
    """The parts of the series add up to the totals, for fewer and for more requests than parts."""
    for requests in (1, 3, 20, 57):
        tally = Tally()
        for i in range(requests):
            tally.add(count(i, 4, (1, 1, 0)))
        report = tally.report(make_setup(), Stored(), 0.0)
        sums = [sum(part[i] for part in report.series) for i in range(4)]

        assert sums == [*report.hits, report.total]
        assert len(report.series) == min(20, requests)
        assert all(part[3] for part in report.series)


@pytest.mark.parametrize(
    ("values", "percent", "expected"), [([], 50, 0), ([7], 90, 7), ([3, 1, 2], 50, 2), (range(1, 11), 90, 9)]
)
def test_percentile_is_a_value_that_occurs(values, percent, expected):
    """Nearest rank: the smallest value that at least so many per cent do not exceed."""
    assert percentile(list(values), percent) == expected


def test_dict_survives_json_and_keeps_every_figure():
    """to_dict is plain values: JSON gives the same back, with hits by name and the identities' verdict."""
    report = example(ORACLE)
    body = report.to_dict()

    assert json.loads(json.dumps(body)) == json.loads(json.dumps(body | {}))
    assert body["hits"] == {"hbm": 2, "host": 7, "disk": 3}
    assert body["write_amplification"] == {"host": 18 / 14, "disk": 17 / 14}
    assert (body["stored"], body["dropped"]) == ({"host": 18, "disk": 17, "restored": 0}, {"refused": 1})
    assert body["ok"] is True
    assert body["setup"]["host_blocks"] is None


@pytest.mark.parametrize("oracle", [None, ORACLE, replace(ORACLE, produced=19)])
def test_table_fits_80_columns_and_shows_what_is_wrong(oracle):
    """No line is wider than 80 columns, large numbers included, and a broken identity is spelled out."""
    report = replace(example(oracle, host_blocks=123_456_789), requests=99_999_999, seconds=12_345.6)
    out = io.StringIO()
    Console(file=out, width=80, markup=False, highlight=False).print(table(report))
    text = out.getvalue()

    assert max(map(len, text.splitlines())) <= 80
    assert "123,456,789" in text
    assert ("oracle's" in text) == (oracle is not None and oracle.produced == 19)
