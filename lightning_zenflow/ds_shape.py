"""The shape of DeepSpeed's config: blocks are mappings, and what DeepSpeed takes as it comes has the right type."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from lightning_zenflow.shown import shown

BLOCKS = (
    *("fp16", "bf16", "optimizer", "scheduler", "activation_checkpointing", "aio", "autotuning"),
    *("checkpoint", "comet", "comms_logger", "compile", "csv_monitor", "data_efficiency", "data_types"),
    *("flops_profiler", "hybrid_engine", "pipeline", "tensor_parallel", "tensorboard", "timers", "torch_autocast"),
    *("wandb", "weight_quantization"),
)
"""Keys of the config that hold mappings; so do these within them."""
INNER_BLOCKS = (
    *(("zero_optimization", "offload_optimizer"), ("zero_optimization", "offload_param")),
    *(("optimizer", "params"), ("scheduler", "params")),
)

_OFFLOAD = 'Write {"device": "cpu"}.'
_REMEDIES = {"offload_optimizer": _OFFLOAD, "offload_param": 'Write "offload_param": {"device": "cpu"}.'}


def own_copy(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy in plain dicts, lists and numbers, so that the caller's stays as it is.

    Raises:
        TypeError: A key is no string, or a value none of JSON's.
        ValueError: It holds itself.
    """
    try:
        return {name: _plain(value, name) for name, value in _items(config, "config")}
    except RecursionError:
        raise ValueError("`config` must end somewhere, got one that holds itself. Write the values out.") from None


def _items(mapping: Mapping[Any, Any], place: str) -> list[tuple[str, Any]]:
    for name in mapping:
        if not isinstance(name, str):
            raise TypeError(f"`{place}` must have strings for keys, got {shown(name)}. Put it in quotes.")
    return list(mapping.items())


def _plain(value: Any, place: str) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(part, f"{place}.{name}") for name, part in _items(value, place)}
    if isinstance(value, (list, tuple)):
        return [_plain(part, place) for part in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    value = value.item() if isinstance(value, np.generic) else value
    if value is not None and not isinstance(value, (str, int, float)):
        raise TypeError(
            f"`{place}` must be something that JSON can say, got {shown(value)}. Write a string, or a number."
        )
    return value


# -- types -------------------------------------------------------------------------------------------------------------


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return is_whole and not isinstance(value, bool) and 1 <= value <= sys.maxsize


_COUNT = ("a whole number of at least 1", _is_count)
_FLAG = ("true or false", lambda value: isinstance(value, bool))
_DTYPES = ("fp32", "bf16", "fp16", "float32", "bfloat16", "float16", "float", "half")
_DTYPE = ("fp32, bf16, fp16 or null", lambda value: value is None or (isinstance(value, str) and value in _DTYPES))
_RULES: dict[tuple[str, ...], tuple[str, Callable[[Any], bool]]] = {
    **{
        (name,): _COUNT
        for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    },
    ("gradient_clipping",): (
        "a number of at least 0",
        lambda value: _is_number(value) and 0 <= value <= sys.float_info.max,
    ),
    ("gradient_predivide_factor",): (
        "a number above 0",
        lambda value: _is_number(value) and 0 < value <= sys.float_info.max,
    ),
    # `inf` is how others say never.
    ("steps_per_print",): (
        "a number of at least 1, or null",
        lambda value: value is None or (_is_number(value) and value >= 1),
    ),
    **{
        (name,): _FLAG
        for name in (
            *("prescale_gradients", "disable_allgather", "dump_state", "disable_python_gc", "wall_clock_breakdown"),
            *("memory_breakdown", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
            *("dataloader_drop_last", "managed_gradient_accumulation"),
        )
    },
    **{
        ("activation_checkpointing", name): _FLAG
        for name in (
            *("partition_activations", "contiguous_memory_optimization", "cpu_checkpointing", "profile"),
            "synchronize_checkpoint_boundary",
        )
    },
    **{("flops_profiler", name): _COUNT for name in ("profile_step", "top_modules")},
    **{("flops_profiler", name): _FLAG for name in ("enabled", "detailed")},
    **{("data_types", name): _DTYPE for name in ("grad_accum_dtype", "param_dtype", "buffer_dtype")},
    ("fp16", "enabled"): _FLAG,
    ("bf16", "enabled"): _FLAG,
}


def refuse_shape(config: Mapping[str, Any]) -> None:
    """Refuses what DeepSpeed would trip over later, or take for something else.

    Raises:
        TypeError: A block is no mapping, or a value has the wrong type. The message names it.
        ValueError: A value is out of range. Likewise.
    """
    for name in BLOCKS:
        if name in config:
            _refuse_block(config[name], (name,))
    for block, name in INNER_BLOCKS:
        value = config.get(block, {}).get(name)
        if value is not None:
            _refuse_block(value, (block, name))
    for path, (rule, holds) in _RULES.items():
        place: Any = config
        for name in path:
            place = place.get(name, _RULES) if isinstance(place, Mapping) else _RULES
        if place is not _RULES and not holds(place):
            error = ValueError if _is_number(place) and rule != _FLAG[0] else TypeError
            raise error(f"`{'.'.join(path)}` must be {rule} in the DeepSpeed config, got {shown(place)}. Change it.")


def _refuse_block(value: Any, path: tuple[str, ...]) -> None:
    if not isinstance(value, Mapping):
        remedy = _REMEDIES.get(path[-1], "Write a JSON object, or remove the key.")
        raise TypeError(f"`{'.'.join(path)}` must be a mapping, got {shown(value)}. {remedy}")
