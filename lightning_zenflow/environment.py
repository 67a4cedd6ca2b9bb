"""What a rank runs on: the accelerator that DeepSpeed has chosen, and who gets which cores of the machine."""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator, MPSAccelerator
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.core_shares import Share
from lightning_zenflow.forked_threads import threads_are_lost
from lightning_zenflow.offload.affinity import worker_cores


def check_accelerator(accelerator: Any) -> None:
    """Compares Lightning's accelerator with DeepSpeed's.

    Raises:
        RuntimeError: It is MPS, or another one than DeepSpeed has chosen.
    """
    from deepspeed.accelerator import get_accelerator

    if isinstance(accelerator, MPSAccelerator):
        raise RuntimeError(
            "ZenFlow must run on CUDA or CPU, got MPS, which DeepSpeed cannot use. Set accelerator='cpu'."
        )
    name = get_accelerator().device_name()
    known = ((CPUAccelerator, "cpu"), (CUDAAccelerator, "cuda"))
    wanted = next((device for kind, device in known if isinstance(accelerator, kind)), name)
    if name != wanted:
        raise RuntimeError(
            f"`accelerator` must be the one that DeepSpeed uses, got {wanted!r} while DeepSpeed has chosen {name!r}. Set"
            f" the environment variable DS_ACCELERATOR={wanted} before the program starts."
        )


def cores_of_worker(config: ZenFlowConfig, local_rank: int, local_ranks: int, share: Share | None = None) -> list[int]:
    """Cores of this rank's background process; empty for no pinning.

    Args:
        config: May name the cores, or the share of them that stays with PyTorch.
        local_rank: Number of this rank on this machine.
        local_ranks: Ranks on this machine.
        share: Its place among those that divide the same cores, if these are not all ranks of the machine.

    Raises:
        ValueError: `worker_cores` is given with several ranks on a machine.
    """
    if config.worker_cores is None:
        rank, ranks = share or (local_rank, local_ranks)
        return worker_cores(os.sched_getaffinity(0), config.pt_reserved_cores_perc, rank, ranks)
    if local_ranks > 1:
        raise ValueError(
            f"`worker_cores` must be left out with {local_ranks} ranks on a machine, got {config.worker_cores}. Set"
            " `pt_reserved_cores_perc` instead."
        )
    return list(config.worker_cores)


class TorchThreads:
    """On CPU, where PyTorch's threads and the background process want the same cores, PyTorch gets its share of them.

    Only from `limit` to `restore`, and not if OMP_NUM_THREADS says how many. Twice the threads on half the cores would not
    be half as fast, but several times slower.
    """

    def __init__(self) -> None:
        self._before: int | None = None

    def limit(self, cores_of_one_worker: int, ranks: int) -> None:
        """Leaves the workers' cores to them, and shares the others between the ranks that may use the same cores."""
        if "OMP_NUM_THREADS" in os.environ:
            return
        self._before = torch.get_num_threads()
        reserved = len(os.sched_getaffinity(0)) - ranks * cores_of_one_worker
        torch.set_num_threads(max(1, min(self._before, reserved // ranks)))

    def make_do(self) -> None:
        """Computes with one thread from now on if this process was forked from one that had more, which it has lost."""
        if threads_are_lost():
            torch.set_num_threads(1)
            rank_zero_warn(
                "This process was forked from one in which PyTorch had computed with several threads, and can use one alone:"
                " it would wait for the others for ever. Start it with multiprocessing's 'spawn' instead, or compute nothing"
                " before the fork.",
                category=RuntimeWarning,
            )

    def restore(self) -> None:
        """Gives PyTorch the threads that it had. Safe to call again."""
        if self._before is not None:
            torch.set_num_threads(self._before)
            self._before = None
