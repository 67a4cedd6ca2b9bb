"""Lightning's DeepSpeed strategy on every accelerator that DeepSpeed knows: CUDA, ROCm, XPU, NPU and CPU."""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import warnings

import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.strategies import DeepSpeedStrategy

from lightning_zenflow.environment import check_accelerator
from lightning_zenflow.restarted import store_of_this_attempt


class _AnyAcceleratorStrategy(DeepSpeedStrategy):
    """`DeepSpeedStrategy` without its three places that refuse everything but CUDA.

    Its name is private so that command lines do not offer it as a strategy of its own.
    """

    def setup_environment(self) -> None:
        """Starts the process group on CUDA, CPU, or another accelerator that DeepSpeed knows.

        Raises:
            RuntimeError: The accelerator is MPS, or another one than DeepSpeed has chosen.
        """
        check_accelerator(self.accelerator)
        # Past DeepSpeedStrategy, which would refuse everything but CUDA.
        super(DeepSpeedStrategy, self).setup_environment()

    def _init_deepspeed_distributed(self) -> None:
        from lightning_zenflow.zero.install import without_compiling

        # DeepSpeed's own calls: under ZeRO-3 a line for each layer and step.
        warnings.filterwarnings("ignore", r".torch\.distributed\.\w+. is deprecated", category=FutureWarning)
        with without_compiling(), store_of_this_attempt():
            super()._init_deepspeed_distributed()
        _keep_in_children()
        # Lightning does this for NCCL alone. A group of another backend that outlives Python may abort the exiting process.
        atexit.unregister(_destroy_process_group)
        atexit.register(_destroy_process_group, os.getpid())

    def setup_distributed(self) -> None:
        if isinstance(self.accelerator, CUDAAccelerator):
            super().setup_distributed()
            return
        # The base class checks CUDA device indices first, which other accelerators do not have.
        from lightning.fabric.utilities.seed import reset_seed

        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    @property
    def root_device(self) -> torch.device:
        device = super().root_device
        # DeepSpeed compares the index with numbers, and a bare CPU device has none.
        return torch.device("cpu", 0) if device.type == "cpu" else device

    def _configure_launcher(self) -> None:
        if self.num_processes * self.num_nodes == 1:
            self._launcher = None  # nothing to launch, so notebooks work as well
        else:
            super()._configure_launcher()


def _destroy_process_group(owner_pid: int) -> None:
    # A forked child has none of the group's threads, and would wait for them.
    if os.getpid() == owner_pid and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@functools.cache
def _keep_in_children() -> None:
    """Once a process: has forked children leave alone what belongs to threads that only the parent has."""
    os.register_at_fork(after_in_child=_keep_process_groups)


def _keep_process_groups() -> None:
    """In a forked child: one reference more to all groups and stores, which a child that ends would wait for, or crash in."""
    world = torch.distributed.distributed_c10d._world
    for group, (_, store) in world.pg_map.items():
        for kept in (group, store):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
