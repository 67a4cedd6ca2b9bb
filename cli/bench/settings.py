"""What is trained where: the settings of the comparison, and the cores and environment that all modes get alike."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from lightning_zenflow.offload.affinity import worker_cores

from ..measure import split_cores
from . import quickstart, two_core

KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 33), "MALLOC_MMAP_THRESHOLD_": str(1 << 25)}
"""Lets glibc keep what is freed (it takes no larger second value). It would give gradients and their fp32 copies back to the
system at every step and fetch them again: 10 to 150 ms of a step, at random."""


@dataclass(frozen=True)
class Setting:
    """A model and its batches.

    Attributes:
        title: For people.
        build: The model in fp32, from its depth.
        make_batch: A batch on the CPU, from its tokens.
        loss_of: The loss of a model, or of an engine around it, and a batch.
        depth: Usual number of blocks.
        tokens: Usual tokens of a step.
        token_unit: Tokens come in multiples of this.
        memory_factor: How much deeper the model is with which memory is compared; small models need more.
        plays_device: Without an accelerator, one core plays it and another one the host.
    """

    title: str
    build: Callable[[int], nn.Module]
    make_batch: Callable[[int], Tensor]
    loss_of: Callable[[Any, Tensor], Tensor]
    depth: int
    tokens: int
    token_unit: int = 1
    memory_factor: int = 2
    plays_device: bool = False

    def memory_depths(self, depth: int) -> tuple[int, int]:
        """The two depths from which bytes per parameter are taken."""
        least = max(1, depth // self.memory_factor)
        return least, self.memory_factor * least


SETTINGS = {
    "two-core": Setting(
        "MLP of width 1024",
        lambda depth: two_core.build_model(depth=depth),
        two_core.make_batch,
        two_core.loss_of,
        depth=8,
        tokens=32,
        plays_device=True,
    ),
    "quickstart": Setting(
        "character model of width 128, as in examples/quickstart.py",
        quickstart.build_model,
        quickstart.make_batch,
        quickstart.loss_of,
        depth=3,
        tokens=16 * quickstart.CONTEXT,
        token_unit=quickstart.CONTEXT,
        memory_factor=16,
    ),
}


@dataclass(frozen=True)
class Cores:
    """Who runs where.

    Attributes:
        trainer: Cores that a rank of ZenFlow is bound to; empty for no binding.
        worker: Cores of its background process.
        every: Cores that a rank of any other mode is bound to; empty for no binding.
    """

    trainer: list[int] = field(default_factory=list)
    worker: list[int] = field(default_factory=list)
    every: list[int] = field(default_factory=list)


def cores_of(setting: Setting, device_type: str, rank: int = 0, ranks: int = 1) -> Cores:
    """The cores of a rank: two of its own in the two-core setting, else no binding of the trainer.

    Raises:
        ValueError: There is only one core where two are needed.
    """
    available = sorted(os.sched_getaffinity(0))
    if not (setting.plays_device and device_type == "cpu"):
        return Cores(worker=worker_cores(available, 0.5, rank, ranks))
    if len(available) < 2:
        raise ValueError(
            f"`--setting two-core` must have 2 cores, got {len(available)}: one plays the accelerator, the other the host."
            " Give this job more, or use --setting quickstart."
        )
    device_core, host_core = (available[(2 * rank + offset) % len(available)] for offset in (0, 1))
    return Cores([device_core], [host_core], sorted([device_core, host_core]))


def environment_of(setting: Setting, device_type: str, *, keeps_memory: bool = True) -> dict[str, str]:
    """Variables that every mode runs with."""
    variables = dict(KEEP_MEMORY) if keeps_memory else {}
    if device_type == "cpu":
        variables["OMP_NUM_THREADS"] = "1" if setting.plays_device else str(len(split_cores()[0]))
    return variables
