"""`python -m tests.faults [--all] [LINE ...]`: breaks the package as the table says, and sees that its tests notice it."""

from __future__ import annotations

import argparse
import sys

from tests.faults.breaking import failing, notices
from tests.faults.line import Line
from tests.faults.table import LINES


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("names", nargs="*", help="lines, as Z1 or 12; without any, all that can be broken")
    parser.add_argument(
        "--all", action="store_true", help="run all tests of a line, not only those that were seen to fail"
    )
    asked = parser.parse_args()
    tests: dict[Line, tuple[str, ...]] = {}
    for line in LINES:
        if line.broken_by is not None and (not asked.names or line.name in asked.names):
            tests[line] = line.tests if asked.all else line.broken_by.seen
    useless = failing(sorted({test for of_line in tests.values() for test in of_line}))
    missed = 0
    for line, of_line in tests.items():
        for test, noticed in notices(line, of_line).items():
            word = "FAILS ANYWAY" if test in useless else "noticed" if noticed else "MISSED"
            missed += word != "noticed"
            sys.stdout.write(f"{line.name:4} {word} {test}\n")
            sys.stdout.flush()
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
