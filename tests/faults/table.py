"""The whole table."""

from __future__ import annotations

from tests.faults.line import Line
from tests.faults.reported import REPORTED
from tests.faults.zenflow import ZENFLOW

LINES: tuple[Line, ...] = (*ZENFLOW, *REPORTED)

NAMES = [f"Z{number}" for number in range(1, 14)] + [str(number) for number in range(1, 44)]
"""Of all lines, in order."""
