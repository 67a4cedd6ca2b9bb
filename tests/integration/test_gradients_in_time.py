"""Gradients can be read once they are complete and before they are used; asking at another time is answered in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_zenflow import ZenFlowStrategy
from tests.modules import EXPECTED_WARNINGS, OFTEN, Small, batches, fit, strategy_of, weights

pytestmark = [*EXPECTED_WARNINGS, pytest.mark.usefixtures("own_process_group")]

TOO_EARLY = r"`(grad_norm|gradient)` must be called between the backward pass .* `on_before_optimizer_step`"

HOOKS = (
    *("on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_zero_grad", "on_before_backward"),
    *(
        "on_after_backward",
        "on_before_optimizer_step",
        "on_train_batch_end",
        "on_validation_start",
        "on_train_epoch_end",
    ),
    "on_train_end",
)


TOLD = (("on_after_backward", True), ("on_before_optimizer_step", True))
"""Where there is an answer: the hook, and whether the micro-batch is the last one of its step."""


class Asks(Callback):
    """Asks for norm and gradients in every hook.

    Attributes:
        answers: The norms, by hook and by whether it is the last micro-batch of a step; none where asking is refused.
    """

    def __init__(self) -> None:
        self.answers: dict[tuple[str, bool], list[float]] = {}
        for hook in HOOKS:
            setattr(self, hook, lambda trainer, module, *args, hook=hook: self._ask(trainer, module, hook))

    def _ask(self, trainer: Trainer, module: LightningModule, hook: str) -> None:
        is_last = trainer.fit_loop.epoch_loop.batch_idx % 2 == 1
        answers = self.answers.setdefault((hook, is_last), [])
        strategy = trainer.strategy
        assert isinstance(module, Small) and isinstance(strategy, ZenFlowStrategy)
        if (hook, is_last) not in TOLD:
            with pytest.raises(RuntimeError, match=TOO_EARLY):
                strategy.grad_norm()
            with pytest.raises(RuntimeError, match=TOO_EARLY):
                strategy.gradient(module.net[0].weight)  # type: ignore[index]
            return
        norm = strategy.grad_norm()
        squares = [strategy.gradient(param).square().sum() for param in module.net.parameters()]
        assert norm == pytest.approx(torch.stack(squares).sum().sqrt().item(), rel=1e-5) and norm > 0
        answers.append(norm)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_are_told_when_they_are_complete_and_refused_before_and_after(stage: int) -> None:
    """FAULTS 19: it was zeros, or the sum of some micro-batches rounded early."""
    asks, module, other = Asks(), Small(), Small()
    settings: dict[str, Any] = {"accumulate_grad_batches": 2, "max_epochs": 2, "num_sanity_val_steps": 0}
    fit(module, batches(6), batches(1), strategy=strategy_of(OFTEN, stage=stage), callbacks=[asks], **settings)
    assert {hook for hook, _ in asks.answers} == set(HOOKS)
    assert [len(set(asks.answers[place])) for place in TOLD] == [6, 6]
    fit(other, batches(6), batches(1), strategy=strategy_of(OFTEN, stage=stage), **settings)
    assert torch.equal(weights(module), weights(other))  # asking changes nothing


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_within_a_backward_there_is_no_whole_gradient(stage: int) -> None:
    """FAULTS 19: what some layers have by then is not the norm."""

    class AsksWithin(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss: Tensor = super().training_step(batch, batch_idx)
            strategy: Any = self.trainer.strategy

            def within(grad: Tensor) -> None:
                self.asked = True
                with pytest.raises(RuntimeError, match=TOO_EARLY):
                    strategy.grad_norm()

            loss.register_hook(within)
            return loss

    module = AsksWithin()
    fit(module, batches(3), strategy=strategy_of(OFTEN, stage=stage))
    assert module.asked


class Manual(Small):
    """Two backward passes a step, as one that is interrupted for a look."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.norms: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        optimizer: Any = self.optimizers()
        with pytest.raises(RuntimeError, match=TOO_EARLY):
            strategy.grad_norm()
        for _ in range(2):
            self.manual_backward(self.loss(self.net, batch) / 2)
            self.norms.append(strategy.grad_norm())
        optimizer.step()
        with pytest.raises(RuntimeError, match=TOO_EARLY):
            strategy.gradient(self.net[0].weight)  # type: ignore[index]
        self.manual_backward(self.loss(self.net, batch))
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match=TOO_EARLY):
            strategy.grad_norm()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_in_manual_optimization_every_backward_adds_to_it_until_the_step(stage: int) -> None:
    """FAULTS 19."""
    module = Manual()
    fit(module, batches(3), strategy=strategy_of(OFTEN, stage=stage))
    assert len(module.norms) == 6
    for half, whole in zip(module.norms[::2], module.norms[1::2], strict=True):
        assert whole == pytest.approx(2 * half, rel=1e-5)
