"""DeepSpeed's JSON config: what is taken from it, what ZenFlow needs in it, and what is refused by name.

Plain dicts in, plain dicts out; DeepSpeed itself is not needed here.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

# Path of a key in the config, the values that are fine besides leaving it out, and why others are not.
_REFUSED: tuple[tuple[tuple[str, ...], tuple[Any, ...], str], ...] = (
    (
        ("zero_optimization", "offload_optimizer", "device"),
        ("cpu", "none", None),
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
)

# The same for stages 1 and 2, which keep all weights on every rank, and for stage 3.
_REFUSED_IN_STAGES_1_AND_2: tuple[tuple[tuple[str, ...], tuple[Any, ...], str], ...] = (
    (("zero_optimization", "offload_param", "device"), ("none", None), "parameters are offloaded by ZeRO-3 only"),
    (("zero_optimization", "cpu_offload_param"), (False, None), "parameters are offloaded by ZeRO-3 only"),
    (("zero_optimization", "cpu_offload_params"), (False, None), "parameters are offloaded by ZeRO-3 only"),
    (("zero_optimization", "zero_hpz_partition_size"), (1,), "it belongs to ZeRO-3"),
)
_REFUSED_IN_STAGE_3: tuple[tuple[tuple[str, ...], tuple[Any, ...], str], ...] = (
    (("zero_optimization", "offload_param", "device"), ("cpu", "none", None), "NVMe is not supported"),
    (("zero_optimization", "cpu_offload_param"), (False, None), 'write "offload_param": {"device": "cpu"}'),
    (("zero_optimization", "cpu_offload_params"), (False, None), 'write "offload_param": {"device": "cpu"}'),
)


def take_zenflow_block(config: Mapping[str, Any]) -> tuple[dict[str, Any], Mapping[str, Any] | None]:
    """A copy of `config` without its `"zenflow"` block, and the block.

    DeepSpeed must not see the block, since its own ZenFlow would start.

    Raises:
        ValueError: The block stands outside `"zero_optimization"`, where DeepSpeed would not read it either.
    """
    own = copy.deepcopy(dict(config))
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
        if config.get(key) == "auto":
            del config[key]
    for key in ("fp16", "bf16"):
        if _look_up(config, (key, "enabled"), default=None) == "auto":
            del config[key]
    for block in ("optimizer", "scheduler"):
        for name, value in (_look_up(config, (block, "params"), default=None) or {}).items():
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


def check_batch_size(config: Mapping[str, Any], train_batch_size: int | None, accumulate: int, ranks: int) -> None:
    """Compares DeepSpeed's global batch size with the one that data loader, Trainer and ranks make.

    Raises:
        ValueError: They differ.
    """
    micro = config["train_micro_batch_size_per_gpu"]
    total = micro * accumulate * ranks
    if train_batch_size not in (None, total):
        raise ValueError(
            f"`train_batch_size` must be {total} (batch of {micro}, accumulated {accumulate} times, on {ranks} ranks), got"
            f" {train_batch_size}. Remove the key."
        )


def complete(config: dict[str, Any]) -> None:
    """Checks a DeepSpeed config (without its `"zenflow"` block) and adds, in place, what ZenFlow needs.

    Raises:
        ValueError: A key contradicts ZenFlow.
    """
    zero = config.get("zero_optimization")
    if not isinstance(zero, dict):
        raise ValueError(
            f'`zero_optimization` must be a mapping with "stage" 1, 2 or 3, got {zero!r}. ZenFlow is part of ZeRO.'
        )
    stage = zero.get("stage", 2)
    if stage not in (1, 2, 3) or isinstance(stage, bool):
        raise ValueError(f"`stage` must be 1, 2 or 3, got {stage!r}. ZenFlow is part of ZeRO.")
    of_stage = _REFUSED_IN_STAGE_3 if stage == 3 else _REFUSED_IN_STAGES_1_AND_2
    offload = zero.get("offload_param")
    if offload is not None and not isinstance(offload, Mapping):
        raise ValueError(
            f'`zero_optimization.offload_param` must be a mapping, got {offload!r}. Write "offload_param": {{"device": "cpu"}}.'
        )
    for path, allowed, reason in (*_REFUSED, *of_stage):
        value = _look_up(config, path, default=allowed[0])
        if not any(value is good or value == good for good in allowed):
            raise ValueError(
                f"`{'.'.join(path)}` must be {' or '.join(map(repr, allowed))} with ZenFlow, got {value!r}: {reason}."
                " Change or remove the key."
            )
    zero["stage"] = stage
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


def optimizer_settings(block: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `ZenFlowAdamW` from a DeepSpeed `"optimizer"` block.

    Raises:
        ValueError: The type, or a parameter of it, is not supported.
    """
    kind, params = str(block.get("type", "")), dict(block.get("params", {}))
    if kind.lower() not in ("adam", "adamw"):
        raise ValueError(
            f'`optimizer.type` must be "Adam" or "AdamW" with ZenFlow, got {kind!r}. Change the DeepSpeed config.'
        )
    # DeepSpeed's "Adam" is AdamW too, unless adam_w_mode says otherwise, and only torch's AdamW decays by default.
    decoupled = params.pop("adam_w_mode", True) or kind.lower() == "adamw"
    default_decay = 0.01 if params.pop("torch_adam", False) and decoupled else 0.0
    params.pop("foreach", None)  # changes torch's speed, not its maths
    settings: dict[str, Any] = {
        "decoupled_weight_decay": bool(decoupled),
        "weight_decay": params.pop("weight_decay", default_decay),
    }
    for flag, value in (("amsgrad", False), ("bias_correction", True), ("fp32_optimizer_states", True)):
        if bool(params.pop(flag, value)) != value:
            raise ValueError(f"`optimizer.params.{flag}` must be {value} with ZenFlow. Remove the key.")
    for name in ("lr", "betas", "eps"):
        if name in params:
            settings[name] = tuple(params.pop(name)) if name == "betas" else params.pop(name)
    if params:
        raise ValueError(
            f"`optimizer.params` has unknown key `{next(iter(params))}`. Remove it from the DeepSpeed config."
        )
    return settings
