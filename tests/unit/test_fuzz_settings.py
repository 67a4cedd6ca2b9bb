"""Any value for any setting of `ZenFlowConfig`, from Python, JSON and YAML: kept and meaningful, or refused in words."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from functools import partial
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_zenflow import AutoTuner, StallMonitor, ZenFlowConfig, ZenFlowStrategy
from lightning_zenflow.zero.settings import RunSettings
from tests.fuzz import HUGE, LONG, SHORT, UNPRINTABLE, answer, misspelled, nested, numbers, of_python, plain

NAMES = [field.name for field in fields(ZenFlowConfig)]

setting = st.tuples(st.sampled_from(NAMES), of_python)
several = st.dictionaries(st.sampled_from(NAMES), of_python, min_size=1, max_size=4)


def check_python(settings: dict[str, Any]) -> None:
    made = answer(lambda: ZenFlowConfig(**settings))
    if isinstance(made, ZenFlowConfig):
        check_means_something(made)


def check_means_something(config: ZenFlowConfig) -> None:
    """Its values are plain, come back from JSON, and make a schedule."""
    assert ZenFlowConfig.from_mapping(json.loads(json.dumps(asdict(config)))) == config
    assert all(type(getattr(config, name)) in (bool, int, float, str, list, type(None)) for name in NAMES)
    settings = RunSettings(config, select_interval=config.select_interval_steps(7))
    schedule = settings.schedule()
    assert 1 <= schedule.update_interval <= 1000 and schedule.warm_up_steps >= 0
    assert schedule.select_interval is None or schedule.select_interval >= 1
    assert replace(config) == config


@SHORT
@given(setting)
def test_one_setting_from_python(given: tuple[str, Any]) -> None:
    check_python(dict([given]))


@pytest.mark.long
@LONG
@given(several)
def test_several_settings_from_python(given: dict[str, Any]) -> None:
    check_python(given)


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_answers_every_kind_of_value(name: str) -> None:
    """Hypothesis leaves some out in a short run."""
    kinds: list[Any] = [
        None,
        True,
        False,
        -1,
        0,
        1,
        0.5,
        1.5,
        float("nan"),
        float("inf"),
        "",
        "auto",
        "x",
        b"x",
        [],
        [0],
        {},
    ]
    for value in [*kinds, [[1]], {"a": 1}, (0, 1), object(), *HUGE, UNPRINTABLE, [UNPRINTABLE]]:
        check_python({name: value})


@pytest.mark.parametrize("name", NAMES)
def test_numbers_of_numpy_are_as_good_as_pythons(name: str) -> None:
    import numpy as np

    make: Any = ZenFlowConfig
    for number in (np.float64(0.5), np.float32(0.5), np.int64(3), np.int32(1), np.bool_(True), np.bool_(False)):
        ours = answer(partial(make, **{name: number}))
        pythons = answer(partial(make, **{name: number.item()}))
        assert ours == pythons if isinstance(ours, ZenFlowConfig) else str(ours) == str(pythons)


@SHORT
@given(st.dictionaries(st.sampled_from(NAMES), plain, max_size=3))
def test_a_block_of_json(block: dict[str, Any]) -> None:
    check_text(block, json.dumps, json.loads)


@SHORT
@given(st.dictionaries(st.sampled_from(NAMES), nested, max_size=3))
def test_a_section_of_yaml(block: dict[str, Any]) -> None:
    check_text(block, yaml.safe_dump, yaml.safe_load)


def check_text(block: dict[str, Any], dump: Any, load: Any) -> None:
    try:
        read = load(dump({"zenflow": block}))
    except (
        ValueError,
        yaml.YAMLError,
    ):  # not even the format can say it: more digits than Python reads, control characters
        return
    made = answer(lambda: ZenFlowConfig.from_mapping(read["zenflow"]))
    if isinstance(made, ZenFlowConfig):
        check_means_something(made)


@SHORT
@given(st.sampled_from(NAMES).flatmap(lambda name: st.tuples(st.just(name), misspelled(name))))
def test_a_misspelled_setting(names: tuple[str, str]) -> None:
    right, wrong = names
    if wrong in NAMES:
        return
    error = answer(lambda: ZenFlowConfig.from_mapping({wrong: getattr(ZenFlowConfig(), right)}))
    assert isinstance(error, ValueError) and str(error).startswith(f"`zenflow` has no key `{wrong}`. ")


@SHORT
@given(of_python)
def test_anything_for_the_settings_as_a_whole(given: Any) -> None:
    made = answer(lambda: ZenFlowStrategy(given))
    assert not isinstance(made, ZenFlowStrategy) or given == {} or isinstance(given, dict)


# -- callbacks ---------------------------------------------------------------------------------------------------------

BOUNDS = [f"{side}_{kind}_interval" for kind in ("update", "select") for side in ("min", "max")]


@SHORT
@given(st.dictionaries(st.sampled_from(BOUNDS), st.one_of(numbers, of_python), min_size=1))
@example({"max_update_interval": 1001})
@example({"max_select_interval": 10**10})
def test_bounds_of_the_auto_tuner(given: dict[str, Any]) -> None:
    made = answer(lambda: AutoTuner(**given))
    if isinstance(made, AutoTuner):  # then the strategy will take what it decides
        limits = {"update": 1000, "select": 10**9}
        assert all(1 <= value <= limits[name.split("_")[1]] for name, value in made._bounds.items())


@SHORT
@given(of_python)
def test_a_replay_for_the_auto_tuner(given: Any) -> None:
    made = answer(lambda: AutoTuner(replay=given))
    assert given is None or not isinstance(made, AutoTuner)


@SHORT
@given(st.dictionaries(st.sampled_from(["record", "record_every_n_steps", "progress_bar"]), of_python, min_size=1))
@example({"record": ""})
@example({"progress_bar": "yes"})
def test_arguments_of_the_stall_monitor(given: dict[str, Any]) -> None:
    made = answer(lambda: StallMonitor(**given))
    if isinstance(made, StallMonitor):
        assert (made._path is None) == (not given.get("record", False))
        assert given.get("progress_bar", False) in (True, False)
