from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from docstring_parser import parse_from_object
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import StrategyRegistry

from lightning_zenflow import ZenFlowConfig, ZenFlowStrategy
from lightning_zenflow.cli import ZenFlowCLI, main

HERE = ["--seed_everything", "1", "--trainer.accelerator", "cpu", "--trainer.logger", "false"]
CLASS_PATH = ["--trainer.strategy", "lightning_zenflow.ZenFlowStrategy"]
BY_NAME = ["--trainer.strategy", "zenflow"]
FIT = ["fit", "--model", "lightning.pytorch.demos.boring_classes.BoringModel", *HERE]


@pytest.fixture(autouse=True)
def _as_a_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-zenflow"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)


def strategy_from(*args: str) -> ZenFlowStrategy:
    """The strategy that our command line makes of `args`."""
    strategy = ZenFlowCLI(BoringModel, run=False, args=[*HERE, *args]).trainer.strategy
    assert isinstance(strategy, ZenFlowStrategy)
    return strategy


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """What a person reads when our command line refuses `args`."""
    with pytest.raises(SystemExit) as exit_info:
        main([*FIT, *args])
    assert exit_info.value.code == 2
    shown = capsys.readouterr().err
    assert "Traceback" not in shown
    assert "usage:" not in shown
    tip, message = shown[shown.index("tip: ") :].split("\nerror: ")
    assert tip == "tip: For details of accepted options run: lightning-zenflow fit --help"
    return message.removesuffix("\n")


def printed_config(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with pytest.raises(SystemExit) as exit_info:
        main([*args, "--print_config"])
    assert exit_info.value.code in (0, None)
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("zenflow", 2),
        ("zenflow_stage_1", 1),
        ("zenflow_stage_2", 2),
        ("zenflow_stage_3", 3),
        ("zenflow_stage_3_offload", 3),
    ],
)
def test_settings_reach_a_strategy_given_by_name(name: str, stage: int) -> None:
    strategy = strategy_from("--trainer.strategy", name, "--zenflow.topk_ratio", "0.05")
    assert strategy.zenflow == ZenFlowConfig(topk_ratio=0.05)
    assert isinstance(strategy.config, dict)
    zero = strategy.config["zero_optimization"]
    assert zero["stage"] == stage
    assert zero.get("offload_param", {}).get("device") == ("cpu" if name.endswith("_offload") else None)


def test_every_registered_name_of_ours_is_known_to_the_command_line() -> None:
    ours = [name for name, entry in StrategyRegistry.items() if entry["strategy"] is ZenFlowStrategy]
    stages = [f"zenflow_stage_{stage}" for stage in (1, 2, 3)]
    assert sorted(ours) == ["zenflow", *stages, "zenflow_stage_3_offload"]


def test_a_name_without_settings_has_the_defaults() -> None:
    assert strategy_from(*BY_NAME).zenflow == ZenFlowConfig()


def test_a_section_in_yaml_reaches_the_strategy(tmp_path: Path) -> None:
    section = {"topk_ratio": 0.2, "select_strategy": "step", "select_interval": 8, "worker_cores": [1, 0]}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"trainer": {"strategy": "zenflow"}, "zenflow": section}))
    assert strategy_from("--config", str(config)).zenflow == ZenFlowConfig(**section)  # type: ignore[arg-type]


def test_every_kind_of_field_is_read_from_the_command_line() -> None:
    strategy = strategy_from(
        *BY_NAME,
        "--zenflow.topk_ratio=0",  # a float given as a whole number
        "--zenflow.select_strategy=step",  # a list of words
        "--zenflow.select_interval=32",  # a number or a word
        "--zenflow.update_interval=auto",
        "--zenflow.overlap_step=false",
        "--zenflow.worker_cores=[1, 0]",  # a list or nothing
        "--zenflow.worker_timeout_secs=60",
    )
    assert strategy.zenflow == ZenFlowConfig(
        topk_ratio=0.0,
        select_strategy="step",
        select_interval=32,
        overlap_step=False,
        worker_cores=[1, 0],
        worker_timeout_secs=60.0,
    )
    assert strategy_from(*BY_NAME, "--zenflow.worker_cores", "null").zenflow.worker_cores is None


def test_a_class_path_alone_gets_the_section() -> None:
    assert strategy_from(*CLASS_PATH, "--zenflow.topk_ratio", "0.05").zenflow.topk_ratio == 0.05


def test_a_class_path_with_arguments_gets_the_section() -> None:
    strategy = strategy_from(*CLASS_PATH, "--trainer.strategy.stage", "1", "--zenflow.topk_ratio", "0.05")
    assert strategy.zenflow.topk_ratio == 0.05
    assert isinstance(strategy.config, dict)
    assert strategy.config["zero_optimization"]["stage"] == 1


def test_a_class_path_takes_stage_3_and_offloaded_parameters() -> None:
    strategy = strategy_from(*CLASS_PATH, "--trainer.strategy.stage", "3", "--trainer.strategy.offload_parameters=true")
    assert isinstance(strategy.config, dict)
    zero = strategy.config["zero_optimization"]
    assert (zero["stage"], zero["offload_param"]["device"]) == (3, "cpu")


def test_a_class_path_keeps_settings_of_its_own() -> None:
    strategy = strategy_from(*CLASS_PATH, "--trainer.strategy.zenflow.topk_ratio", "0.05")
    assert strategy.zenflow == ZenFlowConfig(topk_ratio=0.05)


def test_the_same_settings_in_both_places_are_no_contradiction() -> None:
    strategy = strategy_from(
        *CLASS_PATH, "--trainer.strategy.zenflow.topk_ratio", "0.05", "--zenflow.topk_ratio", "0.05"
    )
    assert strategy.zenflow.topk_ratio == 0.05


def test_different_settings_in_both_places_are_an_error_that_names_both(capsys: pytest.CaptureFixture[str]) -> None:
    own = ["--trainer.strategy.zenflow.topk_ratio", "0.05"]
    assert refused(capsys, *CLASS_PATH, *own, "--zenflow.update_interval", "2") == (
        "`zenflow` must be given once, got update_interval=2 in the section `zenflow` and topk_ratio=0.05 in"
        " `trainer.strategy.init_args.zenflow`. Remove one of them."
    )


@pytest.mark.parametrize(
    ("strategy", "shown"),
    [("auto", "'auto'"), ("ddp", "'ddp'"), ("lightning.pytorch.strategies.DDPStrategy", "DDPStrategy'")],
)
def test_settings_beside_another_strategy_are_an_error_that_names_both(
    strategy: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refused(capsys, "--trainer.strategy", strategy, "--zenflow.topk_ratio", "0.05")
    assert "`trainer.strategy` must be one of zenflow, zenflow_stage_1, zenflow_stage_2" in message
    assert "topk_ratio=0.05" in message
    assert shown in message
    assert message.endswith("Give `--trainer.strategy zenflow`, or remove the section.")


def test_another_strategy_without_settings_is_left_alone() -> None:
    cli = ZenFlowCLI(BoringModel, run=False, args=[*HERE, "--trainer.strategy", "auto"])
    assert not isinstance(cli.trainer.strategy, ZenFlowStrategy)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--zenflow.topk_ratio", "5"], "`topk_ratio` must be a number from 0 to 1, got 5.0. 0.1 means ten percent."),
        (
            ["--zenflow.topk_ratio", "abc"],
            "`topk_ratio` must be a number from 0 to 1, got 'abc'. 0.1 means ten percent.",
        ),
        (
            ["--zenflow.update_interval", "2.5"],
            "`update_interval` must be a whole number of at least 1, or \"auto\", got '2.5'. It counts steps, from 1 to 1000.",
        ),
        (
            ["--zenflow.select_strategy", "steps"],
            "`select_strategy` must be auto, step or epoch, got 'steps'. It is the unit of `select_interval`.",
        ),
        (["--zenflow.topkratio", "0.1"], "`zenflow` has no key `topkratio`. Did you mean `topk_ratio`?"),
        (["--zenflow", '{"topkratio": 0.1}'], "`zenflow` has no key `topkratio`. Did you mean `topk_ratio`?"),
        (
            ["--zenflow.offload", "true"],
            "`offload` must be false (true is not supported yet), got True. Leave it out.",
        ),
        (
            ["--zenflow.select_interval", "7"],
            (
                '`select_interval` must be "auto" while `select_strategy` is "auto", got 7.'
                ' Set `select_strategy` to "step" or "epoch" to give the interval yourself.'
            ),
        ),
        (
            ["--trainer.strategy", "zenfow"],
            "`trainer.strategy` must be a registered name, got 'zenfow'. Did you mean 'zenflow'?",
        ),
        (
            ["--trainer.strategy.zenflow.topk_ratio", "0.3"],
            (
                "`--trainer.strategy.zenflow.topk_ratio` must follow a class path, got `--trainer.strategy zenflow`."
                " Write `--zenflow.topk_ratio 0.3`, or `--trainer.strategy lightning_zenflow.ZenFlowStrategy`."
            ),
        ),
        (
            [*CLASS_PATH, "--trainer.strategy.zenflow.topk_ratio", "5"],
            "`topk_ratio` must be a number from 0 to 1, got 5.0. 0.1 means ten percent.",
        ),
        (
            [*CLASS_PATH, "--trainer.strategy.zenflow.topk_ratio", "abc"],
            "`topk_ratio` must be a number from 0 to 1, got 'abc'. 0.1 means ten percent.",
        ),
        (
            [*CLASS_PATH, "--trainer.strategy.stage", "4"],
            "`stage` must be 1, 2 or 3, got 4. ZenFlow is part of ZeRO.",
        ),
        (
            [*CLASS_PATH, "--trainer.strategy.stage=3", "--trainer.strategy.offload_params_device=nvme"],
            "`offload_params_device` must be 'cpu', got 'nvme': NVMe is not supported. Leave it out.",
        ),
        (
            ["--trainer.strategy", "zenflow_stage_4"],
            "`trainer.strategy` must be a registered name, got 'zenflow_stage_4'. Did you mean 'zenflow_stage_3'?",
        ),
    ],
)
def test_a_bad_value_is_answered_in_one_line(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, *BY_NAME, *args) == message


def test_offloaded_parameters_without_stage_3_are_answered_with_what_they_belong_to(
    capsys: pytest.CaptureFixture[str],
) -> None:
    message = refused(capsys, *CLASS_PATH, "--trainer.strategy.offload_parameters", "true")
    assert re.match(r"`.*offload_param.*` must be .*ZeRO-3", message)
    assert "\n" not in message


def test_a_bad_value_in_yaml_is_answered_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("zenflow:\n  update_intervall: 4\n")
    answer = refused(capsys, *BY_NAME, "--config", str(config))
    assert answer == "`zenflow` has no key `update_intervall`. Did you mean `update_interval`?"


@pytest.mark.parametrize(
    "args",
    [
        [*BY_NAME, "--zenflow.topk_ratio", "0.3", "--zenflow.update_interval", "2", "--zenflow.worker_cores", "[0]"],
        [*CLASS_PATH, "--trainer.strategy.zenflow.topk_ratio", "0.3", "--trainer.strategy.stage", "1"],
        [*CLASS_PATH],
        ["--trainer.strategy", "zenflow_stage_3_offload", "--zenflow.topk_ratio", "0.3"],
        [*CLASS_PATH, "--trainer.strategy.stage", "3", "--trainer.strategy.offload_parameters=true"],
    ],
    ids=["name", "class path", "class path alone", "name of stage 3", "class path with stage 3"],
)
def test_a_printed_config_gives_the_same_config_again(
    args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = printed_config(capsys, *FIT, *args)
    config = tmp_path / "config.yaml"
    config.write_text(first)
    assert printed_config(capsys, "fit", "--config", str(config)) == first
    assert yaml.safe_load(first)["zenflow"].keys() == {field.name for field in fields(ZenFlowConfig)}


def test_nothing_but_the_config_is_printed() -> None:
    # In a process of its own: DeepSpeed has something to say when it is first imported, which a class path causes.
    args = [*FIT, *CLASS_PATH, "--trainer.strategy.stage", "1", "--print_config"]
    shown = subprocess.run([sys.executable, "-m", "lightning_zenflow.cli", *args], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("# lightning.pytorch==")
    assert yaml.safe_load(shown.stdout)["trainer"]["strategy"]["init_args"]["stage"] == 1


def test_help_shows_what_each_setting_means(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        main(["fit", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    documented = parse_from_object(ZenFlowConfig).params
    assert len(documented) == len(fields(ZenFlowConfig))
    for param in documented:
        assert f"--zenflow.{param.arg_name} " in shown
        assert " ".join(str(param.description).split()) in shown


def test_the_first_help_names_the_subcommands_and_a_command_to_start_from(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    for name in ("fit", "validate", "test", "predict", "doctor", "estimate", "export", "report", "simulate"):
        assert f"\n    {name}  " in shown
    shown = " ".join(shown.split())
    assert "--trainer.strategy zenflow --zenflow.topk_ratio 0.05" in shown


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    from lightning_zenflow import __version__

    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"lightning-zenflow {__version__}\n"


def test_modules_are_found_where_the_user_stands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a_module_of_mine.py").write_text(
        "from lightning.pytorch.demos.boring_classes import BoringModel\nclass Mine(BoringModel): ...\n"
    )
    assert "class_path: a_module_of_mine.Mine" in printed_config(capsys, "fit", "--model", "a_module_of_mine.Mine")


def test_a_lightning_cli_of_ones_own_takes_the_class_path_form() -> None:
    args = [*HERE, *CLASS_PATH, "--trainer.strategy.zenflow.topk_ratio", "0.05"]
    own: Any = LightningCLI(BoringModel, run=False, args=args)
    assert own.trainer.strategy.zenflow == ZenFlowConfig(topk_ratio=0.05)
