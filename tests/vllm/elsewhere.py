"""Cells that run in a process of their own, beside the tests."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile

import pytest
from cells import Stage

PATIENCE_S = 1800.0
TAIL = 3000
"""Characters of the process's last words that a failure shows."""


def asked(request: pytest.FixtureRequest, fixture: str) -> list[str]:
    """Names of the cells of this session whose test uses the fixture."""
    items = [i for i in request.session.items if isinstance(i, pytest.Function) and fixture in i.fixturenames]
    return list(dict.fromkeys(i.callspec.params["cell"] for i in items if "cell" in i.fixturenames))


class Elsewhere:
    """A run of cells.py. halves: "first", "second" or both, with a comma."""

    def __init__(self, models: Path, folder: Path, halves: str, names: Sequence[str]) -> None:
        command = [sys.executable, "cells.py", str(models), str(folder), halves, *names]
        self._said, self._complained = TemporaryFile("w+"), TemporaryFile("w+")  # noqa: SIM115  closed below
        self._process = subprocess.Popen(
            command, cwd=Path(__file__).parent, stdout=self._said, stderr=self._complained
        )
        self._found: dict[str, dict[str, Stage]] | None = None

    def stages(self, name: str) -> dict[str, Stage]:
        """What became of a cell; waits for the end of the run. AssertionError with its last words where it failed."""
        if self._found is None:
            self._process.wait(PATIENCE_S)
            self._said.seek(0)
            lines = [json.loads(line) for line in self._said if line.startswith("{")]
            self._found = {n: _stages(body) for line in lines for n, body in line.items()}
        if name not in self._found:
            self._complained.seek(0)
            raise AssertionError(f"no answer for {name}; the process said\n{self._complained.read()[-TAIL:]}")
        return self._found[name]

    def close(self) -> None:
        """End the process if it runs."""
        self._process.kill()
        self._process.wait()
        self._said.close()
        self._complained.close()


def _stages(body: dict[str, dict]) -> dict[str, Stage]:
    return {stage: Stage(**values) for stage, values in body.items()}
