"""Short measurements of this machine: host memory, link, device. Each takes under 3 seconds and 300 MB.

All of them warm up first, take the median of several runs, run on the cores they are given, and leave the process's
affinity and thread count as they found them.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zenflow.offload.affinity import bind, worker_cores

LIMIT_SECS = 0.8
COPY_BYTES = 96 * 2**20
"""More than the caches of most cores' share."""

CPU_TOKENS, DEVICE_TOKENS = 512, 8192
CPU_WIDTHS, DEVICE_WIDTHS = (1024, 4096), (4096, 4096)
"""In and out of the first linear layer of `LinearStack`: a layer takes 8 MB in 16 bit on a CPU, 32 MB elsewhere."""


def accelerator() -> Any:
    """DeepSpeed's accelerator: CUDA, ROCm, XPU, NPU or CPU."""
    from deepspeed.accelerator import get_accelerator  # imported late: it takes seconds, and --help needs none of it

    return get_accelerator()


def device() -> torch.device:
    """The device that a first rank would use."""
    return torch.device(accelerator().current_device_name())


def device_title() -> str:
    """Its name for people."""
    name = str(accelerator().device_name())
    return f"{name} {torch.cuda.get_device_name(0)}" if name == "cuda" else name


def split_cores(ranks: int = 1) -> tuple[list[int], list[int]]:
    """The cores of this process as a first rank would share them: those left to PyTorch, and those of its worker."""
    available = os.sched_getaffinity(0)
    host = worker_cores(available, 0.5, 0, ranks)
    return sorted(available - set(host)) or host, host


@contextmanager
def on_cores(cores: Collection[int]) -> Iterator[None]:
    """Runs this thread on `cores`, with as many PyTorch threads; both are put back afterwards.

    Raises:
        ValueError: This process may not use some of the cores.
    """
    before, threads = os.sched_getaffinity(0), torch.get_num_threads()
    try:
        bind(cores)
        torch.set_num_threads(len(cores))
        yield
    finally:
        os.sched_setaffinity(0, before)
        torch.set_num_threads(threads)


def median_secs(run: Callable[[], object], limit_secs: float = LIMIT_SECS, warm_ups: int = 2) -> float:
    """Median time of `run` in seconds, device work included: 3 to 30 runs, no more after `limit_secs`."""
    synchronize = accelerator().synchronize
    for _ in range(warm_ups):
        run()
    synchronize()
    secs: list[float] = []
    while len(secs) < 3 or (len(secs) < 30 and sum(secs) < limit_secs):
        begin = time.perf_counter()
        run()
        synchronize()  # launched is not done
        secs.append(time.perf_counter() - begin)
    return statistics.median(secs)


@dataclass(frozen=True)
class HostBandwidth:
    """What `cores` cores move in host memory, reading and writing: `bandwidth` in bytes/s."""

    bandwidth: float
    cores: int


def host_bandwidth(cores: Collection[int]) -> HostBandwidth:
    """Measures a copy within host memory, of which every byte counts as read and as written."""
    with on_cores(cores):
        source = torch.ones(COPY_BYTES // 4)
        target = torch.empty_like(source)
        secs = median_secs(lambda: target.copy_(source))
    return HostBandwidth(2 * source.nbytes / secs, len(cores))


@dataclass(frozen=True)
class Link:
    """Copies between page-locked host memory and the device, in bytes/s.

    Attributes:
        down_bandwidth: Device to host.
        up_bandwidth: Host to device.
        is_pinned: Whether the host memory could be page-locked.
    """

    down_bandwidth: float
    up_bandwidth: float
    is_pinned: bool


def link(cores: Collection[int], nbytes: int = COPY_BYTES) -> Link:
    """Measures copies in both directions; where the CPU is the device, they are copies within its memory.

    Args:
        cores: Cores of the trainer, which launches or does the copies.
        nbytes: Size of a copy.
    """
    with on_cores(cores):
        theirs = torch.ones(nbytes // 4, device=device())
        ours, is_pinned = _pinned(nbytes // 4)
        down = median_secs(lambda: ours.copy_(theirs, non_blocking=True))
        up = median_secs(lambda: theirs.copy_(ours, non_blocking=True))
    return Link(ours.nbytes / down, ours.nbytes / up, is_pinned)


def _pinned(numel: int) -> tuple[Tensor, bool]:
    plain = torch.ones(numel)
    if device().type == "cpu":
        return plain, False
    try:
        return accelerator().pin_memory(plain), True
    except RuntimeError:  # a small limit on locked memory; copies then go through the driver's own buffer
        return plain, False


@dataclass(frozen=True)
class DeviceSpeed:
    """FLOP/s that forward and backward reach with `tokens` tokens in `dtype`."""

    flops: float
    tokens: int
    dtype: torch.dtype


class LinearStack(nn.Module):
    """Linear layers with activations between them: what most of a transformer's time goes to.

    Args:
        dtype: Of weights and activations.
        where: The device.
        layers: Number of layers; so many that weights and gradients do not stay in a core's cache from step to step.
    """

    def __init__(self, dtype: torch.dtype, where: torch.device, layers: int = 6) -> None:
        super().__init__()
        first, second = CPU_WIDTHS if where.type == "cpu" else DEVICE_WIDTHS
        widths = [(first, second), (second, first)] * (layers // 2) + [(first, second)] * (layers % 2)
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False, device=where, dtype=dtype) for a, b in widths)
        self.width = first

    @property
    def numel(self) -> int:
        """Number of parameters."""
        return sum(param.numel() for param in self.parameters())

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.gelu(layer(x))
        return x.float().square().mean()


def device_flops(tokens: int, dtype: torch.dtype, cores: Collection[int]) -> DeviceSpeed:
    """Measures forward and backward of a small model, so that what few tokens cost (reading weights) is included.

    Args:
        tokens: Tokens of a micro-batch. More than 512 on a CPU, or 8192 elsewhere, make no difference and are not run.
        dtype: Of weights and activations.
        cores: Cores of the trainer.
    """
    with on_cores(cores):
        model = LinearStack(dtype, device())
        few = min(tokens, CPU_TOKENS if device().type == "cpu" else DEVICE_TOKENS)
        x = torch.randn(few, model.width, device=device(), dtype=dtype)

        def run() -> None:
            loss = model(x)
            model.zero_grad(set_to_none=True)
            loss.backward()

        secs = median_secs(run)
    return DeviceSpeed(6 * model.numel * few / secs, few, dtype)
