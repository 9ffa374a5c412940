"""Runs vLLM engines on tiny models: with and without kvoffload, in this process or with the engine in one of its own.

Engines come after each other, one at a time. Everything that a process must have set before vLLM is imported is set
when this module is: import it before vllm.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import sys
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tiny import MODELS, VOCABULARY

ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
if "vllm" not in sys.modules:
    os.environ.update(ENVIRONMENT)

LENGTHS = (200, 333, 64, 500)
"""Tokens of the usual prompts: no multiple of a block, fewer than a block more, exact multiples, several chunks."""

CONTEXT = 1024

SHOWN_S = 1.1
"""Longer than between two looks at the counters (connectors/vllm/metrics.py, EVERY_S)."""

PATIENCE_S = 60.0

MOVING = ("host_pinned", "host_pending", "disk_pinned", "disk_pending")
"""Gauges that are zero when nothing moves."""

Prompt = list[int]


def prompts(seed: int = 1, lengths: Sequence[int] = LENGTHS) -> list[Prompt]:
    """Random prompts; the same seed gives the same ones."""
    source = random.Random(seed)
    return [[source.randrange(3, VOCABULARY - 12) for _ in range(n)] for n in lengths]


def restorable(lengths: Iterable[int] = LENGTHS, block: int = 32) -> list[int]:
    """Tokens of each prompt that a load can bring: all full blocks. Where they are all of it vLLM computes the last
    token again after the load."""
    return [n // block * block for n in lengths]


@dataclass(frozen=True, slots=True)
class Answers:
    """What the engine said, by prompt. tokens: generated ones; cached: prompt tokens that were not computed, from pages
    or from tiers; reasons: why each ended."""

    tokens: tuple[tuple[int, ...], ...]
    cached: tuple[int, ...]
    reasons: tuple[str | None, ...]


class Engine:
    """One running engine; a context manager.

    options: kvoffload's configuration, None = no connector. multiprocess: scheduler and worker live in another
    process, started afresh (so the main module must be importable); `scheduler` and `worker` are not to be had then.
    policy: vLLM's kv_load_failure_policy. changes: further arguments of vllm.LLM.
    """

    def __init__(
        self,
        model: Path,
        options: Mapping[str, Any] | None = None,
        *,
        dtype: str = "float32",
        block: int = 32,
        multiprocess: bool = False,
        policy: str = "recompute",
        **changes: Any,
    ) -> None:
        from vllm import LLM

        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(multiprocess))
        inspect_models()
        arguments = {
            "model": str(model),
            "skip_tokenizer_init": True,
            "dtype": dtype,
            "enforce_eager": True,
            "max_model_len": CONTEXT,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 256,
            "block_size": block,
            "kv_cache_memory_bytes": 32 << 20,
            "enable_prefix_caching": True,
            "seed": 0,
            "disable_log_stats": False,
            **changes,
        }
        if options is not None:
            arguments["kv_transfer_config"] = connector_config(options, policy)
        self._multiprocess = multiprocess
        try:
            self.llm: Any = LLM(**arguments)
        except BaseException:
            _clean_up()
            raise

    def generate(
        self,
        asked: Sequence[Prompt],
        tokens: int = 24,
        *,
        many: Sequence[Mapping[str, Any]] = (),
        **sampling: Any,
    ) -> Answers:
        """Greedy answers of `tokens` tokens each. many: per prompt, more fields of vLLM's prompt (cache_salt, ...)."""
        from vllm import SamplingParams

        greedy = SamplingParams(
            **{"temperature": 0, "max_tokens": tokens, "ignore_eos": True, "detokenize": False, **sampling}
        )
        extra = many or [{}] * len(asked)
        inputs = [{"prompt_token_ids": list(p), **more} for p, more in zip(asked, extra, strict=True)]
        out = self.llm.generate(inputs, greedy, use_tqdm=False)
        return Answers(
            tuple(tuple(o.outputs[0].token_ids) for o in out),
            tuple(int(o.num_cached_tokens or 0) for o in out),
            tuple(o.outputs[0].finish_reason for o in out),
        )

    def forget_pages(self) -> None:
        """Empty the engine's own prefix cache; the tiers stay."""
        assert self.llm.reset_prefix_cache()

    def forget_all(self) -> None:
        """Empty the engine's prefix cache and every tier."""
        assert self.llm.reset_prefix_cache(reset_connector=True)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the counters or gauges of that name (without "vllm:") that have these labels.

        kvoffload's own follow within a second of steps; see `settle`.
        """
        found = [m for m in self.llm.get_metrics() if m.name == f"vllm:{name}"]
        return sum(m.value for m in found if labels.items() <= m.labels.items())

    def bytes_read(self) -> dict[str, int]:
        """Bytes that came out of each tier so far: from host to the device, from disk to host."""
        self._show_counters()
        return {tier: int(self.metric("kvoffload_load_bytes", tier=tier)) for tier in ("host", "disk")}

    def settle(self) -> None:
        """Let everything that is on its way between the tiers arrive: blocks that wait for the disk are pinned."""
        end = time.monotonic() + PATIENCE_S
        while True:
            self._show_counters()
            moving = sum(self.metric(f"kvoffload_{name}_bytes") for name in MOVING)
            if not moving:
                return
            assert time.monotonic() < end, f"{moving} bytes are pinned or on their way after {PATIENCE_S} s"

    def _show_counters(self) -> None:
        """Run a step, so that all that has ended is counted, and one that shows the counters: an engine does so once
        in a while."""
        for _ in range(2):
            if not self._multiprocess:
                self.scheduler._looked = self.worker._looked = 0.0
            else:
                time.sleep(SHOWN_S)
            self.generate([[3]], 1)

    # ---- inside of an engine of this process ----

    @property
    def core(self) -> Any:
        """vLLM's EngineCore."""
        assert not self._multiprocess
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        """The connector of the scheduler."""
        return self.core.scheduler.connector

    @property
    def worker(self) -> Any:
        """The connector of the worker."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        assert not self._multiprocess
        return get_kv_transfer_group()

    def counter(self, name: str) -> int:
        """A counter of kvoffload's planner by its name in stats(), now."""
        return int(self.scheduler._scheduler.core.planner.stats().totals[name])

    @property
    def free_blocks(self) -> int:
        """Blocks of the page pool that no request holds."""
        return int(self.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    # ---- end ----

    def close(self) -> None:
        """End the engine and give back everything that a next one needs. Idempotent."""
        if self.llm is not None:
            self.llm.llm_engine.engine_core.shutdown()
            self.llm = None
            _clean_up()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def connector_config(options: Mapping[str, Any], policy: str = "recompute") -> Any:
    """vLLM's KVTransferConfig that asks for kvoffload."""
    from vllm.config import KVTransferConfig

    return KVTransferConfig(
        kv_connector="KVOffloadConnector",
        kv_role="kv_both",
        kv_connector_extra_config=dict(options),
        kv_load_failure_policy=policy,
    )


def import_vllm() -> None:
    """Load what engines need, whatever its libraries warn of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import vllm.entrypoints.llm
        import vllm.v1.engine.core  # noqa: F401
    logging.getLogger("vllm").setLevel(logging.WARNING)


def inspect_models() -> None:
    """Tell vLLM's registry of the classes of the tiny models: it would start a process of 20 s for each."""
    from vllm import ModelRegistry
    from vllm.model_executor.models import deepseek_v2, gemma2, gemma3, gpt_oss, llama

    modules = (llama, gemma2, gemma3, gpt_oss, deepseek_v2)
    for name in {config["architectures"][0] for config in MODELS.values()} - _INSPECTED:
        found = next(vars(m)[name] for m in modules if name in vars(m))
        ModelRegistry.register_model(name, found)
        _INSPECTED.add(name)


_INSPECTED: set[str] = set()


def _clean_up() -> None:
    """After an engine, or after one that could not start."""
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown, kv_transfer_state

    ensure_kv_transfer_shutdown()
    kv_transfer_state._KV_CONNECTOR_AGENT = None
    gc.collect()
    cleanup_dist_env_and_memory()
