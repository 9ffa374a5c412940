"""INCR and KEY rows of docs/cases.md for the vLLM plug, and steps that are built before earlier ones have ended."""

from __future__ import annotations

from types import SimpleNamespace as Of

import pytest
from fake_engine import FULL, HYBRID, SIZE, FakeEngine, Output, Request, Work, settings_of
from kvoffload.connectors.vllm import compat
from kvoffload.connectors.vllm.requests import GrownChain

from kvoffload.layout import CacheGroup, GroupKind, Layout
from kvoffload.messages import JobKind

LOAD, STORE = JobKind.LOAD, JobKind.STORE


def prompt(length: int, family: int = 1) -> list[int]:
    return [10 * family + i % 7 for i in range(length)]


def stored(engine: FakeEngine, since: int = 0) -> list[int]:
    """Depths of the full group's blocks that were given to stores, in order."""
    jobs = [job for job in engine.movers[0].seen[since:] if job.kind is STORE]
    return [int(c["depth"]) for job in jobs for c in job.copies if c["group"] == 0]


def one(engine: FakeEngine, name: str, tokens: list[int], answer: int) -> Request:
    request = engine.add(Request(name, tokens, answer))
    engine.run()
    return request


def test_INCR_01_a_load_leaves_alone_what_pages_hold_already():
    """Pages hold 4 blocks of the prompt and host all 10: only blocks 4 to 9 are written."""
    engine = FakeEngine(FULL)
    one(engine, "first", prompt(40), 1)
    keys = list(engine.cached)
    engine.cached = {key: engine.cached[key] for key in keys[:4]}
    before = {page: engine.memories[0].pages[page] for page in engine.cached.values()}
    since = len(engine.movers[0].seen)
    one(engine, "second", prompt(40), 1)
    loads = [job for job in engine.movers[0].seen[since:] if job.kind is LOAD]
    assert [job.copies["depth"].tolist() for job in loads] == [[4, 5, 6, 7, 8, 9]]
    assert {page: engine.memories[0].pages[page] for page in before} == before


@pytest.mark.parametrize("depth", [1, 3])
def test_INCR_02_decoding_stores_at_block_ends_only(depth):
    """24 tokens, one at a time: one store of one block every 4 tokens."""
    engine = FakeEngine(FULL, depth=depth)
    one(engine, "only", prompt(8), 25)
    jobs = [job for job in engine.movers[0].seen if job.kind is STORE]
    blocks = (8 + 25 - 1) // SIZE
    assert [len(job.copies) for job in jobs] == [2] + [1] * (blocks - 2)
    assert stored(engine) == list(range(blocks))


EVEN = Layout(
    SIZE,
    (
        CacheGroup(0, GroupKind.FULL, SIZE, 4096),
        CacheGroup(1, GroupKind.SLIDING, SIZE, 4096, lookback=2 * SIZE),
    ),
)
"""One token before a boundary the window needs a block more than at it."""


@pytest.mark.parametrize(
    ("layout", "length", "loaded"),
    [(x, n, n // SIZE * SIZE) for x in (FULL, HYBRID) for n in (1, 40, 41, 43)]
    + [(EVEN, 40, 36), (EVEN, 41, 40)],
)
def test_INCR_04_and_05_one_token_is_left_and_left_out_once(layout, length, loaded):
    """All of a prompt is in host: what is offered and what is loaded is the same, the keys are what they were, and the
    engine has a token to compute: the last one again, or the last block where a window does not reach back from it."""
    engine = FakeEngine(layout)
    one(engine, "first", prompt(48), 1)
    one(engine, "same", prompt(length), 1)
    engine.forget_pages()
    request = Request("second", prompt(length), 3)
    keys = GrownChain(engine.namespace, request).keys.copy()
    assert engine.scheduler.match(request, 0)[0] == loaded
    before = engine.planner.counters["used"]
    engine.add(request)
    engine.run()
    assert (engine.planner.counters["used"] - before) * SIZE == loaded
    assert (GrownChain(engine.namespace, request).keys[: len(keys)] == keys).all()


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_INCR_06_tokens_that_are_not_made_yet_are_no_blocks(depth):
    """Steps are built ahead of their tokens: each block is stored once its tokens are known, under its right key."""
    engine = FakeEngine(FULL, depth=depth)
    one(engine, "only", prompt(6), 21)
    assert len(engine.visible()) == (6 + 21 - 1) // SIZE
    engine.check()


def test_INCR_06_drafts_are_no_tokens():
    """Confirmed 7 tokens, 4 drafts scheduled: one block is stored; the second once its tokens are confirmed."""
    engine = FakeEngine(FULL)
    request = Request("only", prompt(7), 9)
    engine.scheduler.new(request)
    assert engine.scheduler.match(request, 0) == (0, False)
    engine.scheduler.allocated(request, lambda: ([1, 2, 3],), 0)
    request.num_computed_tokens = 6
    output = Output(0, [Work(request, 0, 6, 11, True, ([1, 2, 3],), [])])
    output.scheduled_spec_decode_tokens = {"only": [1, 2, 3, 4]}
    assert [len(job.copies) for job in engine.scheduler.step(output).plans.jobs] == [1]
    request.all_token_ids += [5, 6]
    request.num_computed_tokens = 8
    output = Output(1, [Work(request, 0, 8, 13, True, ([1, 2, 3],), [])])
    output.scheduled_spec_decode_tokens = {"only": [1, 2, 3, 4]}
    (job,) = engine.scheduler.step(output).plans.jobs
    assert job.copies["depth"].tolist() == [1]


def test_INCR_08_every_full_block_of_a_long_request_is_stored():
    """600 tokens, 32 a step, then 40 decoded: all blocks whose tokens were computed can be found."""
    engine = FakeEngine(FULL, pages=200, host=256, budget=32)
    tokens = one(engine, "only", prompt(600), 40).all_token_ids
    engine.forget_pages()
    assert engine.scheduler.match(Request("next", [*tokens, 1, 2, 3], 1), 0)[0] == 639 // SIZE * SIZE


@pytest.mark.parametrize("layout", [FULL, HYBRID])
@pytest.mark.parametrize("depth", [1, 2])
def test_INCR_09_a_preempted_request_finds_what_it_generated(layout, depth):
    """20 tokens of a prompt and 16 made by the model; preempted, its pages forgotten: 9 blocks are offered less one."""
    engine = FakeEngine(layout, depth=depth)
    request = engine.add(Request("only", prompt(20), 20))
    while request.num_tokens < 36 + 1:
        engine.step()
    engine.flush()
    engine.preempt(request)
    engine.forget_pages()
    asked = engine.scheduler.match(request, 0)
    engine.run()
    if layout is FULL:
        assert asked[0] == 36
    assert engine.planner.counters["used"] * SIZE >= 28
    engine.check()


def test_blocks_whose_window_has_passed_are_no_pages():
    """A request was loaded with the null block in place of what its windows have passed, and everything is forgotten
    and offered again: of the windows only what has pages is stored."""
    engine = FakeEngine(HYBRID, retention="dense")
    one(engine, "first", prompt(40), 1)
    request = engine.add(Request("second", prompt(40), 9))
    while request.state != "running":
        engine.step()
    assert 0 in request.table[1]
    engine.scheduler.reset()
    engine.run()
    engine.check()


def test_INCR_10_each_turn_stores_what_is_new():
    """5 turns of one conversation: every block goes to host once, and asking the last turn again stores nothing."""
    engine = FakeEngine(FULL, pages=128, host=128)
    tokens, total = prompt(80), 0
    for turn in range(5):
        since = len(engine.movers[0].seen)
        tokens = one(engine, f"turn {turn}", tokens, 8).all_token_ids + [50 + turn] * 12
        new = stored(engine, since)
        assert new == list(range(total, total + len(new)))
        total += len(new)
        engine.forget_pages()
    since = len(engine.movers[0].seen)
    one(engine, "the last one again", tokens[:-20], 1)
    assert stored(engine, since) == []


# ---- what blocks are called ----


def chain(**facts) -> list[bytes]:
    """Keys of 12 tokens under these facts of a request."""
    request = Request("any", prompt(12), 1)
    for name, value in facts.items():
        setattr(request, name, value)
    name = settings_of().namespace(FULL, "facts")
    return [key.tobytes() for key in GrownChain(name, request).keys]


def picture(identifier: str, offset: int, length: int):
    return Of(identifier=identifier, mm_position=Of(offset=offset, length=length))


def lora(name: str, path: str):
    return Of(lora_name=name, lora_path=path)


@pytest.mark.parametrize(
    ("algorithm", "name"),
    [("sha256_cbor", "vllm:sha256_cbor"), ("sha256", ""), ("xxhash", ""), ("xxhash_cbor", "")],
)
def test_KEY_01_only_hashes_that_are_equal_in_every_process_are_taken(algorithm, name):
    """vLLM's pickled and randomly seeded hashes are not used: keys are made of token ids then."""
    config = Of(cache_config=Of(prefix_caching_hash_algo=algorithm))
    assert compat.hash_name(config) == name


def test_KEY_03_and_04_media_count_from_their_first_token_and_in_full():
    """Equal tokens, another picture in block 1: block 0 is shared, the others are not; ids differ in any place."""
    plain, one_id = chain(), chain(mm_features=[picture("ab" * 32, 5, 3)])
    other = chain(mm_features=[picture("cb" + "ab" * 31, 5, 3)])
    assert plain[0] == one_id[0] == other[0]
    assert len({*plain[1:], *one_id[1:], *other[1:]}) == 6


def test_KEY_06_adapters_share_nothing():
    """No adapter, A, B, and another adapter of A's name: four sets of keys."""
    sets = [chain(), *(chain(lora_request=lora(*at)) for at in (("A", "/a"), ("B", "/b"), ("A", "/c")))]
    assert len({key for keys in sets for key in keys}) == 12


def test_KEY_08_and_09_fields_do_not_run_into_each_other():
    """Salt x is not adapter x; (ab, c) is not (a, bc); another salt finds nothing, the same one everything."""
    engine = FakeEngine(FULL)
    engine.add(Request("first", prompt(40), 1, cache_salt="x"))
    engine.run()
    offers = [
        engine.scheduler.match(Request(str(salt), prompt(41), 1, cache_salt=salt), 0)[0]
        for salt in ("x", "y", None)
    ]
    assert offers == [40, 0, 0]
    kinds = [
        chain(cache_salt="x"),
        chain(lora_request=lora("x", "")),
        chain(lora_request=lora("ab", "c")),
        chain(lora_request=lora("a", "bc")),
        chain(),
    ]
    assert len({key for keys in kinds for key in keys}) == 15


def test_KEY_10_types_weights_and_sizes_are_part_of_the_name(tmp_path):
    """Facts of the engine, weights that change in place, ranks and groups: another namespace each time."""
    from dataclasses import replace

    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"1")
    config = Of(model_config=Of(model=str(tmp_path), revision=None))
    revisions = [compat.weights_revision(config)]
    weights.write_bytes(b"22")
    revisions.append(compat.weights_revision(config))
    names = [settings_of().namespace(FULL, f"dtype={kind}") for kind in ("float16", "fp8")]
    names += [
        settings_of(weights_revision=revision).namespace(FULL, "dtype=float16") for revision in revisions
    ]
    names += [
        settings_of(2).namespace(FULL, "dtype=float16"),
        settings_of().namespace(HYBRID, "dtype=float16"),
    ]
    names.append(replace(names[0], tokens_per_block=32))
    assert len({name.digest for name in names}) == len(names) == 7


@pytest.mark.parametrize("host", [True, False])
def test_KEY_12_forgetting_pages_keeps_the_tiers(host):
    """vLLM forgets its pages: all is loaded again; it resets the connector: nothing is."""
    engine = FakeEngine(FULL)
    one(engine, "first", prompt(40), 1)
    engine.forget_pages()
    if not host:
        engine.scheduler.reset()
    assert engine.scheduler.match(Request("second", prompt(41), 1), 0)[0] == (40 if host else 0)


def test_KEY_13_token_ids_count_in_full_width():
    """7 and 263, 65535 and 65536, and the largest id: no two alike."""
    rows = []
    for token in (7, 263, 65535, 65536, 2**31 - 1):
        request = Request("any", [token] * SIZE, 1)
        rows += [key.tobytes() for key in GrownChain(settings_of().namespace(FULL, ""), request).keys]
    assert len(set(rows)) == 5


# ---- asynchronous scheduling ----


def test_steps_built_ahead_of_any_result_lose_nothing():
    """Four steps are built before the first result: a load ends two steps late, the stores of each step are taken in
    when their step is, and the request behind it hits what was stored meanwhile."""
    engine = FakeEngine(HYBRID, depth=4, ranks=2)
    one(engine, "first", prompt(40), 6)
    engine.forget_pages()
    engine.movers[1].held.add(LOAD)
    engine.add(Request("second", prompt(40), 6))
    for _ in range(3):
        engine.step()
    assert len(engine.flying) == 3
    engine.add(Request("third", prompt(40), 6))
    for _ in range(6):
        engine.step()
    assert engine.waits > 0
    engine.movers[1].held.clear()
    engine.run()
    engine.check()
    assert engine.answers["second"] == engine.answers["third"] == engine.answers["first"]


@pytest.mark.parametrize("depth", [2, 3])
def test_a_gap_keeps_steps_under_way_from_storing(depth):
    """A load that the forward waited for failed, and the next steps were built already: what these compute over the
    gap is not stored either; afterwards everything is."""
    engine = FakeEngine(FULL, depth=depth, budget=8)
    one(engine, "first", prompt(40), 1)
    engine.forget_pages()
    engine.movers[0].failing, engine.movers[0].which = {LOAD: 1}, 2
    engine.add(Request("second", prompt(64), 9))
    for _ in range(12):
        engine.step()
        engine.visible()
    engine.run()
    engine.check()
    assert len(engine.visible()) == (64 + 9 - 1) // SIZE
