"""Tests on a real vLLM engine. Collected only where vLLM can be imported; see ../conftest.py."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import runner  # noqa: E402
import tiny  # noqa: E402

SECONDS = 300
"""Of each test: most start an engine."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Engines take time, and warn of much that is not ours; of ours everything is an error still."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore"))
            item.add_marker(pytest.mark.filterwarnings(r"error:::kvoffload\..*"))
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(SECONDS))


@pytest.fixture(scope="session")
def model(request: pytest.FixtureRequest) -> Callable[[str], Path]:
    """The folder of a tiny model, by name."""
    cache = Path(request.config.getoption("--vllm-models"))
    return lambda name: tiny.model(name, cache)


runner.import_vllm()
