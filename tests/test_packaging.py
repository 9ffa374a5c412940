"""Packaging: what is in the tree is in a wheel and in a source archive, and nothing else."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest
from wheel_files import ROOT, differences, expected

import kvoffload

BUILD_FILES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build reads, without anything built; building in the tree itself would leave files there."""
    place = tmp_path_factory.mktemp("tree")
    ignore = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
    for folder in ("kvoffload", "connectors", "csrc", "tests"):
        shutil.copytree(ROOT / folder, place / folder, ignore=ignore)
    for name in BUILD_FILES:
        shutil.copy(ROOT / name, place / name)
    return place


def setup(folder: Path, *arguments: str) -> None:
    """Run setup.py there; its output is shown if it fails."""
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", *arguments],
        cwd=folder,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_installed_python_files_are_those_of_the_tree(copy):
    """A build installs every Python file of kvoffload/ and connectors/, typing marker included, and no other."""
    setup(copy, "build_py", "--build-lib", "out")
    built = {p.relative_to(copy / "out").as_posix() for p in (copy / "out").rglob("*") if p.is_file()}

    assert built == expected(copy) == expected()
    assert {"kvoffload/py.typed", "kvoffload/_C.pyi", "kvoffload/connectors/__init__.py"} <= built


def test_source_archive_has_what_a_build_needs(copy):
    """The source archive holds every native source and header, the build files and the tests."""
    setup(copy, "sdist", "--dist-dir", "dist")
    (archive,) = (copy / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {n.partition("/")[2] for n in tar.getnames()}

    native = {f"csrc/{p.name}" for p in (ROOT / "csrc").iterdir() if p.suffix != ".so"}
    tests = {p.relative_to(ROOT).as_posix() for p in (ROOT / "tests").glob("*.py")}
    assert native | tests | set(BUILD_FILES) <= names
    assert not {n for n in names if n.endswith((".so", ".pyc"))}


def test_differences_are_found():
    """The comparison that CI makes sees a missing file, a stray one and a missing native module."""
    right = expected() | {
        "kvoffload/_C.cpython-311-x86_64-linux-gnu.so",
        "kvoffload-0.1.0.dist-info/METADATA",
    }

    assert differences(right) == []
    assert differences(right - {"kvoffload/keys.py"}) == ["missing: kvoffload/keys.py"]
    assert differences(right | {"connectors/__init__.py"}) == ["too much: connectors/__init__.py"]
    assert differences({n for n in right if not n.endswith(".so")}) == [
        "missing: the native module kvoffload/_C"
    ]


def test_version_is_in_the_changelog():
    """The version of the package is a plain one and the newest that the changelog tells of."""
    newest = re.search(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)

    assert newest is not None
    assert newest.group(1) == kvoffload.__version__


def test_core_dependencies_are_few():
    """The core installs in seconds: no torch and nothing beyond the libraries the design names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.match(r"[a-z0-9-]+", d).group() for d in project["dependencies"]}

    assert names == {"numpy", "xxhash", "msgpack", "typer", "rich"}
    for extra in ("test", "metrics"):
        assert "torch" not in " ".join(project["optional-dependencies"][extra])
