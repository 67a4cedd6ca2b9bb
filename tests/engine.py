"""A DeepSpeed engine with ZenFlow's optimizer, without Lightning: what the comparison tests drive directly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch

from lightning_zenflow import ds_config
from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.optimizer import ZenFlowAdamW
from lightning_zenflow.zero.install import installed, without_compiling
from lightning_zenflow.zero.settings import RunSettings
from lightning_zenflow.zero.stage12 import ZenFlowZeroOptimizer


def init_distributed(backend: str = "gloo") -> None:
    """Joins the process group that MASTER_ADDR, RANK and so on describe."""
    with without_compiling():
        deepspeed.init_distributed(backend, dist_init_required=True, verbose=False)


@contextmanager
def zenflow_engine(
    model: torch.nn.Module,
    groups: list[dict[str, Any]],
    zenflow: ZenFlowConfig,
    *,
    stage: int = 2,
    select_interval: int = 1000,
    clip_norm: float = 0.0,
    precision: str = "fp32",
    local_ranks: int = 1,
    **zero: Any,
) -> Iterator[tuple[Any, ZenFlowZeroOptimizer]]:
    """Yields the engine and its ZeRO optimizer, and ends the background process."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": clip_norm,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 4_000, "allgather_bucket_size": 4_000, **zero},
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    ds_config.complete(config)
    optimizer = ZenFlowAdamW(groups)
    with installed(RunSettings(zenflow, select_interval, local_ranks=local_ranks)):
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)[0]
    try:
        yield engine, engine.optimizer
    finally:
        engine.destroy()
