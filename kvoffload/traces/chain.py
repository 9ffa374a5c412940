"""Whether ids are chained (each names all before it), and new ids for those that are not."""

from __future__ import annotations

import numpy as np

from kvoffload.errors import TraceError
from kvoffload.traces.record import Ids

_DENSE = 1 << 22  # ids below it index the table directly, the others through a dict
_UNSEEN = -2
_ROOT = -1


class ChainCheck:
    """Remembers every id's predecessor; memory grows with distinct ids, not with requests.

    One predecessor per id is all that chaining needs: the place of an id in its prompt follows from it.
    """

    def __init__(self) -> None:
        self._predecessor = np.full(1 << 12, _UNSEEN, dtype=np.int64)
        self._sparse: dict[int, int] = {}

    def add(self, where: str, ids: Ids) -> None:
        """Raises TraceError at the first id that had another predecessor before."""
        if not len(ids):
            return
        index = self._indices(ids)
        previous = np.empty_like(ids)
        previous[0] = _ROOT
        previous[1:] = ids[:-1]
        known = self._predecessor[index]
        wrong = (known != previous) & (known != _UNSEEN)
        self._predecessor[index] = previous
        # An id twice in one prompt leaves its last predecessor: its other places differ from it.
        repeated = self._predecessor[index] != previous
        if wrong.any() or repeated.any():
            at = int(np.argmax(wrong | repeated))
            other = int(known[at]) if wrong[at] else int(self._predecessor[index[at]])
            raise TraceError(_message(where, ids, at, other))

    def _indices(self, ids: Ids) -> Ids:
        index = ids
        if ids.max() >= _DENSE:
            table = self._sparse
            far = [table.setdefault(i, _DENSE + len(table)) for i in ids[ids >= _DENSE].tolist()]
            index = ids.copy()
            index[ids >= _DENSE] = far
        top = int(index.max())
        if top >= len(self._predecessor):
            grown = np.full(max(top + 1, 2 * len(self._predecessor)), _UNSEEN, dtype=np.int64)
            grown[: len(self._predecessor)] = self._predecessor
            self._predecessor = grown
        return index


def _message(where: str, ids: Ids, at: int, other: int) -> str:
    def after(block: int) -> str:
        return "nothing" if block == _ROOT else f"id {block}"

    here = int(ids[at - 1]) if at else _ROOT
    return (
        f"{where}: id {int(ids[at])} (block {at}) follows {after(here)} here and {after(other)} elsewhere:"
        " the ids are not chained; re-key them by (parent, id) with rekey=True (--rekey)"
    )


class Rekey:
    """New ids by (new id of the parent, old id), numbered from 0 in order of appearance."""

    def __init__(self) -> None:
        self._children: dict[tuple[int, int], int] = {}

    def apply(self, ids: Ids) -> Ids:
        """Chained ids for a prompt; equal prefixes, and only those, get equal ids."""
        children, parent = self._children, _ROOT
        fresh = np.empty_like(ids)
        for place, old in enumerate(ids.tolist()):
            parent = children.setdefault((parent, old), len(children))
            fresh[place] = parent
        return fresh
