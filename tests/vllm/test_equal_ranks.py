"""TOPO-02 with vLLM: tensor parallel ranks whose blocks are the same bytes share host memory and disk."""

import zlib
from types import SimpleNamespace

import pytest
import tiny
from fake_parts import FULL, settings_of
from kvoffload.connectors.vllm import compat
from kvoffload.connectors.vllm.scheduler import SchedulerPart
from kvoffload.connectors.vllm.wire import Handshake
from live import Live
from runner import Engine, prompts

from kvoffload.errors import ConfigError
from kvoffload.messages import Inventory

TOKENS = 16


@pytest.fixture
def forked_workers(monkeypatch):
    """Workers know this module's functions, and need not import vLLM again."""
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")


# ---- what vLLM says ----


def told(replicas=4, size=4, **parallel):
    here = {"distributed_executor_backend": "mp", "nnodes_within_dp": 1, "tensor_parallel_size": size}
    config = SimpleNamespace(parallel_config=SimpleNamespace(**{**here, **parallel}), instance_id="17")
    return config, SimpleNamespace(kv_tp_replicas=replicas)


def test_ranks_share_only_where_vllm_says_that_they_are_equal_and_on_one_machine():
    """Other executors, several machines, a version that says nothing, or no name: each rank keeps its own."""
    assert compat.equal_ranks(*told()) == 4
    assert compat.equal_ranks(*told(replicas=2)) == 2
    assert compat.equal_ranks(*told(replicas=1)) == 1
    assert compat.equal_ranks(*told(replicas=3)) == 1
    assert compat.equal_ranks(*told(distributed_executor_backend="ray")) == 1
    assert compat.equal_ranks(*told(distributed_executor_backend="external_launcher")) == 1
    assert compat.equal_ranks(*told(nnodes_within_dp=2)) == 1
    config, _ = told()
    assert compat.equal_ranks(config, SimpleNamespace()) == 1
    assert compat.equal_ranks(config, None) == 1
    config.instance_id = ""
    assert compat.equal_ranks(config, SimpleNamespace(kv_tp_replicas=4)) == 1


def test_vllm_has_what_is_asked_of_it():
    """The names that equal_ranks reads are there in this version."""
    from vllm.config import ParallelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    assert "kv_tp_replicas" in KVCacheConfig.__dataclass_fields__
    assert "distributed_executor_backend" in ParallelConfig.__dataclass_fields__
    assert isinstance(ParallelConfig.nnodes_within_dp, property)
    assert "instance_id" in VllmConfig.__dataclass_fields__


@pytest.mark.parametrize("memories", [("a", "b"), ("a", ""), ("", "")])
def test_ranks_that_do_not_share_one_memory_are_refused(memories):
    """Two ranks with equal bytes and two memories, as after a start on two machines: an error, and no wrong byte."""
    from dataclasses import replace

    settings = settings_of(2, copies=2)
    layout = replace(FULL, groups=tuple(replace(g, replicas=2) for g in FULL.groups))
    name, inventory = settings.namespace(layout, "facts"), Inventory((8,), 8, 0, 0)
    hands = {(0, rank): Handshake(layout, name, inventory, memory) for rank, memory in enumerate(memories)}
    with pytest.raises(ConfigError, match="ranks 0 to 1 have equal bytes and do not share one host memory"):
        SchedulerPart(settings).attach(hands)
    good = {place: replace(hand, memory="a") for place, hand in hands.items()}
    SchedulerPart(settings).attach(good)
    with pytest.raises(ConfigError, match="ranks 0 to 0"):
        SchedulerPart(settings_of(2)).attach(good)


# ---- real engines ----


def mapping(worker):
    """(bytes, device and number of the file) of this rank's host memory. Runs in the worker."""
    from pathlib import Path

    from vllm.distributed.kv_transfer import get_kv_transfer_group

    arena = get_kv_transfer_group()._worker._mover.arena
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(x, 16) for x in line.split()[0].split("-"))
        if begin <= arena.base < end:
            return arena.nbytes, line.split()[3:5]
    raise AssertionError("not mapped")


def contents(worker):
    """Of each page its bytes in all layers, as a checksum. Runs in the worker."""
    caches = worker.model_runner.kv_caches
    pages = range(caches[0].shape[0])
    return [zlib.crc32(b"".join(c[p].contiguous().numpy().tobytes() for c in caches)) for p in pages]


def clear(worker):
    """Pages hold nothing. Runs in the worker."""
    for cache in worker.model_runner.kv_caches:
        cache.zero_()


def pair(folder, options, **changes):
    return Engine(folder, options, tensor_parallel_size=2, **changes)


def shared_memory(engine):
    """The ranks' host memory, which must be one."""
    first, second = engine.core.model_executor.collective_rpc(mapping)
    assert first == second
    return first[0]


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("forked_workers")
def test_TOPO_02_ranks_of_one_key_value_head_share_host_and_disk(models, tmp_path, monkeypatch):
    """Both ranks have the model's only head, as a version that says so would tell: tokens are those of one rank, cold,
    from host, and in a new engine from disk; each block is stored once, in one memory and one folder."""
    monkeypatch.setattr("vllm.v1.core.kv_cache_utils._layer_tp_replicas", lambda spec, tp, dcp: tp)
    folder = tiny.model("llama", models, num_key_value_heads=1)
    asked = prompts()
    options = {"host_bytes": "64MiB", "disk_path": str(tmp_path), "disk_bytes": "64MiB"}
    with Engine(folder) as plain:
        right = plain.generate(asked, TOKENS).tokens
    with pair(folder, options) as engine:
        assert shared_memory(engine) <= 64 << 20
        assert engine.generate(asked, TOKENS).tokens == right
        engine.forget_pages()
        again = engine.generate(asked, TOKENS)
        assert again.tokens == right
        assert min(again.cached) > 0
        live = Live(engine)
        live.until_written()
        block = 4 * 32 * 2 * 32 * 4
        stored = live.count("stored_host")
        assert stored > 30
        assert live.count("store_bytes_host") == stored * block
        assert live.count("store_bytes_disk") == live.count("stored_disk") * block
    assert [p.parent.name for p in tmp_path.rglob("slots")] == ["rank0"]
    with pair(folder, options) as engine:
        fresh = engine.generate(asked, TOKENS)
        assert (fresh.tokens, list(fresh.cached)) == (right, list(again.cached))
        assert Live(engine).count("restored") > 30


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("forked_workers")
def test_TOPO_02_latent_attention_on_two_ranks(model):
    """vLLM says itself that the ranks are equal. Pages are emptied and loaded again: every block that was loaded is
    byte by byte what was computed, on both ranks, from one memory. (Its tokens depend on how prompts are batched.)"""
    (asked,) = prompts(lengths=[200])
    with pair(model("deepseek"), {"host_bytes": "64MiB"}, block=16) as engine:
        ranks = engine.core.model_executor.collective_rpc
        shared_memory(engine)
        engine.generate([asked], 1)
        before = ranks(contents)
        assert before[0] == before[1]
        engine.forget_pages()
        ranks(clear)
        empty = ranks(contents)[0]
        again = engine.generate([asked], 1)
        after = ranks(contents)
        assert again.cached == (192,)
        computed = set(before[0]) - set(empty)
        assert len(computed) == 13
        for pages in after:
            assert len(computed & set(pages)) >= 12
        assert Live(engine).count("stored_host") == 12
