"""The engine against `reference.py`: every pair of settings on 1 and 2 ranks, and random mixtures."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from tests.patience import patient

FACTORS: dict[str, list[Any]] = {
    "stage": [2, 1, 3],
    "offload_params": [False, True],
    "topk_ratio": [0.1, 0, 0.5, 1],
    "update_interval": [4, 1, 2],
    "overlap": [True, False],
    "look_ahead": [True, False],
    "interim": [True, False],
    "warm_up": [0, 3],
    "accumulate": [1, 2],
    "clip_norm": [0.0, 0.05],
    "select_interval": [5, 3, 100],
    "lr_scale": ["linear", "sqrt", "none"],
    "decoupled": [True, False],
    "moments_dtype": ["fp32", "bf16"],
    "skips_parameter": [True, False],
    "nan_step": [None, 4, 6],
    "small_pieces": [False, True],
    "settle_before_step": [None, 7],
    "changes": [None, ((3, 2, 7), (6, 8, 2), (7, 1, 2), (11, 3, 4)), ((4, 4, 2), (5, 4, 9), (9, 5, 1))],
}


def random_case(randomly: random.Random) -> dict[str, Any]:
    return {name: randomly.choice(values) for name, values in FACTORS.items()}


def pairs_of(case: dict[str, Any]) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    return set(itertools.combinations(case.items(), 2))


def pairwise_cases() -> list[dict[str, Any]]:
    """Few cases in which every two values of every two factors meet at least once."""
    randomly = random.Random(0)
    missing = {((a, x), (b, y)) for a, b in itertools.combinations(FACTORS, 2) for x in FACTORS[a] for y in FACTORS[b]}
    cases = []
    while missing:
        best = max((random_case(randomly) for _ in range(60)), key=lambda case: len(missing & pairs_of(case)))
        (a, x), (b, y) = min(missing, key=repr)
        best.update({a: x, b: y})
        missing -= pairs_of(best)
        cases.append(best)
    return cases


def check(run_ranks: Any, cases: list[dict[str, Any]], world_size: int) -> None:
    results = run_ranks(
        "tests.ranks:compare", world_size=world_size, timeout=patient(20 + 10 * len(cases)), cases=cases
    )
    for rank, differences in enumerate(results):
        assert len(differences) == len(cases)
        for case, worst in zip(cases, differences, strict=True):
            assert worst["gradient"] < 1e-5, (rank, case, worst)  # autograd's own summation order
            assert worst["norm"] < 1e-6, (rank, case, worst)
            # An error of 1e-7 may decide how a moment is rounded; other noise in either makes a difference of 5e-4.
            assert worst["weights"] < (5e-5 if case["moments_dtype"] == "bf16" else 1e-6), (rank, case, worst)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("world_size", [1, 2])
def test_every_pair_of_settings_equals_the_reference(run_ranks: Any, world_size: int) -> None:
    cases = pairwise_cases()
    assert len(cases) < 40
    check(run_ranks, cases, world_size)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_gradient_far_beyond_all_before_moves_the_device_as_in_the_reference(run_ranks: Any, world_size: int) -> None:
    settings = {"spike_step": 8, "clip_norm": 0.05, "topk_ratio": 0.1, "moments_dtype": "fp32"}
    check(run_ranks, [{**settings, "stage": stage} for stage in (2, 3)], world_size)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_random_mixtures_of_settings_equal_the_reference_on_two_ranks(run_ranks: Any) -> None:
    randomly = random.Random(1)
    check(run_ranks, [random_case(randomly) for _ in range(24)], world_size=2)
