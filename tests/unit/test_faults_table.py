"""The table of faults is complete, and what it names is there."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache

import pytest

from tests.faults.breaking import REPO, places
from tests.faults.line import Line
from tests.faults.table import LINES, NAMES

BROKEN = [line for line in LINES if line.broken_by is not None]


@cache
def functions_of(file: str) -> set[str]:
    """Test functions at the top of a file below `tests`."""
    tree = ast.parse((REPO / "tests" / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_line_is_there_once_and_in_order() -> None:
    assert [line.name for line in LINES] == NAMES and len(LINES) == 56


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.name)
def test_a_line_has_words_and_tests_that_are_there(line: Line) -> None:
    assert line.kind and line.tests and len(set(line.tests)) == len(line.tests)
    for test in line.tests:
        file, _, name = test.partition("::")
        assert name in functions_of(file), test


@pytest.mark.parametrize("line", BROKEN, ids=lambda line: line.name)
def test_what_brings_a_fault_in_is_one_line_of_the_package(line: Line) -> None:
    """So that `python -m tests.faults` can repeat it."""
    broken_by = line.broken_by
    assert broken_by is not None and broken_by.seen and set(broken_by.seen) <= set(line.tests)
    assert len(places(broken_by)) == 1, places(broken_by)
    old, new = broken_by.old.split("\n"), broken_by.new.split("\n")
    assert sum(one != other for one, other in zip(old, new, strict=False)) + abs(len(old) - len(new)) <= 2


def test_every_line_was_tried_by_hand() -> None:
    assert [line.name for line in LINES if line.broken_by is None] == []


@pytest.mark.long
def test_every_test_that_is_named_is_collected() -> None:
    named = {test for line in LINES for test in line.tests}
    files = sorted({f"tests/{test.partition('::')[0]}" for test in named})
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "-q", "--collect-only", "-m", "not gpu and not bench", *files],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout[-2000:]
    collected = {line.partition("[")[0].removeprefix("tests/") for line in done.stdout.split("\n") if "::" in line}
    assert named - collected == set()
