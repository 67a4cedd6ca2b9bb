"""`AutoTuner`: measures, asks the pure controller of `tuner.py`, and changes the intervals of all ranks at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_debug, rank_zero_info

from lightning_zenflow.callbacks.own_strategy import zenflow_strategy
from lightning_zenflow.callbacks.record import read_changes
from lightning_zenflow.config import check_interval
from lightning_zenflow.shown import shown
from lightning_zenflow.stats import StepStats
from lightning_zenflow.strategy import ZenFlowStrategy
from lightning_zenflow.tuner import Controller, Decision, Intervals, Observation, TunerOptions, Window, WindowCollector

CHECKPOINT_KEY = "zenflow_tuner"


class AutoTuner(Callback):
    """Adjusts those of `update_interval` and `select_interval` that are `auto`, from measured stalls.

    `ZenFlowStrategy` adds one by itself; add it yourself to set bounds or to repeat an earlier run. It looks at windows of 8
    to 16 optimizer steps (not micro-batches, not skipped steps), takes the maximum over ranks, and changes the intervals of
    all ranks at the same step. Each change is logged with its reason. What it has learned stays for the next `fit`, and goes
    into checkpoints.

    Given the same intervals at the same steps, training is the same bit for bit. Measured times never are: to repeat a run,
    give `replay` the record that `StallMonitor(record=...)` has written.

    Args:
        min_update_interval: Lower bound, in steps.
        max_update_interval: Upper bound, in steps. Gradients wait up to so many steps.
        min_select_interval: Lower bound, in steps.
        max_select_interval: Upper bound, in steps.
        replay: Measures nothing, but repeats the changes of an earlier run: its record, or a list of `(step, update_interval,
            select_interval)` with the step after which they changed, 0 for those it began with.

    Attributes:
        decisions: `(step, decision)` for each change of this `fit`, and for the last window.

    Raises:
        TypeError: The Trainer's strategy is not `ZenFlowStrategy`, or an option has the wrong type.
        ValueError: No interval is `auto`, an option is out of range, deterministic algorithms are asked for without
            `replay`, or `replay` is no record.
    """

    def __init__(
        self,
        *,
        min_update_interval: int = 1,
        max_update_interval: int = 16,
        min_select_interval: int = 1,
        max_select_interval: int = 4096,
        replay: str | Path | list[tuple[int, int, int | None]] | None = None,
    ) -> None:
        self._bounds: dict[str, Any] = {
            "min_update_interval": min_update_interval,
            "max_update_interval": max_update_interval,
            "min_select_interval": min_select_interval,
            "max_select_interval": max_select_interval,
        }
        TunerOptions(**self._bounds)  # refuses what is out of range now, not in the middle of a run
        self._changes = None if replay is None else _changes(replay)
        if self._changes is not None and (bound := self._given_bound("interval")):
            raise ValueError(
                f"`{bound}` must be left out beside `replay`, got {self._bounds[bound]}: a replay takes the intervals as they"
                " are recorded. Give one of them."
            )
        self._learned: dict[str, Any] | None = None
        self._controller: Controller | None = None
        self._last_step = 0
        self.decisions: list[tuple[int, Decision]] = []

    def _given_bound(self, kind: str) -> str | None:
        """The name of a bound that was given, and is not just the default, if there is one."""
        default = TunerOptions()
        names = [name for name in self._bounds if name.endswith(kind)]
        return next((name for name in names if self._bounds[name] != getattr(default, name)), None)

    # -- life -------------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = zenflow_strategy(trainer, type(self).__name__)
        self.decisions = []
        self._last_step = strategy.step_stats.step
        self._refuse(strategy)
        if self._changes is not None:
            self._replay(strategy)
            return
        options = self._options(strategy)
        self._controller = Controller(options, Intervals(*strategy.intervals))
        if self._learned is not None:
            # What has been fixed since is as it was set now, whatever was learned.
            update_interval, select_interval = strategy.intervals
            learned = Intervals(**self._learned["intervals"])
            start = Intervals(
                learned.update_interval if options.tune_update else update_interval,
                learned.select_interval or select_interval if options.tune_select else select_interval,
            )
            self._controller.load_state_dict({**self._learned, "intervals": asdict(start)})
            strategy.change_intervals(*_pair(start))
        self._collector = WindowCollector(self._controller.window_steps)
        self._gradient_secs = 0.0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        strategy = zenflow_strategy(trainer, type(self).__name__)
        stats = strategy.step_stats
        if stats.step == self._last_step:
            return  # a micro-batch, or a skipped step
        self._last_step = stats.step
        if self._changes is not None:
            self._replay(strategy)
        elif stats.step > strategy.zenflow.full_warm_up_rounds:  # in warm-up the device waits for the host by intention
            accumulate_secs, update_secs = self._host_secs(stats)
            window = self._collector.add(
                Observation(
                    step_secs=stats.step_secs,
                    update_stall_secs=stats.update_stall_secs,
                    select_stall_secs=stats.select_stall_secs,
                    accumulate_secs=accumulate_secs,
                    update_secs=update_secs,
                    agreement=stats.selection_agreement,
                    deferred_mass_ratio=stats.deferred_mass_ratio,
                    copy_secs=stats.copy_secs,
                )
            )
            if window is not None:
                self._decide(strategy, window)

    def _host_secs(self, stats: StepStats) -> tuple[float, float]:
        """Busy times as if the gradient had been added to all blocks first, so that they compare over intervals."""
        blocks = stats.update_interval
        if blocks > 1:  # the block of the step takes its part of the gradient in its update
            self._gradient_secs = stats.worker_accumulate_secs * blocks / (blocks - 1)
        return self._gradient_secs, max(0.0, stats.worker_update_secs - self._gradient_secs / blocks)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._learned = self.learned
        self._controller = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.on_train_end(trainer, pl_module)

    @property
    def learned(self) -> dict[str, Any] | None:
        """What was learned so far: plain numbers and strings; `None` if nothing."""
        return self._learned if self._controller is None else self._controller.state_dict()

    # Not `state_dict`: Lightning would ask whoever loads the weights for this callback, which nobody has put there.
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self.learned is not None:
            checkpoint[CHECKPOINT_KEY] = self.learned

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._learned = checkpoint.get(CHECKPOINT_KEY, self._learned)

    # -- the work ---------------------------------------------------------------------------------------------------

    def _decide(self, strategy: ZenFlowStrategy, window: Window) -> None:
        assert self._controller is not None
        numbers = torch.tensor(window.to_numbers(), dtype=torch.float64, device=strategy.root_device)
        agreed = strategy.reduce(numbers, reduce_op="max")
        decision = self._controller.decide(Window.from_numbers(agreed.tolist()))
        if self.decisions and not self.decisions[-1][1].changed:
            self.decisions.pop()  # of those that change nothing the last one suffices
        self.decisions.append((self._last_step, decision))
        if decision.changed:
            rank_zero_info(f"ZenFlow, step {self._last_step}: {decision.reason}")
            strategy.change_intervals(*_pair(decision.intervals))
        else:
            rank_zero_debug(f"ZenFlow, step {self._last_step}: {decision.reason}")
        self._collector.window_steps = self._controller.window_steps
        self._collector.restart(decision.skip_steps)

    def _replay(self, strategy: ZenFlowStrategy) -> None:
        assert self._changes is not None
        if self._last_step in self._changes:
            strategy.change_intervals(*self._changes[self._last_step])

    def _options(self, strategy: ZenFlowStrategy) -> TunerOptions:
        zenflow, facts = strategy.zenflow, strategy.run_facts
        return TunerOptions(
            **self._bounds,
            stall_budget=min(zenflow.stall_budget, 0.999),
            tune_update=zenflow.update_interval == "auto",
            tune_select=zenflow.select_interval == "auto" and zenflow.topk_ratio > 0,
            overlap=zenflow.overlap_step,
            auto_ratio=zenflow.auto_ratio,
            memory_steps=facts.memory_steps,
            select_unit_steps=facts.select_unit_steps,
        )

    def _refuse(self, strategy: ZenFlowStrategy) -> None:
        if not strategy.zenflow.is_automatic:
            raise ValueError(
                "`update_interval` or `select_interval` must be 'auto' for AutoTuner, got"
                f" {strategy.zenflow.update_interval} and {strategy.zenflow.select_interval}. Set one of them to auto, or"
                " remove the callback."
            )
        for name in ("update_interval", "select_interval"):
            fixed, bound = getattr(strategy.zenflow, name), self._given_bound(name)
            if fixed != "auto" and bound is not None:
                raise ValueError(
                    f"`{bound}` must be left out of AutoTuner beside `{name}`={fixed}, which is never tuned, got"
                    f" {self._bounds[bound]}. Set `{name}` to auto, or leave the bound out."
                )
        if self._changes is None:
            if torch.are_deterministic_algorithms_enabled():
                raise ValueError(
                    "`deterministic` must be left out of the Trainer with AutoTuner, got deterministic algorithms: measured"
                    " times are never the same twice. Give it `replay`, or remove the callback: intervals then stay as they"
                    " begin."
                )
            return
        selects = strategy.intervals[1] is not None
        for step, (_, select_interval) in self._changes.items():
            if (select_interval is not None) != selects:
                raise ValueError(
                    f"`replay` must {'hold' if selects else 'leave out'} selection intervals with `topk_ratio`"
                    f" {strategy.zenflow.topk_ratio}, got {select_interval} at step {step}. Record a run with these settings."
                )


def _pair(intervals: Intervals) -> tuple[int, int | None]:
    return intervals.update_interval, intervals.select_interval


def _changes(replay: Any) -> Mapping[int, tuple[int, int | None]]:
    """Steps and the intervals that hold after them.

    Raises:
        ValueError: It is no record, or not a list of changes in order.
    """
    changes = read_changes(Path(replay)) if isinstance(replay, (str, Path)) else replay
    found: dict[int, tuple[int, int | None]] = {}
    try:
        for step, update_interval, select_interval in changes:
            if type(step) is not int or step <= max(found, default=-1):
                raise ValueError(f"steps must rise from 0, got {shown(step)}")
            check_interval("update_interval", update_interval)
            if select_interval is not None:
                check_interval("select_interval", select_interval)
            found[step] = (update_interval, select_interval)
        if not found:
            raise ValueError("it is empty")
    except (TypeError, ValueError) as error:
        raise ValueError(
            "`replay` must be a record, or a list of changes (step, update_interval, select_interval), got"
            f" {shown(replay)}: {error}. Take it from an earlier run."
        ) from error
    return found
