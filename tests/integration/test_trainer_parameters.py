"""Models with parameters of every kind, and what a run refuses to do with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_zenflow import ZenFlowStrategy
from tests.modules import (
    CLASSES,
    EXPECTED_WARNINGS,
    FEATURES,
    OFTEN,
    FollowsReference,
    Small,
    batches,
    fit,
    strategy_of,
    weights,
)

pytestmark = [*EXPECTED_WARNINGS, pytest.mark.usefixtures("own_process_group")]


class Everything(nn.Module):
    """Tied, frozen, empty, scalar, sometimes unused, `channels_last`, and a layer used twice under checkpointing."""

    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.tied = nn.Linear(FEATURES, FEATURES)
        self.tied.weight = self.first.weight
        self.conv = nn.Conv2d(2, 4, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.turned = nn.Parameter(torch.randn(8, 7).t())
        self.frozen = nn.Linear(7, 8).requires_grad_(False)
        self.twice = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.sometimes = nn.Linear(8, CLASSES)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tied(torch.tanh(self.first(x)))
        image = x.view(-1, 1, 2, 3).expand(-1, 2, -1, -1).contiguous(memory_format=torch.channels_last)
        x = self.frozen(self.conv(image).flatten(1) @ self.turned.t())
        for _ in range(2):
            x = checkpoint(lambda y: torch.tanh(self.twice(y)), x, use_reentrant=self.reentrant)
        return self.scale * self.last(x) + (self.sometimes(x) if x.sum() > 0 else 0)


class Reentrant(Everything):
    reentrant = True


class VectorsOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(FEATURES))
        self.shift = nn.Parameter(torch.zeros(FEATURES))
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale + self.shift)[:, :CLASSES] * self.temperature


def one_matrix() -> nn.Module:
    return nn.Linear(FEATURES, CLASSES, bias=False)


def one_column() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 1, bias=False), nn.Linear(1, CLASSES, bias=False))


@pytest.mark.parametrize(
    ("make_net", "stage", "accumulate"),
    [
        (Everything, 2, 1),
        (Everything, 1, 2),
        (Reentrant, 2, 2),
        pytest.param(Reentrant, 1, 2, marks=pytest.mark.long),
        (VectorsOnly, 2, 2),
        (one_matrix, 2, 1),
        (one_column, 2, 1),
    ],
)
def test_parameters_of_every_kind_follow_the_reference(
    make_net: Callable[[], nn.Module], stage: int, accumulate: int
) -> None:
    """FAULTS 16, 17, 19, 20."""
    follows, module = FollowsReference(), Small(make_net)
    before = weights(module).clone()
    fit(
        module,
        batches(10 * accumulate),
        strategy=strategy_of(OFTEN, stage=stage),
        callbacks=[follows],
        accumulate_grad_batches=accumulate,
        gradient_clip_val=0.5,
    )
    follows.assert_equal(steps=10)
    trained = torch.cat([param.detach().flatten() for param in module.parameters() if param.requires_grad])
    assert len(trained) > 0 and torch.isfinite(trained).all()
    assert not torch.equal(before, weights(module))


def test_tied_weights_stay_tied_and_frozen_ones_stay_as_they_were() -> None:
    """FAULTS 16."""
    module = Small(Everything)
    net = module.net
    assert isinstance(net, Everything)
    frozen, conv = net.frozen.weight.clone(), net.conv.weight.clone()
    made = fit(module, strategy=strategy_of({**OFTEN, "topk_ratio": 0.5}))
    assert net.first.weight is net.tied.weight
    assert torch.equal(net.frozen.weight, frozen)
    assert not torch.equal(net.conv.weight, conv)
    assert net.scale.shape == () and net.turned.shape == (7, 8)
    strategy = made.strategy
    assert isinstance(strategy, ZenFlowStrategy) and strategy._zero is not None
    names = [spec.name for spec in strategy._zero._tables[0].params]
    assert sum(name.endswith(("first.weight", "tied.weight")) for name in names) == 1


def groups_of_which_one_is_frozen(module: Small) -> Any:
    module.net[0].requires_grad_(False)  # type: ignore[index]
    optimizer = torch.optim.AdamW(
        [
            {"params": module.net[0].parameters(), "lr": 1.0},  # type: ignore[index]
            {"params": module.net[2].parameters()},  # type: ignore[index]
            {"params": module.net[3].parameters(), "weight_decay": 0.1},  # type: ignore[index]
        ],
        lr=1e-2,
    )
    factors = [lambda step: 1.0, lambda step: 0.9**step, lambda step: 1 / (step + 1)]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factors)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def test_a_group_that_is_frozen_as_a_whole_does_not_disturb_the_others() -> None:
    """FAULTS 15, Z1."""
    follows, module = FollowsReference(), Small(configure=groups_of_which_one_is_frozen)
    frozen = module.net[0].weight.clone()  # type: ignore[index]
    fit(module, callbacks=[follows])
    follows.assert_equal(steps=10)
    assert torch.equal(module.net[0].weight, frozen)  # type: ignore[index]
    rates = [group["lr"] for group in module.own_optimizer.param_groups]
    assert rates == pytest.approx([1.0, 1e-2 * 0.9**10, 1e-2 / 11])


def test_trainable_parameters_outside_the_optimizer_keep_their_weights() -> None:
    module = Small(configure=lambda module: torch.optim.AdamW(module.net[3].parameters()))  # type: ignore[index]
    before = [param.detach().clone() for param in module.net.parameters()]
    fit(module)
    same = [torch.equal(old, new) for old, new in zip(before, module.net.parameters(), strict=True)]
    assert same == [True, True, True, True, False, False]


def test_nothing_to_train_is_refused() -> None:
    """FAULTS 17."""
    module = Small()
    module.net.requires_grad_(False)
    with pytest.raises(ValueError, match="The optimizer must hold at least one trainable parameter, got none"):
        fit(module)


def test_unfreezing_while_training_is_refused_since_it_would_have_no_effect() -> None:
    class Unfreezes(Small):
        def on_train_epoch_start(self) -> None:
            self.net[0].requires_grad_(self.current_epoch == 1)  # type: ignore[index]

    module = Unfreezes()
    module.net[0].requires_grad_(False)  # type: ignore[index]
    with pytest.raises(RuntimeError, match=r"`net.0.weight.requires_grad` must stay False during `fit`, got True"):
        fit(module, max_epochs=2)
    assert module.trainer.global_step == 10
