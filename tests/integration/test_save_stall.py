"""How long a save holds training up, against plain DeepSpeed's: times, compared on an idle machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]


@pytest.mark.bench
@pytest.mark.timeout(400)
def test_a_save_takes_at_most_a_fifth_longer_than_that_of_plain_offload() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.save_stall"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=REPO, env=env, timeout=380, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["ratio"] <= 1.2, found
