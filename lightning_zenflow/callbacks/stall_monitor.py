"""`StallMonitor`: shows and records what training with ZenFlow costs."""

from __future__ import annotations

import time
from dataclasses import asdict
from datetime import datetime, timezone
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torchmetrics.aggregation import RunningMean

from lightning_zenflow.callbacks.auto_tuner import AutoTuner
from lightning_zenflow.callbacks.own_strategy import zenflow_strategy
from lightning_zenflow.callbacks.record import FORMAT, Record
from lightning_zenflow.shown import shown
from lightning_zenflow.stats import StepStats
from lightning_zenflow.strategy import ZenFlowStrategy

_SMOOTHING_STEPS = 32

_VERSIONED = ("lightning_zenflow", "torch", "lightning", "deepspeed")
"""Packages whose version is recorded. Asked themselves: in an archive (`python app.pyz`) they may not be installed."""


class StallMonitor(Callback):
    """Sends `StepStats` to the Trainer's loggers, under names that begin with `zenflow/`.

    Logs at real optimizer steps only, at the Trainer's `log_every_n_steps`. Rank zero logs its own figures.

    Args:
        record: Writes the figures of every step to a file of its own as well, which `lightning-zenflow report` draws and
            `AutoTuner(replay=...)` repeats: its path, or `True` for `zenflow.jsonl`. A relative path begins at the
            Trainer's `log_dir`. Other ranks put `.rank1` and so on before the suffix. A second run is appended.
        record_every_n_steps: Leaves out the steps between; a step takes about 1 kB.
        progress_bar: Shows the stall, as a share of the step time over the last 32 steps.

    Raises:
        TypeError: The Trainer's strategy is not `ZenFlowStrategy`, or an argument has the wrong type.
        ValueError: `record_every_n_steps` is below 1, or `record` cannot be written.
    """

    def __init__(
        self, *, record: bool | str | Path = False, record_every_n_steps: int = 1, progress_bar: bool = False
    ) -> None:
        if not isinstance(record, (bool, str, Path)) or record == "":
            error = TypeError if record != "" else ValueError
            raise error(f"`record` must be true, false or a path, got {shown(record)}. true is zenflow.jsonl.")
        if not isinstance(progress_bar, bool):
            raise TypeError(f"`progress_bar` must be true or false, got {shown(progress_bar)}. true shows the stall.")
        if type(record_every_n_steps) is not int or record_every_n_steps < 1:
            error = TypeError if type(record_every_n_steps) is not int else ValueError
            raise error(
                f"`record_every_n_steps` must be a whole number of at least 1, got {shown(record_every_n_steps)}. 1 records"
                " every step."
            )
        self._path = Path("zenflow.jsonl") if record is True else Path(record) if record else None
        self._every_n_steps = record_every_n_steps
        self._shows_progress = progress_bar
        self._record: Record | None = None
        self._logged_step = self._recorded_step = self._decided_step = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        zenflow_strategy(trainer, type(self).__name__)
        if stage == "fit" and self._path is not None and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._open_record(trainer, self._path)  # before anything is started that a bad path would have to end

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = zenflow_strategy(trainer, type(self).__name__)
        self._logged_step = 0
        self._recorded_step = self._decided_step = strategy.step_stats.step
        self._stall_ratio = RunningMean(window=_SMOOTHING_STEPS)
        self._start_secs = time.perf_counter()
        self._is_begun = False

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if self._record is not None and not self._is_begun:  # only now are the intervals those that it begins with
            self._is_begun = True
            self._begin_record(self._record, trainer, zenflow_strategy(trainer, type(self).__name__))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        strategy = zenflow_strategy(trainer, type(self).__name__)
        stats, step, interval = strategy.step_stats, trainer.global_step, trainer.log_every_n_steps  # type: ignore[attr-defined]
        if stats.step != self._recorded_step:
            self._recorded_step = stats.step
            self._write(trainer, stats)
            if self._shows_progress:
                self._stall_ratio.update(stats.stall_ratio)
        if self._shows_progress and stats.step:
            pl_module.log("stall", self._stall_ratio.compute(), prog_bar=True, logger=False, rank_zero_only=True)
        if step == self._logged_step or interval == 0 or step % interval:
            return  # a micro-batch, or not yet, or never
        self._logged_step = step
        metrics = stats.metrics()
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close_record(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close_record(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close_record(trainer)

    # -- the record -------------------------------------------------------------------------------------------------

    def _open_record(self, trainer: Trainer, path: Path) -> None:
        folder = trainer.log_dir or trainer.default_root_dir  # the same on all ranks: rank zero's is broadcast
        if trainer.global_rank:
            path = path.with_suffix(f".rank{trainer.global_rank}{path.suffix}")
        try:
            self._record = Record(Path(folder) / path)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"`record` must be a file that can be written, got {str(Path(folder) / path)!r}: {error}. Give another path."
            ) from error

    def _begin_record(self, record: Record, trainer: Trainer, strategy: ZenFlowStrategy) -> None:
        update_interval, select_interval = strategy.intervals
        record.write(
            "run",
            format=FORMAT,
            started=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            device=str(strategy.root_device),
            precision=str(trainer.precision),
            update_interval=update_interval,
            select_interval=select_interval,
            stall_budget=strategy.zenflow.stall_budget,
            settings=asdict(strategy.zenflow),
            versions={name.replace("_", "-"): import_module(name).__version__ for name in _VERSIONED},
            stage=strategy.run_facts.stage,
            shard_numel=strategy.run_facts.shard_numel,
        )

    def _write(self, trainer: Trainer, stats: StepStats) -> None:
        if self._record is None:
            return
        if stats.step % self._every_n_steps == 0:
            self._record.write(
                "step",
                begin_secs=self._since_start(stats.begin_secs),
                reselected=stats.deferred_mass_ratio is not None,
                spans=[
                    [lane, name, self._since_start(start), _rounded(secs)] for lane, name, start, secs in stats.spans
                ],
                **{name: _rounded(value) for name, value in stats.figures().items()},
            )
        self._write_decisions(trainer)

    def _write_decisions(self, trainer: Trainer) -> None:
        assert self._record is not None
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        tuners = [callback for callback in callbacks if isinstance(callback, AutoTuner)]
        for step, decision in (pair for tuner in tuners for pair in tuner.decisions):
            if step > self._decided_step:
                self._decided_step = step
                self._record.write(
                    "decision",
                    step=step,
                    changed=decision.changed,
                    **asdict(decision.intervals),
                    previous=asdict(decision.previous),
                    reason=decision.reason,
                    window=asdict(decision.window),
                )

    def _close_record(self, trainer: Trainer) -> None:
        if self._record is not None:
            self._write_decisions(trainer)
            self._record.close()
            self._record = None

    def _since_start(self, secs: float) -> float:
        return round(secs - self._start_secs, 6)


def _rounded(value: float | None) -> float | None:
    """Times to the microsecond."""
    return round(value, 6) if isinstance(value, float) else value
