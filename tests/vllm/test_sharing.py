"""Two requests for one prefix that is being loaded."""

import time

import pytest
from live import Live, gate_loads
from runner import Engine, prompts, restorable

from kvoffload.testing.faults import Op

TOKENS = 16


@pytest.mark.parametrize("name", ["gemma3odd"])
def test_the_second_waits_and_then_finds_the_pages(model, name):
    """While the first request's load is held, vLLM is told to ask again for the second one; then that hits pages in
    HBM, and every block went to the device once. Both say what was computed."""
    (asked,) = prompts(lengths=[500])
    with Engine(model(name)) as plain:
        right = plain.generate([asked], TOKENS).tokens[0]
    with Engine(model(name), {"host_bytes": "256MiB"}) as engine:
        live = Live(engine)
        live.add("first of all", asked, TOKENS)
        live.run()
        engine.forget_pages()
        gate, count = gate_loads(engine)
        live.add("loads", asked, TOKENS)
        live.steps(3)
        assert gate.arrived()
        live.add("waits", asked, TOKENS)
        live.steps(10)
        waited = [answer for request, answer in live.asked if request.startswith("waits")]
        gate.release()
        live.run()
        blocks = count.copies(Op.TO_DEVICE)
        loaded = live.count("loaded_host")

    assert set(waited) == {(None, False)}
    assert len(waited) >= 10
    assert live.answers == dict.fromkeys(("first of all", "loads", "waits"), right)
    assert live.cached["waits"] == restorable([500])[0]
    assert live.external("waits") == 0
    assert blocks == loaded


def test_past_the_deadline_the_second_goes_on_alone(model):
    """The first one's load never ends: after the deadline the second request runs and ends; then the first one does."""
    (asked,) = prompts(lengths=[500])
    with Engine(model("gemma3odd"), {"host_bytes": "256MiB", "deadline_s": 2.0}) as engine:
        live = Live(engine)
        live.add("first of all", asked, TOKENS)
        live.run()
        engine.forget_pages()
        gate, _ = gate_loads(engine)
        live.add("loads", asked, TOKENS)
        live.steps(3)
        assert gate.arrived()
        gate.only_before = time.monotonic()
        live.add("waits", asked, TOKENS)
        live.steps(3)
        engine.scheduler._scheduler._clock = lambda: time.monotonic() + 3.0
        live.until(lambda: "waits" in live.answers)
        assert "loads" not in live.answers
        gate.release()
        live.run()

    assert live.asked.count(("waits", (None, False))) >= 2
    assert set(live.answers.values()) == {live.answers["first of all"]}
    assert len(live.answers) == 3
