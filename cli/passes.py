"""The passes over optimizer state on this machine, in seconds per element: this package's own, and ZeRO-Offload's.

Bounded like everything in `measure`: under 3 seconds and 300 MB.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from lightning_zenflow.adamw import Hyper, adamw_
from lightning_zenflow.offload.arena import Arena
from lightning_zenflow.offload.layout import ArenaLayout
from lightning_zenflow.offload.protocol import Accumulated, Gradient, Start, Update, Updated
from lightning_zenflow.offload.worker import HostAdamW
from lightning_zenflow.rates import accumulate_bytes, update_bytes

from .measure import device, median_secs, on_cores

NUMEL = 10_000_000
BLOCKS = 4
HYPER = Hyper(lr=1e-5, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01)
OFFLOAD_NUMEL = 1 << 22
OFFLOAD_DOWN_PIECES, OFFLOAD_STEP_PIECES = 5, 2
"""How many tensors of that size: with fewer, large caches hold what a model's gradients are copied to."""


@dataclass(frozen=True)
class HostPasses:
    """The background process's two passes, alone on its cores.

    Attributes:
        accumulate_secs: Seconds per element of adding a gradient.
        update_secs: Seconds per element of AdamW on a block, its gradient included.
        wire_bytes: Bytes of a gradient element.
        cores: How many cores worked.
    """

    accumulate_secs: float
    update_secs: float
    wire_bytes: int
    cores: int

    @property
    def accumulate_bandwidth(self) -> float:
        """Memory traffic of adding a gradient, bytes/s."""
        return accumulate_bytes(self.wire_bytes) / self.accumulate_secs

    @property
    def update_bandwidth(self) -> float:
        """Memory traffic of AdamW, bytes/s."""
        return update_bytes(self.wire_bytes) / self.update_secs


def host_passes(dtype: torch.dtype, cores: Collection[int], numel: int = NUMEL) -> HostPasses:
    """Measures `HostAdamW` on an arena of its own, in this process.

    Args:
        dtype: Of gradients.
        cores: Cores to work on, a thread each.
        numel: Elements of the shard; 18 to 24 bytes each.
    """
    arena = Arena.create(ArenaLayout(numel, dtype, BLOCKS))
    try:
        with on_cores(cores):
            torch.set_num_threads(1)  # as in the background process: passes are shared by pieces
            host = HostAdamW(arena, Start(arena.layout, (numel,), None, "linear"), len(cores), lambda: None)
            arena.slot.fill_(1e-3)
            gradient, clock = Gradient(1.0, (HYPER.lr,)), iter(range(1, 1 << 30))

            def step() -> None:
                number = next(clock)
                host.update(
                    Update(number % BLOCKS, number % 2, number, 0.625, (HYPER,), gradient, others=True), answers.append
                )

            answers: list[Any] = []
            median_secs(step, warm_ups=BLOCKS)
            added, updated = (
                [answer.secs for answer in answers if isinstance(answer, kind)][BLOCKS:]
                for kind in (Accumulated, Updated)
            )
            accumulate_secs, update_secs = statistics.median(added), statistics.median(updated)
    finally:
        arena.close()
    block = -(-numel // BLOCKS)
    return HostPasses(accumulate_secs / (numel - block), update_secs / block, dtype.itemsize, len(cores))


@dataclass(frozen=True)
class OffloadPasses:
    """What DeepSpeed's ZeRO-Offload does with every element, in seconds per element.

    Attributes:
        down_secs: A gradient's way from backward to its fp32 place on the host.
        step_secs: Clipping, Adam and rounding on the host.
    """

    down_secs: float
    step_secs: float


def offload_passes(dtype: torch.dtype, cores: Collection[int]) -> OffloadPasses:
    """Measures the tensor operations of DeepSpeed 0.19 one after the other, with PyTorch's AdamW for its compiled one.

    Args:
        dtype: Of gradients and weights.
        cores: Cores of the trainer, which does the host's work too.
    """
    with on_cores(cores):
        return OffloadPasses(_offload_down_secs(dtype), _offload_step_secs(dtype))


def _offload_down_secs(dtype: torch.dtype) -> float:
    """Seconds per element, from backward into the host's fp32 gradient."""
    grads = [torch.full((OFFLOAD_NUMEL,), 1e-3, device=device(), dtype=dtype) for _ in range(OFFLOAD_DOWN_PIECES)]
    bucket, reduced = torch.empty_like(grads[0]), torch.empty_like(grads[0])
    host_grad = torch.zeros(OFFLOAD_DOWN_PIECES * OFFLOAD_NUMEL)

    def down() -> None:
        for grad, place in zip(grads, host_grad.split(OFFLOAD_NUMEL), strict=True):
            bucket.copy_(grad)
            bucket.div_(1.0)
            reduced.copy_(bucket)
            reduced.double().norm(2)
            torch.isfinite(reduced.amax()).logical_and(torch.isfinite(reduced.amin()))
            place.copy_(reduced.float(), non_blocking=True)

    return median_secs(down) / host_grad.numel()


def _offload_step_secs(dtype: torch.dtype) -> float:
    """Seconds per element of the host's step."""
    master, host_grad, exp_avg, exp_avg_sq = (torch.zeros(OFFLOAD_STEP_PIECES * OFFLOAD_NUMEL) for _ in range(4))
    rounded = torch.empty(master.shape, dtype=dtype)

    def step() -> None:
        host_grad.mul_(0.5)
        adamw_(master, host_grad, exp_avg, exp_avg_sq, HYPER, clock=10)
        rounded.copy_(master)

    return median_secs(step) / master.numel()
