"""What every connector must do. Subclass `ConnectorSuite` in a test file as `TestMyConnector`.

class TestMyConnector(ConnectorSuite):
    def make(self, layout, memories): ...

The suite runs the connector under the reference engine, with bytes: what comes back is compared with what it must be.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from collections.abc import Sequence as Seq

import numpy as np
import pytest

from kvoffload.connector import PREEMPT, Loaded, Scheduled, SchedulerConnector, WorkerConnector
from kvoffload.layout import Layout
from kvoffload.requests import RequestInfo
from kvoffload.testing.engine import Device, Engine, Limits, NullConnector, Sequence, State
from kvoffload.testing.engine.drive import Traffic, play, settle, step, unfinished
from kvoffload.testing.engine.sequence import random_keys
from kvoffload.testing.pool import PageMemory, Pages
from kvoffload.testing.rig import one_group

PAGES = 64
TOKENS = 16
GUARD = 0xA5


class ConnectorSuite(ABC):
    """REQUIRES: `make` gives a connector that has room for 40 blocks and holds nothing yet."""

    ranks = 1
    stores_generated = True
    """Whether blocks of answers are stored."""

    @abstractmethod
    def make(
        self, layout: Layout, memories: Seq[PageMemory]
    ) -> tuple[SchedulerConnector, Seq[WorkerConnector]]:
        """Both parts, registered with `memories[rank].pools` and attached. The suite closes the workers."""

    @pytest.fixture
    def engine(self) -> Iterator[Engine]:
        layout = one_group(TOKENS)
        memories = [PageMemory(layout, [PAGES], rank=rank) for rank in range(self.ranks)]
        scheduler, workers = self.make(layout, memories)
        device = Device(layout, [PAGES], memories)
        engine = Engine(device, scheduler, workers, limits=Limits(tokens=256, running=8))
        yield engine
        engine.close()

    def test_what_was_stored_comes_back(self, engine: Engine) -> None:
        """The same prompt after the device has forgotten it: loaded, byte for byte, and one token less is computed."""
        store(engine, 1, 160)
        again = ask(engine, 2, 1, 160)

        assert (again.loaded, again.made, engine.device.mismatches) == (144, 16, 0)

    def test_only_what_the_device_lacks_is_loaded(self, engine: Engine) -> None:
        """The device holds 5 of 12 blocks: their pages keep their bytes, and only the others are written."""
        store(engine, 1, 192)
        head = request(2, 1, 81)
        engine.add(head)
        settle(engine)
        before = [memory.arrays[0][0][head_pages(engine, head)].copy() for memory in engine.device.memories]
        after = request(3, 1, 193)
        engine.add(after)
        settle(engine)

        assert (after.hbm, after.loaded, engine.device.mismatches) == (80, 112, 0)
        for memory, old in zip(engine.device.memories, before, strict=True):
            assert (memory.arrays[0][0][head_pages(engine, head)] == old).all()

    def test_a_match_is_free_of_effects(self, engine: Engine) -> None:
        """50 questions with any number of computed tokens, then nothing: no job starts and nothing is held."""
        store(engine, 1, 160)
        seq = request(2, 1, 160)
        hits = [engine.scheduler.match(seq, 16 * (n % 9)).tokens for n in range(50)]

        assert hits == [144 - 16 * (n % 9) for n in range(50)]
        assert engine.scheduler.release(2, "abort") == 0

    def test_an_engine_may_take_less(self, engine: Engine) -> None:
        """144 tokens are offered and 96 taken: one Loaded that says 96, and no byte of the pages beyond is touched."""
        store(engine, 1, 160)
        for memory in engine.device.memories:
            memory.arrays[0][0][:] = GUARD
        seq = request(2, 1, 160)
        pages = [np.arange(10, dtype=np.int32)]
        assert engine.scheduler.match(seq, 0).tokens == 144
        engine.scheduler.allocated(seq, pages, 0, 96)
        loaded = loads(engine)

        assert [(item.request, item.boundary) for item in loaded] == [(2, 96)]
        assert all((memory.arrays[0][0][6:10] == GUARD).all() for memory in engine.device.memories)
        seq.table = pages
        engine.device.attend(seq, 0, 96, "load")
        assert engine.device.mismatches == 0
        assert engine.scheduler.release(2, "end_turn") == 0

    def test_an_engine_may_take_nothing(self, engine: Engine) -> None:
        """Nothing is taken of what was offered: no Loaded ever comes."""
        store(engine, 1, 160)
        seq = request(2, 1, 160)
        engine.scheduler.match(seq, 0)
        engine.scheduler.allocated(seq, [np.arange(10, dtype=np.int32)], 0, 0)

        assert loads(engine, steps=20) == []
        assert engine.scheduler.release(2, "end_turn") == 0

    def test_an_abort_at_any_point_gives_the_pages_back(self, engine: Engine) -> None:
        """Aborted after 0, 1, 2 ... steps, while it waits, loads, computes and answers: no page is lost."""
        store(engine, 1, 160)
        free = engine.device.free
        for steps in range(12):
            engine.device.forget()
            seq = request(10 + steps, 1, 400, 4)
            engine.add(seq)
            for _ in range(steps):
                step(engine)
            engine.abort(seq)
            engine.abort(seq)
            settle(engine)
            assert (engine.device.free, engine.device.mismatches) == (free, 0)

    def test_a_preempted_request_comes_back(self, engine: Engine) -> None:
        """Preempted in its answer: it is matched again, answers to its end, and its bytes are right."""
        seq = request(1, 1, 100, 60)
        engine.add(seq)
        while seq.generated < 40:
            step(engine)
        for _ in range(200):
            engine.scheduler.step([], engine.clock.now)
            step(engine)
            if seq.generated >= 50:
                break
        engine.device.forget()
        engine.preempt(seq)
        settle(engine)

        assert (seq.generated, seq.preempted, seq.state) == (60, 1, State.ENDED)
        assert engine.device.mismatches == 0
        assert seq.loaded >= (128 if self.stores_generated else 96)

    def test_releases_that_mean_nothing(self, engine: Engine) -> None:
        """A request that was never heard of, or has been released: no hold, no error."""
        store(engine, 1, 32)

        assert engine.scheduler.release(99, "abort") == 0
        assert engine.scheduler.release(99, PREEMPT) == 0
        assert engine.scheduler.release(1, "end_turn") == 0

    def test_steps_without_work_move_jobs_on(self, engine: Engine) -> None:
        """A request ends with its stores under way: steps in which nothing is scheduled are enough to end them."""
        engine.add(request(1, 1, 160))
        engine.step()
        while engine.running:
            engine.step()
        settle(engine)
        engine.device.forget()

        assert engine.device.free == PAGES
        assert engine.scheduler.match(request(2, 1, 160), 0).tokens == 144

    def test_placeholders_are_not_stored(self, engine: Engine) -> None:
        """34 tokens are said to be computed and 30 are confirmed: one block can be found afterwards, not two."""
        seq = request(1, 1, 30, 60)
        pages = [np.arange(6, dtype=np.int32)]
        seq.table = pages
        engine.device.paint(seq, 0, 30)
        seq.computed = 30
        feed(engine, Scheduled(seq, 34, pages))
        assert engine.scheduler.match(request(2, 1, 96), 0).tokens == 16
        if not self.stores_generated:
            return
        begin = seq.computed
        seq.advance(2)
        engine.device.paint(seq, begin, 32)
        feed(engine, Scheduled(seq, 32, pages))
        assert engine.scheduler.match(request(3, 1, 96), 0).tokens == 32

    def test_answers_are_stored_or_not(self, engine: Engine) -> None:
        """A prompt of 6 blocks and an answer of 4 more: the next turn gets both back, or the prompt only."""
        store(engine, 1, 96, 65)
        turn = ask(engine, 2, 1, 200)

        assert turn.loaded == (160 if self.stores_generated else 96)
        assert engine.device.mismatches == 0

    def test_a_reset_forgets(self, engine: Engine) -> None:
        """After a reset nothing is found, and what is stored afterwards is found again."""
        store(engine, 1, 160)
        assert engine.reset()
        assert ask(engine, 2, 1, 160).loaded == 0
        settle(engine)
        assert ask(engine, 3, 1, 160).loaded == 144

    def test_nothing_hit_nothing_changed(self, engine: Engine) -> None:
        """Prompts that share nothing: they end in the same steps as without a connector."""

        def ends(some: Engine) -> list[tuple[object, float | None]]:
            for number in range(12):
                some.add(request(number, 100 + number, 24 + 3 * number, 5))
            return [(seq.info.id, seq.ended) for seq in settle(some)]

        alone = Engine(
            Device(engine.device.layout, [PAGES]),
            NullConnector(),
            limits=Limits(tokens=256, running=8),
        )
        assert ends(engine) == ends(alone)

    def test_random_traffic(self, engine: Engine) -> None:
        """300 requests over 6 texts with aborts, preemptions and resets: all end, no byte is wrong, no page is lost."""
        requests = play(engine, Traffic(300))

        assert unfinished(requests) == []
        assert (engine.device.mismatches, engine.device.free) == (0, PAGES)
        assert sum(seq.loaded for seq in requests) > 0

    def test_close_twice(self, engine: Engine) -> None:
        """Closing is possible with jobs under way, and again."""
        engine.add(request(1, 1, 160))
        engine.step()
        engine.close()
        engine.close()


def store(engine: Engine, text: int, prompt: int, output: int = 1) -> None:
    """A request that computes everything; afterwards the device has forgotten it."""
    seq = request(1, text, prompt, output)
    engine.add(seq)
    settle(engine)
    engine.device.forget()
    for memory in engine.device.memories:
        for array in memory.arrays[0]:
            array[:] = 0


def ask(engine: Engine, number: int, text: int, prompt: int) -> Sequence:
    """A request over a device that remembers nothing."""
    engine.device.forget()
    seq = request(number, text, prompt)
    engine.add(seq)
    settle(engine)
    return seq


def feed(engine: Engine, item: Scheduled) -> None:
    """One step with this item and many without."""
    for number in range(200):
        metadata = engine.scheduler.step([item] if number == 0 else [], engine.clock.now)
        for worker in engine.workers:
            worker.before_forward(metadata)
            worker.after_forward(metadata)
        engine.scheduler.update([report for worker in engine.workers for report in worker.poll()])
        step(engine)


def loads(engine: Engine, steps: int = 5000) -> list[Loaded]:
    """Step by hand until a load has ended, or so many steps; all Loaded."""
    loaded: list[Loaded] = []
    for _ in range(steps):
        metadata = engine.scheduler.step([], engine.clock.now)
        for worker in engine.workers:
            worker.before_forward(metadata)
            worker.after_forward(metadata)
        update = engine.scheduler.update([r for worker in engine.workers for r in worker.poll()])
        loaded += update.loaded
        if loaded:
            break
    return loaded


def request(number: int, text: int, prompt: int, output: int = 1) -> Sequence:
    """A request over a text of 40 blocks that its number names."""
    return Sequence(RequestInfo(number), random_keys(40, text), TOKENS, prompt, output)


def head_pages(engine: Engine, seq: Sequence) -> Pages:
    """The pages in which the device's cache holds the first 5 blocks of a text."""
    return engine.device.pools[0].match(seq.all_keys[:5])
