"""The model of the setting `two-core`: large weights and little compute, as in fine-tuning with small batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 1024


def build_model(width: int = WIDTH, depth: int = 8) -> nn.Sequential:
    """An MLP in fp32: 67 million parameters as it stands, 8.4 million in each of `depth` blocks."""
    blocks = [(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(depth)]
    return nn.Sequential(*[layer for block in blocks for layer in block])


def make_batch(tokens: int) -> Tensor:
    """Hidden states `[tokens, WIDTH]` in bf16."""
    return torch.randn(tokens, WIDTH).bfloat16()


def loss_of(model: Any, batch: Tensor) -> Tensor:
    """A number that depends on every weight."""
    return model(batch).float().pow(2).mean()
