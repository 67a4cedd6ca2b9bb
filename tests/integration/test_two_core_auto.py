"""`auto` against the best fixed pair of intervals: times, compared on an idle machine of two cores."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
STALL_BUDGET_RATIO = 0.05


@pytest.mark.bench
@pytest.mark.timeout(1500)
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core plays the device, another the host")
@pytest.mark.parametrize("factor", [1, 4, 16])
def test_auto_ends_near_the_best_fixed_pair_and_within_the_budget_where_one_can(factor: int) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.two_core_auto", str(factor)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=REPO, env=env, timeout=1480, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert statistics.median(found["ratios"]) <= 1.05, found
    if found["least_stall_ratio"] <= STALL_BUDGET_RATIO:
        assert found["stall_ratio"] <= STALL_BUDGET_RATIO, found
