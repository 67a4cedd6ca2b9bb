"""Manual optimization: the module says when to go backward and when to step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from tests.cases import relative
from tests.modules import EXPECTED_WARNINGS, EXTREMES, OFTEN, Small, batches, fit, fit_plainly, strategy_of, weights

pytestmark = [*EXPECTED_WARNINGS, pytest.mark.usefixtures("own_process_group")]


def adamw(module: Small) -> torch.optim.Optimizer:
    """With a large `eps`, so that the size of gradients matters."""
    return torch.optim.AdamW(module.parameters(), lr=0.3, eps=1.0, weight_decay=0.05)


class Manual(Small):
    """Goes another of the documented ways in each batch."""

    def __init__(self) -> None:
        super().__init__(configure=adamw)
        self.automatic_optimization = False
        self.steps = 0

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.steps += 1

    def training_step(self, batch: Any, batch_idx: int) -> None:
        way = (self.one_by_one, self.toggled, self.unsynchronized, self.with_closure, self.clipped, self.lazily)
        way[batch_idx % len(way)](self.optimizers(), batch)

    def halves(self, batch: Any) -> Any:
        return [self.loss(self.net, half) / 2 for half in zip(batch[0].chunk(2), batch[1].chunk(2), strict=True)]

    def one_by_one(self, optimizer: Any, batch: Any) -> None:
        """Several `manual_backward` before one step."""
        for loss in self.halves(batch):
            self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    def toggled(self, optimizer: Any, batch: Any) -> None:
        self.toggle_optimizer(optimizer)
        self.manual_backward(self.loss(self.net, batch))
        optimizer.step()
        optimizer.zero_grad()
        self.untoggle_optimizer(optimizer)

    def unsynchronized(self, optimizer: Any, batch: Any) -> None:
        first, second = self.halves(batch)
        with optimizer.toggle_model(sync_grad=False):
            self.manual_backward(first)
        with optimizer.toggle_model(sync_grad=True):
            self.manual_backward(second)
            optimizer.step()
        optimizer.zero_grad()

    def with_closure(self, optimizer: Any, batch: Any) -> None:
        def closure() -> torch.Tensor:
            loss = self.loss(self.net, batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)
        optimizer.zero_grad()

    def clipped(self, optimizer: Any, batch: Any) -> None:
        self.manual_backward(self.loss(self.net, batch))
        self.clip_gradients(optimizer, gradient_clip_val=0.2, gradient_clip_algorithm="norm")
        optimizer.step()
        optimizer.zero_grad()

    def lazily(self, optimizer: Any, batch: Any) -> None:
        """Gradients of a sum of losses, and no limit left over from the batch before."""
        optimizer.zero_grad()
        self.manual_backward(sum(self.halves(batch)))
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("zenflow", EXTREMES, ids=["selected", "deferred"])
def test_each_way_of_manual_optimization_equals_a_plain_trainer(zenflow: dict[str, Any], stage: int) -> None:
    """FAULTS 4, 6."""
    ours, plain = Manual(), Manual()
    made = fit(ours, batches(12), strategy=strategy_of(zenflow, stage=stage))
    fit_plainly(plain, batches(12))
    assert relative(weights(ours), weights(plain)) < 1e-6
    assert ours.steps == made.global_step == made.strategy.step_stats.step == 12  # type: ignore[attr-defined]


class InPasses(Small):
    """One step for each batch, by one backward or by several."""

    def __init__(self, way: str) -> None:
        super().__init__(configure=adamw)
        self.way, self.automatic_optimization = way, False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        if self.way == "dropped":  # as in two-player games
            self.manual_backward(self.loss(self.net, batch) ** 2)
            optimizer.zero_grad()
        if self.way == "halves":
            for part in zip(batch[0].chunk(2), batch[1].chunk(2), strict=True):
                self.manual_backward(self.loss(self.net, part) / 2)
        else:
            self.manual_backward(self.loss(self.net, batch))
        optimizer.step()


@pytest.mark.parametrize("way", ["halves", "dropped"])
@pytest.mark.parametrize("stage", [2, 3])
def test_all_backward_passes_of_a_step_see_the_same_weights(way: str, stage: int) -> None:
    """FAULTS 1, 20: though the device moves deferred weights during backward."""
    ours, other = InPasses(way), InPasses("whole")
    for module in (ours, other):
        fit(module, batches(20), strategy=strategy_of({**OFTEN, "select_interval": 20}, stage=stage))
    assert relative(weights(ours), weights(other)) < 1e-5


def test_clipping_by_the_trainer_is_refused_as_always() -> None:
    with pytest.raises(MisconfigurationException, match="gradient clipping is not supported for manual optimization"):
        fit(Manual(), gradient_clip_val=0.5)


@pytest.mark.parametrize("automatic", [True, False])
def test_two_optimizers_are_refused_in_words(automatic: bool) -> None:
    class Two(Small):
        def configure_optimizers(self) -> Any:
            return [torch.optim.AdamW(layer.parameters()) for layer in (self.net[0], self.net[3])]  # type: ignore

    module = Two()
    module.automatic_optimization = automatic
    with pytest.raises(
        (RuntimeError, MisconfigurationException), match=r"multiple optimizers|only supports single optimizer"
    ):
        fit(module, zenflow=OFTEN)


class DropsGradients(Small):
    """Goes backward twice and throws the first gradients away, as in two-player games."""

    def __init__(self, automatic: bool) -> None:
        super().__init__(configure=adamw)
        self.automatic_optimization = automatic

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(self.net, batch)
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        self.manual_backward(loss**2)
        optimizer.zero_grad()
        self.manual_backward(self.loss(self.net, batch))
        optimizer.step()
        return None

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:  # type: ignore[override]
        if batch_idx % 2:
            optimizer.step(closure=closure)
        else:
            closure()


@pytest.mark.parametrize("automatic", [True, False])
@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_that_zero_grad_throws_away_are_not_applied(automatic: bool, stage: int) -> None:
    ours, plain = DropsGradients(automatic), DropsGradients(automatic)
    fit(ours, strategy=strategy_of({"topk_ratio": 1}, stage=stage))
    fit_plainly(plain)
    assert relative(weights(ours), weights(plain)) < 1e-6
