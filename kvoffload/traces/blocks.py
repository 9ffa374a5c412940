"""The block size of a trace, its rule for the last block, and larger blocks made from smaller ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from kvoffload.errors import TraceError
from kvoffload.traces.record import Request, Tail, Trace

_NO_LIMIT = 1 << 40


class Entry(NamedTuple):
    """A request on its way from a reader: where it stands, and what its own line says about block sizes.

    `blocks` ids were listed for `tokens` tokens (delta form: the turn's own, not the prompt's).
    `block_size` is the declared one. `exact`: blocks = floor or ceil of tokens / size; Weka may list fewer.
    `aligned`: as in Trace.
    """

    where: str
    request: Request
    blocks: int
    tokens: int
    block_size: int | None
    exact: bool
    aligned: bool


@dataclass(slots=True)
class _Bounds:
    """Block sizes in [low, high] fit every line so far; the places are the lines that set the limits."""

    low: int = 1
    high: int = _NO_LIMIT
    low_at: str = ""
    high_at: str = ""

    def narrow(self, low: int, high: int, where: str) -> None:
        if low > self.low:
            self.low, self.low_at = low, where
        if high < self.high:
            self.high, self.high_at = high, where

    def fits(self, size: int) -> bool:
        return self.low <= size <= self.high

    def breaker(self, size: int) -> str:
        return self.high_at if size > self.high else self.low_at


class Shape:
    """Learns the block size and the tail rule from lengths and id counts, line by line."""

    def __init__(self) -> None:
        self.declared: int | None = None
        self._declared_at = ""
        self._first = ""
        self._bounds: dict[Tail, _Bounds] = {"floor": _Bounds(), "ceil": _Bounds()}

    def add(self, entry: Entry) -> None:
        """Raises TraceError for a second block size, or more ids than an inexact listing may have."""
        if entry.block_size is not None:
            self._declare(entry)
        blocks, tokens, where = entry.blocks, entry.tokens, entry.where
        self._first = self._first or where
        if entry.exact:
            most = tokens // blocks if blocks else _NO_LIMIT
            self._bounds["floor"].narrow(tokens // (blocks + 1) + 1, most, where)
            self._bounds["ceil"].narrow(*_ceil_limits(blocks, tokens), where)
        elif self.declared is not None and blocks > tokens // self.declared:
            raise TraceError(
                f"{where}: {blocks} ids for {tokens} tokens; at most {tokens // self.declared} blocks of"
                f" {self.declared} are full; correct block_size, in or hash_ids"
            )

    def _declare(self, entry: Entry) -> None:
        if self.declared is None:
            self.declared, self._declared_at = entry.block_size, entry.where
        elif entry.block_size != self.declared:
            raise TraceError(
                f"{entry.where}: block_size = {entry.block_size}, but {self.declared} at {self._declared_at};"
                " a trace has one block size: split it, or convert the part with smaller blocks first"
            )

    def resolve(self, wanted: int | None) -> tuple[int, Tail]:
        """The source's block size and tail rule. `wanted` counts as the source's where nothing else fits."""
        size = self.declared or self._deduce(wanted)
        for tail, bounds in self._bounds.items():
            if bounds.fits(size):
                return size, tail
        raise TraceError(self._misfit(size))

    def _misfit(self, size: int) -> str:
        floor, ceil = (bounds.breaker(size) for bounds in self._bounds.values())
        return (
            f"{floor}: the id count is not floor(tokens / {size}), and at {ceil} it is not ceil(tokens /"
            f" {size}); give the right block size (--block-size), or the right form (--form)"
        )

    def _deduce(self, wanted: int | None) -> int:
        if wanted is not None and any(bounds.fits(wanted) for bounds in self._bounds.values()):
            return wanted
        powers = {1 << n for n in range(40) if any(bounds.fits(1 << n) for bounds in self._bounds.values())}
        if len(powers) == 1:
            return powers.pop()
        if not powers and wanted is not None:
            raise TraceError(self._misfit(wanted))
        fit = ", ".join(map(str, sorted(powers)[:4])) or "no power of two"
        at = self._bounds["floor"].low_at or self._bounds["ceil"].low_at or self._first
        raise TraceError(
            f"{at}: no block_size in the lines, and the lengths fit {fit}; give the block size"
            " (--block-size N)"
        )


def _ceil_limits(blocks: int, tokens: int) -> tuple[int, int]:
    """Sizes b with ceil(tokens / b) == blocks, as [low, high]; empty as (1, 0)."""
    if blocks == 0 or tokens == 0:
        return (1, _NO_LIMIT) if blocks == tokens else (1, 0)
    return -(-tokens // blocks), (tokens - 1) // (blocks - 1) if blocks > 1 else _NO_LIMIT


def coarsen(trace: Trace, block_tokens: int) -> Trace:
    """The trace in larger blocks, exactly: a big block has the id of its last small one; partial ones go.

    Raises TraceError unless block_tokens is a multiple of the trace's and its blocks are aligned.
    """
    if block_tokens == trace.block_tokens:
        return trace
    factor, rest = divmod(block_tokens, trace.block_tokens)
    if rest or factor < 1:
        raise TraceError(
            f"{trace.source}: blocks of {block_tokens} tokens cannot be made from blocks of"
            f" {trace.block_tokens}; give a multiple of {trace.block_tokens}"
        )
    if not trace.aligned:
        raise TraceError(
            f"{trace.source}: blocks of {block_tokens} tokens cannot be made: generated tokens have no ids"
            f" here, so blocks start anywhere; keep block size {trace.block_tokens}"
        )
    requests = tuple(
        replace(request, ids=request.ids[factor - 1 : whole * factor : factor])
        for request in trace.requests
        for whole in [min(len(request.ids) // factor, request.input_tokens // block_tokens)]
    )
    return replace(trace, block_tokens=block_tokens, partial_tail="floor", requests=requests)
