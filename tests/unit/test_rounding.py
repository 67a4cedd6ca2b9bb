"""Stochastic rounding of moments: element by element as stated, right in the mean, and never where nothing is to round."""

from __future__ import annotations

import struct
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from lightning_zenflow import rounding
from lightning_zenflow.adamw import Hyper, adamw_
from lightning_zenflow.offload import worker
from lightning_zenflow.rounding import NOISES, noise_at, round_into, rounded, rounded_columns
from lightning_zenflow.shards import Piece

EVERY_BF16 = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def bits_of(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def slowly(value: float, noise: int) -> float:
    """The bf16 neighbour of smaller magnitude, or the other one if the noise reaches that far."""
    bits = bits_of(value)
    lower, rest = bits >> 16, bits & 0xFFFF
    return float(struct.unpack("<f", struct.pack("<I", (lower + (rest + noise > 0xFFFF)) << 16))[0])


def test_every_element_is_rounded_as_stated_bit_for_bit_wherever_a_run_begins() -> None:
    torch.manual_seed(0)
    first, clock = 3 * NOISES - 700, 12345
    moments = torch.randn(2, 1501) * 10.0 ** torch.randint(-30, 30, (2, 1501))
    expected = [
        [
            slowly(value.item(), int(noise_at(torch.tensor(first + index), clock, moment)))
            for index, value in enumerate(row)
        ]
        for moment, row in enumerate(moments)
    ]
    targets = torch.empty(2, 1501, dtype=torch.bfloat16)
    round_into((targets[0], targets[1]), moments.clone(), first, clock)
    assert targets.tolist() == expected
    places = first + torch.arange(1501)
    for moment in (0, 1):
        assert rounded(moments[moment], noise_at(places, clock, moment)).tolist() == expected[moment]
        assert (targets[moment] != moments[moment].to(torch.bfloat16)).any(), "that is not the nearest"


def test_how_a_shard_is_cut_into_runs_changes_no_bit() -> None:
    torch.manual_seed(0)
    numel, first = rounding.RUN_NUMEL + 1000, 10**12 + 7
    moments, whole, parts = torch.randn(2, numel), *(torch.empty(2, numel, dtype=torch.bfloat16) for _ in range(2))
    round_into((whole[0], whole[1]), moments.clone(), first, 9)
    for start, stop in ((0, 1), (1, 70_000), (70_000, 70_003), (70_003, numel)):
        into = parts[:, start:stop]
        round_into((into[0], into[1]), moments[:, start:stop].clone(), first + start, 9)
    assert torch.equal(whole, parts) and worker.CHUNK_NUMEL <= rounding.RUN_NUMEL


def test_columns_are_rounded_as_runs_are_beyond_two_to_the_31() -> None:
    """FAULTS 18: by a place in the shard that 32 bits do not hold."""
    torch.manual_seed(0)
    piece, clock, columns = Piece(3_000_000_000, rows=7, width=100, column=0, group=0), 9, torch.tensor([0, 31, 99])
    moments, runs = torch.randn(2, 700), torch.empty(2, 700, dtype=torch.bfloat16)
    round_into((runs[0], runs[1]), moments.clone(), piece.start, clock)
    for moment in (0, 1):
        chosen, expected = (each[moment].view(7, 100)[:, columns] for each in (moments, runs))
        assert torch.equal(rounded_columns(chosen, piece, columns, clock, moment), expected)


def test_what_bf16_holds_is_never_changed_infinities_and_nan_included() -> None:
    for noise in (0, 1, 0x7FFF, 0xFFFF):
        same = rounded(EVERY_BF16.float(), torch.full((1 << 16,), noise, dtype=torch.int32))
        finite = EVERY_BF16.isfinite()
        assert torch.equal(same[finite].view(torch.int16), EVERY_BF16[finite].view(torch.int16)), "minus zero included"
        assert torch.equal(same.isinf(), EVERY_BF16.isinf()) and torch.equal(same.isnan(), EVERY_BF16.isnan())
        assert (
            rounded(torch.tensor([torch.nan, -torch.nan, torch.inf - torch.inf]), torch.tensor([noise] * 3))
            .isnan()
            .all()
        )


@pytest.mark.parametrize("clocks_apart", [1, 4, 64])
def test_an_element_that_is_rounded_at_every_noise_is_right_in_the_mean(clocks_apart: int) -> None:
    """Also if it is updated at every 64th step only, where noises of a power of two would come again too soon."""
    clocks = clocks_apart * torch.arange(NOISES)
    for place, moment in ((0, 0), (10**10 + 1, 1)):
        noises = torch.stack([noise_at(torch.tensor(place), int(clock), moment) for clock in clocks[:3]]).tolist()
        assert len(set(noises)) == 3
        # The same by places: an element's noise at a clock is that of another element at clock 0.
        offsets = (2 * clocks + moment) * rounding._STRIDE + place
        noise = noise_at(offsets, 0, 0)
        assert noise[:3].tolist() == noises
        for value in (1.001, -0.30003, 3e-30):
            lower, upper = slowly(value, 0), slowly(value, 0xFFFF)
            share = (rounded(torch.full((NOISES,), value), noise) == upper).double().mean().item()
            exact = Fraction(float(torch.tensor(value))) - Fraction(lower)
            assert share == pytest.approx(float(exact / (Fraction(upper) - Fraction(lower))), abs=2 / NOISES)


def test_noise_of_an_element_at_different_clocks_and_of_its_moments_is_not_related() -> None:
    places = torch.arange(200_000)
    series = [noise_at(places, clock, moment).double() for clock, moment in ((7, 0), (7, 1), (8, 0), (11, 0), (11, 1))]
    correlations = torch.corrcoef(torch.stack(series)) - torch.eye(len(series))
    assert correlations.abs().max() < 0.02


def trained(rounds: str, steps: int = 600, numel: int = 4000) -> tuple[Tensor, Tensor]:
    """Second moments and weights after AdamW on noisy gradients whose size falls and then grows."""
    generator = torch.Generator().manual_seed(3)
    hyper = Hyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0)
    weight, wide = torch.ones(numel), torch.zeros(2, numel)
    stored = torch.zeros(2, numel, dtype=torch.bfloat16)
    for clock in range(1, steps + 1):
        size = 1.0 if clock <= 300 else 0.3
        grad = size * (0.3 * weight + torch.randn(numel, generator=generator))
        if rounds != "not":
            wide.copy_(stored)
        adamw_(weight, grad, wide[0], wide[1], hyper, clock=clock)
        if rounds == "stochastically":
            round_into((stored[0], stored[1]), wide, 0, clock)
        elif rounds == "to the nearest":
            stored.copy_(wide)
    return (wide if rounds == "not" else stored.float())[1].clone(), weight


def test_the_second_moment_follows_that_in_fp32_where_rounding_to_the_nearest_leaves_it_behind() -> None:
    (exact, weight), (ours, near), (frozen, far) = map(trained, ("not", "stochastically", "to the nearest"))
    assert ours.mean().item() == pytest.approx(exact.mean().item(), rel=0.01)
    assert (ours / exact).log().abs().mean() < 0.05 < 0.15 < (frozen / exact).log().abs().mean()
    assert abs(frozen.mean() / exact.mean() - 1) > 0.2
    assert (near - weight).norm() < 0.01 * (weight - 1).norm() and 2 * (near - weight).norm() < (far - weight).norm()
