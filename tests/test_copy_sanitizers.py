"""Copies and disk I/O under the address, undefined and thread sanitizers, without Python in the process."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from disk_world import ROOT

SOURCES = {
    "copy": ("copy_cpu", "thread_pool"),
    "disk": ("disk_io", "disk_table", "file_io", "crc32c", "thread_pool"),
}


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
@pytest.mark.parametrize("driver", SOURCES)
def test_clean(tmp_path, driver, sanitizer):
    """The driver's bytes are right and the sanitizer has nothing to say."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    program = tmp_path / driver
    sources = [ROOT / "csrc" / f"{name}.cpp" for name in SOURCES[driver]]
    command = [compiler, "-std=c++17", "-g", "-O0", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    command += ["-pthread", "-I", ROOT / "csrc", "-o", program, ROOT / f"tests/native/{driver}_driver.cpp"]
    subprocess.run([*command, *sources], check=True)
    done = subprocess.run([program, tmp_path], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
