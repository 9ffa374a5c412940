"""Tests of a real device: collected only where one can be used, so `pytest tests` is the same everywhere else."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvoffload import native

sys.path.insert(0, str(Path(__file__).parents[1]))

FOUND = native.device_module()
collect_ignore_glob = [] if FOUND.module is not None else ["test_*.py"]


@pytest.fixture
def device():
    """The module of the runtime that has a device."""
    return FOUND.module
