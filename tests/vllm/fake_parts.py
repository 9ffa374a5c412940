"""Requests, steps and settings of the small vLLM in fake_engine.py: what a connector reads of vLLM's own."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from fake_mover import GARBAGE, Memory, begins
from kvoffload.connectors.vllm.settings import Settings
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, KVConnectorOutput

from kvoffload.config import Config
from kvoffload.index import EntryFlag
from kvoffload.keys import Chain, Namespace
from kvoffload.layout import CacheGroup, GroupKind, Layout

SIZE = 4
"""Tokens of a block."""

FULL = Layout(SIZE, (CacheGroup(0, GroupKind.FULL, SIZE, 4096),))
HYBRID = Layout(
    SIZE,
    (CacheGroup(0, GroupKind.FULL, SIZE, 4096), CacheGroup(1, GroupKind.SLIDING, SIZE, 4096, lookback=6)),
)


@dataclass(eq=False)
class Request:
    """What a connector reads of vLLM's Request; `state`, `table`, `life`, ... are the engine's own.

    life: grows when what is in flight for the request no longer counts. device: the tokens as the workers know them,
    another list in each life.
    """

    request_id: str
    prompt: list[int]
    answer: int
    cache_salt: str | None = None
    lora_request: Any = None
    mm_features: list[Any] = field(default_factory=list)
    prompt_embeds: Any = None
    kv_transfer_params: Any = None
    session_id: str = ""
    num_computed_tokens: int = 0
    state: str = "waiting"
    reason: str | None = None
    table: tuple[list[int], ...] = ()
    life: int = 0
    placeholders: int = 0
    in_flight: int = 0
    last_step: int = -1
    device: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.all_token_ids = list(self.prompt)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def block_hashes(self) -> list[bytes]:
        digest, found = b"", []
        for end in range(SIZE, self.num_tokens + 1, SIZE):
            digest = hashlib.sha256(
                digest + bytes(str(self.all_token_ids[end - SIZE : end]), "ascii")
            ).digest()
            found.append(digest)
        return found

    def get_finished_reason(self) -> str | None:
        return self.reason


@dataclass(eq=False)
class Work:
    """One request in one step: tokens [start, end) of `text`, as the workers know it by then, over this table."""

    request: Request
    life: int
    start: int
    end: int
    samples: bool
    table: tuple[list[int], ...]
    text: list[int]
    token: int | None = None


@dataclass(eq=False)
class Output:
    """vLLM's SchedulerOutput, and with it what the step is to do. fresh: pages that it was given, whose content is lost
    with its forward."""

    number: int
    works: list[Work] = field(default_factory=list)
    preempted_req_ids: set[str] = field(default_factory=set)
    has_sync_kv_loads: bool = False
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)
    told: Any = None
    fresh: list[int] = field(default_factory=list)

    @property
    def num_scheduled_tokens(self) -> dict[str, int]:
        return {work.request.request_id: work.end - work.start for work in self.works}

    @property
    def kv_connector_block_state(self) -> Output:
        return self

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...] | None:
        return next((work.table for work in self.works if work.request.request_id == request_id), None)


def next_token(text: list[int]) -> int:
    """What the model says after this text."""
    return 3 + hashlib.sha256(bytes(str(text), "ascii")).digest()[0]


def settings_of(ranks: int = 1, *, copies: int = 1, **options: Any) -> Settings:
    """Of an engine with so many tensor parallel ranks, of which `copies` neighbours have the same bytes."""
    config = Config(**{"host_bytes": 1 << 20, "model_id": "fake", **options})
    return Settings(config, (ranks, 1), "", 0, copies=copies, run="fake")


def is_right(layout: Layout, memory: Memory, work: Work) -> bool:
    """Whether this rank's pages hold all that the work's tokens look back at."""
    for group, table in zip(layout.groups, work.table, strict=True):
        begin = 0 if group.kind is GroupKind.FULL else max(0, work.start - group.lookback) // SIZE
        for block in range(begin, -(-work.start // SIZE)):
            wanted = (group.id, tuple(work.text[: min(work.start, (block + 1) * SIZE)]))
            if not begins(memory.pages.get(table[block], GARBAGE), wanted, (block + 1) * SIZE):
                return False
    return True


def key_of(namespace: Namespace, text: tuple[int, ...]) -> bytes:
    """The key of the last block of this text, under kvoffload's own hashes."""
    chain = Chain(namespace)
    chain.extend(np.array(text, np.uint32))
    return bytes(chain.keys[-1].tobytes())


def joined(aggregator: KVOutputAggregator, says: list[KVConnectorOutput]) -> KVConnectorOutput:
    """What the workers say of one step, as vLLM's scheduler gets it."""
    outputs = [replace(EMPTY_MODEL_RUNNER_OUTPUT, kv_connector_output=said) for said in says]
    whole = aggregator.aggregate(outputs)
    assert whole is not None
    assert whole.kv_connector_output is not None
    return whole.kv_connector_output


def shown(planner: Any, namespace: Namespace, memories: Sequence[Memory]) -> dict[tuple[int, bytes], int]:
    """(group, key) of all that host shows, and its slot; AssertionError where a rank has other bytes there."""
    found = {}
    entries = planner._tiers.index.entries()
    for entry in entries[(entries["flags"] & EntryFlag.HOST_VALID) != 0]:
        place = (int(entry["group"]), int(entry["host"]))
        for memory in memories:
            content = memory.host.get(place, GARBAGE)
            assert content != GARBAGE, f"garbage is visible in slot {place}"
            assert content[0] == place[0]
            assert key_of(namespace, content[1]) == entry["key"].tobytes(), f"slot {place} holds other tokens"
        found[place[0], entry["key"].tobytes()] = place[1]
    return found
