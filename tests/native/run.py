"""Native code under sanitizers: every tests/native/*.cpp linked with csrc/*.cpp (without bindings), and run.

The device copy path is part of it: csrc/gpu.cu is compiled as C++ over the simulated runtime.

A driver is a program that returns 0 when all is right; its argument is an empty folder. Each is built and run twice:
with ASAN + UBSAN and with TSAN.
`--python` builds the module _C with ASAN + UBSAN in a copy of the tree instead, and runs the Python tests that use it.

Where the compiler has no sanitizer that is said, and is an error when CI=true.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "native"
CXX = shlex.split(os.environ.get("CXX", "g++"))
COMMON = [
    "-std=c++17",
    "-O1",
    "-g",
    "-fno-omit-frame-pointer",
    "-pthread",
    "-Wall",
    "-Wextra",
    "-Wno-unused-parameter",
    "-Icsrc",
    "-DKVOFFLOAD_SIM",
]
MEMORY = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
SANITIZERS = {"asan": MEMORY, "tsan": ["-fsanitize=thread"]}
OPTIONS = {
    "ASAN_OPTIONS": "detect_stack_use_after_return=1:strict_string_checks=1",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
}
NATIVE_PARTS = re.compile(
    r"^(?:from|import) kvoffload\.?(?:_C|arena|index|planner|local|mover|tiers|copying|testing|replay)",
    re.MULTILINE,
)
DRIVER_SECONDS = 300
PYTHON_SECONDS = 1200


def run(command: list[str], **options) -> None:
    """Run one command from the root of the tree; raises CalledProcessError when it fails."""
    subprocess.run(command, cwd=options.pop("cwd", ROOT), check=True, **options)


def works(flags: list[str]) -> bool:
    """Whether the compiler links a program with these flags."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*CXX, *flags, "-x", "c++", "-", "-o", f"{folder}/a"]
        program = b"int main() { return 0; }"
        return subprocess.run(command, input=program, capture_output=True, check=False).returncode == 0


def fixed_addresses() -> list[str]:
    """A prefix that turns address randomisation off: TSAN refuses some layouts. [] where it is not permitted."""
    prefix = ["setarch", os.uname().machine, "-R"]
    allowed = shutil.which("setarch") and subprocess.run([*prefix, "true"], capture_output=True, check=False)
    return prefix if allowed and allowed.returncode == 0 else []


def compiled(source: Path, folder: Path, flags: list[str]) -> Path:
    """The object of one source, made again where it is older than the source or any header."""
    target = folder / f"{source.parent.name}-{source.stem}.o"
    inputs = [source, *(ROOT / "csrc").glob("*.h"), *source.parent.glob("*.h"), Path(__file__)]
    if not target.exists() or target.stat().st_mtime < max(p.stat().st_mtime for p in inputs):
        run([*CXX, *COMMON, *flags, "-x", "c++", "-c", str(source), "-o", str(target)])
    return target


def run_drivers(name: str, drivers: list[Path]) -> None:
    """Build everything with one sanitizer and run each driver."""
    folder = BUILD / name
    folder.mkdir(parents=True, exist_ok=True)
    flags = SANITIZERS[name]
    core = [p for p in sorted((ROOT / "csrc").glob("*.c[pu]*")) if not p.name.startswith("bind_")]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(lambda p: compiled(p, folder, flags), [*core, *drivers]))
    for driver, mine in zip(drivers, objects[len(core) :], strict=True):
        program = folder / driver.stem
        run([*CXX, *flags, "-pthread", str(mine), *map(str, objects[: len(core)]), "-o", str(program)])
        prefix = fixed_addresses() if name == "tsan" else []
        with tempfile.TemporaryDirectory() as scratch:
            command = [*prefix, str(program), scratch]
            run(command, env={**os.environ, **OPTIONS}, timeout=DRIVER_SECONDS)
        print(f"{name} {driver.stem}: ok", flush=True)


def library(name: str) -> str:
    """Where the compiler keeps a runtime library."""
    answer = subprocess.run([*CXX, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return answer.stdout.strip()


def uses_native(test: Path) -> bool:
    """Whether a test module, or a helper beside it that it imports, loads the native module."""
    text = test.read_text()
    helpers = [
        test.parent / f"{name}.py" for name in re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE)
    ]
    return any(NATIVE_PARTS.search(t) for t in (text, *(h.read_text() for h in helpers if h.exists())))


def run_python(arguments: list[str]) -> None:
    """The Python tests that load _C, on a copy of the package with _C built with ASAN + UBSAN."""
    tests = [str(p) for p in sorted((ROOT / "tests").glob("test_*.py")) if uses_native(p)]
    if not tests:
        print("asan python: no test uses the native module")
        return
    tree = BUILD / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    ignore = shutil.ignore_patterns("__pycache__", "*.so")
    for folder in ("kvoffload", "connectors", "csrc"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=ignore)
    for file in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, tree / file)
    flags = shlex.join([*MEMORY, "-fno-omit-frame-pointer", "-g", "-O1"])
    build = {
        **os.environ,
        "KVOFFLOAD_CUDA": "0",
        "KVOFFLOAD_HIP": "0",
        "CFLAGS": flags,
        "CXXFLAGS": flags,
        "LDFLAGS": shlex.join(MEMORY),
    }
    run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=tree, env=build)

    preload = f"{library('libasan.so')} {library('libstdc++.so')}"
    env = {**os.environ, **OPTIONS, "LD_PRELOAD": preload, "PYTHONMALLOC": "malloc", "PYTHONPATH": str(tree)}
    env["ASAN_OPTIONS"] = "detect_leaks=0"
    options = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "-p", "no:cacheprovider"]
    options += ["-o", "timeout=600", "-o", "faulthandler_timeout=700"]
    # From another folder than the root, where `import kvoffload` would find the package of the tree.
    command = [sys.executable, "-m", "pytest", *options, *arguments, *tests]
    run(command, cwd=BUILD, env=env, timeout=PYTHON_SECONDS)


def main() -> int:
    """Run what was asked for; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", action="store_true", help="run the Python tests on a build with ASAN")
    known, rest = parser.parse_known_args()
    names = ["asan"] if known.python else list(SANITIZERS)
    missing = [n for n in names if not works(SANITIZERS[n])]
    for name in missing:
        print(
            f"{name}: {shlex.join(CXX)} cannot build with {' '.join(SANITIZERS[name])}; not run", flush=True
        )
    if known.python and not missing:
        run_python(rest)
    elif not known.python:
        drivers = sorted(Path(__file__).parent.glob("*.cpp"))
        print(f"{len(drivers)} native drivers", flush=True)
        for name in names:
            if name not in missing and drivers:
                run_drivers(name, drivers)
    return int(bool(missing) and os.environ.get("CI") == "true")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        sys.exit(f"{error}")
