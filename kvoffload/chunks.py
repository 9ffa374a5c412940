"""How a job is cut into what is read or written in one call. Transit slots that copies use in turn set the limits."""

from __future__ import annotations

from collections.abc import Iterator

from kvoffload import _C
from kvoffload.messages import Copies


def chunks(count: int, size: int) -> Iterator[slice]:
    """[0, count) in slices of `size`."""
    return (slice(begin, min(begin + size, count)) for begin in range(0, count, size))


def load_chunks(copies: Copies, size: int) -> Iterator[slice]:
    """Slices of at most `size` copies in which no transit slot stands twice, half as long as the slots allow: two
    are under way at once."""
    begin = 0
    for end in _C.load_chunks(copies, size):
        yield slice(begin, end)
        begin = end


def share_slots(a: Copies, b: Copies) -> bool:
    """Whether a transit slot stands in both."""
    return _C.share_slots(a, b)
