"""Greedy tokens with kvoffload are those without a connector, whatever way the blocks come back.

By default few cells that hold every pair of values, with `--vllm-full` all of them.
"""

from __future__ import annotations

import pytest
from cells import ALL, Cell, first, pairwise
from elsewhere import Elsewhere, asked
from runner import LENGTHS, restorable


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The cells of this run, by the processes that a test asks for."""
    cells = ALL if metafunc.config.getoption("--vllm-full") else pairwise()
    processes = "two" if "beside" in metafunc.fixturenames else "one"
    if "cell" in metafunc.fixturenames:
        metafunc.parametrize("cell", [c.name for c in cells if c.processes == processes])


@pytest.fixture(scope="session")
def firsts(models, folder):
    """The first half of a cell, run once."""
    known = {}

    def run(name):
        if name not in known:
            known[name] = first(Cell.of(name), models, folder)
        return known[name]

    return run


@pytest.fixture(scope="session")
def fresh(request, models, folder, firsts):
    """One process that was not there when the disks were written, and opens each of them."""
    names = asked(request, "fresh")
    for name in names:
        firsts(name)
    run = Elsewhere(models, folder, "second", names)
    yield run
    run.close()


def check_first(cell, stages):
    """A cold answer, one from host and one from disk: equal to the plain one, and from where it should be."""
    block = Cell.of(cell).block
    plain, cold, host, disk = (stages[s] for s in ("plain", "cold", "host", "disk"))

    assert len({tuple(t) for t in plain.tokens}) == len(LENGTHS)
    assert cold.tokens == host.tokens == disk.tokens == plain.tokens
    assert cold.cached == [0] * len(LENGTHS)
    assert (cold.host, cold.disk) == (0, 0)
    assert host.cached == disk.cached == restorable(block=block)
    assert host.host > 0
    assert host.disk == 0
    assert disk.disk == disk.host == host.host  # host had lost every block


def check_second(cell, before, stages):
    """A new engine knows nothing but what it finds on disk, and gives the same answer."""
    new = stages["new"]

    assert new.tokens == before["plain"].tokens
    assert new.cached == restorable(block=Cell.of(cell).block)
    assert new.disk == new.host == before["host"].host


def test_tokens_are_equal(cell, firsts):
    """Cold, from host, and from disk after host has lost the blocks, in this process."""
    check_first(cell, firsts(cell))


def test_tokens_are_equal_in_a_new_process(cell, firsts, fresh):
    """A process that starts later finds the blocks on disk under the same keys."""
    check_second(cell, firsts(cell), fresh.stages(cell))


@pytest.mark.timeout(1800)
def test_tokens_are_equal_with_an_engine_process(cell, beside):
    """Scheduler and worker in a process apart from the client: every way back, and a new such process at the end."""
    stages = beside.stages(cell)

    check_first(cell, stages)
    check_second(cell, stages, stages)


def test_the_cells_hold_every_pair():
    """The chosen cells are few, and any two values that some cell joins are joined by a chosen one."""
    pairs = {(a, b) for c in ALL for a in c.name.split("-") for b in c.name.split("-")}

    assert {(a, b) for c in pairwise() for a in c.name.split("-") for b in c.name.split("-")} == pairs
    assert len(pairwise()) <= 16
