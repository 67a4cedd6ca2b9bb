"""Checkpoints under ZeRO-3, where parameters are cut over the ranks: one rank."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.modules import EXPECTED_WARNINGS
from tests.resuming import BATCHES, Case, Numbered, check_resumes, stage_arguments

pytestmark = [
    *EXPECTED_WARNINGS,
    pytest.mark.filterwarnings("ignore:Step after .* skipped"),
    pytest.mark.filterwarnings("ignore:.*resuming from a checkpoint that ended before the epoch ended"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.usefixtures("own_process_group"),
    pytest.mark.timeout(240),
]

CUT, OFFLOADED = stage_arguments(3), stage_arguments("3 offload")
BY_THREE: dict[str, Any] = {"accumulate_grad_batches": 3}
FP16: dict[str, Any] = {"initial_scale_power": 8, "loss_scale_window": 2}


# -- resuming ----------------------------------------------------------------------------------------------------------

CASES = {
    "plain, offloaded": Case(arguments=OFFLOADED),
    "in threes, bf16": Case(arguments=CUT, settings={**BY_THREE, "precision": "bf16-mixed"}),
    "fp16 with skipped steps, offloaded": Case(
        arguments={**OFFLOADED, **FP16}, settings={"precision": "16-mixed"}, module=partial(Numbered, infinite=(4, 5, 11))
    ),
    "warm-up, then intervals change": Case(
        arguments=CUT, zenflow={"full_warm_up_rounds": 3}, changes={5: (2, 3), 6: (6, 3), 12: (1, 5), 15: (3, 2)}
    ),
    "manual, in threes": Case(arguments=CUT, module=partial(Numbered, manual=3)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_run_resumes_after_any_batch(name: str, tmp_path: Path) -> None:
    """It saves after every batch, and has the same weights as one that never saves."""
    resumes: Collection[int] = (1, 2, 4, 5, 7, 11, 13, 16)
    assert check_resumes(CASES[name], tmp_path, range(1, 2 * BATCHES), resumes) == []
