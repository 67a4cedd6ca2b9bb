"""The model of the setting `quickstart`: of the same kind and size as that of `examples/quickstart.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

ASCII, WIDTH, HEADS, CONTEXT = 128, 128, 4, 64


class CharacterModel(nn.Module):
    """A decoder-only transformer that predicts the next character.

    Args:
        depth: Number of layers.
    """

    mask: Tensor

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(ASCII, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        options: dict[str, Any] = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, **options) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, ASCII)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        """Scores `[windows, CONTEXT, ASCII]` of the characters after those of `text`, `[windows, CONTEXT]`."""
        hidden = self.characters(text) + self.positions.weight
        for layer in self.layers:
            hidden = layer(hidden, src_mask=self.mask, is_causal=True)
        return self.head(self.norm(hidden))


def build_model(depth: int = 3) -> CharacterModel:
    """The model in fp32."""
    return CharacterModel(depth)


def make_batch(tokens: int) -> Tensor:
    """Windows of random characters `[tokens // CONTEXT, CONTEXT + 1]`: what a step takes does not depend on the text."""
    return torch.randint(ASCII, (tokens // CONTEXT, CONTEXT + 1))


def loss_of(model: Any, batch: Tensor) -> Tensor:
    """Cross entropy of the next characters."""
    scores = model(batch[:, :-1])
    return nn.functional.cross_entropy(scores.flatten(0, 1).float(), batch[:, 1:].flatten())
