"""A short soak; `python -m tests.soak --steps 20000` is the long one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.soak.plan import Soak
from tests.soak.run import soak


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "settings",
    [
        {"steps": 500, "legs": 2, "accumulate": 2, "stage": 1, "precision": "bf16-mixed"},
    ],
)
def test_a_disturbed_run_ends_as_an_undisturbed_one_and_nothing_grows(settings: dict[str, Any], tmp_path: Path) -> None:
    """FAULTS 21, 33, 43: pauses, saves, evaluations, kills and resumes change no bit, and leave nothing behind."""
    result = soak(Soak(**settings), tmp_path)
    assert result.faults == []
    assert result.paused > 10 and len(result.samples) == settings["legs"] + 1
