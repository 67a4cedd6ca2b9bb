"""DeepSpeed's `"optimizer"` and `"scheduler"` blocks: what they mean for ZenFlow, and what is refused by name."""

from __future__ import annotations

import inspect
import math
import sys
import warnings
from collections.abc import Mapping
from typing import Any

from lightning_zenflow.shown import shown


def optimizer_settings(block: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `ZenFlowAdamW` from a DeepSpeed `"optimizer"` block.

    Raises:
        TypeError: A parameter has the wrong type.
        ValueError: The type, or a parameter of it, is not supported.
    """
    kind, params = block.get("type", ""), dict(block.get("params") or {})
    if not isinstance(kind, str) or kind.lower() not in ("adam", "adamw"):
        raise ValueError(
            f'`optimizer.type` must be "Adam" or "AdamW" with ZenFlow, got {shown(kind)}. Change the DeepSpeed config.'
        )
    for flag in ("adam_w_mode", "torch_adam", "amsgrad", "bias_correction", "fp32_optimizer_states"):
        if not isinstance(params.get(flag, True), bool):
            raise TypeError(f"`optimizer.params.{flag}` must be true or false, got {shown(params[flag])}. Change it.")
    # DeepSpeed's "Adam" is AdamW too, unless adam_w_mode says otherwise, and only torch's AdamW decays by default.
    decoupled = params.pop("adam_w_mode", True) or kind.lower() == "adamw"
    default_decay = 0.01 if params.pop("torch_adam", False) and decoupled else 0.0
    params.pop("foreach", None)  # changes torch's speed, not its maths
    settings: dict[str, Any] = {"decoupled_weight_decay": decoupled, "weight_decay": default_decay}
    for flag, value in (("amsgrad", False), ("bias_correction", True), ("fp32_optimizer_states", True)):
        if params.pop(flag, value) != value:
            raise ValueError(f"`optimizer.params.{flag}` must be {value} with ZenFlow. Remove the key.")
    for name in ("lr", "eps", "weight_decay"):
        if name in params:
            settings[name] = _number(name, params.pop(name))
    if "betas" in params:
        settings["betas"] = _betas(params.pop("betas"))
    if params:
        raise ValueError(
            f"`optimizer.params` has unknown key `{next(iter(params))}`. Remove it from the DeepSpeed config."
        )
    return settings


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number(name: str, value: Any) -> float:
    message = f"`optimizer.params.{name}` must be a number of at least 0, got {shown(value)}. Change it."
    if not _is_number(value):
        raise TypeError(message)
    if not 0 <= value <= sys.float_info.max:
        raise ValueError(message)
    return float(value)


def _betas(value: Any) -> tuple[float, float]:
    message = (
        f"`optimizer.params.betas` must be two numbers from 0 to below 1, got {shown(value)}. 0.9 and 0.999 are usual."
    )
    if not isinstance(value, (list, tuple)) or len(value) != 2 or not all(map(_is_number, value)):
        raise TypeError(message)
    if not all(0 <= beta < 1 for beta in value):
        raise ValueError(message)
    return float(value[0]), float(value[1])


def refuse_scheduler(block: Mapping[str, Any]) -> None:
    """Refuses a scheduler that DeepSpeed would not find, or could not make.

    Raises:
        ValueError: The message names type or parameter.
    """
    import torch
    from deepspeed.runtime import lr_schedules

    kind, params = block.get("type"), block.get("params") or {}
    known = [*lr_schedules.VALID_LR_SCHEDULES, "a class of torch.optim.lr_scheduler"]
    made: Any = None
    if isinstance(kind, str):
        made = getattr(lr_schedules, kind, None) or getattr(torch.optim.lr_scheduler, kind, None)
    if not inspect.isclass(made) or not hasattr(made, "step"):
        raise ValueError(f"`scheduler.type` must be one of {', '.join(known)}, got {shown(kind)}. Change it.")
    if "params" not in block:
        raise ValueError(
            f"`scheduler.params` must be there beside its type {kind!r}, got none. Write {{}} for its defaults."
        )
    takes = list(inspect.signature(made).parameters.values())[1:]  # the first is the optimizer
    names = [parameter.name for parameter in takes]
    for name in params:
        if name not in names:
            raise ValueError(f"`scheduler.params` has no key `{name}` for {kind}. Known keys: {', '.join(names)}.")
    for parameter in takes:
        if parameter.default is parameter.empty and parameter.name not in params:
            raise ValueError(f"`scheduler.params.{parameter.name}` must be there for {kind}, got none. Write a value.")
    _try(made, str(kind), params)


def _try(made: Any, kind: str, params: Mapping[str, Any]) -> None:
    """Makes a scheduler for an optimizer that nobody uses, and takes a step.

    Raises:
        ValueError: It cannot be made, or its rate is none.
    """
    import torch

    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scheduler = made(optimizer, **params)
            takes_metrics = "metrics" in inspect.signature(scheduler.step).parameters
            for _ in range(2):
                optimizer.step()
                scheduler.step(*([0.0] if takes_metrics else []))
        rate = float(optimizer.param_groups[0]["lr"])
        reason = None if math.isfinite(rate) else f"its rate would be {rate}"
    except Exception as error:
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    if reason:
        raise ValueError(
            f"`scheduler.params` must be what {kind} takes, got {shown(dict(params))}: {reason}. Change it."
        )
