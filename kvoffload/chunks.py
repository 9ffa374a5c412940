"""How a job is cut into what is read or written in one call. Transit slots that copies use in turn set the limits."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvoffload.messages import Copies, CopyFlag


def chunks(count: int, size: int) -> Iterator[slice]:
    """[0, count) in slices of `size`."""
    return (slice(begin, min(begin + size, count)) for begin in range(0, count, size))


def load_chunks(copies: Copies, size: int) -> Iterator[slice]:
    """Slices of at most `size` copies in which no transit slot stands twice, half as long as the slots allow: two
    are under way at once."""
    places = copies["group"].astype(np.int64) << 32 | copies["host"]
    places[(copies["flags"] & CopyFlag.TRANSIT) == 0] = -1
    slots = len(np.unique(places[places >= 0]))
    if not slots:
        yield from chunks(len(copies), size)
        return
    size = max(1, min(size, slots // 2))
    begin, seen = 0, set[int]()
    for number, place in enumerate(places.tolist()):
        if number - begin == size or place in seen:
            yield slice(begin, number)
            begin, seen = number, set()
        if place >= 0:
            seen.add(place)
    yield slice(begin, len(copies))


def share_slots(a: Copies, b: Copies) -> bool:
    """Whether a transit slot stands in both."""
    names = ["group", "host"]
    mine = a[(a["flags"] & CopyFlag.TRANSIT) != 0][names]
    theirs = b[(b["flags"] & CopyFlag.TRANSIT) != 0][names]
    return bool(len(mine) and len(theirs) and np.isin(mine, theirs).any())
