"""What differs between vLLM versions, asked of the objects themselves. The only place of the plug that probes.

Read against 0.32.0 and 0.33.0.
"""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path
from typing import Any

from kvoffload.errors import ConfigError

STABLE_HASHES = {"sha256_cbor"}
"""vLLM's algorithms by which equal inputs hash equally, in any process. The default one pickles objects, and equal
objects may pickle differently; the xxhash ones start from a random number in each process."""


def is_registered(factory: Any, name: str) -> bool:
    """Whether the connector factory knows the name."""
    return name in getattr(factory, "_registry", ())


def hash_name(vllm_config: Any) -> str:
    """The engine's algorithm where its hashes can be used, "" where kvoffload makes its own from token ids."""
    algorithm = str(getattr(vllm_config.cache_config, "prefix_caching_hash_algo", "sha256"))
    return f"vllm:{algorithm}" if algorithm in STABLE_HASHES else ""


def engine_facts(vllm_config: Any, kv_cache_config: Any, caches: Any = None) -> str:
    """Everything of the engine beside model id and groups that changes the bytes of a block, as one line."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    facts = {
        "graph": model.compute_hash(),
        "dtype": model.dtype,
        "cache": cache.cache_dtype,
        "quantization": model.quantization,
        "layout": getattr(kv_cache_config, "kv_cache_layout", None),
        "draft": getattr(getattr(vllm_config, "speculative_config", None), "model", None),
    }
    load_format = str(getattr(vllm_config.load_config, "load_format", "auto"))
    if "dummy" in load_format:
        facts["weights"] = f"dummy seed {model.seed}"
    if caches is not None:
        facts |= _tensor_facts(caches)
    return " ".join(f"{name}={value}" for name, value in facts.items())


def _tensor_facts(caches: Any) -> dict[str, Any]:
    """Of the registered tensors: their types, and on a CPU what its kernels pack blocks for."""
    import torch

    flat = [t for c in caches.values() for t in (c if isinstance(c, list | tuple) else [c])]
    facts: dict[str, Any] = {"tensors": ",".join(sorted({str(t.dtype) for t in flat}))}
    if all(t.device.type == "cpu" for t in flat):
        amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
        facts["isa"] = f"{platform.machine()},{torch.backends.cpu.get_cpu_capability()},amx={amx}"
    return facts


def weights_revision(vllm_config: Any) -> str:
    """The revision asked for; of a local checkpoint the names, sizes and times of its files, since it may change in
    place."""
    model = vllm_config.model_config
    digest = files_digest(Path(str(model.model)))
    return f"files:{digest}" if digest else str(model.revision or "")


def files_digest(folder: Path) -> str:
    """Of names, sizes and times of the weights and configurations in a folder; "" where there is no such folder."""
    if not folder.is_dir():
        return ""
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.suffix in (".safetensors", ".bin", ".pt", ".gguf", ".json"):
            at = file.stat()
            digest.update(f"{file.name}\0{at.st_size}\0{at.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:16]


def forward_mode(context: Any) -> str:
    """The kind of graph by which a forward runs; "" where its layers' hooks do not run, or nothing is known."""
    mode = str(getattr(getattr(context, "cudagraph_runtime_mode", None), "name", ""))
    return mode if mode in ("NONE", "PIECEWISE") else ""


def data_parallel_index(vllm_config: Any) -> int:
    """Which engine of a data-parallel set this is. The rank is no use: vLLM sets it to 0 for dense models."""
    parallel = vllm_config.parallel_config
    index = getattr(parallel, "data_parallel_index", None)
    return int(index if index is not None else getattr(parallel, "data_parallel_rank", 0) or 0)


def equal_ranks(vllm_config: Any, kv_cache_config: Any) -> int:
    """Neighbouring tensor parallel ranks whose blocks vLLM says are the same bytes (latent attention), where it says
    too that they are processes on one machine; else 1."""
    parallel = vllm_config.parallel_config
    copies = int(getattr(kv_cache_config, "kv_tp_replicas", 1) or 1)
    here = (
        getattr(parallel, "distributed_executor_backend", None) == "mp"
        and getattr(parallel, "nnodes_within_dp", 0) == 1
        and run_name(vllm_config) != ""
    )
    return copies if here and parallel.tensor_parallel_size % copies == 0 else 1


def run_name(vllm_config: Any) -> str:
    """Of this start of the engine, the same in all its processes, of letters and digits; "" where vLLM gives none."""
    return "".join(
        c for c in str(getattr(vllm_config, "instance_id", "") or "") if c.isascii() and c.isalnum()
    )


def refuse_unknown(vllm_config: Any) -> None:
    """Raise ConfigError for settings under which blocks would not mean what their hashes say, or would move."""
    parallel = vllm_config.parallel_config
    if getattr(vllm_config, "num_hash_lookahead_tokens", 0):
        raise ConfigError(
            f"num_hash_lookahead_tokens is {vllm_config.num_hash_lookahead_tokens}: hashes that look ahead name other "
            "blocks than the ones they stand for; kvoffload needs 0"
        )
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ConfigError(
                f"{name} is {getattr(parallel, name)}; kvoffload handles tensor, pipeline and data parallel "
                "ranks, not context parallel ones: set it to 1"
            )
    model = vllm_config.model_config
    pooling = getattr(model, "runner_type", "") == "pooling"
    if pooling and not getattr(model, "is_prefix_caching_supported", True):
        raise ConfigError(
            "this model's pooling needs every token of a prompt computed (vLLM has no prefix caching for it); what a "
            "tier holds cannot be used: leave the connector out"
        )
    if getattr(model, "enable_sleep_mode", False):
        raise ConfigError(
            "enable_sleep_mode is set; the cache's memory goes away in sleep while copies may run: leave one of "
            "sleep mode and kvoffload out"
        )


def retained_tokens(spec: Any) -> int:
    """Tokens below a boundary that a sliding window needs."""
    retained = getattr(spec, "num_retained_tokens", None)
    return int(retained or spec.sliding_window - 1 + getattr(spec, "extra_retained_tokens", 0))


def stored_group(group: Any) -> bool:
    """Whether blocks of the group are part of what a prefix names."""
    return bool(getattr(group, "enable_kv_transfer", True)) and bool(
        getattr(group.kv_cache_spec, "prefix_cacheable", True)
    )


def mamba_pages(spec: Any) -> str:
    """Why the states of a spec cannot be named by prefixes; "" where they can."""
    mode = getattr(spec, "mamba_cache_mode", "none")
    if mode not in ("all", "align"):
        return (
            f"mamba_cache_mode is {mode!r}, which keeps no state at block boundaries; start vLLM with "
            "--enable-prefix-caching --mamba-cache-mode align"
        )
    if getattr(spec, "num_speculative_blocks", 0):
        return "states with speculative blocks are not handled; leave speculation or the connector out"
    return ""


def session_of(request: Any) -> tuple[str, str]:
    """(session, agent) that the client named: vLLM's session id, or "session" and "agent" in kv_transfer_params."""
    params = getattr(request, "kv_transfer_params", None) or {}
    session = getattr(request, "session_id", None) or params.get("session") or ""
    return str(session), str(params.get("agent") or "")


def media_of(request: Any) -> list[tuple[str, int, int]]:
    """(id, begin, end) of each picture, sound or embedding in the prompt."""
    out = []
    for feature in getattr(request, "mm_features", None) or ():
        at = feature.mm_position
        out.append((str(feature.identifier), int(at.offset), int(at.offset + at.length)))
    return out


def adapter_of(request: Any) -> tuple[str, str] | None:
    """(name, revision) of the request's adapter: a LoRA is told from another by its path too."""
    lora = getattr(request, "lora_request", None)
    return None if lora is None else (str(lora.lora_name), str(getattr(lora, "lora_path", "")))


def events_wanted(vllm_config: Any) -> bool:
    """Whether the engine publishes KV events."""
    events = getattr(vllm_config, "kv_events_config", None)
    return bool(events is not None and events.enable_kv_cache_events)


def block_stored(**fields: Any) -> Any:
    """A BlockStored of those fields that this version knows."""
    from vllm.distributed.kv_events import BlockStored

    known = set(getattr(BlockStored, "__struct_fields__", fields))
    return BlockStored(**{name: value for name, value in fields.items() if name in known})


def spec_facts(spec: Any) -> tuple[str | None, int | None]:
    """(kind, window) of a group as events say them."""
    from vllm.v1 import kv_cache_interface

    kind_of = getattr(kv_cache_interface, "get_kv_cache_spec_kind", None)
    kind = None if kind_of is None else str(kind_of(spec).value)
    return kind, getattr(spec, "sliding_window", None)
