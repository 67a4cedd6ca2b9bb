"""The strategy's part in intervals: asked for, changed in mid-run, or followed by a callback that tunes them."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import TYPE_CHECKING

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_zenflow.config import ZenFlowConfig, check_interval
from lightning_zenflow.configured import ConfiguredStrategy

if TYPE_CHECKING:
    from lightning_zenflow.callbacks import AutoTuner
    from lightning_zenflow.zero.adapter import ZenFlowZero


class IntervalsStrategy(ConfiguredStrategy):
    """Tells and changes the intervals of a run; the attributes are the strategy's."""

    zenflow: ZenFlowConfig
    _auto_tuner: AutoTuner | None
    _step_is_open: bool

    @abstractmethod
    def _training(self, name: str) -> ZenFlowZero: ...

    @property
    def intervals(self) -> tuple[int, int | None]:
        """Update interval and selection interval in steps, as they are now; `None` if nothing is ever selected.

        Raises:
            RuntimeError: No training is under way.
        """
        return self._training("intervals").shard.intervals

    def change_intervals(self, update_interval: int, select_interval: int | None) -> None:
        """Other intervals from the next step on, in steps. Every rank must call it with the same values, between steps.

        A new `update_interval` settles first (see `settle`), so that no gradient is lost. The next selection comes
        `select_interval` steps after the last one. A step begins with the `training_step` of its first micro-batch, and
        ends with the optimizer step; hooks such as `on_train_batch_start` and `on_train_batch_end` are in between.

        Raises:
            RuntimeError: No training is under way, or the next step has begun.
            TypeError: An interval is no whole number.
            ValueError: It is out of range.
        """
        check_interval("update_interval", update_interval)
        if select_interval is not None:
            check_interval("select_interval", select_interval)
        zero = self._training("change_intervals")
        if self._step_is_open:
            raise RuntimeError(
                "Intervals must be changed between two steps, got a call within one. Call it in `on_train_batch_end`, and"
                " with accumulation after the last batch of a step."
            )
        zero.change_intervals(update_interval, select_interval)

    def _add_auto_tuner(self, trainer: Trainer) -> None:
        """Has automatic intervals tuned, by the same callback in every `fit`, so that it goes on with what it has learned."""
        from lightning_zenflow.callbacks import AutoTuner

        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if not self.zenflow.is_automatic or any(isinstance(callback, AutoTuner) for callback in callbacks):
            return
        if torch.are_deterministic_algorithms_enabled():
            rank_zero_info(
                "ZenFlow: automatic intervals stay as they begin, since measured times are never the same twice and"
                " deterministic algorithms were asked for. AutoTuner(replay=...) repeats the intervals of an earlier run."
            )
            return
        self._auto_tuner = self._auto_tuner or AutoTuner()
        callbacks.insert(0, self._auto_tuner)

    def _steps_per_epoch(self) -> int | None:
        if self.zenflow.select_strategy != "epoch":
            return None  # not asked for, so that no data loader is set up early
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        trainer.fit_loop.setup_data()
        batches = trainer.num_training_batches
        return None if math.isinf(batches) else max(1, math.ceil(batches / trainer.accumulate_grad_batches))
