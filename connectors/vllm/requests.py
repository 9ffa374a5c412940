"""vLLM's requests as connector.EngineRequest sees them, and their keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvoffload.keys import Adapter, Chain, KeyArray, Media, Namespace
from kvoffload.requests import RequestInfo

from .adapters import Adapters, marked
from .compat import adapter_of, media_of, session_of
from .events import EventTranslator

NULL_BLOCK = 0
"""vLLM's block of nothing: what a table holds where a window has passed."""


class GrownChain:
    """The keys of a request's full blocks, brought up to date whenever they are asked for.

    Of the engine's hashes where the namespace names its algorithm; else of token ids, adapter, media and salt. A
    request with prompt embeddings has no token ids that tell its content: it has no keys. Nor has one whose adapter's
    files changed under the engine.
    """

    def __init__(self, namespace: Namespace, request: Any, adapters: Adapters | None = None) -> None:
        self._namespace = namespace
        self._request = request
        files = (adapters or Adapters()).files(request)
        self._unknown, self._files = files is None, files or ""
        self._own = namespace.hash.partition(":")[0] != "vllm"
        self._last: object = None
        self._media = 0
        self._chain = self._new()
        self._keys = self._chain.keys

    def _new(self) -> Chain:
        if not self._own:
            return Chain(self._namespace)
        adapter = adapter_of(self._request)
        return Chain(
            self._namespace,
            adapter=None if adapter is None else Adapter(adapter[0], self._revision(adapter[1])),
            salt=self._request.cache_salt,
        )

    def _revision(self, path: str) -> str:
        return f"{path}\0{self._files}" if self._files else path

    @property
    def keys(self) -> KeyArray:
        """(blocks, 16) uint8."""
        if not self._unknown and (self._extend() if self._own else self._append()):
            self._keys = self._chain.keys
        return self._keys

    def _append(self) -> bool:
        """Take what the engine has hashed since; whether there was anything."""
        hashes = self._request.block_hashes
        known = self._chain.blocks
        if len(hashes) <= known:
            return False
        self._chain.append(
            [marked(h, self._files) for h in hashes[known:]] if self._files else hashes[known:]
        )
        self._last = hashes[-1]
        return True

    def _extend(self) -> bool:
        """Hash the full blocks that are new; whether there were any."""
        request, chain = self._request, self._chain
        size = self._namespace.tokens_per_block
        whole = request.num_tokens // size * size
        if whole <= chain.tokens or request.prompt_embeds is not None:
            return False
        media = media_of(request)
        chain.extend(request.all_token_ids[chain.tokens : whole], [Media(*m) for m in media[self._media :]])
        self._media = len(media)
        hashes = request.block_hashes
        self._last = hashes[chain.blocks - 1] if len(hashes) >= chain.blocks else None
        return True

    @property
    def broken(self) -> bool:
        """Whether the engine took back tokens that have keys already (a streamed session that was edited). Its own
        hashes tell, under kvoffload's keys too, unless it keeps none."""
        if self._own and self._request.num_tokens < self._chain.tokens:
            return True
        hashes, known = self._request.block_hashes, self._chain.blocks
        if not known or self._last is None:
            return False
        return len(hashes) < known or (
            hashes[known - 1] is not self._last and hashes[known - 1] != self._last
        )


class ToldChain(GrownChain):
    """A GrownChain whose tokens and whole hashes KV events are to say."""

    def __init__(
        self, namespace: Namespace, request: Any, events: EventTranslator, adapters: Adapters | None = None
    ) -> None:
        super().__init__(namespace, request, adapters)
        self._events = events
        self._told = 0
        self._ids = np.empty(0, np.uint32)

    @property
    def token_ids(self) -> NDArray[np.uint32]:
        """(n,) uint32: those of the full blocks that the engine has hashed."""
        hashes = self._request.block_hashes
        if len(hashes) > self._told:
            self._events.learn(hashes[self._told :], self._files)
            self._told = len(hashes)
            count = self._told * self._namespace.tokens_per_block
            more = self._request.all_token_ids[len(self._ids) : count]
            self._ids = np.concatenate([self._ids, np.array(more, np.uint32)])
        return self._ids


@dataclass(slots=True, eq=False)
class Tracked:
    """One live request. Satisfies connector.EngineRequest.

    computed: tokens it had when it was last asked about; disk: of the tokens then offered, those from disk. step: the
    step in which it got its pages, -1 without. loading: an asynchronous load that vLLM waits for. wanted: tokens that
    the last load is to reach; short: it was begun for fewer. sync: it was one that the forward waits for.
    """

    request: Any
    chain: GrownChain
    info: RequestInfo
    computed: int = 0
    disk: int = 0
    step: int = -1
    loading: bool = False
    wanted: int = 0
    sync: bool = False
    short: bool = False

    @classmethod
    def of(
        cls,
        request: Any,
        namespace: Namespace,
        events: EventTranslator | None = None,
        adapters: Adapters | None = None,
    ) -> Tracked:
        session, agent = session_of(request)
        if events is None:
            chain = GrownChain(namespace, request, adapters)
        else:
            chain = ToldChain(namespace, request, events, adapters)
        return cls(request, chain, RequestInfo(request.request_id, session, agent))

    @property
    def tokens(self) -> int:
        return int(self.request.num_tokens)

    @property
    def prompt(self) -> int:
        return int(self.request.num_prompt_tokens)


def pages_of(table: Sequence[Sequence[int]]) -> tuple[NDArray[np.int32], ...]:
    """A block table by group as kvoffload's pages: the null block is no page."""
    pages = tuple(np.array(blocks, np.int32) for blocks in table)
    for mine in pages:
        mine[mine == NULL_BLOCK] = -1
    return pages


class LazyPages(Sequence[NDArray[np.int32]]):
    """The block table of one request in this step, converted only when something of it is stored."""

    def __init__(self, state: Any, request_id: str) -> None:
        self._state = state
        self._id = request_id
        self._pages: tuple[NDArray[np.int32], ...] | None = None

    def _found(self) -> tuple[NDArray[np.int32], ...]:
        if self._pages is None:
            self._pages = pages_of(self._state.get_block_ids(self._id) or ())
        return self._pages

    def __getitem__(self, group: Any) -> Any:
        return self._found()[group]

    def __len__(self) -> int:
        return len(self._found())
