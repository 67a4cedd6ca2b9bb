"""The char-GPT of DESIGN section 2.2: model, data and learning rate of the convergence figures."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB = 128
SEQUENCE = 64
STEPS = 400
WARM_UP_STEPS = 40


def load_text() -> Tensor:
    """The first 1.5 million characters of the standard library's modules, int64 `[characters]`, as ids below `VOCAB`."""
    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:120]
    text = "".join(module.read_text(errors="ignore") for module in modules)[:1_500_000]
    return torch.tensor(list(text.encode()), dtype=torch.long).clamp(max=VOCAB - 1)


def batches(text: Tensor, steps: int = STEPS, batch_size: int = 16, seed: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields `steps` random batches: ids and the ids that follow them, both int64 `[batch_size, SEQUENCE]`."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(0, len(text) - SEQUENCE - 1, (batch_size,), generator=generator)
        window = text[starts[:, None] + torch.arange(SEQUENCE + 1)]
        yield window[:, :-1], window[:, 1:]


def learning_rate(step: int, lr: float, steps: int = STEPS) -> float:
    """The rate at `step` (1, 2, ...): linear warm-up, then linear decay to 2 % of `lr`."""
    return lr * min(1.0, step / WARM_UP_STEPS) * max(0.02, 1 - step / steps)


class Block(nn.Module):
    """A pre-norm transformer block on fp32 `[batch, sequence, width]`."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        # The order of construction decides what the seed gives to whom, and so the figures.
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class CharGPT(nn.Module):
    """A small causal language model over `VOCAB` characters and at most `SEQUENCE` places."""

    def __init__(self, width: int = 128, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, width), nn.Embedding(SEQUENCE, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits fp32 `[batch, sequence, VOCAB]` of ids int64 `[batch, sequence]`."""
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, ids: Tensor, following: Tensor) -> Tensor:
        """Mean cross-entropy of the following characters, a scalar."""
        return F.cross_entropy(self(ids).flatten(0, 1), following.flatten())
