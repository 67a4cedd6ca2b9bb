"""What becomes of DeepSpeed's JSON: nothing is lost, nothing contradicts in silence."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest

from lightning_zenflow import ZenFlowConfig, ds_blocks, ds_config


def nested(path: str, value: Any, stage: int = 2) -> dict[str, Any]:
    """A config with one key at a dotted path, and ZeRO-2."""
    config: dict[str, Any] = {"zero_optimization": {"stage": stage}}
    *blocks, key = path.split(".")
    place = config
    for block in blocks:
        place = place.setdefault(block, {})
    place[key] = value
    return config


def test_the_block_is_taken_out_of_a_copy() -> None:
    block = {"topk_ratio": 0.05}
    config = {"zero_optimization": {"stage": 1, "zenflow": block}, "other": [1]}
    before = copy.deepcopy(config)
    taken, found = ds_config.take_zenflow_block(config)
    assert found == block
    assert taken == {"zero_optimization": {"stage": 1}, "other": [1]}
    taken["other"].append(2)
    assert config == before


def test_every_key_of_deepspeeds_block_carries_over() -> None:
    from deepspeed.runtime.zenflow.zenflow_config import ZenFlowConfig as DeepSpeeds

    block = {
        "topk_ratio": 0.05,
        "select_strategy": "step",
        "select_interval": 7,
        "update_interval": 3,
        "overlap_step": False,
        "offload": False,
        "auto_ratio": 0.9,
        "full_warm_up_rounds": 2,
        "pt_reserved_cores_perc": 0.25,
    }
    assert {*DeepSpeeds.model_fields, "steps_per_epoch"} == {*block, "steps_per_epoch"}
    config = ZenFlowConfig.from_mapping(block)
    assert {name: getattr(config, name) for name in block} == block
    assert ZenFlowConfig.from_mapping({}) == ZenFlowConfig()


def test_a_block_in_the_wrong_place_is_an_error() -> None:
    with pytest.raises(ValueError, match='`zenflow` must be inside "zero_optimization"'):
        ds_config.take_zenflow_block({"zenflow": {}, "zero_optimization": {"stage": 2}})


REFUSED = [
    ("zero_optimization.offload_optimizer.device", "nvme"),
    ("zero_optimization.offload_optimizer.ratio", 0.5),
    ("zero_optimization.offload_optimizer.super_offload", True),
    ("zero_optimization.offload_param.device", "nvme"),
    ("zero_optimization.cpu_offload_param", True),
    ("zero_optimization.cpu_offload_params", True),
    ("zero_optimization.zero_quantized_gradients", True),
    ("zero_optimization.zero_quantized_weights", True),
    ("zero_optimization.zero_quantized_nontrainable_weights", True),
    ("zero_optimization.compute_grad_norm", False),
    ("fp16.fp16_master_weights_and_grads", True),
    ("bf16.bf16_master_weights_and_grads", True),
    ("bf16.bf16_optimizer_states", True),
    ("torch_autocast.enabled", True),
    ("tensor_parallel.autotp_size", 2),
    ("pipeline.stages", 2),
    ("managed_gradient_accumulation", False),
    ("hybrid_engine.enabled", True),
    ("sequence_parallel_size", 2),
    ("compile.deepcompile", True),
    ("zero_force_ds_cpu_optimizer", True),
    ("zero_allow_untested_optimizer", False),
]
OF_STAGE_3 = [
    ("zero_optimization.offload_param.device", "cpu"),
    ("zero_optimization.zero_hpz_partition_size", 2),
]


@pytest.mark.parametrize(
    ("stage", "path", "value"),
    [(stage, *key) for stage in (2, 3) for key in REFUSED] + [(stage, *key) for stage in (1, 2) for key in OF_STAGE_3],
)
def test_a_key_that_contradicts_is_named_with_its_value(stage: int, path: str, value: Any) -> None:
    """FAULTS Z1 and issue 2: never ignored."""
    with pytest.raises(ValueError, match=re.escape(f"`{path}` must be ") + f".* with ZenFlow, got {value!r}: "):
        ds_config.complete(nested(path, value, stage))


@pytest.mark.parametrize(("path", "value"), OF_STAGE_3)
def test_what_belongs_to_stage_3_is_left_to_it(path: str, value: Any) -> None:
    config = nested(path, value, 3)
    expected = copy.deepcopy(config["zero_optimization"])
    ds_config.complete(config)
    assert config["zero_optimization"] == {**expected, "offload_optimizer": {"device": "cpu", "pin_memory": False}}


@pytest.mark.parametrize("stage", [0, "2", True, None, 4])
def test_another_stage_is_refused(stage: Any) -> None:
    with pytest.raises(ValueError, match=f"`stage` must be 1, 2 or 3, got {stage!r}"):
        ds_config.complete({"zero_optimization": {"stage": stage}})


@pytest.mark.parametrize("zero", [None, False, True, [2]])
def test_a_config_without_zero_is_refused(zero: Any) -> None:
    config = {} if zero is None else {"zero_optimization": zero}
    with pytest.raises(
        ValueError, match=re.escape(f'`zero_optimization` must be a mapping with "stage" 1, 2 or 3, got {zero!r}')
    ):
        ds_config.complete(config)


def test_what_is_needed_is_added_and_everything_else_stays() -> None:
    zero = {
        "reduce_bucket_size": 5,
        "cpu_offload": True,
        "cpu_offload_use_pin_memory": True,
        "offload_optimizer": {"device": "cpu", "pin_memory": True, "buffer_count": 5},
    }
    config = {"zero_optimization": zero, "steps_per_print": 10}
    ds_config.complete(config)
    assert config == {
        "zero_optimization": {
            "stage": 2,
            "reduce_bucket_size": 5,
            "offload_optimizer": {"device": "cpu", "pin_memory": False},
        },
        "steps_per_print": 10,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }


def test_auto_is_left_to_the_trainer_where_it_knows() -> None:
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "fp16": {"enabled": "auto", "loss_scale": 0},
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},  # DeepSpeed's own "auto"
    }
    ds_config.drop_auto(config)
    assert config == {
        "fp16": {"loss_scale": 0},
        "bf16": {},
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
    }
    ds_config.settle_precision(config, "16-mixed")
    assert config["fp16"] == {"loss_scale": 0, "enabled": True} and config["bf16"] == {"enabled": False}


def test_the_older_name_of_bf16_is_as_good() -> None:
    config: dict[str, Any] = {"bfloat16": {"enabled": True}}
    ds_config.drop_auto(config)
    assert config == {"bf16": {"enabled": True}}
    with pytest.raises(ValueError, match="`bfloat16` must be left out beside `bf16`"):
        ds_config.drop_auto({"bfloat16": {}, "bf16": {}})


@pytest.mark.parametrize(("block", "name"), [("optimizer", "lr"), ("scheduler", "warmup_num_steps")])
def test_auto_is_refused_where_nobody_knows(block: str, name: str) -> None:
    message = f'`{block}.params.{name}` must be a value in the DeepSpeed config, got "auto"'
    with pytest.raises(ValueError, match=re.escape(message)):
        ds_config.drop_auto({block: {"type": "any", "params": {name: "auto"}}})


@pytest.mark.parametrize(
    ("config", "precision", "clip", "message"),
    [
        ({"bf16": {"enabled": True}}, "32-true", None, r"`precision` must agree .*'32-true' and `bf16.enabled`=True"),
        ({"bf16": {"enabled": False}}, "bf16-mixed", None, r"got 'bf16-mixed' and `bf16.enabled`=False"),
        ({"fp16": {"enabled": True}}, "bf16-true", None, r"`fp16.enabled`=True. Set Trainer\(precision='16-mixed'\)"),
        ({"gradient_clipping": 1.0}, "32-true", 0.5, r"`gradient_clip_val` must agree .* got 0.5 and .*=1.0"),
        ({"gradient_clipping": 1.0}, "32-true", 0, r"`gradient_clip_val` must agree .* got 0 and .*=1.0"),
    ],
)
def test_config_and_trainer_must_agree(config: dict[str, Any], precision: str, clip: Any, message: str) -> None:
    """FAULTS 41."""
    with pytest.raises(ValueError, match=message):
        ds_config.check_against_trainer(config, precision, clip)


@pytest.mark.parametrize(
    ("config", "precision", "clip"),
    [
        ({}, "16-mixed", 1.0),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": False}}, "bf16-true", None),
        ({"fp16": {"enabled": True}, "gradient_clipping": 1}, "16-mixed", 1.0),
        ({"fp16": {"enabled": False}, "gradient_clipping": 0.5}, "32-true", None),
    ],
)
def test_config_and_trainer_that_agree_are_fine(config: dict[str, Any], precision: str, clip: Any) -> None:
    ds_config.check_against_trainer(config, precision, clip)


def test_the_global_batch_size_must_be_what_loader_trainer_and_ranks_make() -> None:
    config = {"train_micro_batch_size_per_gpu": 4}
    ds_config.check_batch_size(config, 2, 3)
    ds_config.check_batch_size(config, 2, 3, train_batch_size=24, accumulation_steps=2)
    message = r"`train_batch_size` must be 24 \(batch of 4, accumulated 2 times, on 3 ranks\), got 32"
    with pytest.raises(ValueError, match=message):
        ds_config.check_batch_size(config, 2, 3, train_batch_size=32)
    message = (
        r"`accumulate_grad_batches` must agree with the DeepSpeed config, got 2 and `gradient_accumulation_steps`=4"
    )
    with pytest.raises(ValueError, match=message):
        ds_config.check_batch_size(config, 2, 3, accumulation_steps=4)


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ({"type": "AdamW"}, {"decoupled_weight_decay": True, "weight_decay": 0.0}),
        ({"type": "Adam", "params": {}}, {"decoupled_weight_decay": True, "weight_decay": 0.0}),
        ({"type": "Adam", "params": {"adam_w_mode": False}}, {"decoupled_weight_decay": False, "weight_decay": 0.0}),
        ({"type": "AdamW", "params": {"torch_adam": True}}, {"decoupled_weight_decay": True, "weight_decay": 0.01}),
        (
            {"type": "adamw", "params": {"lr": 0.1, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.2}},
            {"decoupled_weight_decay": True, "weight_decay": 0.2, "lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6},
        ),
        ({"type": "Adam", "params": {"bias_correction": True}}, {"decoupled_weight_decay": True, "weight_decay": 0.0}),
    ],
)
def test_an_optimizer_block_means_what_deepspeed_means(block: dict[str, Any], expected: dict[str, Any]) -> None:
    before = copy.deepcopy(block)
    assert ds_blocks.optimizer_settings(block) == expected
    assert block == before


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"type": "Lamb"}, """`optimizer.type` must be "Adam" or "AdamW" with ZenFlow, got 'Lamb'"""),
        ({}, "`optimizer.type` must be"),
        ({"type": "Adam", "params": {"amsgrad": True}}, "`optimizer.params.amsgrad` must be False"),
        ({"type": "Adam", "params": {"bias_correction": False}}, "`optimizer.params.bias_correction` must be True"),
        ({"type": "AdamW", "params": {"fp32_optimizer_states": False}}, "fp32_optimizer_states` must be True"),
        ({"type": "AdamW", "params": {"learning_rate": 1}}, "`optimizer.params` has unknown key `learning_rate`"),
    ],
)
def test_an_optimizer_block_that_is_not_supported_is_named(block: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        ds_blocks.optimizer_settings(block)


@pytest.mark.parametrize("value", ["cpu", True])
def test_offload_param_must_be_a_mapping(value: Any) -> None:
    with pytest.raises(
        TypeError, match=r"`zero_optimization.offload_param` must be a mapping, got .*\"device\": \"cpu\""
    ):
        ds_config.complete({"zero_optimization": {"stage": 3, "offload_param": value}})
