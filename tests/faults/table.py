"""The whole table."""

from __future__ import annotations

from tests.faults.checkpoints import CHECKPOINTS
from tests.faults.life import LIFE
from tests.faults.line import Line
from tests.faults.parameters import PARAMETERS
from tests.faults.steps import STEPS
from tests.faults.zenflow import ZENFLOW

LINES: tuple[Line, ...] = (*ZENFLOW, *STEPS, *PARAMETERS, *CHECKPOINTS, *LIFE)

NAMES = [f"Z{number}" for number in range(1, 14)] + [str(number) for number in range(1, 44)]
"""Of all lines, in order."""
