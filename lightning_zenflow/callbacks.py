"""Callbacks that show what training with ZenFlow costs."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_zenflow.strategy import ZenFlowStrategy


class StallMonitor(Callback):
    """Sends `StepStats` to the Trainer's loggers, under names that begin with `zenflow/`.

    Logs at real optimizer steps only, at the Trainer's `log_every_n_steps`. Rank zero logs its own figures.

    Raises:
        TypeError: The Trainer's strategy is not `ZenFlowStrategy`.
    """

    def __init__(self) -> None:
        self._logged_step = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not isinstance(trainer.strategy, ZenFlowStrategy):
            raise TypeError(
                f"`strategy` must be zenflow for StallMonitor, got {type(trainer.strategy).__name__}. Set strategy='zenflow'"
                " or remove the callback."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._logged_step = 0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        assert isinstance(trainer.strategy, ZenFlowStrategy)
        step, interval = trainer.global_step, trainer.log_every_n_steps  # type: ignore[attr-defined]
        if step == self._logged_step or interval == 0 or step % interval:
            return  # a micro-batch, or not yet, or never
        self._logged_step = step
        metrics = trainer.strategy.step_stats.metrics()
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=step)
