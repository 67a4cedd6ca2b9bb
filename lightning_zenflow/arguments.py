"""The arguments of `ZenFlowStrategy` beside the settings themselves: what goes together and what does not."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from lightning.pytorch.strategies import DeepSpeedStrategy

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.shown import shown

_ZERO_ARGUMENTS = (
    "contiguous_gradients",
    "overlap_comm",
    "allgather_partitions",
    "reduce_scatter",
    "allgather_bucket_size",
    "reduce_bucket_size",
    "sub_group_size",
)
_COMPARABLE = (bool, int, float, str, timedelta)
_LOSS_SCALE_ARGUMENTS = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")


def without_defaults(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that say something: jsonargparse passes all arguments of the base class, given or not."""
    known = inspect.signature(DeepSpeedStrategy.__init__).parameters
    return {name: value for name, value in kwargs.items() if name not in known or not _is(value, known[name].default)}


def _is(value: Any, default: Any) -> bool:
    """Whether they are the same; arrays and the like, which do not compare to one answer, are no defaults."""
    return value is default or (type(value) in _COMPARABLE and value == default)


def refuse(stage: int | None, kwargs: Mapping[str, Any]) -> None:
    """Arguments that contradict ZenFlow, by name.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: The message names argument, value and reason.
    """
    if stage is not None and (not isinstance(stage, int) or stage not in (1, 2, 3) or isinstance(stage, bool)):
        raise ValueError(f"`stage` must be 1, 2 or 3, got {shown(stage)}. ZenFlow is part of ZeRO.")
    wanted: dict[str, tuple[tuple[Any, ...], str]] = {
        "zero_optimization": ((True,), "ZenFlow is part of ZeRO"),
        "offload_optimizer_device": (("cpu",), "NVMe is not supported"),
        "offload_params_device": (("cpu",), "NVMe is not supported"),
        "remote_device": ((None, "cpu"), "NVMe is not supported"),
        "zero_allow_untested_optimizer": ((True,), "ZenFlow brings its own optimizer"),
    }
    for name, (values, reason) in wanted.items():
        if not any(_is(kwargs.get(name, values[0]), value) for value in values):
            allowed = " or ".join(map(repr, values))
            raise ValueError(f"`{name}` must be {allowed}, got {shown(kwargs[name])}: {reason}. Leave it out.")
    for name in _LOSS_SCALE_ARGUMENTS:
        value = kwargs.get(name, 1)
        message = f"`{name}` must be a number of at least 0, got {shown(value)}. Leave it out for Lightning's default."
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise TypeError(message)
        if not 0 <= value <= sys.float_info.max:
            raise ValueError(message)
    for name in ("load_full_weights", "exclude_frozen_parameters", "offload_optimizer", "offload_parameters"):
        if not isinstance(kwargs.get(name, False), bool):
            raise TypeError(
                f"`{name}` must be true or false, got {shown(kwargs[name])}. Leave it out for Lightning's default."
            )
    if not isinstance(kwargs.get("timeout", timedelta()), (timedelta, type(None))):
        raise TypeError(
            f"`timeout` must be a datetime.timedelta, got {shown(kwargs['timeout'])}. Write timedelta(seconds=...)."
        )
    level = kwargs.get("logging_level", 0)
    if not isinstance(level, int) or isinstance(level, bool):
        raise TypeError(f"`logging_level` must be a level of `logging`, got {shown(level)}. logging.WARN is usual.")


def refuse_without_stage_3(kwargs: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Arguments that stages 1 and 2 have no use for, and those that need another one.

    Raises:
        ValueError: The message names the argument.
    """
    zero = config.get("zero_optimization")
    if not isinstance(zero, Mapping):
        return  # refused with the rest of the config
    stage = zero.get("stage", 2)
    for name in ("offload_parameters", "remote_device", "load_full_weights"):
        if kwargs.get(name) and stage != 3:
            raise ValueError(
                f"`{name}` must be left out with ZeRO stage {stage}, got {kwargs[name]!r}: it belongs to ZeRO-3. Set"
                " `stage` to 3, or leave it out."
            )
    offload = zero.get("offload_param")
    device = offload.get("device") if isinstance(offload, Mapping) else None
    if kwargs.get("remote_device") and device != "cpu":
        raise ValueError(
            f"`remote_device` must be left out without offloaded parameters, got {kwargs['remote_device']!r}: weights that"
            " are made there stay there. Set `offload_parameters` as well."
        )


def refuse_beside_config(kwargs: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Arguments that only build a config would be dropped silently beside one."""
    builders = {*inspect.signature(DeepSpeedStrategy._create_default_config).parameters, *_ZERO_ARGUMENTS}
    if "fp16" in config:
        builders.update(_LOSS_SCALE_ARGUMENTS)
    # Where only one value is accepted anyway, and it has been checked, nothing is lost.
    fixed = {"self", "zero_kwargs", "zero_optimization", "zero_allow_untested_optimizer", "offload_optimizer"}
    for name in kwargs:
        if name in builders - fixed:
            raise ValueError(
                f"`{name}` must be left out beside a DeepSpeed `config` (or PL_DEEPSPEED_CONFIG_PATH), got both. Write it into"
                " the config."
            )


def merge_zenflow(given: ZenFlowConfig, block: Mapping[str, Any] | None) -> ZenFlowConfig:
    """The settings of the argument and of the DeepSpeed config's block, of which one must say nothing.

    Raises:
        ValueError: Both say something, and they differ.
    """
    if block is None:
        return given
    config = ZenFlowConfig.from_mapping(block)
    if given not in (ZenFlowConfig(), config):
        raise ValueError(
            '`zenflow` must be left out beside a DeepSpeed config with a "zenflow" block, got both and they differ. Give one'
            " of them."
        )
    return config


def known_arguments(kind: type) -> dict[str, Any]:
    """Arguments of a class and their types, those of the base class with them where it takes what it does not name."""
    found: dict[str, Any] = {}
    for base in kind.__mro__:
        made = vars(base).get("__init__")
        if made is None:
            continue
        parameters = inspect.signature(made).parameters.values()
        named = [part for part in parameters if part.kind not in (part.VAR_KEYWORD, part.VAR_POSITIONAL)]
        found = {**{part.name: part.annotation for part in named if part.name != "self"}, **found}
        if not any(part.kind is part.VAR_KEYWORD for part in parameters):
            break
    return found
