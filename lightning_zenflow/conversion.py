"""Turning the optimizer a user returned into `ZenFlowAdamW`: what is accepted, and what is refused by name."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from lightning_zenflow.optimizer import ZenFlowAdamW

_ACCEPTED = "torch.optim.AdamW, torch.optim.Adam, DeepSpeedCPUAdam, FusedAdam and lightning_zenflow.ZenFlowAdamW"

# Flags that would change the maths, with the only value that is computed here.
_FIXED_FLAGS: dict[str, Any] = {
    "amsgrad": False,
    "maximize": False,
    "differentiable": False,
    "bias_correction": True,
    "fp32_optimizer_states": True,
}


def convert(optimizer: Optimizer) -> ZenFlowAdamW:
    """A `ZenFlowAdamW` with the group dicts of `optimizer` themselves, not copies: ZeRO and schedulers write to them.

    Raises:
        ValueError: The optimizer or one of its flags is not supported.
    """
    decoupled = _decoupled(optimizer)
    for index, group in enumerate(optimizer.param_groups):
        _refuse_flags(optimizer, index, group)
    if optimizer.state:
        raise ValueError(
            f"`{_name(optimizer)}` must be fresh, got one with state for {len(optimizer.state)} parameters. Return it from"
            " `configure_optimizers` before its first step and without loading a state dict."
        )
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise ValueError(
            f"`{_name(optimizer)}` must have no step hooks, since its own step is never called. Use a Lightning callback."
        )
    # A list of its own: ZeRO cannot take a group without trainable parameters, while schedulers count on all of them.
    groups = [group for group in optimizer.param_groups if any(param.requires_grad for param in group["params"])]
    if not groups:
        raise ValueError("The optimizer must hold at least one trainable parameter, got none. Check `requires_grad`.")
    converted = ZenFlowAdamW([{"params": group["params"]} for group in groups])
    for group in groups:
        group.setdefault("decoupled_weight_decay", decoupled)
    converted.param_groups = groups
    converted.made_from = optimizer
    converted.counts_in_integers = not type(optimizer).__module__.startswith("torch.")
    # A scheduler made for `optimizer` warns unless that optimizer has stepped; its step is this one's from here on.
    optimizer._opt_called = True  # type: ignore[attr-defined]
    return converted


def _decoupled(optimizer: Optimizer) -> bool:
    """Whether weight decay is decoupled where the groups do not say so themselves."""
    kind = type(optimizer)
    if kind in (torch.optim.AdamW, torch.optim.Adam, ZenFlowAdamW):
        return kind is not torch.optim.Adam
    if kind.__module__.startswith("deepspeed.ops.adam") and kind.__name__ in ("DeepSpeedCPUAdam", "FusedAdam"):
        # One name each: `adam_w_mode` holds a bool in the first and 0 or 1 in the second.
        return bool(getattr(optimizer, "adam_w_mode", True))
    raise ValueError(
        f"The optimizer must be one of {_ACCEPTED}, got {kind.__module__}.{kind.__qualname__}. Return one of these from"
        " `configure_optimizers`, or use another strategy."
    )


def _refuse_flags(optimizer: Optimizer, index: int, group: dict[str, Any]) -> None:
    for flag, value in _FIXED_FLAGS.items():
        got = group.get(flag, getattr(optimizer, flag, value))
        if got is not None and bool(got) != value:
            raise ValueError(
                f"`{flag}` must be {value} in every parameter group of `{_name(optimizer)}`, got {got!r} in group {index}."
                f" ZenFlow does not compute it; leave the flag out."
            )


def _name(optimizer: Optimizer) -> str:
    return type(optimizer).__name__
