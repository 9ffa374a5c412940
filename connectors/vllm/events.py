"""kvoffload's events in vLLM's words, for routers that read the engine's event stream."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from kvoffload.events import Cleared, Event, Removed, Stored
from kvoffload.keys import KEY_BYTES

from .adapters import marked
from .compat import block_stored, spec_facts

MEDIA = {"host": MEDIUM_CPU, "disk": MEDIUM_STORAGE}

HASHES = 1 << 18
"""Engine hashes whose tails are remembered, the latest ones: a key is the first 16 bytes of a hash, and the engine
publishes hashes whole."""


class EventTranslator:
    """Thread: the scheduler's.

    A block whose hash is not remembered (found on disk at start, or older than HASHES) is published under its key. What
    is visible is kept by medium and group: vLLM has no word for "forget what is outside the GPU", so it is taken back
    block by block.
    """

    def __init__(self, kv_cache_config: Any) -> None:
        self._facts = [spec_facts(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups]
        self._hashes: OrderedDict[bytes, BlockHash] = OrderedDict()
        self._visible: dict[tuple[str, int], dict[bytes, None]] = {}

    def learn(self, hashes: Sequence[BlockHash], files: str = "") -> None:
        """The engine has made these. files: of the request's adapter, see `marked`."""
        for whole in hashes:
            self._hashes[bytes(marked(whole, files)[:KEY_BYTES])] = whole
        while len(self._hashes) > HASHES:
            self._hashes.popitem(last=False)

    def translate(self, events: Iterable[Event]) -> list[Any]:
        """In order."""
        out: list[Any] = []
        for event in events:
            if isinstance(event, Stored):
                self._visible.setdefault((event.medium, event.group), {}).update(dict.fromkeys(event.keys))
                out.append(self._stored(event))
            elif isinstance(event, Removed):
                seen = self._visible.get((event.medium, event.group), {})
                known = [key for key in event.keys if seen.pop(key, key) is None]
                if known:
                    out.append(self._removed(event.medium, event.group, known))
            elif isinstance(event, Cleared):
                out += [
                    self._removed(medium, group, list(keys))
                    for (medium, group), keys in self._visible.items()
                    if keys
                ]
                self._visible = {}
        return out

    def _hash(self, key: bytes) -> Any:
        return maybe_convert_block_hash(self._hashes.get(key, BlockHash(key)))

    def _stored(self, event: Stored) -> Any:
        kind, window = self._facts[event.group]
        return block_stored(
            block_hashes=[self._hash(key) for key in event.keys],
            parent_block_hash=None if event.parent is None else self._hash(event.parent),
            token_ids=list(event.tokens),
            block_size=event.tokens_per_block,
            lora_id=None,
            medium=MEDIA[event.medium],
            lora_name=None,
            group_idx=event.group,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window,
        )

    def _removed(self, medium: str, group: int, keys: Sequence[bytes]) -> Any:
        return BlockRemoved(
            block_hashes=[self._hash(key) for key in keys], medium=MEDIA[medium], group_idx=group
        )
