"""Parameters that only some micro-batches of a step have a gradient for: none of it is lost, whatever the stage."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightning_zenflow import ZenFlowStrategy
from tests.cases import gathered, relative
from tests.modules import (
    CLASSES,
    EXPECTED_WARNINGS,
    EXTREMES,
    FEATURES,
    OFTEN,
    Small,
    batches,
    fit,
    fit_plainly,
    strategy_of,
    weights,
)

pytestmark = [*EXPECTED_WARNINGS, pytest.mark.usefixtures("own_process_group")]

MICRO = 3
"""Micro-batches of a step."""

WAYS = [(stage, overlap) for stage in (1, 2, 3) for overlap in (True, False)]


class SometimesNet(nn.Module):
    """One layer is used when it is told so."""

    uses_sometimes = True

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 8)
        self.sometimes = nn.Linear(8, 8)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if self.uses_sometimes:
            x = x + torch.tanh(self.sometimes(x))
        return self.last(x)


class Sometimes(Small):
    """Uses that layer in one micro-batch of each step: in another one on each rank."""

    def __init__(self, shift: int = 1) -> None:
        super().__init__(SometimesNet)
        self.shift = shift
        self.seen: list[tuple[Any, bool]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        net: Any = self.net
        net.uses_sometimes = batch_idx % MICRO == (self.shift * self.global_rank) % MICRO
        self.seen.append((batch, net.uses_sometimes))
        return super().training_step(batch, batch_idx)


class Gradients(Callback):
    """Compares the gradient of each parameter with that which autograd computes for all micro-batches of a step.

    Attributes:
        worst: Largest relative difference, by parameter.
        steps: How many steps were compared.
    """

    def __init__(self) -> None:
        self.worst: dict[str, float] = {}
        self.steps = 0
        self._weights: dict[str, Tensor] = {}  # those of the step's forward: backward may move them already

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        assert isinstance(pl_module, Sometimes)
        if not pl_module.seen:
            with gathered(pl_module.net.parameters()):
                self._weights = {name: value.clone() for name, value in pl_module.net.state_dict().items()}

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        assert isinstance(pl_module, Sometimes) and isinstance(trainer.strategy, ZenFlowStrategy)
        params = dict(pl_module.net.named_parameters())
        for name, expected in self._expected(trainer, pl_module).items():
            difference = relative(trainer.strategy.gradient(params[name]), expected)
            self.worst[name] = max(self.worst.get(name, 0.0), difference)
        self.steps += 1

    def _expected(self, trainer: Trainer, module: Sometimes) -> dict[str, Tensor]:
        twin = SometimesNet()
        twin.load_state_dict(self._weights)
        for batch, twin.uses_sometimes in module.seen:
            (F.cross_entropy(twin(batch[0]), batch[1]) / MICRO).backward()
        module.seen.clear()
        found = {}
        for name, param in twin.named_parameters():
            found[name] = torch.zeros_like(param) if param.grad is None else param.grad
            if trainer.world_size > 1:
                torch.distributed.all_reduce(found[name])
                found[name] /= trainer.world_size
        return found


@pytest.mark.parametrize(("stage", "overlap"), WAYS)
def test_a_gradient_of_an_earlier_micro_batch_alone_is_applied(stage: int, overlap: bool) -> None:
    """FAULTS 1, 20: per parameter, against autograd and against a plain Trainer with AdamW."""
    plain = Sometimes()
    fit_plainly(plain, batches(4 * MICRO), accumulate_grad_batches=MICRO)
    for zenflow in EXTREMES:
        module, gradients = Sometimes(), Gradients()
        fit(
            module,
            batches(4 * MICRO),
            strategy=strategy_of(zenflow, stage=stage, overlap_comm=overlap),
            callbacks=[gradients],
            accumulate_grad_batches=MICRO,
        )
        assert gradients.steps == 4 and len(gradients.worst) == 6
        assert max(gradients.worst.values()) < 1e-5, gradients.worst
        assert relative(weights(module), weights(plain)) < 1e-5


def test_sums_in_16_bits_are_those_of_the_other_stages() -> None:
    """FAULTS 1, 14: under ZeRO-1 DeepSpeed sums in an attribute of its own then."""
    trained = {}
    for stage, overlap in WAYS:
        module = Sometimes()
        strategy = strategy_of(OFTEN, stage=stage, overlap_comm=overlap)
        fit(module, batches(4 * MICRO), strategy=strategy, precision="bf16-true", accumulate_grad_batches=MICRO)
        trained[stage, overlap] = weights(module)
    first = trained[1, True]
    assert [way for way, flat in trained.items() if not torch.equal(flat, first)] == []


def two_ranks(ways: list[list[Any]]) -> list[dict[str, float]]:
    """Per way the worst difference of each parameter."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = []
    for stage, settings, shift in ways:
        module, gradients = Sometimes(shift), Gradients()
        fit(
            module,
            batches(4 * MICRO, seed=int(os.environ["RANK"])),
            strategy=strategy_of(OFTEN, stage=stage, **settings),
            callbacks=[gradients],
            accumulate_grad_batches=MICRO,
            devices=2,
        )
        found.append({**gradients.worst, "steps": float(gradients.steps)})
    return found


@pytest.mark.timeout(180)
def test_two_ranks_may_have_it_in_different_micro_batches(run_ranks: Any) -> None:
    """FAULTS 1, 20: under ZeRO-1, which reduces once a step; the other stages reduce each micro-batch by itself."""
    ways: list[list[Any]] = [
        [1, {"overlap_comm": overlap, "reduce_bucket_size": size}, shift]
        for overlap in (True, False)
        for size, shift in ((10**6, 1), (100, 2))
    ]
    ways += [[stage, {"contiguous_gradients": False}, int(stage == 1)] for stage in (1, 2, 3)]
    for of_rank in run_ranks(two_ranks, ways=ways, timeout=150):
        for way, worst in zip(ways, of_rank, strict=True):
            assert worst.pop("steps") == 4 and len(worst) == 6
            assert max(worst.values()) < 1e-5, (way, worst)
