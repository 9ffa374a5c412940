"""The shape of the tree: who may import whom, how large things may get, and what must not be in it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOFT_LINES, HARD_LINES = 300, 500
TEXT = {".py", ".pyi", ".c", ".h", ".cuh", ".cpp", ".cu", ".toml", ".md", ".yaml", ".sh", ".in", ""}
FOLDERS = ("kvoffload", "connectors", "csrc", "tests", "bench", "docs", ".ci")
NATIVE = {".c", ".h", ".cuh", ".cpp", ".cu"}

SPINE: dict[str, set[str]] = {
    "keys": set(),
    "layout": {"keys"},
    "retention": {"keys", "layout"},
    "messages": {"keys", "layout"},
    "index": {"keys", "layout", "retention", "messages"},
    "planner": {"keys", "layout", "retention", "messages", "index"},
    "arena": {"keys", "layout", "messages"},
    "tiers": {"keys", "layout", "messages", "arena"},
    "copying": {"keys", "layout", "messages", "arena"},
    "mover": {"keys", "layout", "messages", "arena", "tiers", "copying"},
}
"""What each part of the spine may reach, over any number of steps. Modules not named here may sit between."""

ABOVE = {"local", "connector", "connectors", "replay", "bench", "cli", "testing"}
"""They see all; of the spine nothing reaches them."""


def files(*suffixes: str) -> list[Path]:
    """All shipped files with one of the suffixes, without what builds and caches leave behind."""
    found = [p for p in ROOT.iterdir() if p.is_file() and not p.name.startswith(".git")]
    for folder in FOLDERS:
        found += [p for p in (ROOT / folder).rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    wanted = suffixes or tuple(TEXT)
    return sorted(p for p in found if p.suffix in wanted)


def package() -> list[Path]:
    """Python sources of the installed package."""
    return [p for p in files(".py") if p.relative_to(ROOT).parts[0] in ("kvoffload", "connectors")]


@cache
def tree(path: Path) -> ast.Module:
    """The parsed file."""
    return ast.parse(path.read_text(), str(path))


def name_of(path: Path) -> str:
    """The module's dotted name inside kvoffload: "planner", "tiers.base", "connectors.vllm", "" for the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    inner = parts[1:] if parts[0] == "kvoffload" else parts
    return ".".join(p for p in inner if p != "__init__")


def targets(node: ast.AST, name: str, is_package: bool) -> Iterator[str]:
    """Absolute names that one import statement asks for, `from a import b` as a.b."""
    if isinstance(node, ast.Import):
        yield from (a.name for a in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            above = ["kvoffload", *name.split(".")] if name else ["kvoffload"]
            above = above[: len(above) - node.level + is_package]
            base = ".".join([*above, base] if base else above)
        yield from (f"{base}.{a.name}" for a in node.names)


@cache
def imports() -> dict[str, set[str]]:
    """Absolute imports of every module of the package, at top level, in functions and for types alike."""
    return {
        name_of(p): {
            t for node in ast.walk(tree(p)) for t in targets(node, name_of(p), p.name == "__init__.py")
        }
        for p in package()
    }


@cache
def reach(name: str) -> frozenset[str]:
    """Modules of kvoffload that importing `name` can load, itself included."""
    seen, todo = set(), [m for m in imports() if m == name or m.startswith(name + ".")]
    while todo:
        module = todo.pop()
        if module in seen:
            continue
        seen.add(module)
        for target in imports()[module]:
            inner = target.removeprefix("kvoffload.") if target.startswith("kvoffload.") else None
            while inner and inner not in imports():
                inner = inner.rpartition(".")[0]
            todo += [inner] if inner else []
    return frozenset(seen)


def parts(modules: frozenset[str]) -> set[str]:
    """Top-level names of the modules."""
    return {m.partition(".")[0] for m in modules}


def test_files_are_found():
    """The tests below look at something: the package, native sources and tests are all in the list."""
    names = {str(p.relative_to(ROOT)) for p in files()}

    assert {"kvoffload/keys.py", "csrc/block_copy.h", "tests/test_architecture.py", "pyproject.toml"} <= names
    assert "kvoffload.errors" in {t.rpartition(".")[0] for t in imports()["keys"]}
    assert "errors" in reach("keys")


@pytest.mark.parametrize("name", SPINE)
def test_imports_go_one_way(name):
    """A part of the spine reaches only the parts below it, and never what is built on top."""
    reached = parts(reach(name)) - {name}

    assert reached & set(SPINE) <= SPINE[name]
    assert not reached & ABOVE


def test_nothing_below_reaches_the_top():
    """Only the modules on top, and the two that the command starts, know replay, bench, testing or connectors."""
    top = {"replay", "bench", "cli", "testing", "connectors"}
    for name in {m.partition(".")[0] for m in imports() if m} - top - {"__main__"}:
        assert not parts(reach(name)) & top, name


def test_planner_side_never_imports_torch():
    """No module that the planner loads, or that scheduler processes share, names torch or another device library."""
    heavy = {"torch", "cupy", "triton", "vllm", "sglang"}
    shared = (
        "keys",
        "layout",
        "retention",
        "messages",
        "index",
        "planner",
        "config",
        "stats",
        "events",
        "local",
    )
    for name in shared:
        for module in reach(name):
            assert not {t.partition(".")[0] for t in imports()[module]} & heavy, (name, module)


@pytest.mark.parametrize("name", sorted({"planner", "keys", "config", "stats", "metrics"} & set(imports())))
def test_planner_side_loads_no_torch(name):
    """Importing the module in a fresh process loads no torch, and no other half of kvoffload."""
    program = f"import sys, kvoffload.{name}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()

    assert f"kvoffload.{name}" in loaded
    assert not {"torch", "cupy", "kvoffload.mover", "kvoffload.copying", "kvoffload.tiers"} & set(loaded)


def test_torch_is_imported_only_where_it_belongs():
    """torch and engines are imported in connectors/, in the torch copy engine and in tests, nowhere else."""
    for name, asked in imports().items():
        if not name.startswith("connectors") and name != "copying.torch":
            assert not {t.partition(".")[0] for t in asked} & {"torch", "vllm", "sglang", "transformers"}, (
                name
            )


def test_only_bindings_include_pybind11():
    """Native logic compiles without Python: bind_*.cpp and bind.h alone include pybind11."""
    for path in files(*NATIVE):
        if not path.name.startswith("bind"):
            assert not re.search(r"#\s*include\s*[<\"](pybind11|Python\.h)", path.read_text()), path


def test_files_stay_small():
    """No source is above the hard budget; those above the soft one are listed."""
    lines = {p.relative_to(ROOT): len(p.read_text().splitlines()) for p in files(".py", ".pyi", *NATIVE)}
    for path, count in lines.items():
        if count > SOFT_LINES:
            print(f"{path}: {count} lines, above {SOFT_LINES}")

    assert {str(p): n for p, n in lines.items() if n > HARD_LINES} == {}


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    """Every class of the package with its place."""
    for path in package():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef):
                yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node


def methods(node: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """The functions in the class body."""
    return [n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


def test_classes_stay_small():
    """A class has at most 20 methods that are not special, an interface at most 7 abstract ones."""
    large = []
    for place, node in classes():
        own = [m for m in methods(node) if not (m.name.startswith("__") and m.name.endswith("__"))]
        abstract = [m for m in own if any("abstractmethod" in ast.unparse(d) for d in m.decorator_list)]
        if len(own) > 20 or len(abstract) > 7:
            large.append(f"{place}: {len(own)} methods, {len(abstract)} abstract")

    assert large == []


def test_no_probing_of_attributes():
    """Types are known: getattr, hasattr and their kin stand only in a connector's compat.py."""
    for path in package():
        if path.name == "compat.py" and path.relative_to(ROOT).parts[0] == "connectors":
            continue
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("getattr", "hasattr"), f"{path.relative_to(ROOT)}:{node.lineno}"


def test_no_environment_variables():
    """Behaviour comes from Config alone: nothing in the package reads the environment."""
    for path in package():
        nodes = list(ast.walk(tree(path)))
        text = {n.attr for n in nodes if isinstance(n, ast.Attribute)}
        text |= {n.name for n in nodes if isinstance(n, ast.alias)}
        assert not text & {"environ", "environb", "getenv", "getenvb"}, path


def test_no_built_in_hash():
    """The built-in hash of text differs between processes: nothing in the package calls it."""
    for path in package():
        calls = [n.func for n in ast.walk(tree(path)) if isinstance(n, ast.Call)]
        assert not [c for c in calls if isinstance(c, ast.Name) and c.id == "hash"], path


def test_nothing_is_pickled():
    """Bytes from disk or another process never run code: the package imports no pickle."""
    for name, asked in imports().items():
        assert not {t.partition(".")[0] for t in asked} & {"pickle", "marshal", "shelve", "dill"}, name


def test_sources_are_ascii():
    """Every shipped text file is ASCII."""
    for path in files():
        assert path.read_bytes().isascii(), path.relative_to(ROOT)


def test_only_conftest_names_the_folder_of_traces():
    """The place of real traces is an option of conftest.py; no other file knows it."""
    folder = "sha" + "red"
    place = re.compile(rf"""(["'/ ]|--){folder}(/|["'])""")
    for path in files(".py", ".sh", ".toml", ""):
        if path != ROOT / "tests/conftest.py":
            assert not place.search(path.read_text()), path.relative_to(ROOT)


def test_no_machine_is_named():
    """No shipped file names a folder of the machine it was written on, or a host that packages came from."""
    folders = "|".join(("wo" + "rk", "fa" + "rm", "ro" + "ot", "ho" + "me", "Us" + "ers"))
    hosts = "|".join(("pypi" + r"\.org", "python" + "hosted", "npm" + "js", "deb" + r"\.debian"))
    bad = re.compile(rf"(?<![\w.~}})])/({folders})/|{hosts}")
    for path in files():
        found = bad.search(path.read_text())
        assert found is None, f"{path.relative_to(ROOT)}: {found and found.group()}"


def test_no_loose_ends():
    """No shipped source promises work that is not there."""
    words = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X|Not" + r"ImplementedError)\b")
    for path in files(".py", ".pyi", *NATIVE):
        assert not words.search(path.read_text()), path.relative_to(ROOT)
