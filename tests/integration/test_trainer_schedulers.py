"""Learning rate schedules under Lightning: stepped exactly once, on the groups that both parts read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor
from torch.optim import lr_scheduler
from torch.optim.optimizer import Optimizer

from lightning_zenflow import ZenFlowAdamW, ZenFlowStrategy
from tests.modules import (
    EXPECTED_WARNINGS,
    OFTEN,
    FollowsReference,
    MemoryLogger,
    Small,
    batches,
    fit,
    fit_plainly,
    strategy_of,
    three_groups,
)

pytestmark = [*EXPECTED_WARNINGS, pytest.mark.usefixtures("own_process_group")]


def one_cycle(module: Small) -> dict[str, Any]:
    """Changes betas as well as rates, and asks the Trainer how many steps there are."""
    optimizer = three_groups(module)
    steps = module.trainer.estimated_stepping_batches
    assert steps == 2 * 5
    return of(optimizer, lr_scheduler.OneCycleLR(optimizer, max_lr=[1e-2, 2e-2, 3e-2], total_steps=int(steps)))


def of(optimizer: Optimizer, scheduler: Any, interval: str = "step", **settings: Any) -> dict[str, Any]:
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": interval, **settings}}


def three_lambdas(module: Small) -> dict[str, Any]:
    optimizer = three_groups(module)
    factors = [lambda step: 1 / (step + 1), lambda step: 0.9**step, lambda step: 1 + 0.1 * step]
    return of(optimizer, lr_scheduler.LambdaLR(optimizer, factors), frequency=2)


def per_epoch(module: Small) -> dict[str, Any]:
    optimizer = three_groups(module)
    return of(optimizer, lr_scheduler.ExponentialLR(optimizer, 0.5), "epoch")


def plateau(module: Small) -> dict[str, Any]:
    optimizer = three_groups(module)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=0, threshold=10.0)
    return of(optimizer, scheduler, "epoch", monitor="val_loss")


def sequential(module: Small) -> dict[str, Any]:
    optimizer = three_groups(module)
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(optimizer, 8)]
    return of(optimizer, lr_scheduler.SequentialLR(optimizer, parts, [3]))


def of_our_own_optimizer(module: Small) -> dict[str, Any]:
    """`ZenFlowAdamW` as the user's own; the plain Trainer, which cannot use it, gets its twin."""
    twin = three_groups(module)
    ours = isinstance(module.trainer.strategy, ZenFlowStrategy)
    optimizer = ZenFlowAdamW(twin.param_groups, lr=1e-2) if ours else twin
    return of(optimizer, lr_scheduler.StepLR(optimizer, 3, 0.5))


class SeesRates(Callback):
    """What each step of the optimizer is going to use."""

    def __init__(self) -> None:
        self.seen: list[list[tuple[float, ...]]] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.seen.append([(group["lr"], *group["betas"]) for group in optimizer.param_groups])


@pytest.mark.parametrize(
    "configure",
    [one_cycle, three_lambdas, per_epoch, plateau, sequential, of_our_own_optimizer],
    ids=lambda f: f.__name__,
)
def test_a_schedule_is_stepped_exactly_as_by_a_plain_trainer_and_reaches_both_parts_at_once(
    configure: Callable[[Small], Any],
) -> None:
    """FAULTS 8, 10, Z1: rates equal a plain Trainer's at each step, weights the reference that reads those rates."""
    follows, ours, plain = FollowsReference(), SeesRates(), SeesRates()
    settings: dict[str, Any] = {"max_epochs": 2, "accumulate_grad_batches": 2}
    fit(Small(configure=configure), validation=batches(2), callbacks=[ours, follows], **settings)
    fit_plainly(Small(configure=configure), validation=batches(2), callbacks=[plain], **settings)
    follows.assert_equal(steps=10)
    assert ours.seen == plain.seen
    assert len({group[0] for group in ours.seen[0]}) == 3  # three rates
    assert ours.seen[0] != ours.seen[-1]


def test_the_learning_rate_monitor_sees_all_groups() -> None:
    """FAULTS 11: and each of them once, under the names that a plain Trainer has."""
    names = []
    for run in (fit, fit_plainly):
        logger = MemoryLogger()
        monitor = LearningRateMonitor("step", log_momentum=True, log_weight_decay=True)
        run(Small(configure=three_lambdas), callbacks=[monitor], logger=logger, log_every_n_steps=1)
        names.append({name for _, metrics in logger.logged for name in metrics})
        for group, first in ((1, 1e-2), (2, 3e-3), (3, 2e-2)):
            rates = logger.values(f"lr-AdamW/pg{group}")
            assert len(rates) == 10 and rates[0] == first and rates[-1] != first
        assert logger.values("lr-AdamW/pg1-weight_decay")[0] == 0.1
        assert logger.values("lr-AdamW/pg2-momentum")[0] == 0.8
    assert names[0] == names[1] and len(names[0]) == 3 * 3


class HalvesRates(Small):
    """Of all groups, after each batch."""

    def on_train_batch_end(self, *args: Any) -> None:
        optimizer = self.optimizers()
        assert not isinstance(optimizer, list)
        for group in optimizer.param_groups:
            group["lr"] /= 2


@pytest.mark.parametrize("stage", [2, 3])
def test_the_learning_rate_monitor_sees_all_groups_without_a_scheduler(stage: int) -> None:
    """FAULTS 11: also where nothing but the strategy's own optimizer has them."""
    logger = MemoryLogger()
    module = HalvesRates(configure=three_groups)
    fit(
        module,
        strategy=strategy_of(OFTEN, stage=stage),
        callbacks=[LearningRateMonitor("step")],
        logger=logger,
        log_every_n_steps=1,
    )
    for group, first in ((1, 1e-2), (2, 3e-3), (3, 2e-2)):
        assert logger.values(f"lr-ZenFlowAdamW/pg{group}") == [first / 2**step for step in range(10)]


def test_number_of_steps_and_device_are_right_inside_configure_optimizers() -> None:
    """FAULTS 9."""
    seen = []

    def configure(module: Small) -> Any:
        seen.append(module.trainer.estimated_stepping_batches)
        assert module.device == module.trainer.strategy.root_device == torch.device("cpu", 0)
        return torch.optim.AdamW(module.parameters())

    made = fit(Small(configure=configure), max_epochs=3, accumulate_grad_batches=4)
    assert seen == [9] == [made.global_step]


def test_early_stopping_stops_and_a_rate_set_by_hand_is_used_in_the_same_step() -> None:
    """FAULTS 10."""

    class ByHand(Small):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:  # type: ignore[override]
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * (1 + self.trainer.global_step)
            optimizer.step(closure=closure)

    follows, rates = FollowsReference(), SeesRates()
    stopping = EarlyStopping("val_loss", min_delta=10.0, patience=1)
    made = fit(ByHand(), validation=batches(2), callbacks=[stopping, follows, rates], max_epochs=20)
    assert made.current_epoch == 2
    follows.assert_equal(steps=20)
    assert [groups[0][0] for groups in rates.seen] == [1e-3 * step for step in range(1, 21)]
