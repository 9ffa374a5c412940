"""Tests on a real vLLM engine. Collected only where vLLM can be imported; see ../conftest.py."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import runner  # noqa: E402
import tiny  # noqa: E402
from elsewhere import Elsewhere, asked  # noqa: E402

SECONDS = 300
"""Of each test: most start an engine."""

BESIDE = "beside"
"""A fixture that begins at once and whose tests come last: it works in another process meanwhile."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Engines take time, and warn of much that is not ours; of ours everything is an error still."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore"))
            item.add_marker(pytest.mark.filterwarnings(r"error:::kvoffload\..*"))
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(SECONDS))
    items.sort(key=_uses_beside)


def _uses_beside(item: pytest.Item) -> bool:
    return isinstance(item, pytest.Function) and BESIDE in item.fixturenames


@pytest.fixture(scope="session", autouse=True)
def _begin_beside(request: pytest.FixtureRequest) -> None:
    if any(map(_uses_beside, request.session.items)):
        request.getfixturevalue(BESIDE)


@pytest.fixture(scope="session")
def models(request: pytest.FixtureRequest) -> Path:
    """The folder that keeps tiny models."""
    return Path(request.config.getoption("--vllm-models"))


@pytest.fixture(scope="session")
def model(models: Path) -> Callable[[str], Path]:
    """The folder of a tiny model, by name."""
    return lambda name: tiny.model(name, models)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the disks of all cells of the matrix are."""
    return tmp_path_factory.mktemp("disks")


@pytest.fixture(scope="session")
def beside(request: pytest.FixtureRequest, models: Path, folder: Path) -> Iterator[Elsewhere]:
    """Cells whose engine has a process of its own; they run while other tests do."""
    run = Elsewhere(models, folder, "first,second", asked(request, BESIDE))
    yield run
    run.close()


runner.import_vllm()
