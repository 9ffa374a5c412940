"""Two tensor parallel ranks, each a process of its own; scheduler and connector are in this one."""

import pytest
from live import Live
from runner import Engine, prompts, restorable

TOKENS = 16


@pytest.fixture(autouse=True)
def forked_workers(monkeypatch):
    """Workers know this module's functions, and need not import vLLM again: spawned ones start as well, in minutes."""
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")


def fail_loads(worker, rank, calls):
    """On that rank the copies to the device numbered in `calls` fail. Runs in the worker."""
    from live import wrap
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from kvoffload.testing.faults import Failing, Op

    connector = get_kv_transfer_group()
    if connector._worker._rank == rank:
        connector.fault = Failing(calls=calls, ops=[Op.TO_DEVICE])
        wrap(connector, [connector.fault])


def loads_seen(worker):
    """Calls that `fail_loads` has seen. Runs in the worker."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector = get_kv_transfer_group()
    return connector.fault._seen if connector._worker._rank == 1 else 0


def withhold(worker, rank, door):
    """That rank tells of nothing that has ended before there is a file `door`. Runs in the worker."""
    from pathlib import Path

    from vllm.distributed.kv_transfer import get_kv_transfer_group

    part = get_kv_transfer_group()._worker
    if part._rank == rank:
        inner = part._mover.poll
        part._mover.poll = lambda: inner() if Path(door).exists() else []


def slow_down(worker, rank, seconds):
    """On that rank every copy takes so long. Runs in the worker."""
    from live import wrap
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from kvoffload.testing.faults import Slow

    connector = get_kv_transfer_group()
    if connector._worker._rank == rank:
        wrap(connector, [Slow(seconds)])


def watch_jobs(worker):
    """Note the ids of the jobs that are given to this rank. Runs in the worker."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    mover = get_kv_transfer_group()._worker._mover
    inner, mover.seen = mover.submit, []

    def submit(plans, *more):
        mover.seen += [job.id for job in plans.jobs]
        inner(plans, *more)

    mover.submit = submit


def seen_jobs(worker):
    """What `watch_jobs` noted. Runs in the worker."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return list(get_kv_transfer_group()._worker._mover.seen)


def pair(model, name, options, **changes):
    return Engine(model(name), options, tensor_parallel_size=2, **changes)


def check(model, name, tmp_path):
    """Tokens as with one rank, cold, from host, with a rank that fails or is slow, and in a new engine from disk."""
    asked = prompts()
    options = {"host_bytes": "256MiB", "disk_path": str(tmp_path), "disk_bytes": "64MiB"}
    with Engine(model(name)) as plain:
        right = plain.generate(asked, TOKENS).tokens
    with pair(model, name, options) as engine:
        ranks = engine.core.model_executor.collective_rpc
        ranks(watch_jobs)
        assert engine.generate(asked, TOKENS).tokens == right
        engine.forget_pages()
        again = engine.generate(asked, TOKENS)
        assert (again.tokens, list(again.cached)) == (right, restorable())
        jobs = ranks(seen_jobs)
        assert jobs[0] == jobs[1]
        assert len(jobs[0]) > 8
        ranks(fail_loads, args=(1, (1, 2, 5)))
        for _ in range(3):
            engine.forget_pages()
            assert engine.generate(asked, TOKENS).tokens == right
        live = Live(engine)
        assert sum(ranks(loads_seen)) >= 5
        ranks(slow_down, args=(0, 0.02))
        engine.forget_pages()
        assert engine.generate(asked, TOKENS).tokens == right
        live.until_written()
    with pair(model, name, options) as engine:
        fresh = engine.generate(asked, TOKENS)
        assert (fresh.tokens, list(fresh.cached)) == (right, restorable())


def test_llama_on_two_ranks(model, tmp_path):
    """One group: loads from host are waited for by the forward of both ranks."""
    check(model, "llama", tmp_path)


@pytest.mark.full
def test_gemma3_on_two_ranks(model, tmp_path):
    """Four groups: all loads are asynchronous, and vLLM counts the reports of both ranks."""
    check(model, "gemma3odd", tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_a_key_is_visible_once_both_ranks_have_stored_it(model, tmp_path, rank):
    """One rank has stored a prompt and does not say so, the other one does: whoever asks is told to wait, and offered
    nothing. Once both have said so all of it is offered, and what comes back says the same."""
    (asked,) = prompts(lengths=[120])
    door = tmp_path / "door"
    with pair(model, "llama", {"host_bytes": "64MiB", "deadline_s": 600.0}) as engine:
        engine.core.model_executor.collective_rpc(withhold, args=(rank, str(door)))
        live, planner = Live(engine), engine.scheduler._scheduler.core.planner
        live.add("stores", asked, TOKENS)
        live.run()
        engine.forget_pages()
        live.add("asks", asked, TOKENS)
        live.steps(10)
        before, owed = live.count("stored_host"), planner.describe()
        door.touch()
        live.run()

    assert (before, owed.count(f"ranks [{rank}]")) == (0, 2)
    *told, last = [answer for name, answer in live.asked if name == "asks"]
    assert len(told) >= 10
    assert set(told) == {(None, False)}
    assert last == (restorable([120])[0], False)
    assert live.cached == {"stores": 0, "asks": restorable([120])[0]}
    assert live.answers["asks"] == live.answers["stores"]


@pytest.mark.full
@pytest.mark.timeout(600)
def test_two_engines_of_a_data_parallel_set_on_one_disk(model, tmp_path):
    """Both have tiers of their own below one folder, both serve their own blocks, and their counters stay apart."""
    import asyncio

    from dp_child import ask

    said = asyncio.run(ask(model("llama"), tmp_path, prompts()))
    folders = sorted(p.name for p in tmp_path.glob("*/dp*"))
    assert folders == ["dp0", "dp1"]
    assert said["tokens"][0] == said["tokens"][1] == said["again"][0] == said["again"][1]
    assert said["cached"] == [restorable(), restorable()]
    assert set(said["loaded"]) == {"0", "1"}
    assert min(said["loaded"].values()) > 0
