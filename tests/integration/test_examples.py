from __future__ import annotations

import csv
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import pytest
import yaml

from examples.quickstart import CharGPT, StandardLibraryText
from lightning_zenflow.cli import main

REPO = Path(__file__).resolve().parents[2]
PICTURE = REPO / "examples" / "zenflow-report.png"
CONFIG = REPO / "examples" / "configs" / "quickstart.yaml"
ZERO_3_CONFIG = REPO / "examples" / "configs" / "zero3_offload.yaml"
BY_SCRIPT = [sys.executable, str(REPO / "examples" / "quickstart.py")]
BY_ZERO_3 = [sys.executable, "-m", "lightning_zenflow.cli", "fit", "--config", str(ZERO_3_CONFIG)]
BY_CONFIG = [sys.executable, "-m", "lightning_zenflow.cli", "fit", "--config", str(CONFIG)]


def train(command: list[str], cwd: Path, timeout: float) -> str:
    # `examples` is found from the repository's root, where the README's commands are typed.
    command = [*command, f"--trainer.logger.init_args.save_dir={cwd}"] if command[1] == "-m" else command
    where = REPO if command[1] == "-m" else cwd
    done = subprocess.run(command, cwd=where, timeout=timeout, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def logged(folder: Path, name: str) -> list[float]:
    with (folder / "lightning_logs" / "version_0" / "metrics.csv").open() as file:
        return [float(row[name]) for row in csv.DictReader(file) if row[name]]


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("command", [BY_SCRIPT, BY_CONFIG], ids=["script", "config"])
def test_the_quickstart_learns_and_shows_its_stall(command: list[str], tmp_path: Path) -> None:
    printed = train(command, tmp_path, timeout=380)
    summary = re.search(r"Training loss: ([\d.]+) over the first 20 steps, ([\d.]+) over the last 20 of 400\.", printed)
    assert summary, printed[-2000:]
    first, last = map(float, summary.groups())
    assert first > 3.5
    assert last < 2.5
    assert re.search(
        r"A step took \d+ ms; training waited for the host during [\d.]+% of it\. Intervals at the end:", printed
    )
    assert len(logged(tmp_path, "val_loss")) == 2
    assert len(logged(tmp_path, "zenflow/stall_ratio")) == 400 // 50
    assert logged(tmp_path, "zenflow/step")[-1] == 400
    check_report(tmp_path)


def check_report(folder: Path) -> None:
    """Draws the run; with ZENFLOW_UPDATE_PICTURES set, the picture becomes the one in examples/."""
    main(["report", str(folder), "--output", str(folder / "report")])
    entries = [json.loads(line) for line in next(folder.rglob("zenflow.jsonl")).read_text().splitlines()]
    assert sum(entry["kind"] == "step" for entry in entries) == 400
    assert any(entry["kind"] == "decision" and entry["changed"] for entry in entries)
    made = folder / "report" / PICTURE.name
    # As wide as the shipped one; the height depends on how many changes there are reasons for.
    assert matplotlib.image.imread(made).shape[1] == matplotlib.image.imread(PICTURE).shape[1]
    if os.environ.get("ZENFLOW_UPDATE_PICTURES"):
        shutil.copy(made, PICTURE)


def test_script_and_config_describe_the_same_run() -> None:
    config = yaml.safe_load(CONFIG.read_text())
    source = (REPO / "examples" / "quickstart.py").read_text()
    for section, cls in (("model", CharGPT), ("data", StandardLibraryText)):
        defaults = {name: param.default for name, param in inspect.signature(cls.__init__).parameters.items()}
        assert {name: defaults[name] for name in config[section]["init_args"]} == config[section]["init_args"]
    trainer = config["trainer"]
    for name in ("max_epochs", "limit_train_batches", "val_check_interval", "limit_val_batches", "gradient_clip_val"):
        assert f"{name}={trainer[name]}," in source
    for name, value in config["zenflow"].items():
        assert f"{name}={value}" in source
    assert f"seed_everything({config['seed_everything']})" in source


@pytest.mark.parametrize("config", sorted((REPO / "examples" / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_config_is_accepted_by_the_command_line(config: Path) -> None:
    command = [sys.executable, "-m", "lightning_zenflow.cli", "fit", "--config", str(config), "--print_config"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    printed = yaml.safe_load(done.stdout)
    given = yaml.safe_load(config.read_text())
    assert printed["zenflow"].items() >= given.get("zenflow", {}).items()
    assert printed["trainer"]["strategy"] == given["trainer"]["strategy"]


@pytest.mark.long
@pytest.mark.parametrize("stage", ["zenflow_stage_3", "zenflow_stage_3_offload"])
def test_a_model_whose_layers_are_made_late_trains_under_zero_3(stage: str, tmp_path: Path) -> None:
    few = ["limit_train_batches=40", "val_check_interval=40", "limit_val_batches=2", f"strategy={stage}"]
    printed = train([*BY_ZERO_3, *(f"--trainer.{setting}" for setting in few)], tmp_path, timeout=100)
    summary = re.search(r"Training loss: ([\d.]+) over the first 20 steps, ([\d.]+) over the last 20 of 40\.", printed)
    assert summary, printed[-2000:]
    first, last = map(float, summary.groups())
    assert last < first - 0.5
    assert logged(tmp_path, "val_loss")[0] < first
    header = json.loads(next(tmp_path.rglob("zenflow.jsonl")).read_text().splitlines()[0])
    assert header["stage"] == 3


def test_layers_are_made_once_whenever_that_is() -> None:
    late = CharGPT(width=8, layers=2, heads=2, context=4, late=True)
    assert not list(late.parameters())
    late.configure_model()
    made = dict(late.named_parameters())
    late.configure_model()
    assert all(param is made[name] for name, param in late.named_parameters())
    at_once = CharGPT(width=8, layers=2, heads=2, context=4)
    assert {name: param.shape for name, param in at_once.named_parameters()} == {
        name: param.shape for name, param in made.items()
    }
