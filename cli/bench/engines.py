"""The engine of each mode, built the way its users build it."""

from __future__ import annotations

import logging
import os
import socket
from typing import Any

from torch import nn

from lightning_zenflow import ZenFlowConfig, ds_config

from .compiling import load_cpu_adam
from .job import Job
from .modes import is_ours
from .settings import Cores

LR = 1e-5
BUCKETS = {"reduce_bucket_size": 20_000_000, "allgather_bucket_size": 20_000_000}


def free_port() -> int:
    """A port of the loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def join_group(accelerator: Any) -> None:
    """Joins the process group that the environment describes; without one, a group of this process alone."""
    import deepspeed

    from lightning_zenflow.zero.install import without_compiling

    deepspeed.utils.logging.logger.setLevel(logging.ERROR)
    if "RANK" not in os.environ:
        os.environ.update(
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(free_port()),
            RANK="0",
            WORLD_SIZE="1",
            LOCAL_RANK="0",
            LOCAL_SIZE="1",
        )
    backend = "gloo" if accelerator.device_name() == "cpu" else accelerator.communication_backend_name()
    with without_compiling():
        deepspeed.init_distributed(backend, verbose=False)


def build_engine(job: Job, model: nn.Module, cores: Cores, pinned: bool = False) -> Any:
    """DeepSpeed's engine for every mode that has one: all but `compute` and `zenflow_auto`.

    Args:
        job: What to measure.
        model: The model in fp32; it is trained in bf16.
        cores: Those of the background process.
        pinned: Whether DeepSpeed page-locks its host memory.
    """
    import deepspeed

    zero: dict[str, Any] = {"stage": job.zero_stage, **BUCKETS}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
    }
    if is_ours(job.mode):
        return _zenflow_engine(job, model, config, cores)
    config["optimizer"] = {"type": "AdamW", "params": {"lr": LR}}
    if job.mode in ("zero", "zero_2"):
        config["optimizer"]["params"]["torch_adam"] = True
    else:
        load_cpu_adam()
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": pinned}
    if job.mode == "ds_zenflow":
        zero["zenflow"] = {
            "topk_ratio": job.topk_ratio,
            "select_strategy": "step",
            "select_interval": 1000,
            "update_interval": job.update_interval,
            "overlap_step": True,
            "full_warm_up_rounds": 0,
        }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def _zenflow_engine(job: Job, model: nn.Module, config: dict[str, Any], cores: Cores) -> Any:
    import deepspeed

    from lightning_zenflow.optimizer import ZenFlowAdamW
    from lightning_zenflow.zero.install import installed
    from lightning_zenflow.zero.settings import RunSettings

    settings = ZenFlowConfig(
        topk_ratio=job.topk_ratio,
        select_strategy="step",
        select_interval=job.select_interval,
        update_interval=job.update_interval,
    )
    ds_config.complete(config)
    optimizer = ZenFlowAdamW(model.parameters(), lr=LR)
    with installed(RunSettings(settings, job.select_interval, worker_cores=cores.worker, local_ranks=job.ranks)):
        return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
