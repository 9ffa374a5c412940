"""What is wrong is said at start, with what to do about it; nothing is guessed later."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from kvoffload.connectors import vllm as plug
from kvoffload.connectors.vllm import compat
from kvoffload.connectors.vllm.settings import Settings
from runner import Engine
from vllm.config import ModelConfig, PoolerConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA, supports_hma

from kvoffload.errors import ConfigError


def config(options=None, **changes):
    """As much of a VllmConfig as settings are made of. changes: fields of its parts, as part__field."""
    parts = {
        "kv_transfer_config": {"kv_connector_extra_config": options or {}},
        "model_config": {"model": "org/model", "revision": "abc", "enable_sleep_mode": False},
        "parallel_config": {
            "tensor_parallel_size": 2,
            "pipeline_parallel_size": 3,
            "data_parallel_index": 4,
            "data_parallel_rank": 0,
        },
        "cache_config": {"prefix_caching_hash_algo": "sha256"},
    }
    top = {}
    for name, value in changes.items():
        part, _, field = name.partition("__")
        if field:
            parts[part][field] = value
        else:
            top[part] = value
    return SimpleNamespace(**{n: SimpleNamespace(**fields) for n, fields in parts.items()} | top)


def test_settings_come_from_options_and_from_the_engine():
    """Options are kvoffload's; model, revision, ranks and instance are the engine's; an option wins over the engine."""
    settings = Settings.of(config({"host_bytes": "1GiB", "model_id": "mine"}))

    assert settings.config.host_bytes == 1 << 30
    assert (settings.config.model_id, settings.config.weights_revision) == ("mine", "abc")
    assert (settings.grid, settings.ranks, settings.instance) == ((2, 3), 6, 4)
    assert [settings.rank(p, t) for p in range(3) for t in range(2)] == list(range(6))


def test_unknown_options_list_the_known_ones():
    """A misspelt option names itself, the nearest and all."""
    with pytest.raises(
        ConfigError, match=r"unknown option 'host_byte'; did you mean 'host_bytes'\? Known: host_bytes, "
    ):
        Settings.of(config({"host_byte": "1GiB"}))


@pytest.mark.parametrize("name", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_context_parallel_is_refused(name):
    """Blocks that are spread over ranks by token: the option and its value are in the message."""
    with pytest.raises(ConfigError, match=f"{name} is 2; .*set it to 1"):
        Settings.of(config(**{f"parallel_config__{name}": 2}))


def test_sleep_mode_is_refused():
    """Memory that goes away while copies run."""
    with pytest.raises(ConfigError, match=r"enable_sleep_mode is set; .*leave one of"):
        Settings.of(config(model_config__enable_sleep_mode=True))


@pytest.mark.parametrize("pooling", ["MEAN", "CLS", "LAST"])
def test_pooling_over_tokens_that_a_load_leaves_out_is_refused(pooling, model):
    """vLLM raises in the middle of a step where a pooler of all tokens sees a part of them."""
    of = ModelConfig(
        str(model("llama")),
        runner="pooling",
        convert="embed",
        pooler_config=PoolerConfig(pooling_type=pooling),
        skip_tokenizer_init=True,
        dtype="float32",
    )
    if pooling == "LAST":
        compat.refuse_unknown(config(model_config=of))
    else:
        with pytest.raises(ConfigError, match=r"pooling needs every token.*leave the connector out"):
            compat.refuse_unknown(config(model_config=of))


def test_hashes_that_look_ahead_are_refused():
    """They name other blocks than the ones they stand for."""
    with pytest.raises(ConfigError, match=r"num_hash_lookahead_tokens is 3: .*kvoffload needs 0"):
        Settings.of(config(num_hash_lookahead_tokens=3))


def test_a_local_checkpoint_is_known_by_its_files(tmp_path):
    """Its name may stay while its weights change: the revision follows the files."""
    (tmp_path / "model.safetensors").write_bytes(b"1234")
    told = config(model_config__model=str(tmp_path))
    before = compat.weights_revision(told)
    assert before == compat.weights_revision(told)
    (tmp_path / "model.safetensors").write_bytes(b"12345")

    assert before.startswith("files:")
    assert compat.weights_revision(told) != before


def test_instances_are_told_apart_by_index():
    """vLLM sets the data-parallel rank of dense models to 0; the index stays."""
    assert compat.data_parallel_index(config(parallel_config__data_parallel_index=1)) == 1
    assert compat.data_parallel_index(config(parallel_config__data_parallel_index=None)) == 0


def test_registering_twice_is_fine():
    """vLLM calls the entry point in each of its processes, and a second registration of a name would raise."""
    plug.register()
    plug.register()

    found = KVConnectorFactory.get_connector_class_by_name(plug.NAME)
    assert found.__module__ == plug.MODULE
    assert issubclass(found, SupportsHMA)
    assert supports_hma(found)
    assert not found.__abstractmethods__
    assert not found.supports_sleep_mode(None)


def test_an_engine_with_a_wrong_option_does_not_start(model):
    """The message reaches the one who started the engine, and the next engine of the process starts."""
    with pytest.raises(Exception, match="unknown option 'host_byte'; did you mean 'host_bytes'"):
        Engine(model("llama"), {"host_byte": "1GiB"})
    with pytest.raises(Exception, match=r"host_bytes gives 65536 bytes to this rank.*raise host_bytes"):
        Engine(model("llama"), {"host_bytes": "64KiB"})
    with Engine(model("llama"), {"host_bytes": "16MiB"}) as engine:
        assert engine.generate([[5, 6, 7]], 2).reasons == ("length",)


def test_the_module_path_finds_it_too(model):
    """Where plug-ins are switched off the class is named by its module."""
    from vllm.config import KVTransferConfig

    named = KVTransferConfig(
        kv_connector=plug.NAME,
        kv_role="kv_both",
        kv_connector_module_path=plug.MODULE,
        kv_connector_extra_config={"host_bytes": "16MiB"},
    )
    with Engine(model("llama"), kv_transfer_config=named) as engine:
        engine.generate([list(range(3, 90))], 2)
        assert engine.counter("stored_host") == 2
