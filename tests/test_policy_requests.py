"""What a connector says of its requests reaches the policy: session, agent, finish reason and time, or none of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engine_world import counting_engine, until

from kvoffload.config import Config
from kvoffload.requests import RequestInfo
from kvoffload.testing.engine import Engine, Sequence
from kvoffload.testing.engine.drive import step
from kvoffload.testing.engine.sequence import random_keys

SIZE = 16


def learned(planner: Any) -> dict[str, Any]:
    """What the host's policy says of itself."""
    table: dict[str, Any] = planner.stats().policies["host"]
    return table


def play(engine: Engine, info: RequestInfo, keys: np.ndarray, reason: str = "", pause: float = 0.0) -> None:
    """One whole request of this text, `pause` seconds after the last one."""
    engine.clock.now += pause
    engine.add(Sequence(info, keys, SIZE, len(keys) * SIZE, 1, reason))
    until(engine, lambda: engine.idle)
    step(engine, 0.0)


def engine_and_planner() -> tuple[Engine, Any]:
    engine, planner, _ = counting_engine(pages=256, host=400, config=Config(host_policy="rri"))
    return engine, planner


def test_names_that_a_connector_gives_are_the_streams() -> None:
    """Requests of one session and agent are one stream whatever their texts; another agent is another one."""
    engine, planner = engine_and_planner()
    for number, agent in enumerate(("main", "main", "helper", "main", "helper")):
        play(engine, RequestInfo(number, "s", agent), random_keys(8, 100 + number))
    assert learned(planner)["streams"] == 2


def test_without_names_streams_are_inferred_from_the_texts() -> None:
    """A text that grows is one stream, two texts in turn are two."""
    engine, planner = engine_and_planner()
    texts = [random_keys(20, 1), random_keys(20, 2)]
    for turn in range(4):
        for text in texts:
            play(engine, RequestInfo(f"{turn} {text[0, 0]}"), text[: 8 + turn])
    assert learned(planner)["streams"] == 2


@pytest.mark.parametrize("reason", ["tool_use", "end_turn", ""])
def test_the_reason_of_a_release_chooses_the_class(reason: str) -> None:
    """What is released with a reason is counted in that reason's classes, and with none in those of the unknown."""
    engine, planner = engine_and_planner()
    for turn in range(6):
        play(engine, RequestInfo(turn, "s", "main"), random_keys(20, 1)[: 8 + turn], reason, pause=4.0)
    reused = {r["finish"] for r in learned(planner)["classes"] if r["reused"] > 0}
    assert reused == {reason or "unknown"}


@pytest.mark.parametrize(("pause", "low", "high"), [(2.0, 0.05, 1.0), (200.0, 0.0, 0.02)])
def test_ages_are_those_of_the_steps_clock(pause: float, low: float, high: float) -> None:
    """A stream that comes back after `pause` seconds of `step`'s clock is worth about one reuse per pause."""
    engine, planner = engine_and_planner()
    for turn in range(200):
        play(engine, RequestInfo(turn, "s", "main"), random_keys(8, 1), "tool_use", pause)
    values = {
        (r["kind"], r["pace"]): r["index"] for r in learned(planner)["classes"] if r["finish"] == "tool_use"
    }
    assert low <= values["own", "middle"] <= high
