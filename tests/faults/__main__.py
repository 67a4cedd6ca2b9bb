"""`python -m tests.faults [--all] [LINE ...]`: breaks the package as the table says, and sees that its tests notice it."""

from __future__ import annotations

import argparse
import sys

from tests.faults.breaking import notices
from tests.faults.table import LINES


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("names", nargs="*", help="lines, as Z1 or 12; without any, all that can be broken")
    parser.add_argument(
        "--all", action="store_true", help="run all tests of a line, not only those that were seen to fail"
    )
    asked = parser.parse_args()
    missed = 0
    for line in LINES:
        if line.broken_by is None or (asked.names and line.name not in asked.names):
            continue
        for test, noticed in notices(line, line.tests if asked.all else line.broken_by.seen).items():
            missed += not noticed
            sys.stdout.write(f"{line.name:4} {'noticed' if noticed else 'MISSED '} {test}\n")
            sys.stdout.flush()
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
