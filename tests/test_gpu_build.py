"""What is built for devices: the machine code of the copy kernel, the switches of setup.py, and the text for cupy."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from kvoffload import _C, native

ROOT = Path(__file__).parents[1]
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
FAT_BINARY = bytes.fromhex("50ed55ba")
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="nvcc is not here: no CUDA code was compiled")


@needs_nvcc
def test_kernel_moves_16_bytes_at_a_time(tmp_path):
    """The kernel's PTX has 128-bit loads and stores, four loads before a store, and no local memory."""
    assert NVCC is not None
    target = tmp_path / "gpu.ptx"
    command = [
        NVCC,
        "-O3",
        "-std=c++17",
        "-arch=compute_90",
        "-Icsrc",
        "-ptx",
        "csrc/gpu.cu",
        "-o",
        str(target),
    ]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    lines = re.findall(r"\b(ld|st)\.global\S*\.v4\.[ubf]32", target.read_text())

    assert re.search(r"ldldldldstststst", "".join(lines))
    assert ".local" not in target.read_text()


def setup_says(expression, **switches):
    """Evaluate an expression inside setup.py without building; (exit status, what was said)."""
    code = f"""
import sys, setuptools
setuptools.setup = lambda **_: None
sys.path.insert(0, ".")
import setup
print({expression})
"""
    env = {**os.environ, "KVOFFLOAD_CUDA": "0", "KVOFFLOAD_HIP": "0", **switches}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


PTX, MACHINE_CODE = 1, 2


def images(data):
    """(kind, architecture) of every image in the fat binaries that lie in these bytes."""
    found, at = set(), data.find(FAT_BINARY)
    while at >= 0:
        _, _, header, size = struct.unpack_from("<IHHQ", data, at)
        place, end = at + header, at + header + size
        while place < end:
            kind, _, header, size = struct.unpack_from("<HHIQ", data, place)
            found.add((kind, struct.unpack_from("<I", data, place + 28)[0]))
            place += header + size
        at = data.find(FAT_BINARY, end)
    return found


@needs_nvcc
def test_cuda_code_is_for_the_architectures_asked_for(tmp_path):
    """The compiler line makes machine code for every architecture asked for, and PTX for those to come."""
    line = "setup.shlex.join(setup.nvcc_command(setup.find_tool('nvcc', (), '/usr/local/cuda')))"
    status, text = setup_says(line, KVOFFLOAD_CUDA_ARCHS="80 90 100")
    assert status == 0
    target = tmp_path / "gpu.fatbin"
    command = [*shlex.split(text.splitlines()[-1]), "-Icsrc", "-fatbin", "csrc/gpu.cu", "-o", str(target)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    expected = {(PTX, 80), (MACHINE_CODE, 80), (MACHINE_CODE, 90), (MACHINE_CODE, 100)}
    assert images(target.read_bytes()) == expected


def test_cuda_module_has_code_for_devices():
    """A CUDA module that was built holds machine code, and PTX that later devices can compile."""
    found = native.load("_cuda")
    if found.module is None:
        pytest.skip(f"_cuda is not here: {found.reason}")
    path = Path(importlib.import_module("kvoffload._cuda").__file__ or "")
    kinds = [kind for kind, _ in images(path.read_bytes())]
    assert PTX in kinds
    assert MACHINE_CODE in kinds


@pytest.mark.parametrize(("switch", "tool"), [("KVOFFLOAD_CUDA", "nvcc"), ("KVOFFLOAD_HIP", "hipcc")])
def test_a_module_that_was_asked_for_needs_its_tool(switch, tool):
    """Without the tool the build fails at 1 and says what to do, says what it leaves out at auto, and is still at 0."""
    wanted = f"setup.os.environ.update({switch}='%s') or setup.wanted('{switch}', None, '{tool}')"
    status, text = setup_says(wanted % "1")
    assert status != 0
    assert f"{switch}=1, but {tool} was not found" in text
    assert f"{switch}=0" in text
    assert setup_says(wanted % "auto") == (0, f"kvoffload: no {tool} here, its module is not built\nFalse\n")
    assert setup_says(wanted % "0") == (0, "False\n")


def test_switches_take_three_values():
    """Any other word than auto, 0 and 1 is an error that names them."""
    status, text = setup_says("1", KVOFFLOAD_CUDA="yes")
    assert status != 0
    assert "KVOFFLOAD_CUDA=yes: must be auto, 0 or 1" in text


def test_cuda_module_needs_no_cuda_library():
    """COPY-11: a module built for CUDA refers to no CUDA library and to no driver symbol, so it imports anywhere."""
    found = native.load("_cuda")
    if found.module is None:
        pytest.skip(f"_cuda is not here: {found.reason}")
    path = Path(importlib.import_module("kvoffload._cuda").__file__ or "")
    if shutil.which("readelf") is None:
        pytest.skip("readelf is not here")
    needed = subprocess.run(["readelf", "-d", str(path)], capture_output=True, text=True, check=True).stdout
    symbols = subprocess.run(
        ["readelf", "--dyn-syms", "-W", str(path)], capture_output=True, text=True, check=True
    ).stdout
    assert "NEEDED" in needed
    assert "libcuda" not in needed
    assert not re.search(r"UND cu[A-Z]\w+|UND cuda\w+", symbols)


def test_text_of_the_kernel_is_in_the_core():
    """What run-time compilers get is exactly the headers of the native modules."""
    assert _C.kernels_text() == (ROOT / "csrc" / "kernels.h").read_text()
    assert _C.compat_text() == (ROOT / "csrc" / "compat.h").read_text()


def nvrtc():
    """The run-time compiler, where it is installed."""
    names = ["libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12"]
    spec = importlib.util.find_spec("nvidia")
    for place in list(spec.submodule_search_locations or []) if spec else []:
        names += [str(p) for p in Path(place).rglob("libnvrtc.so.*")]
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def test_kernel_compiles_at_run_time():
    """The source that cupy is given compiles with NVRTC and has the entry point, with 128-bit accesses."""
    library = nvrtc()
    if library is None:
        pytest.skip("NVRTC is not here: the text for cupy was not compiled")
    source = Path(ROOT / "kvoffload" / "copying" / "cupy.py").read_text()
    entry = re.search(r'ENTRY = """(.*?)"""', source, re.DOTALL)
    assert entry
    text = _C.compat_text() + _C.kernels_text() + entry[1]
    text = text.replace('#include "compat.h"', "").replace("#pragma once", "")
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    assert library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"copy.cu", 0, None, None) == 0
    options = (ctypes.c_char_p * 2)(b"-std=c++17", b"--gpu-architecture=compute_90")
    status = library.nvrtcCompileProgram(program, 2, options)
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    assert status == 0, log.value.decode()
    library.nvrtcGetPTXSize(program, ctypes.byref(size))
    ptx = ctypes.create_string_buffer(size.value)
    library.nvrtcGetPTX(program, ptx)
    assert b".entry kvoffload_copy(" in ptx.value
    assert re.search(rb"ld\.global\S*\.v4\.u32", ptx.value)
