"""The model that grows, and an engine around it without a Trainer: the one place that builds either."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

BUCKET_NUMEL = 20_000_000
UPDATE_INTERVAL = 4
TOPK_RATIO = 0.1
NEVER_AGAIN = 1_000_000
"""Columns are selected at the first step, and then not while anything is timed."""


class Grown(nn.Module):
    """Square matrices, each adding to what flows past it, so that nothing vanishes however many there are.

    Args:
        numel: Parameters, about: whole matrices of a width that is a multiple of 8.
        tensors: How many matrices.
    """

    def __init__(self, numel: int, tensors: int) -> None:
        super().__init__()
        self.width = max(8, 8 * round(math.sqrt(numel / tensors) / 8))
        scale = 1 / math.sqrt(self.width * tensors)
        self.matrices = nn.ParameterList(scale * torch.randn(self.width, self.width) for _ in range(tensors))

    @property
    def numel(self) -> int:
        """Parameters."""
        return len(self.matrices) * self.width**2

    def forward(self, x: Tensor) -> Tensor:
        for matrix in self.matrices:
            x = x + x @ matrix
        return x.float().square().mean()


@contextmanager
def engine_of(model: nn.Module, worker_cores: list[int], ranks: int) -> Iterator[Any]:
    """DeepSpeed's engine in bf16 under ZeRO-2 with ZenFlow, as the environment describes the ranks; ends it afterwards."""
    import deepspeed  # imported late: it takes seconds

    from lightning_zenflow import ZenFlowConfig, ds_config
    from lightning_zenflow.optimizer import ZenFlowAdamW
    from lightning_zenflow.zero.install import installed, without_compiling
    from lightning_zenflow.zero.settings import RunSettings

    deepspeed.utils.logging.logger.setLevel(logging.ERROR)
    with without_compiling():
        deepspeed.init_distributed("gloo", verbose=False)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 2,
            "reduce_bucket_size": BUCKET_NUMEL,
            "allgather_bucket_size": BUCKET_NUMEL,
        },
    }
    ds_config.complete(config)
    settings = ZenFlowConfig(
        topk_ratio=TOPK_RATIO,
        select_strategy="step",
        select_interval=NEVER_AGAIN,
        update_interval=UPDATE_INTERVAL,
    )
    optimizer = ZenFlowAdamW(model.parameters(), lr=1e-5)
    with installed(RunSettings(settings, NEVER_AGAIN, worker_cores=worker_cores, local_ranks=ranks)):
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    try:
        yield engine
    finally:
        engine.destroy()
