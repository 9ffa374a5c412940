"""vLLM's asynchronous scheduling on a real engine: a step is built before the tokens of the one before it are known."""

from __future__ import annotations

import pytest
from runner import Engine, prompts

BLOCK = 32


@pytest.fixture
def ahead(monkeypatch):
    """vLLM builds steps ahead on a CPU too, where it does not do so by itself: its scheduler and its loop do, and the
    runner, which has every token when a step has run, need not know."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    inner = CpuPlatform.check_and_update_config.__func__

    def checked(cls, vllm_config):
        inner(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    never = property(lambda self: False, lambda self, value: None)
    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(checked))
    monkeypatch.setattr(CPUModelRunner, "use_async_scheduling", never, raising=False)


@pytest.mark.parametrize("name", ["llama", "gemma3odd"])
def test_ORDER_08_the_last_full_block_of_a_request_is_stored(model, ahead, name):
    """Requests end before, with and behind the token whose forward fills their second block; the step that computed it
    was built before the token was known. Each comes back from host to its last full block, and goes on as without."""
    cases = {count: prompts(count, [60])[0] for count in range(3, 8)}
    with Engine(model(name)) as plain:
        right = {count: plain.generate([text], count).tokens[0] for count, text in cases.items()}
        more = {n: plain.generate([[*text, *right[n], 7]], 4).tokens[0] for n, text in cases.items()}
    with Engine(model(name), {"host_bytes": "64MiB"}) as engine:
        assert engine.core.batch_queue_size == 2
        assert engine.generate(list(cases.values()), 3).tokens == tuple(right[n][:3] for n in cases)
        engine.forget_all()
        found = {}
        for count, text in cases.items():
            said = engine.generate([text], count).tokens[0]
            engine.settle()
            engine.forget_pages()
            again = engine.generate([[*text, *said, 7]], 4)
            found[count] = (said, again.cached[0], again.tokens[0])
    assert found == {n: (right[n], (60 + n - 1) // BLOCK * BLOCK, more[n]) for n in cases}
