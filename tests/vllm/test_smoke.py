"""One engine, one load: the first thing to look at when the other tests fail."""

from runner import Engine, prompts, restorable


def test_an_answer_from_host_is_the_answer_that_was_computed(model):
    """Without a connector, cold, and after a load from host the tokens are the same; all full blocks were loaded."""
    asked = prompts()
    with Engine(model("llama")) as plain:
        right = plain.generate(asked)
    with Engine(model("llama"), {"host_bytes": "256MiB"}) as engine:
        cold = engine.generate(asked)
        engine.forget_pages()
        warm = engine.generate(asked)

    assert cold.tokens == warm.tokens == right.tokens
    assert cold.cached == (0, 0, 0, 0)
    assert list(warm.cached) == restorable()
