"""The configuration of one engine instance: the user's options, and what vLLM knows itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvoffload.config import Config
from kvoffload.identity import namespace_of
from kvoffload.keys import Namespace
from kvoffload.layout import Layout

from .compat import (
    data_parallel_index,
    equal_ranks,
    events_wanted,
    hash_name,
    refuse_unknown,
    run_name,
    weights_revision,
)


@dataclass(frozen=True, slots=True)
class Settings:
    """config: with model id and weights filled in. grid: (tensor, pipeline) parallel sizes. hash_name: the engine's
    hash algorithm, "" where kvoffload hashes token ids itself. instance: number of this engine among data-parallel
    ones; each keeps tiers of its own. events: the engine publishes KV events. copies: neighbouring ranks that share
    host memory and disk, since their bytes are the same. run: names this start of the engine, where they do."""

    config: Config
    grid: tuple[int, int]
    hash_name: str
    instance: int
    events: bool = False
    copies: int = 1
    run: str = ""

    @classmethod
    def of(cls, vllm_config: Any, kv_cache_config: Any = None) -> Settings:
        """Raises ConfigError for an unknown or unfitting option, and for an engine that cannot be offloaded."""
        refuse_unknown(vllm_config)
        options = dict(vllm_config.kv_transfer_config.kv_connector_extra_config or {})
        options.setdefault("model_id", str(vllm_config.model_config.model))
        options.setdefault("weights_revision", weights_revision(vllm_config))
        parallel = vllm_config.parallel_config
        return cls(
            Config.from_mapping(options),
            (parallel.tensor_parallel_size, parallel.pipeline_parallel_size),
            hash_name(vllm_config),
            data_parallel_index(vllm_config),
            events_wanted(vllm_config),
            equal_ranks(vllm_config, kv_cache_config),
            run_name(vllm_config),
        )

    @property
    def ranks(self) -> int:
        """Workers of this engine instance."""
        return self.grid[0] * self.grid[1]

    @property
    def sets(self) -> int:
        """Pieces of host memory and disk, each of which `copies` ranks use."""
        return self.ranks // self.copies

    def rank(self, pipeline: int, tensor: int) -> int:
        """The number of a worker, 0 to ranks - 1."""
        return pipeline * self.grid[0] + tensor

    def namespace(self, layout: Layout, facts: str) -> Namespace:
        """The namespace of a rank's blocks. facts: of the engine, see compat.engine_facts."""
        return namespace_of(self.config, layout, self.grid, dtype=facts, hash_name=self.hash_name)
