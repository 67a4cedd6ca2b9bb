"""The mode `zenflow_auto`: this package as its users have it, under a Trainer, with intervals that tune themselves."""

from __future__ import annotations

import logging
import os
import statistics
import warnings
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_zenflow import AutoTuner, ZenFlowConfig, ZenFlowStrategy

from ..measure import accelerator
from .collectives import Received
from .engines import BUCKETS, LR
from .job import WARM_UP_STEPS, Job, Run
from .loop import clock, run_on
from .resident import resident_bytes
from .settings import SETTINGS, Setting, cores_of

LEAST_SETTLING_STEPS, QUIET_STEPS, MOST_SETTLING_STEPS = 48, 32, 256
"""Counting begins when no interval has changed for `QUIET_STEPS` steps (two to four of the tuner's windows)."""


class _Module(LightningModule):
    def __init__(self, setting: Setting, depth: int) -> None:
        super().__init__()
        self.setting = setting
        self.model = setting.build(depth)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.setting.loss_of(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=LR)


class Settled(Callback):
    """Times steps where the plain loop does, and keeps those after the intervals have come to rest.

    Args:
        counted_steps: How many steps to keep before training ends.
        received: What counts collectives.
    """

    def __init__(self, counted_steps: int, received: Received) -> None:
        self.counted_steps, self.received = counted_steps, received
        self.now = clock(accelerator())
        self.settling_steps = 0
        self.resident = 0
        self.steps: list[float] = []
        self.passes: list[float] = []
        self.stalls: list[float] = []
        self.selected: list[int] = []
        self.down: list[int] = []
        self.up: list[int] = []
        self.from_ranks: list[float] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self._before = self.received.nbytes
        self._start = self.now()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self._turn = self.now()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        end = self.now()
        strategy = trainer.strategy
        assert isinstance(strategy, ZenFlowStrategy)
        stats = strategy.step_stats
        if not self.settling_steps:
            if self._has_settled(trainer, stats.step):
                self.settling_steps = stats.step
            return
        if stats.select_stall_secs > 0:
            self.selected.append(len(self.steps))
        self.steps.append(end - self._start)
        self.passes.append(self._turn - self._start)
        self.stalls.append(1e3 * (stats.update_stall_secs + stats.select_stall_secs))
        self.down.append(stats.to_host_bytes)
        self.up.append(stats.to_device_bytes)
        self.from_ranks.append(self.received.nbytes - self._before)
        if len(self.steps) == self.counted_steps:
            self.intervals = list(strategy.intervals)
            self.resident = resident_bytes()
            trainer.should_stop = True

    def _has_settled(self, trainer: Trainer, step: int) -> bool:
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        decisions = [made for callback in callbacks if isinstance(callback, AutoTuner) for made in callback.decisions]
        changed_at = max((at for at, decision in decisions if decision.changed), default=0)
        quiet = step >= LEAST_SETTLING_STEPS and step - changed_at >= QUIET_STEPS
        return quiet or step >= MOST_SETTLING_STEPS


def measure(job: Job, received: Received | None = None) -> Run:
    """Trains in this process and binds it to its cores: call it in a process of its own."""
    received = received or Received()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    setting, device_type = SETTINGS[job.setting], accelerator().device_name()
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    cores = cores_of(setting, device_type, int(os.environ.get("LOCAL_RANK", "0")), job.ranks)
    run_on(cores.trainer)
    torch.manual_seed(0)
    settled = Settled(max(1, job.steps - WARM_UP_STEPS), received)
    one_rank = job.ranks == 1  # of several, each takes its share of the cores
    config = ZenFlowConfig(topk_ratio=job.topk_ratio, worker_cores=cores.worker if one_rank else None)
    trainer = Trainer(
        accelerator="cpu" if device_type == "cpu" else "auto",
        devices=job.ranks,
        precision="bf16-true",
        max_epochs=-1,
        strategy=ZenFlowStrategy(config, stage=job.zero_stage, **BUCKETS),
        callbacks=[settled],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = _Module(setting, job.depth)
    numel = sum(param.numel() for param in module.parameters())
    batches = [setting.make_batch(job.tokens)] * (MOST_SETTLING_STEPS + job.steps)  # no epoch ends on the way
    trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return Run(
        numel=numel,
        step_ms=settled.steps,
        passes_ms=settled.passes,
        stall_ms=settled.stalls,
        selected_at=settled.selected,
        to_host_bytes=statistics.fmean(settled.down),
        to_device_bytes=statistics.fmean(settled.up),
        from_ranks_bytes=statistics.fmean(settled.from_ranks),
        resident_bytes=settled.resident,
        intervals=settled.intervals,
        settling_steps=settled.settling_steps,
    )
