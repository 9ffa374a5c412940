"""Two requests for one prefix that is being loaded."""

import time

import pytest
from live import Live, gate_loads
from runner import Engine, prompts, restorable

from kvoffload.testing.faults import Op

TOKENS = 16


def needs(layout, boundary: int) -> int:
    """Blocks of all groups from which a request can go on at `boundary`."""
    spans = [group.needs(0, boundary) for group in layout.groups]
    return sum(end - begin for begin, end in spans)


@pytest.mark.parametrize("name", ["gemma3odd"])
def test_the_second_waits_and_then_finds_the_pages(model, name):
    """While the first request's load is held, vLLM is told to ask again for the second one; then that hits pages in
    HBM, and every block that the prompt needs went to the device once. Both say what was computed."""
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
        blocks, calls = count.copies(Op.TO_DEVICE), count.calls(Op.TO_DEVICE)
        layout = engine.scheduler._scheduler.core.planner.layout
        counted = [live.count(name) for name in ("loaded_host", "loaded_disk", "used", "vanished")]

    assert set(waited) == {(None, False)}
    assert len(waited) >= 10
    assert live.answers == dict.fromkeys(("first of all", "loads", "waits"), right)
    assert live.cached["waits"] == restorable([500])[0]
    assert live.cached["loads"] == restorable([500])[0]
    assert live.external("waits") == 0
    needed = needs(layout, restorable([500])[0])
    assert (blocks, calls) == (needed, 1)
    assert counted == [needed, 0, 480 // layout.base_tokens, 0]


def test_past_the_deadline_the_second_goes_on_alone(model):
    """The first one's load never ends: after the deadline the second request loads the same blocks into pages of its
    own, and ends; then the first one does. Until then it was told nothing but to ask again."""
    (asked,) = prompts(lengths=[500])
    with Engine(model("gemma3odd")) as plain:
        right = plain.generate([asked], TOKENS).tokens[0]
    with Engine(model("gemma3odd"), {"host_bytes": "256MiB", "deadline_s": 2.0}) as engine:
        live = Live(engine)
        live.add("first of all", asked, TOKENS)
        live.run()
        engine.forget_pages()
        gate, count = gate_loads(engine)
        live.add("loads", asked, TOKENS)
        live.steps(3)
        assert gate.arrived()
        layout = engine.scheduler._scheduler.core.planner.layout
        gate.only_before = time.monotonic()
        live.add("waits", asked, TOKENS)
        live.steps(3)
        engine.scheduler._scheduler._clock = lambda: time.monotonic() + 3.0
        live.until(lambda: "waits" in live.answers)
        assert "loads" not in live.answers
        gate.release()
        live.run()

    told = [answer for request, answer in live.asked if request == "waits"]
    needed = needs(layout, restorable([500])[0])
    assert len(told) >= 3
    assert told == [(None, False)] * (len(told) - 1) + [(restorable([500])[0], True)]
    assert live.cached["waits"] == live.cached["loads"] == restorable([500])[0]
    assert (count.copies(Op.TO_DEVICE), count.calls(Op.TO_DEVICE)) == (2 * needed, 2)
    assert live.answers == dict.fromkeys(("first of all", "loads", "waits"), right)
