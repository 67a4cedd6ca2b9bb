from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from lightning_zenflow.config import AUTO_SELECT_INTERVAL_STEPS, AUTO_UPDATE_INTERVAL_STEPS, ZenFlowConfig

FIELDS = [field.name for field in dataclasses.fields(ZenFlowConfig)]

WRONG_TYPE: dict[str, list[Any]] = {
    "topk_ratio": ["0.1", None, True, [0.1]],
    "select_interval": [1.5, None, True, [4]],
    "update_interval": [2.0, None, False, {"steps": 4}],
    "overlap_step": [1, "true", None],
    "offload": [0, "false", None],
    "auto_ratio": ["0.99", None, True],
    "stall_budget": ["0.05", None, True],
    "full_warm_up_rounds": [1.0, "3", None, True],
    "pt_reserved_cores_perc": ["half", None, True],
    "look_ahead": [1, "yes", None],
    "interim_step": [1, "yes", None, 0.3],
    "worker_cores": [3, "0,1", [0.0], [True], ["0"], {0, 1}],
    "worker_timeout_secs": ["300", None, True],
}

OUT_OF_RANGE: dict[str, list[Any]] = {
    "topk_ratio": [-0.01, 1.01, float("nan"), float("inf")],
    "select_strategy": ["steps", "", None, 1],
    "select_interval": [0, -1, "never"],
    "update_interval": [0, -4, "auto "],
    "auto_ratio": [-0.5, 1.5, float("nan")],
    "stall_budget": [0, 0.0, -0.1, 1.01, float("nan")],
    "full_warm_up_rounds": [-1],
    "pt_reserved_cores_perc": [-0.1, 1.1, float("nan")],
    "deferred_lr_scale": ["log", None, 4],
    "moments_dtype": ["fp16", "bfloat16", "", None, 16],
    "worker_cores": [[], [-1], [0, 0]],
    "worker_timeout_secs": [0, -1.0, 1e30, float("nan"), float("inf")],
}

ACCEPTED: dict[str, list[Any]] = {
    "topk_ratio": [0, 0.0, 1, 1.0, 0.05],
    "select_strategy": ["auto", "step", "epoch"],
    "select_interval": ["auto"],
    "update_interval": [1, 4, 1000, "auto"],
    "overlap_step": [True, False],
    "offload": [False],
    "auto_ratio": [0.99, 0, 1, 0.5],
    "stall_budget": [0.05, 1, 1e-6],
    "full_warm_up_rounds": [0, 100],
    "pt_reserved_cores_perc": [0, 0.5, 1],
    "look_ahead": [True, False],
    "interim_step": [True, False],
    "deferred_lr_scale": ["linear", "sqrt", "none"],
    "moments_dtype": ["fp32", "bf16"],
    "worker_cores": [None, [0], [3, 1]],
    "worker_timeout_secs": [0.5, 300],
}


def _pairs(table: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    return [(name, value) for name, values in table.items() for value in values]


def test_the_tables_cover_every_field() -> None:
    assert set(ACCEPTED) == set(FIELDS)
    # Fields with a list of words have no type of their own: anything else is out of range.
    assert set(WRONG_TYPE) == set(FIELDS) - {"select_strategy", "deferred_lr_scale", "moments_dtype"}
    assert set(OUT_OF_RANGE) == set(FIELDS) - {"overlap_step", "offload", "look_ahead", "interim_step"}


@pytest.mark.parametrize(("name", "value"), _pairs(ACCEPTED))
def test_a_value_within_the_rule_is_kept_as_given(name: str, value: Any) -> None:
    assert getattr(ZenFlowConfig(**{name: value}), name) == value


@pytest.mark.parametrize(("name", "value"), _pairs(WRONG_TYPE))
def test_a_value_of_the_wrong_type_is_a_type_error_that_names_field_and_value(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=rf"^`{name}` must be .*, got {re.escape(repr(value))}\."):
        ZenFlowConfig(**{name: value})


@pytest.mark.parametrize(("name", "value"), _pairs(OUT_OF_RANGE))
def test_a_value_out_of_range_is_an_error_that_names_field_and_value(name: str, value: Any) -> None:
    expected = TypeError if value in ("never", "auto ") else ValueError
    with pytest.raises(expected, match=rf"^`{name}` must be .*, got {re.escape(repr(value))}\."):
        ZenFlowConfig(**{name: value})


def test_a_selection_interval_without_its_unit_is_refused_with_the_way_out() -> None:
    with pytest.raises(
        ValueError, match=r'`select_interval` must be "auto" while `select_strategy` is "auto", got 16\. Set'
    ):
        ZenFlowConfig(select_interval=16)


@pytest.mark.parametrize("unit", ["step", "epoch"])
def test_a_selection_interval_with_its_unit_is_accepted(unit: Any) -> None:
    assert ZenFlowConfig(select_strategy=unit, select_interval=16).select_interval == 16


def test_offload_is_known_but_refused_until_it_is_supported() -> None:
    with pytest.raises(NotImplementedError, match=r"`offload` must be false \(true is not supported yet\), got True"):
        ZenFlowConfig(offload=True)


def test_intervals_are_automatic_where_they_say_so_and_something_is_selected() -> None:
    assert ZenFlowConfig().is_automatic and ZenFlowConfig(topk_ratio=0).is_automatic
    assert ZenFlowConfig(update_interval=4).is_automatic
    assert not ZenFlowConfig(update_interval=4, topk_ratio=0).is_automatic
    assert not ZenFlowConfig(update_interval=4, select_strategy="step", select_interval=16).is_automatic


def test_fields_are_given_by_name_only_and_never_change() -> None:
    with pytest.raises(TypeError, match="positional"):
        ZenFlowConfig(0.1)  # type: ignore[call-arg]
    with pytest.raises(dataclasses.FrozenInstanceError):
        ZenFlowConfig().topk_ratio = 0.2  # type: ignore[misc]


def test_a_deepspeed_block_with_every_key_carries_over() -> None:
    block = {
        "topk_ratio": 0.05,
        "select_strategy": "step",
        "select_interval": 32,
        "update_interval": 8,
        "overlap_step": False,
        "offload": False,
        "auto_ratio": 0.9,
        "full_warm_up_rounds": 3,
        "pt_reserved_cores_perc": 0.25,
    }
    config = ZenFlowConfig.from_mapping(block)
    assert {name: getattr(config, name) for name in block} == block


def test_deepspeeds_own_defaults_carry_over() -> None:
    zenflow = pytest.importorskip("deepspeed.runtime.zenflow.zenflow_config")
    defaults = zenflow.ZenFlowConfig().model_dump()
    defaults.pop("steps_per_epoch", None)  # DeepSpeed fills it in by itself
    carried = dataclasses.asdict(ZenFlowConfig.from_mapping(defaults))
    assert {name: carried[name] for name in defaults} == defaults


@pytest.mark.parametrize(
    ("key", "answer"),
    [
        ("topk_ration", "Did you mean `topk_ratio`?"),
        ("overlap", "Did you mean `overlap_step`?"),
        ("Update_Interval", "Did you mean `update_interval`?"),
        ("lr", "Known keys: topk_ratio, select_strategy,"),
    ],
)
def test_an_unknown_key_is_an_error_that_suggests_the_right_one(key: str, answer: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"`zenflow` has no key `{key}`. {answer}")):
        ZenFlowConfig.from_mapping({key: 1})


def test_the_length_of_an_epoch_is_not_a_setting() -> None:
    with pytest.raises(ValueError, match=r"`zenflow\.steps_per_epoch` must be left out: it comes from the Trainer"):
        ZenFlowConfig.from_mapping({"steps_per_epoch": 100})


@pytest.mark.parametrize("settings", [None, True, "auto", [("topk_ratio", 0.1)], 3])
def test_a_block_that_is_no_mapping_is_refused(settings: Any) -> None:
    with pytest.raises(TypeError, match=rf"`zenflow` must be a mapping of settings, got {re.escape(repr(settings))}"):
        ZenFlowConfig.from_mapping(settings)


def test_auto_intervals_stand_for_the_documented_steps() -> None:
    config = ZenFlowConfig()
    assert config.update_interval_steps() == AUTO_UPDATE_INTERVAL_STEPS == 4
    assert config.select_interval_steps(None) == config.select_interval_steps(10) == AUTO_SELECT_INTERVAL_STEPS == 64


@pytest.mark.parametrize(
    ("unit", "interval", "steps_per_epoch", "steps"),
    [
        ("step", 7, None, 7),
        ("step", "auto", None, 64),
        ("epoch", "auto", 30, 30),
        ("epoch", 2, 30, 60),
        ("epoch", 3, 0, 1),
    ],
)
def test_intervals_come_out_in_steps(unit: Any, interval: Any, steps_per_epoch: Any, steps: int) -> None:
    config = ZenFlowConfig(select_strategy=unit, select_interval=interval)
    assert config.select_interval_steps(steps_per_epoch) == steps


def test_epochs_of_an_endless_loader_ask_for_a_step_interval() -> None:
    config = ZenFlowConfig(select_strategy="epoch", select_interval=1)
    with pytest.raises(
        ValueError, match=r"`select_strategy` must be step for a data loader without a length, got 'epoch'"
    ):
        config.select_interval_steps(None)


def test_every_field_has_documentation_of_its_own() -> None:
    docstring_parser = pytest.importorskip("docstring_parser")
    documented = {
        param.arg_name: param.description for param in docstring_parser.parse_from_object(ZenFlowConfig).params
    }
    assert all(documented.get(name) for name in FIELDS)
