"""Which layers tell before they read their pages, so that a forward may begin before all of a load is there."""

from __future__ import annotations

from collections.abc import Mapping

WHOLE = -1
"""In the place of a layer: the whole load."""


class Hooks:
    """Evidence, not promise: vLLM calls a hook before a layer's attention, but not under full CUDA graphs, and not in
    every model. A load is given layer by layer only where every layer with pages has called in a forward of the same
    mode before; from then on each of them waits for its part.

    Thread: hooks may run on several at once, between two `begin`s."""

    def __init__(self, places: Mapping[str, int]) -> None:
        """places: by layer with pages, the place of its last region in the group's pool."""
        self._places = places
        self._seen: dict[str, set[str]] = {}
        self._mode = ""

    def begin(self, mode: str) -> bool:
        """A forward of this mode begins ("" = one without hooks): whether each layer will call."""
        self._mode = mode
        return bool(mode and self._places) and self._seen.get(mode, set()) >= self._places.keys()

    def called(self, layer: str) -> int:
        """The layer's hook: its place, WHOLE where it has no pages of its own."""
        if self._mode and layer in self._places:
            self._seen.setdefault(self._mode, set()).add(layer)
        return self._places.get(layer, WHOLE)
