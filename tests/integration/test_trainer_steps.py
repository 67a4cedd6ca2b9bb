"""What a step is under Lightning: accumulation, leftovers, clipping, hooks, skipped steps, what is logged."""

from __future__ import annotations

import logging
import math
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch.utils.data import DataLoader, IterableDataset

from lightning_zenflow import StallMonitor, StepStats, ZenFlowStrategy
from tests.cases import relative
from tests.modules import (
    EXPECTED_WARNINGS,
    EXTREMES,
    OFTEN,
    FollowsReference,
    MemoryLogger,
    Small,
    batches,
    fit,
    fit_plainly,
    schedule_of,
    strategy_of,
    three_groups,
    trainer,
    weights,
)

pytestmark = [*EXPECTED_WARNINGS, pytest.mark.usefixtures("own_process_group")]


class Endless(IterableDataset[Any]):
    """Seven batches, but no length to know it from."""

    def __iter__(self) -> Any:
        return iter(list(batches(7)))


@pytest.mark.parametrize("stage", [1, 2])
def test_leftover_batches_step_at_the_end_of_each_epoch_and_all_counters_agree(stage: int) -> None:
    """FAULTS 1, 2, 3, 6, 15, Z2, Z10, Z11."""
    follows, module = FollowsReference(), Small(configure=three_groups)
    strategy = strategy_of({**OFTEN, "update_interval": 4}, stage=stage)
    made = fit(
        module,
        strategy=strategy,
        callbacks=[follows],
        max_epochs=3,
        accumulate_grad_batches=4,
        gradient_clip_val=0.5,
    )
    follows.assert_equal(steps=3 * math.ceil(10 / 4))
    assert made.global_step == strategy.deepspeed_engine.global_steps == strategy.step_stats.step == 9
    assert schedule_of(made).update_interval == 4
    assert torch.isfinite(weights(module)).all()


def test_leftover_batches_of_a_loader_without_length_step_as_well() -> None:
    """FAULTS 2."""
    follows = FollowsReference()
    made = fit(
        Small(),
        DataLoader(Endless(), batch_size=None),
        callbacks=[follows],
        max_epochs=2,
        accumulate_grad_batches=2,
    )
    follows.assert_equal(steps=8)
    assert made.global_step == made.strategy.step_stats.step == 8  # type: ignore[attr-defined]


@pytest.mark.parametrize("zenflow", EXTREMES, ids=["selected", "deferred"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_both_parts_are_clipped_as_a_plain_trainer_clips(zenflow: dict[str, Any], kind: Any) -> None:
    """FAULTS 6: the limit lies below most norms, and weight decay and large `eps` make the scale of gradients matter."""
    results = []
    settings: dict[str, Any] = {"max_epochs": 2, "accumulate_grad_batches": 4, "gradient_clip_val": 0.3}
    for run in (partial(fit, zenflow=zenflow), fit_plainly):
        module = Small(configure=lambda module: kind(module.parameters(), lr=0.3, eps=1.0, weight_decay=0.05))
        made = run(module, **settings)
        results.append((weights(module), made.global_step))
    (ours, our_steps), (plain, plain_steps) = results
    assert our_steps == plain_steps == 6
    assert relative(ours, plain) < 1e-6
    unclipped = Small(configure=lambda module: kind(module.parameters(), lr=0.3, eps=1.0, weight_decay=0.05))
    fit_plainly(unclipped, max_epochs=2, accumulate_grad_batches=4)
    assert relative(weights(unclipped), plain) > 1e-2


class OwnClipping(Small):
    """Clips in a way of its own, and not at all in the last batches."""

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        if len(self.losses) < 6:
            self.clip_gradients(optimizer, gradient_clip_val=0.05 * len(self.losses), gradient_clip_algorithm="norm")


def test_a_clipping_hook_of_ones_own_is_obeyed() -> None:
    """FAULTS 6."""

    def sgd_like(module: Small) -> torch.optim.Optimizer:
        return torch.optim.AdamW(module.parameters(), lr=0.3, eps=1.0)

    ours, plain = OwnClipping(configure=sgd_like), OwnClipping(configure=sgd_like)
    made = fit(ours, zenflow={"topk_ratio": 1})
    fit_plainly(plain)
    assert relative(weights(ours), weights(plain)) < 1e-6
    stats = made.strategy.step_stats  # type: ignore[attr-defined]
    assert stats.grad_norm_clipped == stats.grad_norm


class ByValue(Small):
    """Clips by value in its hook, or by hand."""

    def __init__(self, *, by_hand: bool) -> None:
        super().__init__()
        self.automatic_optimization = not by_hand

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="value")
            optimizer.step()
        return loss

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="value")


BY_VALUE = "`gradient_clip_algorithm` must be 'norm' with ZenFlow, got 'value'"


def test_clipping_by_value_is_refused_before_anything_is_trained() -> None:
    """FAULTS 7."""
    module = Small()
    with pytest.raises(ValueError, match=BY_VALUE):
        fit(module, gradient_clip_val=0.1, gradient_clip_algorithm="value")
    assert module.losses == []


@pytest.mark.parametrize("by_hand", [True, False])
def test_a_module_that_clips_by_value_is_refused_at_its_first_step(by_hand: bool) -> None:
    """FAULTS 7: of which the Trainer knows nothing."""
    module = ByValue(by_hand=by_hand)
    with pytest.raises(ValueError, match=BY_VALUE):
        fit(module)
    assert len(module.losses) == 1


class CountsHooks(Small):
    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}

    def _count(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1

    def on_before_backward(self, loss: Any) -> None:
        self._count("on_before_backward")

    def on_after_backward(self) -> None:
        self._count("on_after_backward")

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self._count("on_before_zero_grad")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self._count("on_before_optimizer_step")
        assert isinstance(self.trainer.strategy, ZenFlowStrategy)
        assert self.trainer.strategy.step_stats.step == self.calls["on_before_optimizer_step"] - 1

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self._count("configure_gradient_clipping")

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self._count("optimizer_step")
        super().optimizer_step(*args, **kwargs)


def test_optimizer_hooks_fire_once_per_real_step() -> None:
    """FAULTS 4."""
    module = CountsHooks()
    made = fit(module, max_epochs=2, accumulate_grad_batches=3)
    per_batch = dict.fromkeys(("on_before_backward", "on_after_backward"), 20)
    names = ("on_before_zero_grad", "on_before_optimizer_step", "configure_gradient_clipping", "optimizer_step")
    assert module.calls == {**per_batch, **dict.fromkeys(names, 8)}
    assert made.strategy.step_stats.step == 8  # type: ignore[attr-defined]


def test_the_stall_monitor_logs_fixed_names_once_per_step_with_the_norm_before_and_after_clipping() -> None:
    """FAULTS 4, 5."""
    logger = MemoryLogger()
    fit(
        Small(),
        callbacks=[StallMonitor()],
        logger=logger,
        log_every_n_steps=2,
        max_epochs=2,
        accumulate_grad_batches=2,
        gradient_clip_val=0.2,
    )
    ours = [(step, metrics) for step, metrics in logger.logged if "zenflow/step" in metrics]
    assert [step for step, _ in ours] == [2, 4, 6, 8, 10] == logger.values("zenflow/step")
    for _, metrics in ours:
        always = StepStats(select_interval=64).metrics().keys()
        assert always <= metrics.keys() <= always | {"zenflow/selection_agreement", "zenflow/deferred_mass_ratio"}
        assert (metrics["zenflow/update_interval"], metrics["zenflow/select_interval"]) == (4, 4)
        assert metrics["zenflow/grad_norm"] > 0.2
        assert metrics["zenflow/grad_norm_clipped"] == pytest.approx(0.2, rel=1e-4)
        assert 0 < metrics["zenflow/step_secs"] < 10
        assert 0 <= metrics["zenflow/stall_ratio"] <= 1
        assert metrics["zenflow/to_host_bytes"] > 0 and metrics["zenflow/to_device_bytes"] > 0
        assert metrics["zenflow/skipped_steps"] == 0
        assert 1 <= metrics["zenflow/deferred_age_steps"] <= 4
    # What the host took is known when it has answered, on a busy machine some steps later.
    for name in ("zenflow/worker_accumulate_secs", "zenflow/worker_update_secs"):
        assert max(metrics[name] for _, metrics in ours) > 0


def test_the_stall_monitor_stays_silent_when_nothing_is_to_be_logged_and_refuses_other_strategies() -> None:
    logger = MemoryLogger()
    fit(Small(), batches(2), callbacks=[StallMonitor()], logger=logger, log_every_n_steps=0)
    assert not logger.logged
    with pytest.raises(TypeError, match="`strategy` must be zenflow for StallMonitor, got SingleDeviceStrategy"):
        fit_plainly(Small(), callbacks=[StallMonitor()])


class SometimesNaN(Small):
    """Some batches have a loss that is not finite."""

    bad: tuple[int, ...] = (2, 3, 7)
    """Their numbers."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (math.nan if batch_idx in self.bad else 1.0)


class WatchesSkips(Callback):
    def __init__(self) -> None:
        self.clocks: list[int] = []
        self.moved: list[bool] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.before = weights(pl_module).clone()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.clocks.append(trainer.strategy.step_stats.step)
        self.moved.append(not torch.equal(weights(pl_module), self.before))


@pytest.mark.parametrize("interim", [False, True])
def test_a_loss_that_is_not_finite_skips_the_step_is_counted_and_said_once_each(interim: bool) -> None:
    """FAULTS 12: the clock stands still, and training goes on as if the batch had not been there.

    Where the device moves deferred weights it has moved them by then: the masters are shown, which takes a settling.
    """
    zenflow = {**OFTEN, "interim_step": interim}
    module, watches = SometimesNaN(), WatchesSkips()
    with pytest.warns(RuntimeWarning) as warned:
        made = fit(module, callbacks=[watches], zenflow=zenflow)
    assert watches.clocks == [1, 2, 2, 2, 3, 4, 5, 5, 6, 7]
    assert watches.moved == [True, True, interim, False, True, True, True, interim, True, True]
    said = [str(warning.message) for warning in warned if "skipped" in str(warning.message)]
    assert said == [
        f"Step after {clock} skipped: the gradient norm is nan ({count} skipped so far). No weight changes by it."
        for clock, count in ((2, 1), (2, 2), (5, 3))
    ]
    assert isinstance(made.strategy, ZenFlowStrategy)
    assert made.strategy.step_stats.skipped_steps == made.strategy.deepspeed_engine.skipped_steps == 3
    assert made.global_step == made.strategy.deepspeed_engine.global_steps == 7 + 3
    other = Small()
    good = [batch for index, batch in enumerate(batches(10)) if index not in SometimesNaN.bad]
    fit(other, DataLoader(good, batch_size=None), zenflow=zenflow)  # type: ignore[arg-type]
    # A settling applies early what the host holds, to other weights then: as `reference.py` does.
    assert torch.isfinite(weights(module)).all()
    assert interim or torch.equal(weights(other), weights(module))


def test_skipped_steps_of_a_second_fit_are_said_as_well() -> None:
    """FAULTS 12."""
    made, module = trainer(), SometimesNaN()
    module.bad = (2,)
    for epochs in (1, 2):
        made.fit_loop.max_epochs = epochs
        with pytest.warns(RuntimeWarning, match=r"Step after 2 skipped: .* \(1 skipped so far\)"):
            made.fit(module, batches(4))


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@pytest.mark.filterwarnings("ignore:Step after")
def test_deepspeed_does_not_repeat_what_is_said_of_a_skipped_step() -> None:
    """FAULTS 12, Z12: it writes to stdout."""
    records = Records()
    logging.getLogger("DeepSpeed").addHandler(records)
    try:
        fit(SometimesNaN(), batches(4))
    finally:
        logging.getLogger("DeepSpeed").removeHandler(records)
    assert [line for line in records.said if "OVERFLOW" in line] == []


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_training_step_without_loss_is_refused(accumulate: int) -> None:
    class Nothing(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx == 2 else super().training_step(batch, batch_idx)

    with pytest.raises(ValueError, match="`training_step` must return a loss with ZenFlow, got None"):
        fit(Nothing(), accumulate_grad_batches=accumulate)


def test_accumulation_that_changes_between_epochs_is_refused_in_words() -> None:
    """FAULTS 3: Lightning's own message, which names strategy and argument."""
    message = "`ZenFlowStrategy` does not support `accumulate_grad_batches` changing between epochs"
    with pytest.raises(RuntimeError, match=message):
        fit(Small(), callbacks=[GradientAccumulationScheduler({0: 2, 1: 3})])


def test_an_interval_in_epochs_comes_from_the_trainer() -> None:
    """FAULTS Z3: ten batches in steps of three make four steps an epoch."""
    follows = FollowsReference()
    zenflow = {"topk_ratio": 0.3, "select_strategy": "epoch", "select_interval": 2}
    made = fit(Small(), zenflow=zenflow, callbacks=[follows], max_epochs=5, accumulate_grad_batches=3)
    assert schedule_of(made).select_interval == 8
    follows.assert_equal(steps=20)  # the reference selects at steps 1, 9 and 17


def test_an_interval_in_epochs_counts_only_batches_that_are_used() -> None:
    """FAULTS Z3."""
    zenflow = {"select_strategy": "epoch"}
    made = fit(Small(), zenflow=zenflow, limit_train_batches=3, max_epochs=2)
    assert schedule_of(made).select_interval == 3


def test_an_interval_in_epochs_asks_for_steps_where_the_loader_has_no_length() -> None:
    """FAULTS Z3."""
    with pytest.raises(
        ValueError, match="`select_strategy` must be step for a data loader without a length, got 'epoch'"
    ):
        fit(Small(), DataLoader(Endless(), batch_size=None), zenflow={"select_strategy": "epoch"})


class AsksInHook(Small):
    """Compares what the strategy tells of gradients with what the parameters tell."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        strategy = self.trainer.strategy
        assert isinstance(strategy, ZenFlowStrategy)
        params = [param for param in self.net.parameters() if param.requires_grad]
        norm = strategy.grad_norm()
        squares = sum(strategy.gradient(param).square().sum().item() for param in params)
        assert norm == pytest.approx(squares**0.5, rel=1e-6)
        self.norms = [*getattr(self, "norms", []), norm]


def test_gradients_and_their_norm_can_be_read_in_hooks_and_nowhere_else() -> None:
    """FAULTS 19; `FollowsReference` compares each of them with autograd's."""
    module = AsksInHook()
    made = fit(module, gradient_clip_val=0.1, accumulate_grad_batches=2)
    assert len(module.norms) == 5 and min(module.norms) > 0.1  # before clipping
    strategy = made.strategy
    assert isinstance(strategy, ZenFlowStrategy)
    for ask in (strategy.grad_norm, strategy.settle, lambda: strategy.gradient(module.net[0].weight)):  # type: ignore
        with pytest.raises(RuntimeError, match=r"must be called while `trainer.fit` runs"):
            ask()


def test_asking_for_the_gradient_of_a_parameter_that_is_not_trained_is_an_error() -> None:
    """FAULTS 19: zeros would look like an answer."""

    class AsksForFrozen(Small):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.trainer.strategy.gradient(self.net[0].weight)  # type: ignore

    module = AsksForFrozen()
    module.net[0].requires_grad_(False)  # type: ignore[index]
    with pytest.raises(ValueError, match=r"`param` must be a trainable parameter of the optimizer, got .*\[8, 6\]"):
        fit(module)
