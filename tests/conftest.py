"""Shared fixtures. `--shared` is the only place that names the folder of real traces."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shared", default=str(Path(__file__).parents[2] / "shared"), help="folder with traces/"
    )
    parser.addoption("--soak", default="5", help="seconds of each soak test")


@pytest.fixture(scope="session")
def traces(request: pytest.FixtureRequest) -> Path:
    """The folder of real traces; a failure when CI=true and it is missing, a skip elsewhere."""
    folder = Path(request.config.getoption("--shared")) / "traces"
    if not folder.is_dir():
        message = f"no traces at {folder}; give --shared FOLDER"
        pytest.fail(message) if os.environ.get("CI") == "true" else pytest.skip(message)
    return folder
