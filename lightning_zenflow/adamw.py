"""The one AdamW update of the package: the device, the host and the tests' comparisons all run this function.

It wraps PyTorch's fused kernel, which needs no compiler and runs on CPU at the speed of hand-written AVX code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Hyper:
    """The settings of one parameter group at one step.

    Attributes:
        lr: Learning rate of this step.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Weight decay.
        decoupled: `True` for AdamW's decay of the weight itself; `False` for Adam's L2 term in the gradient.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool = True

    @classmethod
    def of(cls, group: dict[str, Any]) -> Hyper:
        """Reads the current settings of a `torch.optim` parameter group."""
        beta1, beta2 = group["betas"]
        return cls(
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            decoupled=bool(group.get("decoupled_weight_decay", True)),
        )


def deferred_lr(lr_sum: float, steps: int, scale: str) -> float:
    """Learning rate of one update that stands for `steps` steps whose rates add up to `lr_sum`."""
    return lr_sum / {"linear": 1.0, "sqrt": math.sqrt(steps), "none": float(steps)}[scale]


@torch.no_grad()
def add_spread_(exp_avg_sq: Tensor, difference: Tensor, beta2: float, steps: int) -> None:
    """Gives the second moment the spread of `steps` gradients, in place; `adamw_` must follow.

    With d = `difference`, the last gradient less the mean one, v becomes after both calls::

        v = beta2**n * v + (1 - beta2**n) * (g * g + d * d)

    The square of a mean of n gradients is smaller than the mean of their squares, by their variance times 1 - 1/n, so that
    updates of noisy elements would grow with n. `d * d` estimates just that, without any memory.
    """
    decay = beta2**steps
    exp_avg_sq.addcmul_(difference, difference, value=(1 - decay) / decay)


@torch.no_grad()
def adamw_(
    weight: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, hyper: Hyper, *, clock: int, steps: int = 1
) -> None:
    """One AdamW update, in place, that stands for `steps` steps and ends at step `clock`.

    With n = `steps` and g the mean gradient of these steps (DESIGN section 2.2; n = 1 is Loshchilov & Hutter's AdamW,
    arXiv 1711.05101, algorithm 2)::

        w = w - lr * weight_decay * w
        m = beta1**n * m + (1 - beta1**n) * g
        v = beta2**n * v + (1 - beta2**n) * g * g
        w = w - lr * (m / (1 - beta1**clock)) / (sqrt(v / (1 - beta2**clock)) + eps)

    Args:
        weight: fp32 master weight, flat, on any device.
        grad: fp32 mean gradient, same shape and device; left as it is.
        exp_avg: fp32 first moment m.
        exp_avg_sq: fp32 second moment v.
        hyper: The group's settings; `hyper.lr` is already the rate of all `steps` together.
        clock: Number of the last step whose gradient is included: the one clock of the bias correction.
        steps: How many steps the update stands for.
    """
    if weight.numel() == 0:
        return
    # The kernel corrects by 1 - beta**step with the betas it is given: (beta**n)**(clock / n) is beta**clock.
    step = torch.full((), clock / steps, dtype=torch.float32, device=weight.device)  # filled there: nothing waits
    kernel = torch._fused_adamw_ if hyper.decoupled else torch._fused_adam_
    kernel(
        [weight],
        [grad],
        [exp_avg],
        [exp_avg_sq],
        [],
        [step],
        lr=hyper.lr,
        beta1=hyper.beta1**steps,
        beta2=hyper.beta2**steps,
        weight_decay=hyper.weight_decay,
        eps=hyper.eps,
        amsgrad=False,
        maximize=False,
    )
