"""What of an adapter (LoRA) changes the bytes of a block beyond its name and path: the files that lie there."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from .compat import adapter_of, files_digest

MARK_BYTES = 16


class Adapters:
    """The files of each adapter as they were when its first request came: what was loaded then.

    Blocks on disk outlive the engine, and an adapter may be trained again into the same folder. One whose files change
    while the engine runs is of unknown content, since vLLM may hold either version: it has no keys until `forget`.
    Thread: the scheduler's.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], str] = {}

    def files(self, request: Any) -> str | None:
        """The digest of the files of the request's adapter; "" without one, or where it is no folder here. None where
        nothing may be said of its blocks."""
        adapter = adapter_of(request)
        if adapter is None:
            return ""
        digest = files_digest(Path(adapter[1])) if adapter[1] else ""
        return digest if self._seen.setdefault(adapter, digest) == digest else None

    def forget(self) -> None:
        """Nothing is left of what was computed with any of them."""
        self._seen.clear()


def marked(whole: bytes, files: str) -> bytes:
    """The engine's hash of a block, told from that of the same adapter with other files."""
    return hashlib.sha256(whole + files.encode()).digest()[:MARK_BYTES] if files else whole
