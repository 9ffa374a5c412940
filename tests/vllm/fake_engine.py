"""A small vLLM: its scheduler, block pool, runner and KVOutputAggregator as far as a connector can tell, over symbols.

It keeps vLLM's own assertions, and checks what vLLM trusts: every token comes from a context that was right on all
ranks, every load's end is told once per rank, and whatever the tiers show is what its key names.

depth: steps that are built before the first one's results are taken in; more than 1 is asynchronous scheduling.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Collection
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from fake_mover import GARBAGE, begins, movers_of
from fake_parts import (
    FULL,
    HYBRID,
    SIZE,
    Output,
    Request,
    Work,
    is_right,
    joined,
    next_token,
    settings_of,
    shown,
)
from fake_pool import FakePool
from kvoffload.connectors.vllm.scheduler import SchedulerPart
from kvoffload.connectors.vllm.wire import Handshake
from kvoffload.connectors.vllm.worker import WorkerPart
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.outputs import KVConnectorOutput

from kvoffload.layout import GroupKind, Layout
from kvoffload.messages import Inventory, JobKind
from kvoffload.testing.rig import Clock

__all__ = ["FULL", "HYBRID", "SIZE", "FakeEngine", "Output", "Request", "Work", "next_token", "settings_of"]


class FakeEngine(FakePool):
    """See the module. Every check is made as the engine goes on; `check` asks for what must hold at rest."""

    def __init__(
        self,
        layout: Layout = FULL,
        *,
        ranks: int = 1,
        copies: int = 1,
        depth: int = 1,
        pages: int = 64,
        budget: int = 16,
        host: int = 64,
        disk: int = 0,
        streams: bool = False,
        **options: Any,
    ) -> None:
        """copies: ranks with equal bytes. streams: as on a device whose copies streams order: no step waits for
        its stores."""
        layout = replace(layout, groups=tuple(replace(g, replicas=copies) for g in layout.groups))
        super().__init__(layout, pages)
        self.depth, self.budget = depth, budget
        self.clock = Clock()
        self.movers = movers_of(layout, self.owner, ranks, copies)
        self.memories = [mover.memory for mover in self.movers]
        settings = settings_of(ranks, copies=copies, **options)
        self.scheduler = SchedulerPart(settings, clock=self.clock)
        self.workers = [WorkerPart(settings, rank) for rank in range(ranks)]
        name = settings.namespace(layout, "facts")
        self.namespace = name
        counts = tuple(8 for _ in layout.groups)
        inventory = Inventory(counts, max(1, host // 8), 1, disk // 8)
        for worker, mover in zip(self.workers, self.movers, strict=True):
            worker._mover = mover  # type: ignore[assignment]
            if streams:
                worker._device = SimpleNamespace(streams=True, point=lambda: None)  # type: ignore[assignment]
        memory = [str(rank // copies) if copies > 1 else "" for rank in range(ranks)]
        self.scheduler.attach({(0, r): Handshake(layout, name, inventory, m) for r, m in enumerate(memory)})
        self.aggregator = KVOutputAggregator(ranks)
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.received: set[str] = set()
        self.failed: set[str] = set()
        self.preempted: set[str] = set()
        self.flying: deque[Output] = deque()
        self.deferred: list[tuple[int, list[int]]] = []
        self.number = 0
        self.processed = -1
        self.answers: dict[str, list[int]] = {}
        self.waits = 0
        self.computed = 0

    @property
    def planner(self) -> Any:
        assert self.scheduler.core is not None
        return self.scheduler.core.planner

    # ---- what a client does ----

    def add(self, request: Request) -> Request:
        self.requests[request.request_id] = request
        self.waiting.append(request)
        self.scheduler.new(request)
        return request

    def abort(self, request_id: str) -> None:
        request = self.requests.get(request_id)
        if request is not None and request.state != "finished":
            self._finish(request, "abort")

    def preempt(self, request: Request) -> None:
        """As when pages run out."""
        self.running.remove(request)
        self._release(request)
        request.num_computed_tokens = request.placeholders = 0
        request.life += 1
        request.state = "waiting"
        self.waiting.insert(0, request)
        self.preempted.add(request.request_id)

    def forget_pages(self) -> None:
        """Nothing is found in pages that nobody holds any more."""
        self.cached = {key: page for key, page in self.cached.items() if self.uses.get(page)}

    # ---- a step ----

    def step(self) -> None:
        """Build one step; take in the oldest one once `depth` of them are under way."""
        self.flying.append(self._schedule())
        if len(self.flying) >= self.depth:
            self._process(self.flying.popleft())

    def flush(self) -> None:
        """Take in the steps that are under way."""
        while self.flying:
            self._process(self.flying.popleft())

    def run(self, steps: int = 2000, idle_s: float = 0.0) -> None:
        """Until nothing is left to do; AssertionError if that never comes."""
        for _ in range(steps):
            if not self.requests and self.planner.idle:
                self.flush()
                self.step()
                self.flush()
                if self.planner.idle and not self.scheduler._settled:
                    return
            self.step()
            self.clock.now += idle_s
        raise AssertionError(
            f"never at rest: {self.planner.describe()}, {[r.__dict__ for r in self.requests.values()]}"
        )

    def _schedule(self, also: Collection[str] = ()) -> Output:
        """also: requests that lost their pages before and may be admitted again at once."""
        output = Output(self.number)
        budget = self.budget
        for request in list(self.running):
            if request not in self.running:
                continue
            count = min(self._left(request), budget)
            if count > 0 and self._make_room(output, request, count):
                self._work(output, request, count)
                budget -= count
        if not self.preempted:
            for request in sorted(self.waiting, key=lambda r: not r.table):  # those that hold pages first
                if budget <= 0 or not self._admit(output, request, budget):
                    break
                budget = self.budget - sum(work.end - work.start for work in output.works)
        output.preempted_req_ids, self.preempted = self.preempted | set(also), set()
        output.fresh, self.fresh = self.fresh, []
        output.told = pickle.dumps(self.scheduler.step(output))
        for work in output.works:
            work.request.num_computed_tokens = work.end
            work.request.in_flight += work.end - work.start
            if self.depth > 1 and work.samples:
                work.request.placeholders += 1
        self.number += 1
        return output

    def _left(self, request: Request) -> int:
        """Tokens that may be scheduled now."""
        made = request.num_tokens - request.num_prompt_tokens + request.placeholders
        if self.depth > 1 and made >= request.answer:
            return 0
        return request.num_tokens + request.placeholders - request.num_computed_tokens

    def _make_room(self, output: Output, request: Request, count: int) -> bool:
        """Pages for so many more tokens, at the cost of the requests that came last; False if it was one of them."""
        self._skip(request)
        while not self._grow(request, request.num_computed_tokens + count):
            victim = self.running[-1]
            self.preempt(victim)
            output.works = [w for w in output.works if w.request is not victim or w.life == victim.life]
            if victim is request:
                return False
        return True

    def _work(self, output: Output, request: Request, count: int) -> None:
        start, end = request.num_computed_tokens, request.num_computed_tokens + count
        samples = end == request.num_tokens + request.placeholders
        request.last_step = output.number
        table = tuple(list(mine) for mine in request.table)
        output.works.append(Work(request, request.life, start, end, samples, table, request.device))
        self._cache(request, min(end, request.num_tokens))

    def _admit(self, output: Output, request: Request, budget: int) -> bool:
        """Whether the next request may be tried. Nobody is admitted who could not be finished alone."""
        if request.state == "remote":
            if request.request_id not in self.received:
                return True
            self._arrived(request)
        if len(self.free) + sum(map(len, request.table)) < self._most(request):
            return False
        if not request.table:
            return self._admit_new(output, request, budget)
        count = min(budget, request.num_tokens - request.num_computed_tokens)
        if not self._grow(request, request.num_computed_tokens + count):
            return False
        self.scheduler.allocated(request, lambda: request.table, 0)
        self._begin(output, request, count)
        return True

    def _begin(self, output: Output, request: Request, count: int) -> None:
        self.waiting.remove(request)
        self.running.append(request)
        request.state = "running"
        request.device = list(request.all_token_ids)
        self._work(output, request, count)

    def _admit_new(self, output: Output, request: Request, budget: int) -> bool:
        """It has no pages: ask what there is for it."""
        local = self._local(request)
        external, later = self.scheduler.match(request, len(local) * SIZE)
        if external is None:
            self.waits += 1
            return True
        computed = len(local) * SIZE + external
        assert computed <= request.num_tokens
        assert external == 0 or later or computed < request.num_tokens
        count = 0 if later else min(budget, request.num_tokens - computed)
        for page in local:
            self._take(page)
        request.table = (local, *([] for _ in self.layout.groups[1:]))
        if not self._grow(request, computed + count, computed):
            self._release(request)
            return False
        self.scheduler.allocated(request, lambda: request.table, external)
        request.num_computed_tokens = computed
        if later:
            request.state = "remote"
            return True
        output.has_sync_kv_loads |= external > 0
        self._begin(output, request, count)
        return True

    def _most(self, request: Request) -> int:
        return len(self.layout.groups) * -(-(request.num_prompt_tokens + request.answer) // SIZE)

    def _arrived(self, request: Request) -> None:
        """The request's load is over: as _update_waiting_for_remote_kv."""
        self.received.remove(request.request_id)
        if request.request_id in self.failed:
            self.failed.remove(request.request_id)
            if not request.num_computed_tokens:
                self._release(request)
        else:
            self._cache(request, request.num_computed_tokens)
            request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        request.state = "waiting"

    def _process(self, output: Output) -> None:
        """Run one step on every worker, and take in what they say."""
        told = [pickle.loads(output.told) for _ in self.workers]
        for worker, mine in zip(self.workers, told, strict=True):
            worker.begin(mine)
        for memory in self.memories:
            for page in output.fresh:
                memory.pages.pop(page, None)
        if output.has_sync_kv_loads:
            for worker, mine in zip(self.workers, told, strict=True):
                worker.start(mine)
        for work in output.works:
            self._forward(work)
        says = []
        for worker, mine in zip(self.workers, told, strict=True):
            if not output.has_sync_kv_loads:
                worker.start(mine)
            worker.save(mine)
            received, failed = worker.ended()
            errors, report = worker.errors(), worker.report()
            says.append(
                KVConnectorOutput(
                    finished_recving=received,
                    failed_recving=failed,
                    invalid_block_ids=errors,
                    kv_connector_worker_meta=pickle.loads(pickle.dumps(report)),
                )
            )
        self.processed = output.number
        while self.deferred and self.deferred[0][0] <= self.processed:
            self._give_back(self.deferred.pop(0)[1])
        self._update(output, joined(self.aggregator, says))

    def _forward(self, work: Work) -> None:
        """Compute tokens [start, end). What comes of a wrong context is garbage on every rank."""
        text = work.text
        right = all(is_right(self.layout, memory, work) for memory in self.memories)
        self.computed += work.end - work.start
        for group, table in zip(self.layout.groups, work.table, strict=True):
            for block in range(work.start // SIZE, -(-work.end // SIZE)):
                if not table[block]:
                    continue
                content = (group.id, tuple(text[: min(work.end, (block + 1) * SIZE)]))
                for memory in self.memories:
                    have = memory.pages.get(table[block], GARBAGE)
                    if not right:
                        memory.pages[table[block]] = GARBAGE
                    elif not begins(have, content, (block + 1) * SIZE):
                        memory.pages[table[block]] = content
        if work.samples:
            work.token = next_token(text[: work.end]) if right else -1
            text.append(work.token)

    def _update(self, output: Output, said: KVConnectorOutput) -> None:
        for request_id in said.failed_recving:
            request = self.requests.get(request_id)
            if request is not None and request.state == "remote":
                request.num_computed_tokens = 0
                self.failed.add(request_id)
        spoiled = self._invalid(output, said.invalid_block_ids) if said.invalid_block_ids else set()
        for work in output.works:
            request = work.request
            request.in_flight -= work.end - work.start
            if work.life != request.life or request.state == "finished" or request in spoiled:
                continue
            if work.samples:
                assert work.token is not None
                assert work.token >= 0, f"{request.request_id}: a token from a wrong context"
                request.all_token_ids.append(work.token)
                request.placeholders = max(0, request.placeholders - 1)
                if request.num_tokens - request.num_prompt_tokens >= request.answer:
                    self._finish(request, "length")
        report = said.kv_connector_worker_meta
        if (
            report is not None or said.finished_recving or said.invalid_block_ids
        ):  # else vLLM does not call it
            self.scheduler.update(() if report is None else (report,))
        for request_id in said.finished_recving or ():
            assert request_id in self.requests
            request = self.requests[request_id]
            if request.state == "remote":
                self.received.add(request_id)
            else:
                assert request.state == "finished"
                self._free(request)

    def _invalid(self, output: Output, pages: set[int]) -> set[Request]:
        """As _update_requests_with_invalid_blocks, for requests that run."""
        assert len(self.layout.groups) == 1
        counts = {
            work.request: work.end - work.start for work in output.works if work.life == work.request.life
        }
        found = set()
        for request in self.running:
            computed = request.num_computed_tokens - counts.get(request, 0)
            for block in range(-(-computed // SIZE)):
                if request.table[0][block] in pages:
                    request.num_computed_tokens = block * SIZE
                    request.placeholders = 0
                    request.life += 1
                    request.device = list(request.all_token_ids)
                    found.add(request)
                    lost = set(request.table[0][block:])
                    self.cached = {key: page for key, page in self.cached.items() if page not in lost}
                    break
        return found

    # ---- ends and pages ----

    def _finish(self, request: Request, reason: str) -> None:
        delay = False
        if request.state == "remote":
            delay = request.request_id not in self.received
            self.received.discard(request.request_id)
            self.failed.discard(request.request_id)
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
        request.state, request.reason = "finished", reason
        self.scheduler.finished(request, reason, request.table)
        if reason != "abort":
            self.answers[request.request_id] = request.all_token_ids[request.num_prompt_tokens :]
        if not delay:
            self._free(request)

    def _free(self, request: Request) -> None:
        self._release(request)
        del self.requests[request.request_id]

    def _release(self, request: Request) -> None:
        pages = [page for table in request.table for page in table if page]
        request.table = ()
        if request.last_step > self.processed:
            self.deferred.append((self.number - 1, pages))
        else:
            self._give_back(pages)

    def _skip(self, request: Request) -> None:
        """Give back what windows have passed."""
        done = request.num_computed_tokens - request.in_flight
        for group, table in zip(self.layout.groups, request.table, strict=True):
            if group.kind is GroupKind.SLIDING:
                for block in range(min(max(0, done - group.lookback) // SIZE, len(table))):
                    if table[block]:
                        self._give_back([table[block]])
                        table[block] = 0

    # ---- checks ----

    def visible(self) -> dict[tuple[int, bytes], int]:
        return shown(self.planner, self.namespace, self.memories)

    def check(self) -> None:
        """At rest: nothing is held, waited for or half told."""
        self.visible()
        self.planner.check_integrity()
        assert self.planner.idle
        assert (self.planner.pinned(), len(self.planner.requests)) == (0, 0)
        assert len(self.free) == self.pages
        assert not self.aggregator._recv_remaining_count
        assert not self.aggregator._failed_recving_pending
        assert not self.scheduler._requests
        assert not self.scheduler._holds
        for worker in self.workers:
            assert (worker._said, worker._gaps, worker._jobs, worker._sync) == (set(), set(), {}, set())
        orders = [[j.id for j in mover.seen if j.kind is not JobKind.STORE] for mover in self.movers]
        assert all(order == orders[0] for order in orders), "ranks were given jobs in different orders"
