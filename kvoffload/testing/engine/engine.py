"""The step loop: admission, chunked prefill, decode, preemption, abort, and the calls to a connector in their order.

Pages for a whole prompt are taken when a request is admitted, and none while it waits; a decode that finds no page
preempts the request admitted last. So what holds pages needs nothing from what waits: every request ends.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from kvoffload.connector import PREEMPT, Loaded, Scheduled, SchedulerConnector, WorkerConnector
from kvoffload.errors import ConfigError
from kvoffload.messages import RequestId
from kvoffload.requests import Pages
from kvoffload.testing.engine.device import Device
from kvoffload.testing.engine.sequence import Sequence, State
from kvoffload.testing.rig import Clock


class StepCost(Protocol):
    """What a forward takes."""

    def step(self, work: Seq[tuple[int, int]]) -> float:
        """Seconds, for (new tokens, tokens before them) of every request in the step."""

    def prefill(self, tokens: int, before: int) -> float:
        """Seconds that a request's prompt tokens take by themselves."""


@dataclass(frozen=True, slots=True)
class FixedCost:
    """Every step with work takes the same time."""

    seconds: float = 0.01

    def step(self, work: Seq[tuple[int, int]]) -> float:
        return self.seconds if work else 0.0

    def prefill(self, tokens: int, before: int) -> float:
        return self.seconds


@dataclass(frozen=True, slots=True)
class Limits:
    """tokens: computed in one step at most, over all requests. running: requests with pages, loading ones counted.

    attend_at_end: compare all blocks of a request once more when it ends.
    """

    tokens: int = 8192
    running: int = 64
    attend_at_end: bool = True


@dataclass(slots=True)
class Totals:
    """Counted by the engine over all requests, apart from what each request counts for itself.

    prompt_made: prompt tokens computed before a request's first answer token.
    """

    steps: int = 0
    prompt_made: int = 0
    answer_made: int = 0
    preemptions: int = 0
    aborts: int = 0
    failed_loads: int = 0


class Engine:
    """Thread: one. The connectors are the engine's from here on; `close` closes the workers'."""

    def __init__(
        self,
        device: Device,
        scheduler: SchedulerConnector,
        workers: Seq[WorkerConnector] = (),
        *,
        limits: Limits | None = None,
        cost: StepCost | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.device = device
        self.scheduler = scheduler
        self.workers = workers
        self.limits = limits or Limits()
        self.cost = cost or FixedCost()
        self.clock = clock or Clock()
        self.totals = Totals()
        self.waiting: list[Sequence] = []
        self.loading: dict[RequestId, Sequence] = {}
        self.running: list[Sequence] = []
        self.held: dict[int, Pages] = {}
        self.worked = False
        """Whether the last step computed anything, or brought news."""

    # ---- requests ----

    def add(self, seq: Sequence) -> None:
        """A request arrives. Raises ConfigError if the device can never hold it."""
        if not self.device.fits(seq.total):
            raise ConfigError(
                f"request {seq.info.id} has {seq.total} tokens and the device {self.device.pools[0].pages} pages:"
                " give it more pages"
            )
        seq.arrived = self.clock.now
        self.waiting.append(seq)

    def abort(self, seq: Sequence) -> None:
        """The client has gone. A request that has ended is left alone."""
        if seq.state is State.ENDED:
            return
        self.totals.aborts += 1
        self._drop(seq)
        self._end(seq, "abort")

    def reset(self) -> bool:
        """Forget all that is cached, here and below; False where the connector cannot."""
        self.device.forget()
        return self.scheduler.reset()

    @property
    def idle(self) -> bool:
        """No request is here and no page is held for a job."""
        return not (self.waiting or self.loading or self.running or self.held)

    # ---- steps ----

    def step(self) -> list[Sequence]:
        """One iteration, also without work; the requests that ended in it."""
        self.totals.steps += 1
        chunks = self._schedule()
        items = [Scheduled(seq, seq.computed + count, seq.table) for seq, count in chunks]
        metadata = self.scheduler.step(items, self.clock.now)
        for worker in self.workers:
            worker.before_forward(metadata)
        self.clock.now += self.cost.step([(count, seq.computed) for seq, count in chunks])
        for seq, count in chunks:
            self._forward(seq, count)
        for worker in self.workers:
            worker.after_forward(metadata)
        for seq, _ in chunks:
            self.device.slide(seq)
        news = self._listen()
        ended = [seq for seq, _ in chunks if self._sample(seq)]
        self.worked = bool(chunks) or news
        return ended

    def glide(self, until: float) -> None:
        """Do at once the steps before `until` in which `step` would do nothing but generate tokens inside blocks.

        REQUIRES: no job ends and no request arrives before `until`.
        """
        if self.waiting or self.loading or not self.running:
            return
        count = min(self._quiet(seq) for seq in self.running)
        now, done = self.clock.now, 0
        while done < count:
            end = now + self.cost.step([(1, seq.computed + done) for seq in self.running])
            if end >= until:
                break
            now, done = end, done + 1
        self.clock.now = now
        self.totals.steps += done
        self.totals.answer_made += done * len(self.running)
        for seq in self.running:
            seq.advance(done)

    def _quiet(self, seq: Sequence) -> int:
        """Steps of a request that complete no block, need no page and are not its last."""
        size = seq.base_tokens
        if seq.computed + 1 != seq.tokens or seq.first is None or not self.device.covers(seq):
            return 0
        return min(-seq.tokens % size, seq.output - seq.generated - 1)

    def close(self) -> None:
        """Close the workers' connectors."""
        for worker in self.workers:
            worker.close()

    # ---- what runs this step ----

    def _schedule(self) -> list[tuple[Sequence, int]]:
        """(request, tokens to compute): those that run first, in order of admission, then newly admitted ones."""
        budget, preemptions = self.limits.tokens, self.totals.preemptions
        chunks: list[tuple[Sequence, int]] = []
        for seq in list(self.running):
            if budget and seq.state is State.RUNNING and self._grow(seq, chunks):
                count = min(budget, seq.tokens - seq.computed)
                chunks.append((seq, count))
                budget -= count
        if self.totals.preemptions == preemptions:
            for seq in self._admit():
                count = min(budget, seq.tokens - seq.computed)
                chunks += [(seq, count)] if count else []
                budget -= count
        return chunks

    def _grow(self, seq: Sequence, chunks: list[tuple[Sequence, int]]) -> bool:
        """Pages for all confirmed tokens, at the expense of those admitted later; False: not this step."""
        while not self.device.grow(seq, seq.tokens):
            victim = self.running[-1]
            if self.held or (victim is seq and (self.loading or len(self.running) == 1)):
                return False
            chunks[:] = [chunk for chunk in chunks if chunk[0] is not victim]
            self.preempt(victim)
            if victim is seq:
                return False
        return True

    def preempt(self, seq: Sequence) -> None:
        """Take the pages of a running request away; it goes back to the head of the queue."""
        self.totals.preemptions += 1
        self.running.remove(seq)
        self._return(seq, PREEMPT)
        seq.preempted += 1
        seq.rewind()
        self.waiting.insert(0, seq)

    def _admit(self) -> list[Sequence]:
        """First come, first served; one that is told to wait for a transfer lets others pass. Those that run now."""
        ready: list[Sequence] = []
        for seq in list(self.waiting):
            if len(self.running) + len(self.loading) >= self.limits.running:
                break
            pages, computed = self.device.match(seq)
            hit = self.scheduler.match(seq, computed)
            if hit.wait:
                continue
            if not self.device.admit(seq, pages, computed + hit.tokens):
                break
            self.waiting.remove(seq)
            seq.computed = seq.hbm = computed
            seq.expected, seq.expected_disk = hit.tokens, hit.disk
            if not (self.device.windows and hit.tokens):
                self.device.attend(seq, 0, computed, "hbm")
            self.scheduler.allocated(seq, seq.table, computed, hit.tokens)
            if hit.tokens:
                seq.state = State.LOADING
                self.loading[seq.info.id] = seq
            else:
                self._run(seq)
                ready.append(seq)
        return ready

    def _run(self, seq: Sequence) -> None:
        seq.state = State.RUNNING
        self.running.append(seq)

    # ---- the forward ----

    def _forward(self, seq: Sequence, count: int) -> None:
        end = seq.computed + count
        prompt = max(0, min(end, seq.prompt) - seq.computed) if seq.first is None else 0
        if prompt:
            self.totals.prompt_made += prompt
            seq.prefill_s += self.cost.prefill(prompt, seq.computed)
            seq.made += prompt
        self.totals.answer_made += count - prompt
        self.device.compute(seq, end)
        seq.computed = end

    def _sample(self, seq: Sequence) -> bool:
        """The next token of a request that has computed all it has; True when that was the last one."""
        if seq.state is not State.RUNNING or seq.computed < seq.tokens:
            return False
        if seq.first is None:
            seq.first = self.clock.now
            seq.hits = (seq.hbm, seq.loaded - seq.disk, seq.disk)
            seq.prompt_made = seq.made
        seq.sample()
        if seq.generated < seq.output:
            return False
        self.running.remove(seq)
        if self.limits.attend_at_end:
            self.device.attend(seq, 0, seq.computed, "at its end")
        self._end(seq, seq.reason)
        return True

    # ---- news ----

    def _listen(self) -> bool:
        """Take in what the workers report; whether any load or hold has ended."""
        update = self.scheduler.update([report for worker in self.workers for report in worker.poll()])
        for item in update.loaded:
            self._loaded(item)
        for hold in update.freed:
            self.device.release(self.held.pop(hold))
        return bool(update.loaded or update.freed)

    def _loaded(self, item: Loaded) -> None:
        seq = self.loading.pop(item.request)
        if item.boundary < seq.computed + seq.expected:
            self.totals.failed_loads += 1
            if self.device.windows:  # the windows before an earlier boundary have no pages: start anew
                self._return(seq, PREEMPT)
                seq.rewind()
                self.waiting.insert(0, seq)
                return
        self.device.attend(seq, seq.computed, item.boundary, "load")
        self.device.publish(seq, seq.computed, item.boundary)
        seq.loaded = item.boundary - seq.computed
        seq.disk = min(seq.expected_disk, seq.loaded)
        seq.computed = item.boundary
        self._run(seq)

    # ---- the end ----

    def _drop(self, seq: Sequence) -> None:
        """Take it out of the queue it stands in."""
        if seq.state is State.WAITING:
            self.waiting.remove(seq)
        elif seq.state is State.LOADING:
            del self.loading[seq.info.id]
        else:
            self.running.remove(seq)

    def _end(self, seq: Sequence, reason: str) -> None:
        seq.state = State.ENDED
        seq.ended = self.clock.now
        self._return(seq, reason)
        seq.table = ()

    def _return(self, seq: Sequence, reason: str) -> None:
        """Give the pages back, now or when the connector has done with them."""
        hold = self.scheduler.release(seq.info.id, reason)
        if hold:
            self.held[hold] = seq.table
        else:
            self.device.release(seq.table)
