"""Training under ZeRO-3, where a module's parameters are cut: what its tests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn

from lightning_zenflow import ZenFlowStrategy
from tests.cases import gathered
from tests.modules import OFTEN, Small, fit, strategy_of, two_layers

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
