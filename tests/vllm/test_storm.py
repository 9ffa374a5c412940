"""Many requests with random lengths, prefixes and cancellations, in a pool of pages that is too small for them."""

import random

import pytest
from live import Live, wrap
from runner import Engine, prompts

from kvoffload.testing.faults import Failing, Op, Slow

SECONDS = 0.003
"""Of each copy to or from the device: long enough for aborts to hit loads and stores."""


def requests(count: int, longest: int) -> list[tuple[list[int], int]]:
    """(prompt, tokens to generate): a third are prefixes of four texts, a third go on from one, the others are new."""
    source = random.Random(7)
    texts = prompts(3, [longest] * 4)
    found = []
    for number in range(count):
        text = texts[source.randrange(4)]
        shared = text[: source.randrange(1, longest)]
        own = prompts(1000 + number, [source.randrange(1, longest // 2)])[0]
        prompt = (shared, shared[: longest // 2] + own, own)[source.randrange(3)]
        found.append((prompt, source.randrange(1, 24)))
    return found


def storm(engine, wanted, seed):
    """Run them all, a quarter of them cancelled somewhere; what the others said, how many were cancelled, and how often
    everything was forgotten meanwhile."""
    live, source = Live(engine), random.Random(seed)
    left, cancelled, resets = list(enumerate(wanted)), 0, 0
    while left or live.open:
        if left and len(live.open) < 12:
            number, (prompt, tokens) = left.pop(0)
            live.add(str(number), prompt, tokens)
        if live.open and source.random() < 0.06:
            live.abort(source.choice(sorted(live.open)))
            cancelled += 1
        live.steps(1)
        if source.random() < 0.02:
            resets += reset(engine)
    return live, cancelled, resets


def reset(engine) -> bool:
    """Forget pages and tiers under running requests; whether that was done: vLLM cannot while a load is under way."""
    states = {request.status.name for request in engine.core.scheduler.requests.values()}
    if "WAITING_FOR_REMOTE_KVS" in states:
        return False
    assert engine.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    return True


def run_storm(model, name, count, tmp_path, **changes):
    """Against the tokens of an engine without connector: nothing is wrong, nothing is left over."""
    longest = 360
    wanted = requests(count, longest)
    with Engine(model(name), max_model_len=512) as plain:
        right = [plain.generate([p], n).tokens[0] for p, n in wanted]
    options = {"host_bytes": "24MiB", "disk_path": str(tmp_path), "disk_bytes": "64MiB"}
    with Engine(model(name), options, max_model_len=512, **changes) as engine:
        free = engine.free_blocks
        failing = Failing(calls=range(20, 2000, 37))
        wrap(engine.worker, [Slow(SECONDS, [Op.TO_DEVICE, Op.TO_HOST]), failing])
        live, cancelled, resets = storm(engine, wanted, 11)
        preempted = engine.metric("num_preemptions")
        live.settle()
        planner, mover = engine.scheduler._scheduler.core.planner, engine.worker._worker._mover
        left = (planner.idle, planner.pinned(), len(planner.requests), len(mover._tasks), len(mover._copying))
        planner.check_integrity()
        loaded = live.count("loaded_host") + live.count("loaded_disk")
        assert engine.free_blocks == free
        assert engine.scheduler._scheduler._requests == {}
        again = [engine.generate([p], n).tokens[0] for p, n in wanted[:4]]

    assert left == (True, 0, 0, 0, 0)
    told = {int(name): tokens for name, tokens in live.answers.items() if name.isdigit()}
    assert {n for n, tokens in told.items() if tokens != right[n]} == set()
    assert len(told) == count - cancelled
    assert again == right[:4]
    assert failing._seen > 20 + 37
    assert min(cancelled, loaded, preempted, resets) > 0


def test_a_few_requests_in_a_small_pool(model, tmp_path):
    """40 requests on the model with one group: some loads are waited for by the forward, some copies fail."""
    run_storm(model, "llama", 40, tmp_path, kv_cache_memory_bytes=2 << 20)


@pytest.mark.full
@pytest.mark.parametrize("name", ["llama", "gemma3odd"])
def test_200_requests_in_a_small_pool(model, name, tmp_path):
    """200 requests; the hybrid model's loads are all asynchronous."""
    size = {"llama": 2 << 20, "gemma3odd": 6 << 20}[name]
    run_storm(model, name, 200, tmp_path, kv_cache_memory_bytes=size)
