"""Lightning's own callbacks under ZenFlow: each works, or refuses in words before training starts.

| callback | works or refuses | test |
|---|---|---|
| LambdaCallback, ModelSummary, RichModelSummary | works | `test_a_callback_that_only_watches_...` |
| RichProgressBar, TQDMProgressBar | works | the same, and `test_progress_bars_show_every_batch` |
| DeviceStatsMonitor, ThroughputMonitor | works | the same, and `test_monitors_log_what_they_measure` |
| LearningRateMonitor | works | the same; values: test_trainer_schedulers.py |
| EarlyStopping | works | `test_early_stopping_stops_at_a_loss_that_is_not_finite`; patience: test_trainer_schedulers.py |
| Timer | works | `test_a_timer_stops_the_run_which_ends_settled` |
| ModelCheckpoint | works | test_contract_saving.py, test_checkpoints.py, test_resume.py |
| OnExceptionCheckpoint | works | test_contract_saving.py |
| BasePredictionWriter | works | `test_a_prediction_writer_gets_every_batch` |
| WeightAveraging, EMAWeightAveraging | stages 1 and 2; stage 3 refuses | test_contract_averaging.py, test_trainer_life.py |
| ModelPruning | stages 1 and 2, within a fit; else refuses | test_contract_averaging.py |
| GradientAccumulationScheduler | refuses | test_contract_refusals.py, test_trainer_steps.py |
| StochasticWeightAveraging, BaseFinetuning, BatchSizeFinder, LearningRateFinder | refuses | test_contract_refusals.py |
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    DeviceStatsMonitor,
    EarlyStopping,
    LambdaCallback,
    LearningRateMonitor,
    ModelSummary,
    RichModelSummary,
    RichProgressBar,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
)

from tests.modules import (
    EXPECTED_WARNINGS,
    OFTEN,
    MemoryLogger,
    Small,
    batches,
    fit,
    masters,
    strategy_of,
    trainer,
    weights,
)
from tests.stage3 import cut_strategy

pytestmark = [*EXPECTED_WARNINGS, pytest.mark.usefixtures("own_process_group")]

STRATEGIES: dict[str, Callable[[], Any]] = {
    "stage 2": lambda: strategy_of(OFTEN),
    "stage 3": lambda: cut_strategy(OFTEN, "host"),
}
on_both = pytest.mark.parametrize("make_strategy", STRATEGIES.values(), ids=STRATEGIES.keys())


def throughput() -> ThroughputMonitor:
    return ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=4)


class Counted(Small):
    """Tells its work per batch, which ThroughputMonitor asks for."""

    flops_per_batch = 1000


@on_both
def test_a_callback_that_only_watches_changes_no_bit_of_training(make_strategy: Callable[[], Any]) -> None:
    watches = [
        LambdaCallback(on_train_batch_end=lambda *_: None),
        ModelSummary(max_depth=2),
        RichProgressBar(),
        DeviceStatsMonitor(cpu_stats=True),
        throughput(),
        LearningRateMonitor("step"),
        EarlyStopping("val_loss", patience=10),
        Timer(timedelta(minutes=10)),
    ]
    watched, alone = Counted(), Counted()
    settings: dict[str, Any] = {"max_epochs": 2, "log_every_n_steps": 2}
    fit(
        watched,
        validation=batches(2),
        strategy=make_strategy(),
        callbacks=watches,
        logger=MemoryLogger(),
        enable_progress_bar=True,
        enable_model_summary=True,
        **settings,
    )
    fit(alone, validation=batches(2), strategy=make_strategy(), **settings)
    assert torch.equal(weights(watched), weights(alone)) and watched.losses == alone.losses


@on_both
def test_monitors_log_what_they_measure(make_strategy: Callable[[], Any]) -> None:
    logger = MemoryLogger()
    fit(
        Counted(),
        strategy=make_strategy(),
        callbacks=[throughput(), DeviceStatsMonitor(cpu_stats=True), LearningRateMonitor("step")],
        logger=logger,
        log_every_n_steps=2,
    )
    assert logger.values("train/batches") == [2, 4, 6, 8, 10]
    assert logger.values("train/samples") == [8, 16, 24, 32, 40]
    assert min(logger.values("train/device/batches_per_sec")) > 0
    assert len(logger.values("DeviceStatsMonitor.on_train_batch_end/cpu_vm_percent")) == 5
    assert logger.values("lr-ZenFlowAdamW") == [1e-2] * 5  # without a scheduler the optimizer is called what it is


@pytest.mark.parametrize("bar", [RichProgressBar, TQDMProgressBar])
def test_progress_bars_show_every_batch(bar: type[Any], capsys: pytest.CaptureFixture[str]) -> None:
    fit(Small(), callbacks=[bar()], enable_progress_bar=True)
    assert "10/10" in capsys.readouterr().out


@pytest.mark.parametrize(("summary", "stage"), [(ModelSummary, 2), (RichModelSummary, 2), (RichModelSummary, 3)])
def test_summaries_count_all_parameters_also_where_they_are_cut(
    summary: type[Any], stage: int, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    module = Small()
    module.net[0].requires_grad_(False)  # type: ignore[index]
    with caplog.at_level("INFO"):
        fit(
            module,
            strategy=strategy_of(OFTEN, stage=stage),
            callbacks=[summary(max_depth=2)],
            enable_model_summary=True,
            max_steps=1,
        )
    shown = " ".join((capsys.readouterr().out + caplog.text).split())
    frozen, trained = 6 * 8 + 8, 2 * 8 + 8 * 5 + 5
    for kind, count in (("Trainable", trained), ("Non-trainable", frozen), ("Total", frozen + trained)):
        assert re.search(rf"\b{count} {kind} params|{kind} params: {count}\b", shown)


def test_early_stopping_stops_at_a_loss_that_is_not_finite() -> None:
    class Diverges(Small):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", math.nan if self.current_epoch == 1 else 1.0)

    made = fit(Diverges(), validation=batches(1), callbacks=[EarlyStopping("val_loss", patience=9)], max_epochs=9)
    assert made.global_step == 20


def test_a_timer_stops_the_run_which_ends_settled() -> None:
    class AfterThree(Timer):
        """The time is over once three steps are made, however fast the machine is."""

        def time_elapsed(self, *_: Any) -> float:
            return 0.0 if made.global_step < 3 else 1e9

    module = Small()
    made = trainer(callbacks=[AfterThree(timedelta(seconds=60))], max_epochs=100)
    made.fit(module, batches(10))
    assert made.global_step == 3
    final = torch.cat([master.flatten() for master in masters(made).values()])
    assert torch.equal(weights(module), final)


@on_both
def test_a_prediction_writer_gets_every_batch(make_strategy: Callable[[], Any]) -> None:
    class Writes(BasePredictionWriter):
        def __init__(self) -> None:
            super().__init__("batch_and_epoch")
            self.batches: list[torch.Tensor] = []
            self.epochs: list[Any] = []

        def write_on_batch_end(self, trainer: Any, pl_module: Any, prediction: Any, *_: Any) -> None:
            self.batches.append(prediction)

        def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, *_: Any) -> None:
            self.epochs.append(predictions)

    writes = Writes()
    module, plain = Small(), Small()
    trainer(strategy=make_strategy(), callbacks=[writes]).predict(module, batches(3))
    assert len(writes.batches) == 3 and len(writes.epochs) == 1
    for prediction, (inputs, _) in zip(writes.batches, batches(3), strict=True):
        assert torch.allclose(prediction, plain.net(inputs), atol=1e-6)
