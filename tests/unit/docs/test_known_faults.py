"""tests/known_faults.md: every fault has a line, and every test that it names exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FAULTS = {
    "A": (1, 2, 3, 5, 6, 8, 9, *range(10, 20)),
    "B": (1, 2, 3, *range(5, 11), *range(12, 21)),
    "C": (*range(1, 11), 12, 13),
    "D": (*range(1, 7), *range(8, 12), 13, 14),
    "E": (1, 2, *range(4, 14), *range(15, 19)),
    "F": (*range(1, 7), 8, 9),
    "G": (*range(2, 8), *range(9, 17)),
    "H": (*range(1, 5), *range(6, 13)),
    "I": (1, 2, *range(4, 11)),
    "J": (1, 2, 3, *range(5, 10)),
}
"""Numbers of the collection, by group: some were merged into others."""
NAMED = re.compile(r"(tests/[\w/]+\.py)::(test_\w+)")


def lines() -> dict[str, str]:
    """The last cell of the table by fault."""
    rows = re.findall(r"^\| ([A-J]\d\d) \|[^|]+\|(.+)\|$", (ROOT / "tests" / "known_faults.md").read_text(), re.M)
    assert len({number for number, _ in rows}) == len(rows), "a fault has two lines"
    return dict(rows)


@cache
def names_in(file: str) -> frozenset[str]:
    """Names of the test functions of a file, those in classes too; empty when there is no such file."""
    path = ROOT / file
    if not path.is_file():
        return frozenset()
    nodes = ast.walk(ast.parse(path.read_text()))
    return frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef))


def missing(cell: str) -> list[str]:
    """Tests that a line names and that do not exist."""
    return [f"{file}::{name}" for file, name in NAMED.findall(cell) if name not in names_in(file)]


def test_every_fault_has_a_line_and_there_are_no_others() -> None:
    assert list(lines()) == [f"{group}{number:02d}" for group, numbers in FAULTS.items() for number in numbers]


@pytest.mark.parametrize("fault", [f"{group}{number:02d}" for group, ns in FAULTS.items() for number in ns])
def test_a_fault_is_noticed_by_tests_that_exist_or_says_why_it_is_not_ours(fault: str) -> None:
    cell = lines()[fault]
    assert not missing(cell)
    reason = re.search(r"not ours: (.{10,})", cell)
    assert NAMED.search(cell) or reason


def test_a_test_that_does_not_exist_would_be_seen() -> None:
    here = "tests/unit/docs/test_known_faults.py"
    assert missing(f"{here}::test_that_was_renamed") == [f"{here}::test_that_was_renamed"]
    assert missing("tests/unit/nowhere.py::test_that_was_moved") == ["tests/unit/nowhere.py::test_that_was_moved"]
    assert not missing(f"{here}::{test_a_test_that_does_not_exist_would_be_seen.__name__}")
