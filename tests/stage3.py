"""Training under ZeRO-3, where a module's parameters are cut: what its tests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightning_zenflow import ZenFlowStrategy
from tests.cases import gathered
from tests.integration.test_trainer_parameters import Everything
from tests.modules import CLASSES, FEATURES, OFTEN, Small, fit, strategy_of, two_layers

PLACES = ["device", "host"]
"""Where parameters are between two uses: on the device, or offloaded to the host."""


def cut_strategy(zenflow: Any = OFTEN, place: str = "device", zero: Any = None, **arguments: Any) -> ZenFlowStrategy:
    """ZeRO-3 whose parameters are all cut and never stay gathered, in small sub-groups; `zero` overrides that."""
    block: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 0, "sub_group_size": 30}
    if place == "host":
        block["offload_param"] = {"device": "cpu"}
    return strategy_of(zenflow, config={"zero_optimization": {**block, **(zero or {})}}, **arguments)


def fit_cut(
    module: LightningModule,
    loader: Any = None,
    validation: Any = None,
    *,
    zenflow: Any = OFTEN,
    place: str = "device",
    zero: Any = None,
    **settings: Any,
) -> Trainer:
    """`fit` under `cut_strategy`, on ten batches if no loader is given."""
    return fit(module, loader, validation, strategy=cut_strategy(zenflow, place, zero), **settings)


class Configured(Small):
    """Makes its net in `configure_model`, where it is cut at once."""

    def __init__(
        self, make_net: Callable[[], nn.Module] = two_layers, configure: Callable[[Small], Any] | None = None
    ) -> None:
        super().__init__(nn.Identity, configure)
        self.make_net = make_net

    def configure_model(self) -> None:
        if isinstance(self.net, nn.Identity):
            torch.manual_seed(0)
            self.net = self.make_net()

    def configure_optimizers(self) -> Any:
        with gathered(self.parameters()):  # the base class copies them for the reference
            return super().configure_optimizers()


class Sequences(nn.Module):
    """An embedding, an LSTM whose weights are read by a kernel, and tied output weights used outside their module."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols = nn.Embedding(4, 6, padding_idx=0)
        self.lstm = nn.LSTM(6, 6, num_layers=2)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        symbols = (x > 0).long() + 2 * (x > 1).long()
        states, _ = self.lstm(self.symbols(symbols).transpose(0, 1))
        return self.last(F.linear(self.norm(states[-1]), self.symbols.weight))


class Shared(nn.Module):
    """Parameters that other modules read than the ones they belong to, and one that is given out by its module."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 8)
        self.source = Source()
        self.lent = nn.Linear(8, 8)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(F.linear(self.first(x), self.lent.weight, self.lent.bias))
        return self.last(x + self.source())


class Source(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(8))

    def forward(self) -> Tensor:
        return self.shift


class Checkpointed(nn.Module):
    """Recomputes layers in the backward pass, by DeepSpeed's own function."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = deepspeed.checkpointing.checkpoint(lambda y, layer=layer: torch.tanh(layer(y)), x)
        return self.last(x)


class Experts(nn.Module):
    """Sends each sample through one of its layers, which may leave others without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x.sum(1) > 0).long()
        result = torch.zeros_like(x)
        for number, layer in enumerate(self.layers):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                result = result.index_put((rows,), torch.tanh(layer(x[rows])))
        return result


class WithLeaf(nn.Module):
    """A module whose parameters DeepSpeed is told to gather as one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.experts, self.last = nn.Linear(FEATURES, 8), Experts(), nn.Linear(8, CLASSES)
        deepspeed.utils.set_z3_leaf_module(self.experts, True)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.experts(self.first(x)))


class Single(nn.Module):
    """Next to a matrix, parameters with fewer elements than ranks: a scalar and single elements."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.one = nn.Parameter(torch.ones(1, 1))
        self.last = nn.Linear(FEATURES, CLASSES)
        self.bias = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.last(x * self.one + self.bias)


class NotEmpty(Everything):
    """Everything that several ranks can train."""

    def __init__(self) -> None:
        super().__init__()
        del self.empty


class NotEmptyReentrant(NotEmpty):
    reentrant = True


class Steps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(FEATURES, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)
        self.other = nn.Linear(8, CLASSES)


class Uneven(Small):
    """Goes through its net once, twice or three times, and through another layer in every second step."""

    def __init__(self) -> None:
        super().__init__(Steps)
        self.forwards: list[int] = []

    def once(self, net: Any, x: Tensor) -> Tensor:
        return net.last(torch.tanh(net.layer(net.first(x))))

    def loss(self, net: Any, batch: Any) -> Tensor:
        step = self.trainer.global_step
        x = batch[0]
        for _ in range(step % 3 + 1):
            x = torch.cat([self.once(net, x), batch[0][:, CLASSES:]], 1)
        logits = x[:, :CLASSES]
        if step % 2:
            logits = logits + net.other(torch.tanh(net.first(batch[0])))
        return F.cross_entropy(logits, batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.forwards.append(self.trainer.global_step % 3 + 1)
        return super().training_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        for _ in range(batch_idx % 3 + 1):
            x = torch.cat([self.once(self.net, x), batch[0][:, CLASSES:]], 1)
        return x


class ChangesIntervals(Callback):
    """Twice, in the middle of an epoch."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx in (3, 6):
            trainer.strategy.change_intervals(*{3: (2, 3), 6: (3, 4)}[batch_idx])


def is_cut(module: nn.Module) -> bool:
    """Whether every parameter shows no elements, and its part of them is there."""
    return all(param.numel() == 0 and param.ds_tensor is not None for param in module.parameters())  # type: ignore
