"""Tiers made of dicts and the brute-force LRU, and small random traces: what the replay drivers are tested
against."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np

from kvoffload.layout import CacheGroup, GroupKind, Layout
from kvoffload.messages import JobKind
from kvoffload.replay.base import Backlog, ReplayRequest, Stored, Tiers
from kvoffload.replay.driver import Engine
from kvoffload.replay.oracle_lru import TailFirstLRU
from kvoffload.replay.report import Setup, Tally
from kvoffload.requests import Finished, LoadPlan, Match, Offer
from kvoffload.testing.pool import PageMemory, PagePool, key_list

TOKENS = 16
LAYOUT = Layout(TOKENS, (CacheGroup(0, GroupKind.FULL, TOKENS, 136, layers=("a", "b")),))


@dataclass(eq=False)
class FakeJob:
    """One transfer; its bytes move in the step in which it ends. blocks: (key, page) pairs; boundary: of a
    load."""

    id: int
    kind: JobKind
    request: int
    blocks: list
    due: int
    boundary: int = 0


class FakeTiers(Tiers):
    """Host and disk as brute-force LRUs; jobs end `delay` steps after they began; a request counts when it
    ends.

    full: what host cannot hold at all stays blocked. busy: so many offers are refused first. lose: blocks
    that every load brings less. corrupt: the load, counted from 1, that brings one wrong byte. fail: store
    jobs, the first ones, that store nothing. exposed: steps after each store during which blocks can be
    evicted unwritten.
    """

    def __init__(
        self,
        memory=None,
        host=None,
        disk=0,
        *,
        delay=2,
        busy=0,
        lose=0,
        corrupt=0,
        fail=0,
        exposed=0,
        full=False,
    ):
        self.lrus = (TailFirstLRU(host), TailFirstLRU(disk))
        self.jobs, self.offers, self.loads, self.finished = [], [], [], []
        self._most = host if full else 10**9
        self.exposed_until = 0
        self._memory = memory
        self._delay, self._busy, self._lose, self._corrupt, self._fail = delay, busy, lose, corrupt, fail
        self._exposed = exposed
        self._refused = False
        self._kept = set()  # (request, key) that are stored and count when the request ends
        self._content, self._chains, self._computed = {}, {}, {}
        self._steps = self._ids = self._loads = self._stored = self._disk_stored = 0

    def _tier(self, key):
        held = [t for t, lru in enumerate(self.lrus) if key in self._content and key in lru]
        return held[0] if held else None

    def _storing(self):
        return {key for job in self.jobs if job.kind is JobKind.STORE for key, _ in job.blocks}

    def match(self, request, chain, computed):
        self._computed[request.id] = computed // TOKENS
        keys = key_list(chain.keys)[computed // TOKENS :]
        tiers = [self._tier(key) for key in keys]
        run = next((i for i, tier in enumerate(tiers) if tier is None), len(keys))
        storing = self._storing()
        later = (i for i in range(run, len(keys)) if tiers[i] is None and keys[i] not in storing)
        pending = next(later, len(keys))
        ends = [computed + blocks * TOKENS for blocks in (run, pending)]
        return Match(*ends, tiers[:run].count(0), tiers[:run].count(1), False)

    def load(self, request, chain, boundary, pages):
        begin, end = self._computed[request.id], boundary // TOKENS
        blocks = list(zip(key_list(chain.keys)[begin:end], pages[0][begin:end].tolist(), strict=True))
        blocks = blocks[: max(len(blocks) - self._lose, 0)]
        job = self._add(JobKind.LOAD, request.id, blocks)
        job.boundary = (begin + len(blocks)) * TOKENS
        self.loads.append((request.id, boundary, self._steps < self.exposed_until))
        return LoadPlan(job.id, boundary, end - begin, 0)

    def offer(self, request, chain, computed, pages):
        if self._busy:
            self._busy -= 1
            self._refused = True
            return Offer(0, 0, 0, True)
        keys = key_list(chain.keys)[: min(computed // TOKENS, self._most)]
        self._chains[request.id] = keys
        self.offers.append((request.id, computed, self._steps < self.exposed_until))
        storing = self._storing()
        blocks = [
            (key, page)
            for key, page in zip(keys, pages[0].tolist(), strict=False)
            if self._tier(key) is None and key not in storing and (request.id, key) not in self._kept
        ]
        job = self._add(JobKind.STORE, request.id, blocks).id if blocks else 0
        if blocks:
            self.exposed_until = self._steps + self._exposed
        cursor = min(computed, self._most * TOKENS)
        return Offer(job, len(blocks), cursor, cursor < computed)

    def finish(self, request, reason, now):
        keys = self._chains.pop(request.id, [])
        self.lrus[0].touch(keys)
        self._disk_stored += self.lrus[1].touch(keys)
        self.finished.append(request.id)
        return tuple(job.id for job in self.jobs if job.request == request.id)

    def step(self, now):
        self._steps += 1
        self._refused = False
        due = [job for job in self.jobs if job.due <= self._steps]
        self.jobs = [job for job in self.jobs if job.due > self._steps]
        return [self._end(job) for job in due]

    def backlog(self):
        exposed = int(self._steps < self.exposed_until)
        return Backlog(exposed, not (self.jobs or exposed or self._refused))

    def stored(self):
        return Stored(self._stored, self._disk_stored)

    def _add(self, kind, request, blocks):
        self._ids += 1
        self.jobs.append(FakeJob(self._ids, kind, request, blocks, self._steps + self._delay))
        return self.jobs[-1]

    def _end(self, job):
        if job.kind is JobKind.STORE:
            return self._end_store(job)
        self._loads += 1
        if self._memory is not None:
            for key, page in job.blocks:
                for array, row in zip(self._memory.arrays[0], self._content[key], strict=True):
                    array[page] = row
            if self._loads == self._corrupt:
                self._memory.arrays[0][1][job.blocks[-1][1], -1] ^= 1
        return Finished(job.id, job.kind, job.request, job.boundary, 0, False)

    def _end_store(self, job):
        failed = 0
        if self._fail:
            self._fail -= 1
            failed = len(job.blocks)
        else:
            self._stored += len(job.blocks)
            self._kept |= {(job.request, key) for key, _ in job.blocks}
            for key, page in job.blocks:
                arrays = self._memory.arrays[0] if self._memory is not None else ()
                self._content[key] = [array[page].copy() for array in arrays]
        return Finished(job.id, job.kind, job.request, 0, failed, False)


def make_engine(tiers, requests, *, device=0, memory=None, clock=None):
    """An engine over `device` pages (0 = pages of the longest prompt and no prefix cache)."""
    longest = max((len(r.ids) for r in requests), default=1)
    pool = PagePool(device or max(longest, 1), cached=device > 0)
    more = {} if clock is None else {"clock": clock}
    return Engine(tiers, pool, [] if memory is None else [memory], TOKENS, Tally(), **more)


def make_memory(pages):
    return PageMemory(LAYOUT, [pages])


def make_setup(**more):
    """A sequential, counting setup without limits, changed as told."""
    setup = Setup("test", 0, True, TOKENS, 136, "floor", 0, None, 0)
    return replace(setup, **more)


def report_of(engine, tiers, requests, oracle=None, **more):
    return engine.tally.report(make_setup(**more), tiers.stored(), 0.0, oracle)


def random_trace(seed, *, sessions=4, turns=8, longest=40, shared=6):
    """Sessions whose prompts grow, sometimes restart from a shorter prefix, and share heads with each other.

    Ids are chained: one id has one predecessor.
    """
    rng = random.Random(seed)
    names = {}

    def chain(tokens):
        ids, parent = [], 0
        for token in tokens:
            parent = names.setdefault((parent, token), len(names) + 1)
            ids.append(parent)
        return np.array(ids, np.int64)

    heads = [[rng.randrange(3) for _ in range(rng.randrange(shared + 1))] for _ in range(sessions)]
    prompts = {(s, a): list(heads[s]) for s in range(sessions) for a in range(2)}
    requests = []
    for index in range(sessions * turns):
        session, agent = rng.randrange(sessions), int(rng.random() < 0.3)
        prompt = prompts[session, agent]
        if rng.random() < 0.15:
            del prompt[rng.randrange(len(prompt) + 1) :]
        prompt += [rng.randrange(1000) for _ in range(rng.randrange(8))]
        del prompt[longest:]
        ids = chain(prompt)
        requests.append(
            ReplayRequest(
                index, f"s{session}", f"a{agent}", "tool_use", len(ids) * TOKENS + index % TOKENS, ids
            )
        )
    return requests
