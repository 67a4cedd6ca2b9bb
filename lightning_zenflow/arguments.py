"""The arguments of `ZenFlowStrategy` beside the settings themselves: what goes together and what does not."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.strategies import DeepSpeedStrategy

from lightning_zenflow.config import ZenFlowConfig

_ZERO_ARGUMENTS = (
    "contiguous_gradients",
    "overlap_comm",
    "allgather_partitions",
    "reduce_scatter",
    "allgather_bucket_size",
    "reduce_bucket_size",
    "sub_group_size",
)
_LOSS_SCALE_ARGUMENTS = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")


def without_defaults(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that say something: jsonargparse passes all arguments of the base class, given or not."""
    known = inspect.signature(DeepSpeedStrategy.__init__).parameters
    return {name: value for name, value in kwargs.items() if name not in known or value != known[name].default}


def refuse(stage: int | None, kwargs: Mapping[str, Any]) -> None:
    """Arguments that contradict ZenFlow, by name.

    Raises:
        ValueError: The message names argument, value and reason.
        NotImplementedError: Stage 3.
    """
    if stage == 3:
        raise NotImplementedError("`stage` must be 1 or 2, got 3. ZeRO-3 is not supported yet.")
    if stage is not None and (stage not in (1, 2) or isinstance(stage, bool)):
        raise ValueError(f"`stage` must be 1 or 2, got {stage!r}. ZenFlow is part of ZeRO.")
    wanted = {
        "zero_optimization": (True, "ZenFlow is part of ZeRO"),
        "offload_parameters": (False, "parameters are offloaded by ZeRO-3 only, which is not supported yet"),
        "offload_optimizer_device": ("cpu", "NVMe is not supported"),
        "offload_params_device": ("cpu", "NVMe is not supported"),
        "remote_device": (None, "it belongs to ZeRO-3, which is not supported yet"),
        "load_full_weights": (False, "it belongs to ZeRO-3, which is not supported yet"),
        "zero_allow_untested_optimizer": (True, "ZenFlow brings its own optimizer"),
    }
    for name, (value, reason) in wanted.items():
        if kwargs.get(name, value) != value:
            raise ValueError(f"`{name}` must be {value!r}, got {kwargs[name]!r}: {reason}. Leave it out.")


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
