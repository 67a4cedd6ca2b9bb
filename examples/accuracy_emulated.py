"""Trains with ZenFlow or with a variant of its reference in the place of AdamW, under the same Trainer.

An emulation is an optimizer in this process: no DeepSpeed, no worker, and weights stay in fp32. It gets the groups of the
optimizer that the model returned, so the model's scheduler goes on as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim.optimizer import Optimizer

from examples.accuracy_sliced import SlicedReference
from lightning_zenflow import ZenFlowConfig, ZenFlowStrategy
from lightning_zenflow.conversion import convert
from lightning_zenflow.reference import ZenFlowReference
from lightning_zenflow.zero.settings import RunSettings


@dataclass(frozen=True)
class Emulation:
    """A variant of the reference, and its settings.

    Attributes:
        algorithm: Makes it; `ZenFlowReference` itself does as well, if slowly.
        settings: Of `ZenFlowConfig`, in steps.
    """

    algorithm: type[ZenFlowReference] = SlicedReference
    settings: Mapping[str, Any] = field(default_factory=dict)


Method = Mapping[str, Any] | Emulation | None
"""Settings of `ZenFlowConfig` for ZenFlow itself, an emulation, or plain AdamW."""


def trained_by(method: Method) -> tuple[Any, list[Callback]]:
    """The Trainer's strategy, and callbacks that it needs."""
    if isinstance(method, Emulation):
        return "auto", [Emulated(method)]
    return "auto" if method is None else ZenFlowStrategy(zenflow=ZenFlowConfig(**method)), []


class ReferenceOptimizer(Optimizer):
    """A reference as an optimizer: gradients are those of the parameters, which then hold what the device would show.

    Args:
        given: A fresh AdamW or Adam; its group dicts are taken over, so that its scheduler still works.
        emulation: What to do instead.
        clip_norm: Largest gradient norm, which the reference clips to itself: it also needs gradients as they were.

    Attributes:
        reference: Holds all state.
    """

    def __init__(self, given: Optimizer, emulation: Emulation, clip_norm: float | None) -> None:
        groups = convert(given).param_groups
        super().__init__([{"params": group["params"]} for group in groups], {})
        self.param_groups = groups
        config = ZenFlowConfig(**emulation.settings)
        schedule = RunSettings(config, config.select_interval_steps(None)).schedule()
        members = [(index, param) for index, group in enumerate(groups) for param in group["params"]]
        trained = [(index, param) for index, param in members if param.requires_grad]
        self._params = {str(number): param for number, (_, param) in enumerate(trained)}
        self.reference = emulation.algorithm(
            [(str(number), param.detach(), index) for number, (index, param) in enumerate(trained)],
            groups,
            schedule,
            topk_ratio=config.topk_ratio,
            deferred_lr_scale=config.deferred_lr_scale,
            clip_norm=clip_norm,
            moments_dtype=config.moments_dtype,
        )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.reference.step({name: param.grad for name, param in self._params.items()})
        self._show()
        return loss

    def settle(self) -> None:
        """Applies every gradient held: training ends with the masters."""
        self.reference.settle()
        self._show()

    @torch.no_grad()
    def _show(self) -> None:
        for name, param in self._params.items():
            state = self.reference.states[name]
            param.copy_(state.visible.view(state.shape))


class Emulated(Callback):
    """Puts an emulation in the place of the model's optimizer, and clipping by norm into its hands."""

    def __init__(self, emulation: Emulation) -> None:
        self.emulation = emulation

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        (given,) = trainer.optimizers
        self.optimizer = ReferenceOptimizer(given, self.emulation, trainer.gradient_clip_val)
        trainer.optimizers = [self.optimizer]
        self._clip_norm, trainer.gradient_clip_val = trainer.gradient_clip_val, None  # not twice

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.optimizer.settle()
        trainer.gradient_clip_val = self._clip_norm
