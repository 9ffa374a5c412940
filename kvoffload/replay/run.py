"""One replay of a trace, sequential or in lanes: from what was asked to the report."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvoffload.errors import ConfigError
from kvoffload.replay.base import ReplayRequest, requests_of
from kvoffload.replay.driver import Engine
from kvoffload.replay.identities import broken_identities
from kvoffload.replay.lanes import Lanes
from kvoffload.replay.oracle_lru import simulate
from kvoffload.replay.report import Report, Setup, Tally
from kvoffload.replay.sequential import replay_sequential
from kvoffload.replay.tiers import (
    Capacity,
    LocalTiers,
    Policies,
    open_counting,
    open_moving,
    replay_layout,
)
from kvoffload.testing.pool import PageMemory, PagePool, ScratchPool
from kvoffload.traces.record import Trace


@dataclass(frozen=True, slots=True)
class Options:
    """What `kvoffload replay` was asked. lanes 0 = sequential; host_blocks None = no limit."""

    lanes: int = 0
    index_only: bool = False
    block_bytes: int = 16 << 10
    device_blocks: int = 0
    host_blocks: int | None = None
    disk_blocks: int = 0
    disk_path: Path | None = None
    check: bool = False
    host_policy: str = "lru"
    disk_policy: str = "lru"

    def __post_init__(self) -> None:
        if self.block_bytes < 1:
            raise ConfigError(f"--block-bytes {self.block_bytes}: a block has at least 1 byte")
        if self.disk_path is not None and self.index_only:
            raise ConfigError("--disk-path with --index-only: no byte is written; leave one of them out")
        if self.disk_path is not None and not self.disk_blocks:
            raise ConfigError("--disk-path without --disk-blocks: say how many blocks the disk tier holds")
        if self.check and self.lanes:
            raise ConfigError("--check with --lanes: only --sequential is exact; leave one of them out")
        if self.check and self.learns:
            raise ConfigError(
                "--check with a policy that learns: the oracle is an LRU; leave one of them out"
            )

    @property
    def learns(self) -> bool:
        """Some tier does not go by recency alone."""
        return (self.host_policy, self.disk_policy) != ("lru", "lru")


def run_replay(trace: Trace, options: Options, *, progress: bool = False) -> Report:
    """Replay a trace. Raises ConfigError where it cannot run at all; wrong results are in the report."""
    requests = requests_of(trace)
    if not requests:
        raise ConfigError(f"{trace.source}: no requests to replay")
    setup = Setup(
        trace=trace.name,
        lanes=options.lanes,
        index_only=options.index_only,
        block_tokens=trace.block_tokens,
        block_bytes=options.block_bytes,
        rule=trace.partial_tail,
        device_blocks=options.device_blocks,
        host_blocks=options.host_blocks,
        disk_blocks=options.disk_blocks,
    )
    with ExitStack() as stack:
        tally = stack.enter_context(_progress(len(requests), shown=progress))
        tiers, engine = _open(stack, trace, requests, options, tally)
        begin = time.monotonic()
        if options.lanes:
            Lanes(engine, options.lanes).run(requests)
        else:
            replay_sequential(engine, requests)
        seconds, stored = time.monotonic() - begin, tiers.stored()
    if not options.check:
        return tally.report(setup, stored, seconds)
    prompts = [r.ids.tolist() for r in requests]
    oracle = simulate(prompts, (options.device_blocks, options.host_blocks, options.disk_blocks))
    return tally.report(setup, stored, seconds, oracle, _identities(trace, options, prompts))


def _identities(trace: Trace, options: Options, prompts: list[list[int]]) -> list[str]:
    """Those that do not hold for these prompts at the host's size and the disk's, or twice the host's."""

    def again(host: int | None, disk: int) -> Report:
        return run_replay(trace, Options(index_only=True, host_blocks=host, disk_blocks=disk))

    first = options.host_blocks or max(map(len, prompts), default=1)
    return broken_identities(again, prompts, first, max(options.disk_blocks, 2 * first))


def _open(
    stack: ExitStack, trace: Trace, requests: list[ReplayRequest], options: Options, tally: Tally
) -> tuple[LocalTiers, Engine]:
    """Pages and tiers; the stack releases them, threads before memory and memory before files."""
    longest = max(len(r.ids) for r in requests)
    pages = options.device_blocks or max(longest * max(options.lanes, 1), 1)
    if longest > pages:
        raise ConfigError(
            f"the longest prompt of {trace.name} has {longest} blocks and the device {pages}:"
            f" raise --device-blocks to at least {longest}"
        )
    capacity = Capacity(options.host_blocks or distinct_blocks(requests), options.disk_blocks)
    layout = replay_layout(trace.block_tokens, options.block_bytes)
    times = [r.t for r in requests] if options.learns else ()
    policies = Policies(options.host_policy, options.disk_policy, times)
    memories = []
    if options.index_only:
        tiers = open_counting(layout, capacity, policies)
    else:
        path = options.disk_path
        if path is None and options.disk_blocks:
            path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvoffload-replay-")))
        memories = [PageMemory(layout, [pages])]
        tiers = open_moving(layout, capacity, memories[0], path, trace.namespace, policies)
    stack.callback(tiers.close)
    if options.check and tiers.stored().restored:
        raise ConfigError(
            f"--check over {options.disk_path}: it holds {tiers.stored().restored} blocks of an earlier"
            " replay, and the oracle starts empty; clear it or give another --disk-path"
        )
    pool = PagePool(pages) if options.device_blocks else ScratchPool(pages)
    return tiers, Engine(tiers, pool, memories, trace.block_tokens, tally)


def distinct_blocks(requests: list[ReplayRequest]) -> int:
    """Blocks that a tier without limit comes to hold; at least 1."""
    seen: set[int] = set()
    for request in requests:
        seen.update(request.ids.tolist())
    return max(len(seen), 1)


@contextmanager
def _progress(requests: int, *, shown: bool) -> Iterator[Tally]:
    """A tally that moves a bar on standard error, where that is a terminal and wanted."""
    if not (shown and sys.stderr.isatty()):
        yield Tally()
        return
    columns = (TextColumn("replay"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("replay", total=requests)
        yield Tally(lambda: bar.advance(task))
