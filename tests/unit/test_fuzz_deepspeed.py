"""Any DeepSpeed config, as a mapping or a file: read as DeepSpeed reads it, or refused in words when the strategy is made."""

from __future__ import annotations

import copy
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_zenflow import ZenFlowConfig, ZenFlowStrategy
from tests.fuzz import LONG, SHORT, answer, misspelled, nested, numbers, of_python, plain

GOOD: dict[str, Any] = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "steps_per_print": 10,
    "wall_clock_breakdown": False,
    "communication_data_type": "fp32",
    "zero_optimization": {
        "stage": 2,
        "reduce_bucket_size": 5e8,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "offload_optimizer": {"device": "cpu", "pin_memory": True, "ratio": 1.0},
        "zenflow": {"topk_ratio": 0.1, "select_strategy": "step", "select_interval": 8, "update_interval": 4},
    },
    "fp16": {"enabled": False, "loss_scale": 0, "initial_scale_power": 12, "loss_scale_window": 100, "hysteresis": 2},
    "bf16": {"enabled": False},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 0.1, "warmup_num_steps": 10}},
    "activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": False},
    "flops_profiler": {"enabled": False, "profile_step": 1},
    "data_types": {"grad_accum_dtype": "fp32"},
    "checkpoint": {"tag_validation": "Warn"},
    "_comment": "kept",
}
Place = tuple[str, ...]


def places(config: dict[str, Any], before: Place = ()) -> list[Place]:
    found: list[Place] = []
    for name, value in config.items():
        found.append((*before, name))
        found += places(value, (*before, name)) if isinstance(value, dict) else []
    return found


PLACES = [place for place in places(GOOD) if place != ("_comment",)]


def changed(place: Place, value: Any) -> dict[str, Any]:
    """A good config with another value in one place."""
    config = copy.deepcopy(GOOD)
    inner = config
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    return config


def renamed(place: Place, name: str) -> dict[str, Any]:
    config = copy.deepcopy(GOOD)
    inner = config
    for part in place[:-1]:
        inner = inner[part]
    inner[name] = inner.pop(place[-1])
    return config


def check(config: Any) -> Any:
    before = repr(config)
    made = answer(lambda: ZenFlowStrategy(config=config))
    assert repr(config) == before
    if isinstance(made, ZenFlowStrategy):
        assert isinstance(made.config, dict) and isinstance(made.zenflow, ZenFlowConfig)
        assert made.config["zero_optimization"]["stage"] in (1, 2, 3)
        assert made.config["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
        assert "zenflow" not in made.config["zero_optimization"]
    return made


def test_the_good_one_is_good() -> None:
    made = check(GOOD)
    assert isinstance(made, ZenFlowStrategy), made
    assert made.zenflow == ZenFlowConfig(**GOOD["zero_optimization"]["zenflow"])


@SHORT
@given(st.sampled_from(PLACES), of_python)
@example(("communication_data_type",), 5)
@example(("zero_optimization", "offload_optimizer"), "cpu")
@example(("zero_optimization", "reduce_bucket_size"), True)
@example(("fp16", "enabled"), "true")
@example(("optimizer", "params", "betas"), 0.9)
@example(("optimizer", "params"), None)
@example(("scheduler", "type"), "Nope")
@example(("scheduler", "type"), [])
@example(("data_types", "grad_accum_dtype"), "fp99")
@example(("train_batch_size",), 10**400)
@example(("gradient_clipping",), 10**400)
@example(("optimizer", "params", "lr"), 10**400)
def test_any_value_in_any_place(place: Place, value: Any) -> None:
    check(changed(place, value))


@pytest.mark.long
@LONG
@given(st.sampled_from(PLACES), st.one_of(of_python, nested, numbers, plain))
def test_many_values_in_any_place(place: Place, value: Any) -> None:
    check(changed(place, value))


@pytest.mark.parametrize("place", PLACES, ids=".".join)
def test_no_place_takes_everything(place: Place) -> None:
    """Of values that mean nothing anywhere, none is accepted, and the key that has it is named."""
    for value in ({"no": "such"}, [["x"]], "no such word", float("nan"), object()):
        error = check(changed(place, value))
        assert isinstance(error, (TypeError, ValueError)), f"{'.'.join(place)} took {value!r}"
        assert any(part in str(error) for part in place[-2:]), error


@SHORT
@given(st.sampled_from(PLACES).flatmap(lambda place: st.tuples(st.just(place), misspelled(place[-1]))))
def test_a_misspelled_key(names: tuple[Place, str]) -> None:
    place, wrong = names
    if wrong.startswith("_") or (*place[:-1], wrong) in PLACES:
        return
    error = check(renamed(place, wrong))
    # In capitals `fp16` and the like are other keys; what is missing then can be named first.
    assert isinstance(error, (TypeError, ValueError)), f"{'.'.join(place)} as {wrong!r}"


def test_a_misspelled_key_is_named_with_the_closest_one() -> None:
    for place, wrong in {
        ("gradient_clipping",): "gradient_cliping",
        ("zero_optimization", "reduce_bucket_size"): "reduce_buckt_size",
        ("zero_optimization", "offload_optimizer", "pin_memory"): "pin_memry",
        ("fp16", "loss_scale"): "loss_scal",
        ("activation_checkpointing", "partition_activations"): "partition_activation",
    }.items():
        error = check(renamed(place, wrong))
        block = ".".join(place[:-1]) or "config"
        assert str(error).startswith(f"`{block}` has no key `{wrong}`") and f"Did you mean `{place[-1]}`?" in str(error)


@pytest.mark.parametrize("place", PLACES, ids=".".join)
def test_auto_is_known_or_refused(place: Place) -> None:
    """Never left for DeepSpeed to trip over."""
    made = check(changed(place, "auto"))
    by_trainer = {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
    }
    if len(place) == 1:
        assert isinstance(made, ZenFlowStrategy) == (place[0] in by_trainer), made
    if isinstance(made, ZenFlowStrategy) and place[-1] in by_trainer:
        assert isinstance(made.config, dict) and place[-1] not in made.config


@SHORT
@given(st.one_of(of_python, nested))
def test_anything_for_the_config_as_a_whole(config: Any) -> None:
    assert config is None or not isinstance(check(config), ZenFlowStrategy)


@pytest.mark.parametrize("name", [1, None, ("a",), b"x"])
def test_a_key_that_is_no_string_is_named(name: Any) -> None:
    for config in ({**GOOD, name: 1}, {"zero_optimization": {"stage": 2, name: 1}}):
        error = check(config)
        assert isinstance(error, TypeError) and "must have strings for keys" in str(error)


def test_a_config_that_holds_itself_is_refused() -> None:
    config: dict[str, Any] = {"zero_optimization": {"stage": 2}}
    config["zero_optimization"]["again"] = config
    error = answer(lambda: ZenFlowStrategy(config=config))
    assert isinstance(error, ValueError) and "that holds itself" in str(error)


def test_mappings_and_numbers_of_others_are_as_good() -> None:
    from types import MappingProxyType

    config = MappingProxyType(
        {"zero_optimization": MappingProxyType({"stage": np.int64(1)}), "gradient_clipping": np.float32(1)}
    )
    made = check(config)
    assert isinstance(made, ZenFlowStrategy) and isinstance(made.config, dict)
    assert type(made.config["zero_optimization"]["stage"]) is int and type(made.config["gradient_clipping"]) is float


# -- files -------------------------------------------------------------------------------------------------------------

BAD_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "which is empty"),
    "blank": (b" \n\t", "which is empty"),
    "not UTF-8": (b"\xff\xfe{\x00}\x00", "which cannot be read: 'utf-8' codec"),
    "binary": (bytes(range(256)), "which cannot be read"),
    "cut off": (b'{"zero_optimization": {"stage": 2}', "which is no JSON: "),
    "a trailing comma": (b'{"zero_optimization": {"stage": 2},}', "which is no JSON: "),
    "YAML": (b"zero_optimization:\n  stage: 2\n", "which is no JSON: "),
    "a list": (b"[]", "which holds [] instead of an object"),
    "a number": (b"5", "which holds 5 instead of an object"),
    "null": (b"null", "which holds None instead of an object"),
    "a key twice": (b'{"zero_optimization": {"stage": 1, "stage": 2}}', "the key 'stage' is there twice"),
    "too many digits": (b'{"train_batch_size": ' + b"9" * 5000 + b"}", "which is no JSON: "),
    "too deep": (b'{"a":' * 100_000, "which is no JSON: "),
}
GOOD_FILES = {
    "plain": json.dumps(GOOD).encode(),
    "with a byte order mark": b"\xef\xbb\xbf" + json.dumps(GOOD).encode(),
    "with a comment": json.dumps({**GOOD, "_": "ümlaut"}, ensure_ascii=False).encode(),
}


def by_path(path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> tuple[Any, str]:
    """The answer to a file, and what the message calls it."""
    if how == "environment":
        monkeypatch.setenv("PL_DEEPSPEED_CONFIG_PATH", str(path))
        return answer(ZenFlowStrategy), "PL_DEEPSPEED_CONFIG_PATH"
    return answer(lambda: ZenFlowStrategy(config=path if how == "path" else str(path))), "config"


@pytest.mark.parametrize("how", ["path", "string", "environment"])
@pytest.mark.parametrize("name", [*BAD_FILES, "missing", "a directory"])
def test_a_bad_file_is_named_with_what_is_wrong(
    name: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, what = (
        tmp_path / "ds.json",
        {"missing": "which is not there", "a directory": "which is no file"}.get(name, ""),
    )
    if name == "a directory":
        path.mkdir()
    elif name in BAD_FILES:
        content, what = BAD_FILES[name]
        path.write_bytes(content)
    error, source = by_path(path, monkeypatch, how)
    assert isinstance(error, ValueError)
    assert str(error).startswith(
        f"`{source}` must be the path of a JSON file with a DeepSpeed config, got {str(path)!r}, "
    )
    assert what in str(error)


@pytest.mark.parametrize("how", ["path", "environment"])
@pytest.mark.parametrize("name", GOOD_FILES)
def test_a_good_file_is_read(name: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ds.json"
    path.write_bytes(GOOD_FILES[name])
    made, _ = by_path(path, monkeypatch, how)
    assert isinstance(made, ZenFlowStrategy) and made.zenflow.select_interval == 8


def test_an_empty_variable_is_no_config_that_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_DEEPSPEED_CONFIG_PATH", "")
    error = answer(ZenFlowStrategy)
    assert isinstance(error, ValueError) and str(error).startswith("`PL_DEEPSPEED_CONFIG_PATH` must be the path of")
    # The argument goes before it.
    assert isinstance(answer(lambda: ZenFlowStrategy(config=GOOD)), ZenFlowStrategy)


def test_a_file_without_a_name_that_files_can_have_is_refused() -> None:
    for name in ("\0", "x" * 5000):
        error = answer(partial(ZenFlowStrategy, config=name))
        assert isinstance(error, ValueError), error


# -- Lightning's arguments ---------------------------------------------------------------------------------------------

ARGUMENTS = [
    *("reduce_bucket_size", "allgather_bucket_size", "sub_group_size", "contiguous_gradients", "overlap_comm"),
    *(
        "partition_activations",
        "cpu_checkpointing",
        "loss_scale",
        "hysteresis",
        "initial_scale_power",
        "min_loss_scale",
    ),
    *("loss_scale_window", "offload_optimizer", "load_full_weights", "exclude_frozen_parameters", "remote_device"),
    *("pin_memory", "optimizer_buffer_count", "timeout", "logging_level", "logging_batch_size_per_gpu", "stage"),
]


@SHORT
@given(st.sampled_from(ARGUMENTS), of_python)
@example("loss_scale", "x")
@example("hysteresis", np.array([1, 2]))
@example("reduce_bucket_size", -1)
@example("logging_level", "WARN")
def test_any_value_for_an_argument_of_lightnings_strategy(name: str, value: Any) -> None:
    made = answer(lambda: ZenFlowStrategy(**{name: value}))
    assert isinstance(made, (ZenFlowStrategy, TypeError, ValueError))
