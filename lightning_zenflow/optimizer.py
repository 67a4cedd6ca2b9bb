"""`ZenFlowAdamW`: the custom optimizer.

As a `torch.optim.Optimizer` it holds the user's parameter groups, so that schedulers and monitors work as usual. Its
work is done on shards: the ZeRO adapter attaches a `ShardOptimizer`, hands in gradient slices during backward and asks for
the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import Optimizer, ParamsT

from lightning_zenflow.adamw import Hyper


class ZenFlowAdamW(Optimizer):
    """AdamW for `ZenFlowStrategy`; return it from `configure_optimizers`, or return a torch AdamW, which is converted.

    Args:
        params: Parameters, or parameter groups with their own `lr`, `betas`, `eps`, `weight_decay`.
        lr: Learning rate.
        betas: Decay of the first and the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Weight decay.
        decoupled_weight_decay: `True` decays the weight itself (AdamW); `False` adds `weight_decay * weight` to the
            gradient (Adam).

    Attributes:
        counts_in_integers: Whether checkpoints count steps as DeepSpeed's optimizers do; PyTorch's have a tensor for it.
        made_from: The user's optimizer whose groups these are, if it was converted.

    Raises:
        ValueError: A setting is out of range.
    """

    counts_in_integers = True
    made_from: Optimizer | None = None

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        decoupled_weight_decay: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        super().__init__(params, defaults)
        for group in self.param_groups:
            _check_group(group)

    @classmethod
    def from_optimizer(cls, optimizer: Optimizer) -> ZenFlowAdamW:
        """Converts a supported optimizer; the group dicts are shared, so that its schedulers keep working.

        Raises:
            ValueError: The optimizer, or a flag of it, is not supported. The message names it and what is accepted.
        """
        from lightning_zenflow.conversion import convert

        return convert(optimizer)

    def hypers(self) -> tuple[Hyper, ...]:
        """The settings of every group as they are now."""
        return tuple(Hyper.of(group) for group in self.param_groups)

    def __eq__(self, other: object) -> bool:
        """Also equal to the optimizer that it was made from, which stays in the schedulers.

        `LearningRateMonitor` looks for the strategy's optimizer among theirs, and would log each group twice.
        """
        return self is other or (self.made_from is not None and self.made_from is other)

    __hash__ = Optimizer.__hash__

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Not for direct use: ZeRO's engine drives the step on shards.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(
            "`ZenFlowAdamW.step` runs inside `ZenFlowStrategy` only. Use `Trainer(strategy='zenflow')`, or"
            " `torch.optim.AdamW` without it."
        )


def _check_group(group: dict[str, Any]) -> None:
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    rules = (
        ("lr", 0 <= lr < math.inf, "at least 0"),
        ("betas", 0 <= beta1 < 1 and 0 <= beta2 < 1, "two numbers from 0 to below 1"),
        ("eps", 0 <= group["eps"] < math.inf, "at least 0"),
        ("weight_decay", 0 <= group["weight_decay"] < math.inf, "at least 0"),
    )
    for name, holds, rule in rules:
        if not holds:
            raise ValueError(f"`{name}` must be {rule}, got {group[name]!r}. Change it where the optimizer is made.")
