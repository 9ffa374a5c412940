"""Tiers made of dicts and the brute-force LRU: what the replay drivers are tested against."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from kvoffload.layout import CacheGroup, GroupKind, Layout
from kvoffload.messages import JobKind
from kvoffload.replay.driver import Engine, ReplayRequest, Tiers
from kvoffload.replay.oracle_lru import TailFirstLRU
from kvoffload.replay.report import Setup, Stored, Tally
from kvoffload.requests import Finished, LoadPlan, Match, Offer
from kvoffload.testing.pool import PageMemory, PagePool, key_list

BLOCK_TOKENS = 16
LAYOUT = Layout(BLOCK_TOKENS, (CacheGroup(0, GroupKind.FULL, BLOCK_TOKENS, 136, layers=("a", "b")),))


@dataclass(eq=False)
class FakeJob:
    """One transfer: it moves its bytes in the step in which it ends."""

    id: int
    kind: JobKind
    request: int
    keys: list
    pages: list
    begin: int
    due: int
    boundary: int = 0


class FakeTiers(Tiers):
    """Host and disk as brute-force LRUs over keys; jobs end `delay` steps after they began.

    busy: offers are refused that many times first. lose: loads bring that many blocks less. corrupt: the load
    (counted from 1) whose first byte is spoiled.
    """

    def __init__(self, memories, host=None, disk=None, *, delay=2, busy=0, lose=0, corrupt=0, fail_stores=0):
        self.lrus = [TailFirstLRU(host), TailFirstLRU(disk if disk is not None else 0)]
        self.content = {}
        self.jobs = []
        self.steps = 0
        self.log = []
        self._memories = memories
        self._delay, self._busy, self._lose, self._corrupt = delay, busy, lose, corrupt
        self._fail_stores = fail_stores
        self._next = 1
        self._loads = 0
        self._stored = 0

    def _tier(self, key):
        held = [k in self.content and int.from_bytes(k, "big") in lru for lru in self.lrus for k in (key,)]
        return 0 if held[0] else 1 if held[1] else None

    def match(self, request, chain, computed):
        counts = [0, 0]
        keys = key_list(chain.keys)[computed // BLOCK_TOKENS :]
        on_way = {k for job in self.jobs if job.kind is JobKind.STORE for k in job.keys}
        position = pending = 0
        for key in keys:
            tier = self._tier(key)
            if tier is None:
                break
            counts[tier] += 1
            position += 1
        pending = position
        while pending < len(keys) and (keys[pending] in on_way or self._tier(keys[pending]) is not None):
            pending += 1
        boundary = computed + position * BLOCK_TOKENS
        return Match(boundary, computed + pending * BLOCK_TOKENS, *counts, False)

    def load(self, request, chain, boundary, pages):
        end = boundary // BLOCK_TOKENS
        begin = next(j for j in range(end + 1) if self.match(request, chain, j * BLOCK_TOKENS).boundary >= boundary)
        begin = max(begin, self._computed(request))
        keys = key_list(chain.keys)[begin:end]
        job = self._begin(JobKind.LOAD, request, keys, pages[0][begin:end].tolist(), begin)
        job.boundary = boundary - min(self._lose, end - begin) * BLOCK_TOKENS
        return LoadPlan(job.id, boundary, end - begin, 0)

    def _computed(self, request):
        return self.computed_of.get(request.id, 0)

    computed_of: dict = {}

    def offer(self, request, chain, computed, pages):
        if self._busy:
            self._busy -= 1
            return Offer(0, 0, 0, True)
        end = computed // BLOCK_TOKENS
        on_way = {k for job in self.jobs if job.kind is JobKind.STORE for k in job.keys}
        new = [
            (k, p)
            for k, p in zip(key_list(chain.keys)[:end], pages[0][:end].tolist(), strict=True)
            if self._tier(k) is None and k not in on_way
        ]
        self.log.append(("offer", request.id, computed))
        if not new:
            return Offer(0, 0, computed, False)
        job = self._begin(JobKind.STORE, request, [k for k, _ in new], [p for _, p in new], 0)
        self.chains[request.id] = key_list(chain.keys)
        return Offer(job.id, len(new), computed, False)
