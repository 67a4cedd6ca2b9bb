"""What a rank of an engine really moves in a step, counted where it is moved; called by path through `run_ranks`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from torch import Tensor, nn

from lightning_zenflow.config import ZenFlowConfig
from tests.engine import init_distributed, zenflow_engine

WIDTH, LAYERS = 64, 4
GATHERS = ("allgather_fn", "all_gather_into_tensor")
REDUCES = ("reduce_scatter_fn",)
"""Of DeepSpeed's collectives, those that stage 3 calls; each takes what it fills first."""

_FETCH = "_PartitionedParameterCoordinator__all_gather_params_"


def count_all(runs: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Several calls of `count` in the same interpreter, whose start costs more than a run."""
    torch.set_num_threads(1)
    init_distributed()
    return [count(**run) for run in runs]


def count(micro_batches: int = 1, topk_ratio: float = 0.125, update_interval: int = 4, **zero: Any) -> dict[str, float]:
    """Bytes of one step of a stack of square matrices in bf16 under ZeRO-3, once DeepSpeed has traced the model."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    settings = ZenFlowConfig(
        topk_ratio=topk_ratio, select_strategy="step", select_interval=1000, update_interval=update_interval
    )
    ranks = int(os.environ["WORLD_SIZE"])
    engine_of_run = zenflow_engine(
        model,
        [{"params": list(model.parameters()), "lr": 1e-3}],
        settings,
        stage=3,
        precision="bf16",
        local_ranks=ranks,
        **zero,
    )
    with counting() as moved, engine_of_run as (engine, adapter):
        for _ in range(4):
            moved.clear()
            for micro in range(micro_batches):
                engine.set_gradient_accumulation_boundary(micro == micro_batches - 1)
                engine.backward(engine(torch.ones(2, WIDTH, dtype=torch.bfloat16)).float().square().mean())
            engine.step()
        stats = adapter.shard.stats
        return {**moved, "to_host": stats.to_host_bytes, "to_device": stats.to_device_bytes}


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Counts bytes that collectives fill (`gathered`, `reduced`) and weights that the device is to have (`fetched`)."""
    moved: Counter[str] = Counter()
    originals = {name: getattr(dist, name) for name in (*GATHERS, *REDUCES)}
    fetch = getattr(PartitionedParameterCoordinator, _FETCH)

    def counted(name: str) -> Any:
        def call(filled: Tensor, *args: Any, **kwargs: Any) -> Any:
            moved["gathered" if name in GATHERS else "reduced"] += filled.nbytes
            return originals[name](filled, *args, **kwargs)

        return call

    def counted_fetch(self: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        moved["fetched"] += sum(param.ds_numel * 2 for param in params if param.ds_status.name == "NOT_AVAILABLE")
        return fetch(self, params, *args, **kwargs)

    for name in originals:
        setattr(dist, name, counted(name))
    setattr(PartitionedParameterCoordinator, _FETCH, counted_fetch)
    try:
        yield moved
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
        setattr(PartitionedParameterCoordinator, _FETCH, fetch)
