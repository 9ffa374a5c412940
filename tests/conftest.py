"""Shared fixtures. `--shared` is the only place that names the folder of real traces."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def has_vllm() -> bool:
    """Whether vLLM is installed. The folder vllm/ beside this file is no module of that name, but looks like one."""
    found = importlib.util.find_spec("vllm")
    return found is not None and found.origin is not None


HAS_VLLM = has_vllm()
collect_ignore = [] if HAS_VLLM else ["vllm"]


def pytest_report_header() -> str:
    """What is left out, and how it is run."""
    return "" if HAS_VLLM else "vLLM is not installed here: tests/vllm is left to `make test-vllm`"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shared", default=str(Path(__file__).parents[2] / "shared"), help="folder with traces/"
    )
    parser.addoption(
        "--vllm-models", default=str(ROOT / "build" / "vllm-models"), help="folder that keeps tiny models"
    )
    parser.addoption("--vllm-full", action="store_true", help="the whole matrix of tests/vllm, not pairs")
    parser.addoption("--soak", default="5", help="seconds of each soak test")


@pytest.fixture(scope="session")
def traces(request: pytest.FixtureRequest) -> Path:
    """The folder of real traces; a failure when CI=true and it is missing, a skip elsewhere."""
    folder = Path(request.config.getoption("--shared")) / "traces"
    if not folder.is_dir():
        message = f"no traces at {folder}; give --shared FOLDER"
        pytest.fail(message) if os.environ.get("CI") == "true" else pytest.skip(message)
    return folder
