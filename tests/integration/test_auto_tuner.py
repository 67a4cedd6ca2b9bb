"""`AutoTuner` through the Trainer: what it counts, what it changes, what stays exact, what it remembers and refuses."""

from __future__ import annotations

import json
import logging
import math
import os
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_zenflow import AutoTuner, StallMonitor, ZenFlowStrategy
from lightning_zenflow.tuner import Observation, WindowCollector
from tests.delays import host_that_takes
from tests.modules import (
    EXPECTED_WARNINGS,
    FollowsReference,
    MemoryLogger,
    Small,
    batches,
    fit,
    fit_plainly,
    strategy_of,
    trainer,
    weights,
)

pytestmark = [*EXPECTED_WARNINGS, pytest.mark.timeout(180), pytest.mark.usefixtures("own_process_group")]

AUTO = {"topk_ratio": 0.3}
SLOW_HOST = (0.001, 0.2)
"""With which `update_interval` 4 makes a small step wait for 50 ms, and 16 for 12."""


class Slow(Small):
    """A device that takes 20 ms a batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.02)
        return super().training_step(batch, batch_idx)


class Intervals(Callback):
    """Keeps the intervals that each step went by, and behind them those that a next step would."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int | None]] = []
        self.tuners: list[AutoTuner] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.tuners.append(next(callback for callback in trainer.callbacks if isinstance(callback, AutoTuner)))
        self.steps = 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.now = trainer.strategy.intervals

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        stats = trainer.strategy.step_stats
        if stats.step != self.steps:
            self.steps = stats.step
            assert (stats.update_interval, stats.select_interval) == self.now
            self.seen.append(self.now)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append(trainer.strategy.intervals)


def train_slowly(*callbacks: Callback, zenflow: Any = AUTO, count: int = 40, **settings: Any) -> tuple[Slow, Any]:
    module = Slow()
    with host_that_takes(*SLOW_HOST):
        return module, fit(module, batches(count), zenflow=zenflow, callbacks=list(callbacks), **settings)


# -- it tunes, and stays exact -----------------------------------------------------------------------------------------


def test_a_slow_host_gets_more_blocks_and_every_step_equals_the_reference() -> None:
    follows, intervals = FollowsReference(), Intervals()
    module = Slow()
    with host_that_takes(*SLOW_HOST):
        made: Any = fit(module, batches(50), zenflow=AUTO, callbacks=[follows, intervals])
    assert follows.changes >= 1
    follows.assert_equal(steps=50, weights=5e-6)  # five times the steps of other tests, and as many roundings
    assert intervals.seen[0] == (4, 64) and intervals.seen[-1][0] > 4
    assert made.callbacks[:2] == [follows, intervals], "it is taken out again"


def test_a_change_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        train_slowly(count=14)
    (change,) = [record.getMessage() for record in caplog.records if "update_interval 4 ->" in record.getMessage()]
    assert change.startswith("ZenFlow, step 10: update_interval 4 -> ") and "AdamW" in change


def test_fixed_intervals_are_left_alone() -> None:
    class Watch(Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            assert not any(isinstance(callback, AutoTuner) for callback in trainer.callbacks)
            assert trainer.strategy.intervals == (4, 7)

    train_slowly(Watch(), zenflow={"update_interval": 4, "select_strategy": "step", "select_interval": 7}, count=24)


def test_one_automatic_interval_is_tuned_alone() -> None:
    intervals = Intervals()
    train_slowly(intervals, zenflow={"update_interval": 4, **AUTO}, count=24)
    assert {update for update, _ in intervals.seen} == {4}
    intervals = Intervals()
    train_slowly(intervals, zenflow={"select_strategy": "step", "select_interval": 5, **AUTO}, count=24)
    assert {select for _, select in intervals.seen} == {5} and intervals.seen[-1][0] > 4


def test_with_nothing_selected_only_the_blocks_are_tuned() -> None:
    intervals = Intervals()
    train_slowly(intervals, zenflow={"topk_ratio": 0}, count=24)
    assert {select for _, select in intervals.seen} == {None} and intervals.seen[-1][0] > 4


def test_bounds_given_to_the_callback_hold() -> None:
    intervals = Intervals()
    tuner = AutoTuner(max_update_interval=6)
    train_slowly(intervals, tuner, count=40)
    assert intervals.tuners == [tuner], "the strategy adds no second one"
    assert max(update for update, _ in intervals.seen) == 6


def test_select_strategy_epoch_counts_whole_epochs_of_the_trainer() -> None:
    intervals = Intervals()
    train_slowly(
        intervals, zenflow={"select_strategy": "epoch", **AUTO}, count=16, max_epochs=4, accumulate_grad_batches=2
    )
    assert intervals.seen[0] == (4, 8)
    assert all(select is not None and select % 8 == 0 for _, select in intervals.seen)


# -- what counts as a step ---------------------------------------------------------------------------------------------


class SometimesNaN(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (math.nan if batch_idx % 10 in (4, 5) else 1.0)


@pytest.mark.filterwarnings("ignore:Step after .* skipped")
def test_windows_count_applied_steps_not_micro_batches_and_not_skipped_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """FAULTS 4, 12."""
    seen = []
    add = WindowCollector.add

    def spy(self: WindowCollector, step: Observation) -> Any:
        seen.append(step)
        return add(self, step)

    monkeypatch.setattr(WindowCollector, "add", spy)
    made = fit(SometimesNaN(), batches(31), zenflow=AUTO, accumulate_grad_batches=2)
    stats = made.strategy.step_stats  # type: ignore[attr-defined]
    assert stats.skipped_steps == 3 and len(seen) == stats.step == 13
    assert all(step.step_secs > 0 for step in seen)


def test_warm_up_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(WindowCollector, "add", lambda self, step: seen.append(step))
    fit(Small(), batches(12), zenflow={**AUTO, "full_warm_up_rounds": 9})
    assert len(seen) == 3


# -- the same again ----------------------------------------------------------------------------------------------------


def test_a_run_is_repeated_bit_for_bit_from_its_record(tmp_path: Path) -> None:
    """FAULTS 43 with the tuner on: the same intervals at the same steps, whatever the clock says."""
    record = tmp_path / "zenflow.jsonl"
    intervals = Intervals()
    first, _ = train_slowly(StallMonitor(record=record), intervals, count=30)
    assert len(set(intervals.seen)) >= 2
    again, module = Intervals(), Small()
    fit(module, batches(30), zenflow=AUTO, callbacks=[again, AutoTuner(replay=record)])  # at another speed
    assert again.seen == intervals.seen
    assert torch.equal(weights(module), weights(first))
    changes = [(0, *intervals.seen[0])]
    changes += [(step, *now) for step, now in enumerate(intervals.seen) if step and now != intervals.seen[step - 1]]
    by_hand, module = Intervals(), Small()
    fit(module, batches(30), zenflow=AUTO, callbacks=[by_hand, AutoTuner(replay=changes)])
    assert by_hand.seen == intervals.seen and torch.equal(weights(module), weights(first))


def test_deterministic_algorithms_keep_the_intervals_they_begin_with(caplog: pytest.LogCaptureFixture) -> None:
    try:
        with caplog.at_level(logging.INFO):
            made = trainer(AUTO, deterministic=True)
            with host_that_takes(*SLOW_HOST):
                made.fit(Slow(), batches(20))
            assert made.strategy.step_stats.update_interval == 4  # type: ignore[attr-defined]
        assert "automatic intervals stay as they begin" in caplog.text
        with pytest.raises(ValueError, match="`deterministic` must be left out of the Trainer with AutoTuner"):
            fit(Small(), zenflow=AUTO, deterministic=True, callbacks=[AutoTuner()])
        fit(Small(), zenflow=AUTO, deterministic=True, callbacks=[AutoTuner(replay=[(0, 2, 8)])])
    finally:
        torch.use_deterministic_algorithms(False)
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


# -- what it has learned -----------------------------------------------------------------------------------------------


def test_the_next_fit_goes_on_with_what_was_learned() -> None:
    first, second = Intervals(), Intervals()
    _, made = train_slowly(first)
    made.callbacks[made.callbacks.index(first)] = second
    made.fit_loop.max_epochs = 2
    made.fit(Small(), batches(3))
    assert first.seen[0] == (4, 64) != first.seen[-1]
    assert second.seen[0] == first.seen[-1]
    assert first.tuners == second.tuners


class Failing(Slow):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 30:
            raise ValueError("enough")
        return super().training_step(batch, batch_idx)


def test_what_was_learned_survives_an_exception() -> None:
    tuner = AutoTuner()
    with host_that_takes(*SLOW_HOST), pytest.raises(ValueError, match="enough"):
        fit(Failing(), batches(40), zenflow=AUTO, callbacks=[tuner])
    assert tuner.learned is not None and tuner.learned["intervals"]["update_interval"] > 4


def test_a_checkpoint_of_a_tuned_run_is_evaluated_without_a_word(tmp_path: Path) -> None:
    checkpoints, twin = (ModelCheckpoint(tmp_path, every_n_train_steps=20) for _ in range(2))
    made = trainer(AUTO, callbacks=[checkpoints], enable_checkpointing=True)
    made.fit(Small(), batches(20))
    made.validate(Small(), batches(2), ckpt_path=checkpoints.best_model_path)
    other = trainer(AUTO, callbacks=[twin], enable_checkpointing=True)
    other.validate(Small(), batches(2), ckpt_path=checkpoints.best_model_path)


def test_what_was_learned_is_in_a_checkpoint_that_loads_as_weights_only_and_goes_on_from_there(tmp_path: Path) -> None:
    """FAULTS 21, 24."""

    class Save(Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint(tmp_path / "saved")

    intervals, tuner = Intervals(), AutoTuner()
    module, made = train_slowly(intervals, Save(), tuner)
    (file,) = (tmp_path / "saved").rglob("*model_states.pt")
    checkpoint = torch.load(file, weights_only=True)
    assert json.loads(json.dumps(checkpoint["zenflow_tuner"])) == checkpoint["zenflow_tuner"] == tuner.learned
    assert tuner.state_key not in checkpoint["callbacks"], "Lightning would ask for it where weights alone are loaded"
    resumed, again = AutoTuner(), Intervals()
    resumed.on_load_checkpoint(made, module, checkpoint)
    train_slowly(again, resumed, count=2)
    assert again.seen[0] == intervals.seen[-1]


def test_what_was_learned_does_not_override_what_is_fixed_now() -> None:
    tuner = AutoTuner()
    _, made = train_slowly(Intervals(), tuner, count=30)
    assert tuner.learned is not None and tuner.learned["intervals"]["update_interval"] > 4
    for zenflow, expected in (
        ({**AUTO, "update_interval": 3}, (3, 64)),
        ({"topk_ratio": 0}, (tuner.learned["intervals"]["update_interval"], None)),
    ):
        intervals, resumed = Intervals(), AutoTuner()
        resumed.on_load_checkpoint(made, Small(), {"zenflow_tuner": tuner.learned})
        fit(Small(), batches(3), zenflow=zenflow, callbacks=[intervals, resumed])
        assert intervals.seen[0] == expected


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_update_interval": 0}, ValueError, "`max_update_interval` must be .*1 or more, got 0"),
        ({"min_update_interval": 9, "max_update_interval": 8}, ValueError, "`max_update_interval` must be at least"),
        ({"max_select_interval": 1.5}, TypeError, "`max_select_interval` must be a whole number of steps.*, got 1.5"),
        ({"replay": [(0, 4)]}, ValueError, r"`replay` must be a record, or a list of changes .*, got \[\(0, 4\)\]"),
        ({"replay": 5}, ValueError, "`replay` must be a record, or .* got 5"),
        ({"replay": []}, ValueError, "it is empty"),
        ({"replay": [(-5, 4, 8)]}, ValueError, "steps must rise from 0, got -5"),
        ({"replay": [(5, 2, 64), (5, 3, 64)]}, ValueError, "steps must rise from 0, got 5"),
        ({"replay": [(None, 4, 8)]}, ValueError, "steps must rise from 0, got None"),
        ({"replay": [(0, 0, 8)]}, ValueError, "`update_interval` must be a whole number, got 0"),
        ({"replay": [(0, 10**30, 8)]}, ValueError, "It counts steps, from 1 to 1000"),
        ({"replay": [(0, 4, True)]}, ValueError, "`select_interval` must be a whole number, got True"),
        ({"replay": "nowhere.jsonl"}, ValueError, "`replay` must be the record of a run, got 'nowhere.jsonl'"),
    ],
)
def test_options_are_refused_when_they_are_given(options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        AutoTuner(**options)


def test_it_wants_something_to_tune_and_the_right_strategy() -> None:
    fixed = {"update_interval": 4, "select_strategy": "step", "select_interval": 7}
    with pytest.raises(
        ValueError, match="`update_interval` or `select_interval` must be 'auto' for AutoTuner, got 4 and 7"
    ):
        fit(Small(), zenflow=fixed, callbacks=[AutoTuner()])
    with pytest.raises(TypeError, match="`strategy` must be zenflow for AutoTuner, got SingleDeviceStrategy"):
        fit_plainly(Small(), callbacks=[AutoTuner()])
    with pytest.raises(
        ValueError, match="`replay` must leave out selection intervals with `topk_ratio` 0, got 64 at step 0"
    ):
        fit(Small(), zenflow={"topk_ratio": 0}, callbacks=[AutoTuner(replay=[(0, 4, 64)])])


def test_intervals_are_changed_between_steps_of_a_training_only() -> None:
    class Change(Callback):
        steps = 0

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            for update_interval, select_interval in ((0, 4), (2.5, 4), (4, 0), (1001, 4), (True, 4), (4, 2.5)):
                with pytest.raises(
                    (TypeError, ValueError), match=r"must be a whole number, got .* It counts steps, from 1"
                ):
                    trainer.strategy.change_intervals(update_interval, select_interval)
            with pytest.raises(ValueError, match="`select_interval` must stay a number of steps, got None"):
                trainer.strategy.change_intervals(4, None)

        def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            with pytest.raises(RuntimeError, match="Intervals must be changed between two steps"):
                trainer.strategy.change_intervals(2, 5)

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            for change in (trainer.strategy.change_intervals, trainer.strategy._zero.change_intervals):
                with pytest.raises(RuntimeError, match="Intervals must be changed between two steps"):
                    change(2, 5)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            if trainer.strategy.step_stats.step == self.steps:
                with pytest.raises(RuntimeError, match="Intervals must be changed between two steps"):
                    trainer.strategy.change_intervals(2, 5)
            else:
                trainer.strategy.change_intervals(2, 5)
                self.steps = trainer.strategy.step_stats.step

    strategy = strategy_of({"update_interval": 4, "select_strategy": "step", "select_interval": 7})
    with pytest.raises(RuntimeError, match=r"`change_intervals` must be called while `trainer\.fit` runs"):
        strategy.change_intervals(2, 5)
    follows = FollowsReference()
    fit(Small(), batches(20), strategy=strategy, callbacks=[Change(), follows], accumulate_grad_batches=2)
    follows.assert_equal(steps=10)
    assert follows.changes == 1


# -- several ranks -----------------------------------------------------------------------------------------------------


def train_at_different_speeds() -> dict[str, Any]:
    """What each of two ranks does; the host of the second is slow, and so is the device of the first."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    intervals, module = Intervals(), (Small, Slow)[rank == 0]()
    logger = MemoryLogger()
    with host_that_takes(0.001, 0.2 if rank else 0.0):
        fit(
            module,
            batches(60, seed=rank),
            strategy=strategy_of(AUTO),
            callbacks=[intervals, StallMonitor()],
            logger=logger,
            log_every_n_steps=1,
            devices=2,
        )
    return {"intervals": intervals.seen, "weights": weights(module)}


def test_ranks_of_different_speed_hold_the_same_intervals_at_every_step(run_ranks: Any) -> None:
    first, second = run_ranks("tests.integration.test_auto_tuner:train_at_different_speeds", world_size=2, timeout=120)
    assert first["intervals"] == second["intervals"]
    assert len(set(first["intervals"])) >= 2 and first["intervals"][-1][0] > 4
    assert torch.equal(first["weights"], second["weights"])


def overflow_on_one_rank() -> dict[str, Any]:
    """What each of two ranks does; the gradient of the second is not finite at times."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    module = (Small, SometimesNaN)[rank]()
    made = fit(module, batches(30, seed=rank), strategy=strategy_of(AUTO), devices=2)
    strategy = made.strategy
    assert isinstance(strategy, ZenFlowStrategy)
    return {"stats": strategy.step_stats, "weights": weights(module)}


def test_all_ranks_skip_a_step_together_with_the_tuner_on(run_ranks: Any) -> None:
    """FAULTS 13."""
    first, second = run_ranks("tests.integration.test_auto_tuner:overflow_on_one_rank", world_size=2, timeout=120)
    for results in (first, second):
        assert (results["stats"].skipped_steps, results["stats"].step) == (6, 24)
    assert first["stats"].update_interval == second["stats"].update_interval
    assert torch.equal(first["weights"], second["weights"])
