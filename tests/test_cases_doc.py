"""docs/cases.md and the tests tell the same story."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROW = re.compile(r"^\| ([A-Z]+-\d\d) \| (.+?) \| (.*?) ?\|$", re.MULTILINE)


def table() -> dict[str, str]:
    """Why there is no test, by case id; "" where the table says that there is one."""
    return {m[1]: m[3] for m in ROW.finditer((ROOT / "docs/cases.md").read_text())}


def cases_with_tests() -> set[str]:
    """Case ids in the names of test functions: test_DISK_02_..., test_REF_08_and_10_..."""
    found = set()
    for path in (*(ROOT / "tests").rglob("test_*.py"), *(ROOT / "kvoffload/testing").glob("*_suite.py")):
        for area, first, second in re.findall(
            r"^ *def test_([A-Z]+)_(\d\d)_(?:and_(\d\d)_)?", path.read_text(), re.MULTILINE
        ):
            found |= {f"{area}-{number}" for number in (first, second) if number}
    return found


def test_every_tested_case_is_in_the_table():
    """A test named after a case has its row, so that a reader of the table can find it."""
    assert "KEY-01" in cases_with_tests()
    assert cases_with_tests() <= set(table())


def test_no_case_has_both_a_test_and_a_reason_against_one():
    """When a case gets its test, the reason for not having one goes."""
    assert {case for case, reason in table().items() if reason} & cases_with_tests() == set()


def test_cases_without_test_or_reason_are_shown():
    """What the table leaves open is printed; ids are written once."""
    text = (ROOT / "docs/cases.md").read_text()
    print(
        "no test and no reason:",
        *sorted(c for c, reason in table().items() if not reason and c not in cases_with_tests()),
    )

    assert len(ROW.findall(text)) == len(table()) > 100
