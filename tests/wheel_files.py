"""What a wheel of this tree must hold: used by test_packaging.py, and by CI on the wheel it has built.

Run as `python tests/wheel_files.py WHEEL`; exits 1 and names the differences.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def expected(root: Path = ROOT) -> set[str]:
    """Every Python file of the tree at its place in a wheel; connectors/ is installed inside the package."""
    found = set()
    for folder, place in (("kvoffload", "kvoffload"), ("connectors", "kvoffload/connectors")):
        for path in (root / folder).rglob("*"):
            if path.suffix in (".py", ".pyi", ".typed") and "__pycache__" not in path.parts:
                found.add(f"{place}/{path.relative_to(root / folder).as_posix()}")
    return found


def differences(names: set[str], root: Path = ROOT) -> list[str]:
    """What is missing from or too much in a wheel's list of names, in words; [] = all is right.

    Beside the Python files a wheel holds native modules of the package and its own metadata.
    """
    native = {n for n in names if n.startswith("kvoffload/_") and n.endswith(".so")}
    metadata = {n for n in names if n.partition("/")[0].endswith(".dist-info")}
    rest = names - native - metadata
    problems = [f"missing: {n}" for n in sorted(expected(root) - rest)]
    problems += [f"too much: {n}" for n in sorted(rest - expected(root))]
    if not any(n.startswith("kvoffload/_C.") for n in native):
        problems.append("missing: the native module kvoffload/_C")
    return problems


def main(wheel: str) -> int:
    """Print the differences between the wheel and the tree; the exit status."""
    with zipfile.ZipFile(wheel) as archive:
        names = {n for n in archive.namelist() if not n.endswith("/")}
    problems = differences(names)
    print("\n".join(problems) or f"{wheel}: {len(names)} files, as in the tree")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
