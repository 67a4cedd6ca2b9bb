"""What must be equal to something known: torch's AdamW, another split of the same batch, another run of the same seed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.cases import relative

pytestmark = pytest.mark.timeout(180)


def equal_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


ALL_SELECTED = {"topk_ratio": 1, "update_interval": 4}
ALL_DEFERRED_AT_ONCE = {"topk_ratio": 0, "update_interval": 1, "overlap_step": False}


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_two_extremes_equal_torch_adamw_and_adam(run_ranks: Any, world_size: int) -> None:
    extremes = [ALL_SELECTED, ALL_DEFERRED_AT_ONCE]
    runs = [{"config": config, "decoupled": decoupled} for config in extremes for decoupled in (True, False)]
    for results in run_ranks("tests.ranks:against_torch_all", world_size=world_size, runs=runs):
        for run, differences in zip(runs, results, strict=True):
            assert max(differences.values()) < 1e-6, (run, differences)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_neither_a_second_run_nor_random_delays_change_a_bit(run_ranks: Any, precision: str, world_size: int) -> None:
    """FAULTS 43, and the stress test: worker, copies and trainer are late at random."""
    calm: dict[str, Any] = {"config": {"topk_ratio": 0.3, "full_warm_up_rounds": 2}, "precision": precision}
    late = [{**calm, "delays_secs": 0.05, "seed": seed} for seed in (1, 2)]
    ranks = run_ranks("tests.ranks:train_all", world_size=world_size, runs=[calm, calm, *late])
    for first, *others in ranks:
        assert all(equal_bits(first, other) for other in others)
        assert equal_bits(first, ranks[0][0])  # all ranks hold the same weights


def test_one_batch_of_eight_equals_two_of_four_in_both_stages(run_ranks: Any) -> None:
    """FAULTS 1."""
    runs = [
        {"config": {"topk_ratio": 0.3}, "stage": stage, "accumulate": accumulate}
        for stage in (1, 2)
        for accumulate in (1, 2)
    ]
    whole, *others = run_ranks("tests.ranks:train_all", world_size=1, runs=runs)[0]
    for other in others:
        assert all(relative(other[name], whole[name]) < 1e-5 for name in whole)


@pytest.mark.parametrize("topk_ratio", [0, 1], ids=["deferred", "selected"])
def test_bf16_weights_keep_fp32_masters_that_move_at_tiny_rates(run_ranks: Any, topk_ratio: float) -> None:
    """Selected weights equal AdamW's; one deferred step for n comes close to n steps in much the same direction."""
    result = run_ranks("tests.ranks:tiny_steps", world_size=1, topk_ratio=topk_ratio)[0]
    assert result["movement"] > 1e-5  # the weights did move
    assert result["moved"] < (1e-3 if topk_ratio else 0.05), result
    assert result["rounded"] == 1.0  # after settling the model holds the rounded masters
