"""What only a CUDA device can show; `tests/gpu/run.sh` runs them all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CASES: list[dict[str, Any]] = [
    {},
    {"topk_ratio": 0, "update_interval": 1, "overlap": False},
    {"topk_ratio": 1},
    {"warm_up": 3, "accumulate": 2, "clip_norm": 0.05},
    {"stage": 1, "accumulate": 2, "topk_ratio": 0.1},
    {"nan_step": 4, "update_interval": 2},
    {"stage": 3},
    {"stage": 3, "accumulate": 2, "clip_norm": 0.05},
    {"stage": 3, "offload_params": True, "changes": ((3, 2, 7), (6, 8, 2), (7, 1, 2))},
    {"stage": 3, "offload_params": True, "settle_before_step": 7, "nan_step": 4},
]


def test_the_engine_on_cuda_equals_the_reference(run_ranks: Any) -> None:
    results = run_ranks("tests.gpu.ranks:compare", world_size=1, timeout=500, cases=CASES)[0]
    for case, worst in zip(CASES, results, strict=True):
        assert worst["gradient"] < 1e-4 and worst["norm"] < 1e-5 and worst["weights"] < 1e-5, (case, worst)


def test_the_exchange_region_is_page_locked_and_copies_overlap_backward(run_ranks: Any) -> None:
    result = run_ranks("tests.gpu.ranks:pinned_and_overlapping", world_size=1, timeout=500)[0]
    assert result["pinned"]
    assert result["step_to_compute"] < 1.5, result  # gradients leave the device beside backward, not after it


def test_two_runs_of_the_same_seed_are_equal_bit_for_bit(run_ranks: Any) -> None:
    first, second = run_ranks("tests.gpu.ranks:train_twice", world_size=1, timeout=500)[0]
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed", "bf16-true", "16-true", "32-true"])
def test_every_precision_trains_through_the_trainer(run_ranks: Any, precision: str) -> None:
    first, last = run_ranks("tests.gpu.ranks:trainer_losses", world_size=1, timeout=500, precision=precision)[0]
    assert last < 0.8 * first
