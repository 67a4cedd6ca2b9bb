"""DeepSpeed's JSON config: what is taken from it, what ZenFlow needs in it, and what is refused by name.

Plain dicts in, plain dicts out; DeepSpeed itself is not needed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_zenflow import ds_shape
from lightning_zenflow.shown import shown

# Path of a key in the config, the values that are fine besides leaving it out, and why others are not.
_REFUSED: tuple[tuple[tuple[str, ...], tuple[Any, ...], str], ...] = (
    (
        ("zero_optimization", "offload_optimizer", "device"),
        ("cpu", "none"),
        "ZenFlow keeps its state in host memory",
    ),
    (("zero_optimization", "offload_optimizer", "ratio"), (1, 1.0), "ZenFlow decides itself what stays on the device"),
    (("zero_optimization", "offload_optimizer", "super_offload"), (False,), "it is another optimizer"),
    (("zero_optimization", "zero_quantized_gradients"), (False,), "quantized gradients are not supported"),
    (("zero_optimization", "zero_quantized_weights"), (False,), "quantized weights are not supported"),
    (("zero_optimization", "zero_quantized_nontrainable_weights"), (False,), "quantized weights are not supported"),
    (("zero_optimization", "compute_grad_norm"), (True,), "clipping and skipping need the norm"),
    (("fp16", "fp16_master_weights_and_grads"), (False,), "masters are fp32"),
    (("bf16", "bf16_master_weights_and_grads"), (False,), "masters are fp32"),
    (("bf16", "bf16_optimizer_states"), (False,), "moments are fp32"),
    (("torch_autocast", "enabled"), (False,), "set the Trainer's `precision` instead"),
    (("tensor_parallel", "autotp_size"), (0, 1), "tensor parallelism is not supported"),
    (("pipeline", "stages"), (None, 1, "auto"), "pipeline parallelism is not supported"),
    (("managed_gradient_accumulation",), (True,), "Lightning accumulates"),
    (("hybrid_engine", "enabled"), (False,), "it is not supported"),
    (("sequence_parallel_size",), (1,), "sequence parallelism is not supported"),
    (("compile", "deepcompile"), (False,), "it would replace what ZeRO does during backward"),
    (("zero_force_ds_cpu_optimizer",), (False,), "it brings its own optimizer"),
    (("zero_allow_untested_optimizer",), (True,), "it brings its own optimizer"),
)

# The same for stages 1 and 2, which keep all weights on every rank, and for stage 3.
_REFUSED_IN_STAGES_1_AND_2: tuple[tuple[tuple[str, ...], tuple[Any, ...], str], ...] = (
    (("zero_optimization", "offload_param", "device"), ("none",), "parameters are offloaded by ZeRO-3 only"),
    (("zero_optimization", "cpu_offload_param"), (False, None), "parameters are offloaded by ZeRO-3 only"),
    (("zero_optimization", "cpu_offload_params"), (False, None), "parameters are offloaded by ZeRO-3 only"),
    (("zero_optimization", "zero_hpz_partition_size"), (1,), "it belongs to ZeRO-3"),
)
_REFUSED_IN_STAGE_3: tuple[tuple[tuple[str, ...], tuple[Any, ...], str], ...] = (
    (("zero_optimization", "offload_param", "device"), ("cpu", "none"), "NVMe is not supported"),
    (("zero_optimization", "cpu_offload_param"), (False, None), 'write "offload_param": {"device": "cpu"}'),
    (("zero_optimization", "cpu_offload_params"), (False, None), 'write "offload_param": {"device": "cpu"}'),
)


def take_zenflow_block(config: Mapping[str, Any]) -> tuple[dict[str, Any], Mapping[str, Any] | None]:
    """A copy of `config` without its `"zenflow"` block, and the block.

    DeepSpeed must not see the block, since its own ZenFlow would start.

    Raises:
        TypeError: A key of the config is no string.
        ValueError: The block stands outside `"zero_optimization"`, where DeepSpeed would not read it either.
    """
    own = ds_shape.own_copy(config)
    if "zenflow" in own:
        raise ValueError('`zenflow` must be inside "zero_optimization" in the DeepSpeed config. Move the block there.')
    zero = own.get("zero_optimization")
    block = zero.pop("zenflow", None) if isinstance(zero, dict) else None
    return own, block


def drop_auto(config: dict[str, Any]) -> None:
    """Removes, in place, each `"auto"` that stands for a setting of the Trainer: batch size, clipping, precision.

    Raises:
        ValueError: Another setting is `"auto"`, for which there is nothing to take it from.
    """
    for key in (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
    ):
        if isinstance(config.get(key), str) and config[key] == "auto":
            del config[key]
    if "bfloat16" in config:  # an older name, which DeepSpeed still reads
        if "bf16" in config:
            raise ValueError("`bfloat16` must be left out beside `bf16` in the DeepSpeed config, got both. Remove it.")
        config["bf16"] = config.pop("bfloat16")
    for key in ("fp16", "bf16"):
        if _look_up(config, (key, "enabled"), default=None) == "auto":
            del config[key]["enabled"]
    for block in ("optimizer", "scheduler"):
        params = _look_up(config, (block, "params"), default=None)
        for name, value in params.items() if isinstance(params, Mapping) else ():
            if value == "auto":
                raise ValueError(
                    f'`{block}.params.{name}` must be a value in the DeepSpeed config, got "auto". Write the value, or'
                    f" configure the {block} in `configure_optimizers`."
                )


def check_against_trainer(config: Mapping[str, Any], precision: Any, gradient_clip_val: float | None) -> None:
    """Compares what both a DeepSpeed config and the Trainer can say.

    Raises:
        ValueError: They differ.
    """
    clip = config.get("gradient_clipping")
    if None not in (clip, gradient_clip_val) and clip != gradient_clip_val:
        raise ValueError(
            f"`gradient_clip_val` must agree with the DeepSpeed config, got {gradient_clip_val} and `gradient_clipping`={clip}."
            " Give one of them."
        )
    for key, prefix in (("fp16", "16-"), ("bf16", "bf16-")):
        enabled = _look_up(config, (key, "enabled"), default=None)
        if enabled is not None and enabled != str(precision).startswith(prefix):
            raise ValueError(
                f"`precision` must agree with the DeepSpeed config, got {precision!r} and `{key}.enabled`={enabled}. Set"
                f" Trainer(precision='{prefix}mixed') to use {key}, or remove the block."
            )


def settle_precision(config: dict[str, Any], precision: Any) -> None:
    """Where `fp16` or `bf16` do not say whether they hold, the Trainer's precision does."""
    for key, prefix in (("fp16", "16-"), ("bf16", "bf16-")):
        if key in config:
            config[key].setdefault("enabled", str(precision).startswith(prefix))


def check_batch_size(
    config: Mapping[str, Any],
    accumulate: int,
    ranks: int,
    *,
    train_batch_size: int | None = None,
    accumulation_steps: int | None = None,
) -> None:
    """Compares DeepSpeed's batch sizes with those that its batch of one rank, Trainer and ranks make.

    Args:
        config: With `train_micro_batch_size_per_gpu`.
        accumulate: The Trainer's `accumulate_grad_batches`.
        ranks: Number of them.
        train_batch_size: As it was in the config.
        accumulation_steps: `gradient_accumulation_steps` as it was in the config.

    Raises:
        ValueError: They differ.
    """
    micro = config["train_micro_batch_size_per_gpu"]
    if accumulation_steps not in (None, accumulate):
        raise ValueError(
            f"`accumulate_grad_batches` must agree with the DeepSpeed config, got {accumulate} and"
            f" `gradient_accumulation_steps`={accumulation_steps}. Set Trainer(accumulate_grad_batches={accumulation_steps}),"
            " or remove the key."
        )
    total = micro * accumulate * ranks
    if train_batch_size not in (None, total):
        raise ValueError(
            f"`train_batch_size` must be {total} (batch of {micro}, accumulated {accumulate} times, on {ranks} ranks), got"
            f" {train_batch_size}. Remove the key."
        )


def refuse(config: Mapping[str, Any]) -> None:
    """Checks a DeepSpeed config, without its `"zenflow"` block.

    Raises:
        TypeError: A value has the wrong type.
        ValueError: A key contradicts ZenFlow, or a value is out of range.
    """
    zero = config.get("zero_optimization")
    if not isinstance(zero, dict):
        raise ValueError(
            f'`zero_optimization` must be a mapping with "stage" 1, 2 or 3, got {shown(zero)}. ZenFlow is part of ZeRO.'
        )
    stage = zero.get("stage", 2)
    if not isinstance(stage, int) or stage not in (1, 2, 3) or isinstance(stage, bool):
        raise ValueError(f"`stage` must be 1, 2 or 3, got {shown(stage)}. ZenFlow is part of ZeRO.")
    ds_shape.refuse_shape(config)
    of_stage = _REFUSED_IN_STAGE_3 if stage == 3 else _REFUSED_IN_STAGES_1_AND_2
    for path, allowed, reason in (*_REFUSED, *of_stage):
        value = _look_up(config, path, default=allowed[0])
        if not any(value is good or value == good for good in allowed):
            raise ValueError(
                f"`{'.'.join(path)}` must be {' or '.join(map(repr, allowed))} with ZenFlow, got {shown(value)}: {reason}."
                " Change or remove the key."
            )


def complete(config: dict[str, Any]) -> None:
    """Checks a DeepSpeed config as `refuse` does, and adds, in place, what ZenFlow needs.

    Raises:
        TypeError: A value has the wrong type.
        ValueError: A key contradicts ZenFlow, or a value is out of range.
    """
    refuse(config)
    zero = config["zero_optimization"]
    zero.setdefault("stage", 2)
    for deprecated in ("cpu_offload", "cpu_offload_param", "cpu_offload_params", "cpu_offload_use_pin_memory"):
        zero.pop(deprecated, None)  # older names, which DeepSpeed refuses beside the new one
    # The arena page-locks its own exchange region; DeepSpeed's buffers are given up right after start.
    zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    config["zero_force_ds_cpu_optimizer"] = False
    config["zero_allow_untested_optimizer"] = True


def _look_up(config: Mapping[str, Any], path: tuple[str, ...], default: Any) -> Any:
    value: Any = config
    for key in path:
        if not isinstance(value, Mapping) or key not in value:
            return default
        value = value[key]
    return value
