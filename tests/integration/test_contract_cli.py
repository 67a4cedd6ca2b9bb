"""Lightning's command line and registry with ZenFlow.

Settings and their messages are tested in tests/unit/test_cli.py; a YAML with a class path, and a `LightningCLI` of
somebody else's, in test_trainer_config.py; every shipped config and README command in test_examples.py, test_readme.py.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.strategies import StrategyRegistry

from lightning_zenflow import AutoTuner, StallMonitor, ZenFlowConfig, ZenFlowStrategy
from lightning_zenflow.cli import ZenFlowCLI, main
from tests.modules import EXPECTED_WARNINGS, OFTEN, QUIET, Small, batches, fit, weights

pytestmark = [*EXPECTED_WARNINGS, pytest.mark.usefixtures("own_process_group")]


class Plain(Small):
    """With nothing to give on the command line."""

    def __init__(self) -> None:
        super().__init__()


class WithoutOptimizer(Plain):
    """Leaves it to the command line."""

    configure_optimizers = LightningModule.configure_optimizers


class Data(LightningDataModule):
    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.size = size

    def train_dataloader(self) -> Any:
        return batches(10, self.size)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


@pytest.fixture(autouse=True)
def _as_a_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-zenflow"])
    monkeypatch.chdir(tmp_path)


def run(command: str, *args: str, trainer: dict[str, Any] | None = None, **sections: Any) -> Any:
    Path("config.yaml").write_text(yaml.safe_dump({"trainer": {**QUIET, **(trainer or {})}, **sections}))
    given = [command, "--config", "config.yaml", *args]
    return ZenFlowCLI(Plain, Data, save_config_callback=None, seed_everything_default=False, args=given)


@pytest.mark.parametrize("name", sorted(name for name in StrategyRegistry if name.startswith("zenflow")))
def test_every_registered_name_trains_from_the_command_line_as_from_python(name: str) -> None:
    cli = run("fit", "--trainer.strategy", name, zenflow=OFTEN)
    entry = StrategyRegistry[name]
    module = Small()
    fit(module, strategy=entry["strategy"](OFTEN, **entry["init_params"]))
    assert torch.equal(weights(cli.model), weights(module))


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_the_other_subcommands_of_lightning_run(command: str) -> None:
    cli = run(command, "--trainer.strategy", "zenflow")
    assert isinstance(cli.trainer.strategy, ZenFlowStrategy) and cli.trainer.state.finished


def test_batch_sizes_of_the_command_line_reach_deepspeed() -> None:
    cli = run("fit", "--trainer.strategy", "zenflow", "--data.size", "2")
    assert cli.trainer.strategy.config["train_micro_batch_size_per_gpu"] == 2


def test_optimizer_and_schedule_of_the_command_line_are_trained_with() -> None:
    """LightningCLI gives the module a `configure_optimizers` of its own."""
    arguments = ["--optimizer", "AdamW", "--optimizer.lr", "0.02", "--lr_scheduler", "ExponentialLR"]
    Path("config.yaml").write_text(yaml.safe_dump({"trainer": {**QUIET, "strategy": "zenflow"}, "zenflow": OFTEN}))
    cli = ZenFlowCLI(
        WithoutOptimizer,
        Data,
        save_config_callback=None,
        seed_everything_default=False,
        args=["fit", "--config", "config.yaml", *arguments, "--lr_scheduler.gamma", "0.5"],
    )
    assert cli.trainer.strategy.step_stats.step == 10
    assert cli.trainer.lr_scheduler_configs[0].scheduler.get_last_lr() == [0.01]


def test_callbacks_of_the_command_line_are_used() -> None:
    callbacks = [
        {"class_path": "lightning_zenflow.AutoTuner", "init_args": {"max_update_interval": 8}},
        {"class_path": "lightning_zenflow.StallMonitor", "init_args": {"record": "steps.jsonl"}},
    ]
    cli = run("fit", trainer={"strategy": "zenflow", "callbacks": callbacks}, zenflow={"update_interval": "auto"})
    kinds = {type(callback) for callback in cli.trainer.callbacks}
    assert {AutoTuner, StallMonitor} <= kinds
    assert Path("steps.jsonl").read_text().count('"kind": "step"') == 10


def test_the_config_that_a_run_saves_repeats_it() -> None:
    """Lightning writes it beside the logs."""
    logger = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "."}}
    logs = {"logger": logger, "log_every_n_steps": 5}
    settings = {"trainer": {**QUIET, "strategy": "zenflow", **logs}, "zenflow": OFTEN}
    Path("config.yaml").write_text(yaml.safe_dump(settings))
    made = []
    for config in ("config.yaml", "lightning_logs/version_0/config.yaml"):
        cli = ZenFlowCLI(Plain, Data, seed_everything_default=False, args=["fit", "--config", config])
        made.append(weights(cli.model))
    assert Path("lightning_logs/version_1/config.yaml").exists()
    assert torch.equal(*made)


@pytest.mark.parametrize(
    ("class_path", "arguments", "message"),
    [
        (
            "AutoTuner",
            ["min_update_interval=0"],
            "`min_update_interval` must be a whole number of steps, 1 or more, got 0.",
        ),
        ("AutoTuner", ["replay=none.jsonl"], "`replay` must be the record of a run, got 'none.jsonl'"),
        (
            "StallMonitor",
            ["record_every_n_steps=0"],
            "`record_every_n_steps` must be a whole number of at least 1, got 0.",
        ),
    ],
)
@pytest.mark.parametrize("form", ["--trainer.callbacks+=", "--trainer.callbacks="])
def test_what_a_callback_of_ours_refuses_is_one_line(
    form: str, class_path: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [f"--trainer.callbacks.{argument}" for argument in arguments]
    model = ["--model", "lightning.pytorch.demos.boring_classes.BoringModel", "--seed_everything", "1"]
    with pytest.raises(SystemExit) as ended:
        main(["fit", *model, "--trainer.strategy=zenflow", f"{form}lightning_zenflow.{class_path}", *given])
    shown = capsys.readouterr().err
    assert ended.value.code == 2 and "Traceback" not in shown
    (line,) = [line for line in shown.splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: {message}")


def test_help_offers_no_strategy_that_is_only_a_base_class(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fit", "--help"])
    shown = "".join(capsys.readouterr().out.split())
    assert "lightning_zenflow.ZenFlowStrategy" in shown
    for base in ("AnyAcceleratorStrategy", "CheckpointingStrategy"):
        assert base not in shown


def test_the_registry_describes_each_name_and_leaves_lightnings_own_alone() -> None:
    ours = {name: entry for name, entry in StrategyRegistry.items() if entry["strategy"] is ZenFlowStrategy}
    assert len(ours) == 5
    assert all(entry["description"].startswith("ZenFlow on ZeRO stage") for entry in ours.values())
    assert {"deepspeed", "deepspeed_stage_2", "deepspeed_stage_3_offload"} <= set(StrategyRegistry)
    made = Trainer(strategy=ZenFlowStrategy(ZenFlowConfig(topk_ratio=0.2)), **QUIET)
    assert made.strategy.strategy_name == "zenflow"  # type: ignore[attr-defined]
