"""Two engines of a data-parallel set, asked one by one; for test_ranks.py."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runner import CONTEXT, Prompt, connector_config, inspect_models

TOKENS = 16
METRIC = "vllm:kvoffload_loaded_blocks_total"


async def ask(folder: Path, disk: Path, asked: Sequence[Prompt]) -> dict[str, Any]:
    """By engine: tokens cold, tokens and cached counts after the pages were forgotten; loaded blocks by label."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    inspect_models()
    options = {"host_bytes": "64MiB", "disk_path": str(disk), "disk_bytes": "64MiB"}
    arguments = AsyncEngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=CONTEXT,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        block_size=32,
        kv_cache_memory_bytes=32 << 20,
        seed=0,
        data_parallel_size=2,
        kv_transfer_config=connector_config(options),
    )
    engine = AsyncLLM.from_engine_args(arguments)
    greedy = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    said: dict[str, list[Any]] = {"tokens": [], "again": [], "cached": []}
    try:
        for turn in ("tokens", "again"):
            for rank in (0, 1):
                outs = []
                for number, prompt in enumerate(asked):
                    name = f"{turn} {rank} {number}"
                    async for out in engine.generate(
                        {"prompt_token_ids": list(prompt)}, greedy, name, data_parallel_rank=rank
                    ):
                        last = out
                    outs.append(last)
                said[turn].append([list(o.outputs[0].token_ids) for o in outs])
                if turn == "again":
                    said["cached"].append([o.num_cached_tokens for o in outs])
            await engine.reset_prefix_cache()
        loaded = await _loaded(engine, greedy)
    finally:
        engine.shutdown()
    return {**said, "loaded": loaded}


async def _loaded(engine: Any, greedy: Any) -> dict[str, float]:
    """Blocks loaded, by engine; metrics follow within a second of steps."""
    from prometheus_client import REGISTRY

    found: dict[str, float] = {}
    for number in range(40):
        for rank in (0, 1):
            name = f"idle {rank} {number}"
            async for _ in engine.generate(
                {"prompt_token_ids": [5, 6]}, greedy, name, data_parallel_rank=rank
            ):
                pass
        await asyncio.sleep(0.1)
        found = {}
        for family in REGISTRY.collect():
            for sample in family.samples:
                if sample.name == METRIC:
                    engine_name = sample.labels["engine"]
                    found[engine_name] = found.get(engine_name, 0) + sample.value
        if len(found) == 2 and min(found.values()) > 0:
            break
    return found
