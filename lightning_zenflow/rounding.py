"""Stochastic rounding of AdamW's moments to bf16, the same on every run.

A second moment moves by a share of at most 1 - beta2 in a step. With 0.001 that is less than half a step of bf16 (1/256 to
1/128), so that rounding to the nearest would leave it where it is for ever. Here a value between two bf16 numbers becomes the
upper one with a probability equal to its distance from the lower one: right in the mean (as in arXiv 1502.02551, section 3).

The noise is no sequence that is used up, but a function of an element's place in the shard, of the clock, and of which of the
moments it is. So threads, pieces and blocks change no bit, and a run that resumes rounds as if it had never stopped.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from lightning_zenflow.shards import Piece

NOISES = 65_537
"""A prime: whatever the update interval, an element meets each of the noises before one comes again."""

RUN_NUMEL = 1 << 19
"""Elements that all operations run over before the next are touched: a piece of the background process."""

_STRIDE = 40_503
"""From a moment to the other, and half the way from a step to the next."""


@cache
def _noises() -> Tensor:
    """All numbers of 16 bits in random order, one of them twice, over and over: any run lies in one piece. int32."""
    # The raw stream of a bit generator is the same in every version of NumPy; those of PyTorch are not promised to be.
    order = np.random.PCG64(250512242).random_raw(NOISES).argsort(kind="stable")
    return torch.from_numpy(np.resize(np.minimum(order, NOISES - 2), NOISES + _STRIDE + RUN_NUMEL).astype(np.int32))


def noise_at(places: Tensor, clock: int, moment: int) -> Tensor:
    """The noise of single elements.

    Args:
        places: int64, each element's place in the shard, any shape, on CPU.
        clock: Step number of the update.
        moment: 0 for the first moment, 1 for the second.

    Returns:
        int32 from 0 to 65535, in the shape of `places`.
    """
    return _noises()[(places + (2 * clock + moment) * _STRIDE) % NOISES]


def rounded(values: Tensor, noise: Tensor) -> Tensor:
    """fp32 values in bf16. What bf16 holds exactly stays as it is, infinities included, and NaN stays NaN.

    Args:
        values: fp32 on CPU, results of arithmetic: of a NaN whose upper half is infinity's nothing would remain.
        noise: What `noise_at` gives, in the same shape.

    Returns:
        bf16 in the same shape.
    """
    # The sign is a bit of its own: away from zero if the noise carries into the upper half, which is bf16, else towards it.
    return (values.view(torch.int32) + noise).bitwise_right_shift_(16).to(torch.int16).view(torch.bfloat16)


def rounded_columns(values: Tensor, piece: Piece, columns: Tensor, clock: int, moment: int) -> Tensor:
    """Some columns of a moment in bf16.

    Args:
        values: fp32 `[piece.rows, columns]` on CPU.
        piece: Whose columns they are.
        columns: int64 within the piece, on CPU.
        clock: As for `noise_at`.
        moment: The same.

    Returns:
        bf16 in the shape of `values`.
    """
    into = torch.empty_like(values, dtype=torch.bfloat16)
    band = max(1, RUN_NUMEL // columns.numel())  # places take more memory than what lies there
    for row in range(0, piece.rows, band):
        starts = piece.start + piece.width * torch.arange(row, min(row + band, piece.rows))
        noise = noise_at(starts[:, None] + columns, clock, moment)
        into[row : row + band] = rounded(values[row : row + band], noise)
    return into


def round_into(targets: tuple[Tensor, Tensor], moments: Tensor, first: int, clock: int) -> None:
    """The same for both moments of a run of elements, without new memory.

    Args:
        targets: Where the first and the second moment go, bf16 `[numel]` on CPU.
        moments: Both, fp32 `[2, numel]` on CPU; of no use afterwards.
        first: Place of the first element in the shard.
        clock: As for `noise_at`.
    """
    offset, all_bits = first + 2 * clock * _STRIDE, moments.view(torch.int32)
    for start in range(0, moments.size(1), RUN_NUMEL):
        bits = all_bits[:, start : start + RUN_NUMEL]
        bits.add_(_noises().as_strided(bits.shape, (_STRIDE, 1), (offset + start) % NOISES)).bitwise_right_shift_(16)
        for target, upper_half in zip(targets, bits, strict=True):
            target[start : start + RUN_NUMEL].view(torch.int16).copy_(upper_half)
