"""Single steps of training on the CPU, counted; in this process, or in each rank through `run_ranks`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.stats import StepStats
from tests.counted import Counting
from tests.engine import init_distributed, zenflow_engine

UPDATE_INTERVAL = 4
SELECT_INTERVAL = 6
CLIP_NORM = 1e-9
"""So small that every step is clipped, and gradients are scaled."""
COUNTED_STEP = 6
"""The last before columns are selected again, at steps 1, 7, ...: all blocks have come round."""


@dataclass(frozen=True)
class Counted:
    """One step of training, as kernels saw it.

    Attributes:
        step: Forward, backward and step with ZenFlow.
        plain: Forward and backward of the same model alone.
        numel: Parameters of the model.
        selected_numel: Of which live on the device.
        stats: ZenFlow's own figures of the step.
        arena: Begin and end of the addresses that are shared with the worker.
    """

    step: Counting
    plain: Counting
    numel: int
    selected_numel: int
    stats: StepStats
    arena: tuple[int, int]

    @property
    def extra_kernels(self) -> int:
        """Kernels that ZenFlow and DeepSpeed add."""
        return len(self.step.kernels) - len(self.plain.kernels)

    @property
    def extra_dispatched(self) -> int:
        """Calls of the dispatcher that they add."""
        return self.step.dispatched - self.plain.dispatched

    @property
    def extra_bytes(self) -> int:
        """Bytes that they read and write."""
        return self.step.nbytes - self.plain.nbytes


def stack(rows: int, cols: int, layers: int, bias: bool = True) -> nn.Sequential:
    """`layers` pairs of a matrix of `rows * cols` elements and a vector, or the matrices alone."""
    torch.manual_seed(0)
    made: list[nn.Module] = []
    for number in range(layers):
        made.append(nn.Linear(*((cols, rows) if number % 2 == 0 else (rows, cols)), bias=bias))
    return nn.Sequential(*made)


def forward_and_backward(model: Any, x: torch.Tensor, backward: Any) -> None:
    backward(model(x).float().square().mean())


def counted_step(
    rows: int = 512,
    cols: int = 512,
    layers: int = 2,
    topk_ratio: float = 0.125,
    *,
    steps: int = COUNTED_STEP,
    bias: bool = True,
    precision: str = "bf16",
    fresh: bool = False,
    interim_step: bool = False,
    **zero: Any,
) -> Counted:
    """Counts step `steps` of a run; torch.distributed must be there.

    With `fresh` each step has another batch, so that columns change when they are selected anew. `interim_step`, which the
    package has by default, is left out unless asked for: what it adds is counted by itself.
    """
    config = ZenFlowConfig(
        topk_ratio=topk_ratio,
        select_strategy="step",
        select_interval=SELECT_INTERVAL,
        update_interval=UPDATE_INTERVAL,
        interim_step=interim_step,
    )
    model = stack(rows, cols, layers, bias)
    groups = [{"params": list(model.parameters()), "lr": 1e-4}]
    engine_of_run = zenflow_engine(
        model,
        groups,
        config,
        select_interval=SELECT_INTERVAL,
        precision=precision,
        clip_norm=CLIP_NORM,
        local_ranks=int(os.environ["WORLD_SIZE"]),
        **zero,
    )
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
    x = torch.randn(2, cols, dtype=dtype)
    with engine_of_run as (engine, adapter):
        for step in range(steps):
            if fresh:
                x = torch.randn_like(x)
            with Counting() as counted:
                forward_and_backward(engine, x, engine.backward)
                engine.step()
            assert adapter.shard.clock == step + 1
        stats, arena, layout = adapter.shard.stats, adapter.shard.host.arena, adapter.shard.selected.layout
        begin = arena.slot.data_ptr()
        addresses = begin, begin + arena.layout.nbytes
        selected_numel = layout.numel
        del arena
    plain_model = stack(rows, cols, layers, bias).to(dtype)
    with Counting() as plain:
        forward_and_backward(plain_model, x, torch.Tensor.backward)
    numel = sum(param.numel() for param in plain_model.parameters())
    return Counted(counted, plain, numel, selected_numel, stats, addresses)


def collectives(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run by each rank: for each run, what `counted_step` found, as what can be sent back.

    `calls` are the names and bytes of all collectives of the step, in order: bytes of what is gathered, summed up or sent,
    whole.
    """
    torch.set_num_threads(1)
    init_distributed()
    found = []
    for run in runs:
        counted = counted_step(**run)
        calls = []
        for kernel in counted.step.collectives:
            operands = (*kernel.read, *kernel.written)
            calls.append((kernel.name, max((operand.nbytes for operand in operands), default=0)))
        found.append({"calls": calls, "numel": counted.numel, "selected_numel": counted.selected_numel})
    return found
