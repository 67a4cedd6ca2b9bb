"""Runs what the README tells people to type, as it stands there."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

REPO = Path(__file__).resolve().parents[2]
README = (REPO / "README.md").read_text()

PYTHON_PRELUDE = """
import os, sys
sys.path.insert(0, os.getcwd())
import lightning.pytorch
from examples.quickstart import CharGPT, StandardLibraryText

model, data = CharGPT(width=32, layers=1, heads=2), StandardLibraryText(characters=100_000)

class ShortTrainer(lightning.pytorch.Trainer):
    def __init__(self, **settings):
        super().__init__(**settings, accelerator="cpu", devices=1, max_steps=6, limit_val_batches=2)

lightning.pytorch.Trainer = ShortTrainer
"""

PYTHON_CLOSE = """
assert trainer.global_step == 6, trainer.global_step
assert type(trainer.strategy).__name__ == "ZenFlowStrategy", trainer.strategy
"""

OWN_CLI = """
from lightning.pytorch.cli import LightningCLI
from examples.quickstart import CharGPT, StandardLibraryText
LightningCLI(CharGPT, StandardLibraryText, trainer_defaults={"accelerator": "cpu", "devices": 1, "max_steps": 6})
"""


class Block(NamedTuple):
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.language}: {self.text.strip().splitlines()[-1].strip()[:60]}"


BLOCKS = [Block(*found) for found in re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)]
SETUP = [block for block in BLOCKS if "-m venv" in block.text]
RUN_SETUP, TEST_SETUP = SETUP


def of(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language and block not in SETUP]


def named(blocks: list[Block]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("block", blocks, ids=[block.name for block in blocks])


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What a user of the README has in front of them: the checkout, and the files that the README shows."""
    place = tmp_path / "checkout"
    skip = shutil.ignore_patterns(".git", ".venv", "*.egg-info", "build", "lightning_logs", "__pycache__", ".*_cache")
    shutil.copytree(REPO, place, ignore=skip)
    (json_block,) = of("json")
    (place / "ds_config.json").write_text(json_block.text)
    (place / "my_cli.py").write_text(OWN_CLI)
    return place


def run(command: list[str], cwd: Path, timeout: float = 110) -> str:
    """Runs `command` with this interpreter's scripts first on the path, and returns what it printed."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        command, cwd=cwd, env=environment, timeout=timeout, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 0, (
        f"{command} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    )
    return done.stdout + done.stderr


def test_every_block_is_of_a_kind_that_is_run() -> None:
    assert {block.language for block in BLOCKS} == {"python", "bash", "yaml", "json", "text"}
    assert [block.language for block in SETUP] == ["bash", "bash"]


@pytest.mark.long
@named(of("python"))
def test_python_from_the_readme_trains(block: Block, checkout: Path) -> None:
    (checkout / "block.py").write_text(PYTHON_PRELUDE + block.text + PYTHON_CLOSE)
    run([sys.executable, "block.py"], checkout)


@pytest.mark.long
@pytest.mark.timeout(300)
@named(of("bash"))
def test_a_command_from_the_readme_does_what_it_says(block: Block, checkout: Path) -> None:
    # `bench` compiles DeepSpeed's CPU Adam where nobody has yet.
    printed = run(["bash", "-euo", "pipefail", "-c", block.text], checkout, timeout=290)
    expected = {
        " fit ": "stopped",
        " report ": "zenflow-report.png",
        " doctor": "ZenFlow will run here",
        " estimate ": "update_interval",
        " bench ": "zero_offload: DeepSpeed's ZeRO-Offload",
        " simulate ": "Times as fast as the synchronous schedule",
    }
    said = [words for command, words in expected.items() if command in block.text]
    assert said and all(words in printed for words in said)


@pytest.mark.long
@named(of("yaml"))
def test_yaml_from_the_readme_trains_in_somebody_elses_command_line(block: Block, checkout: Path) -> None:
    (checkout / "config.yaml").write_text(block.text)
    printed = run([sys.executable, "my_cli.py", "fit", "--config", "config.yaml"], checkout)
    assert "`Trainer.fit` stopped: `max_steps=6` reached." in printed


def test_the_first_setup_command_differs_from_the_second_only_in_its_end() -> None:
    start = "python3 -m venv .venv && . .venv/bin/activate && pip install torch==2.13.0 && "
    assert (
        RUN_SETUP.text == start + "pip install . && lightning-zenflow fit --config examples/configs/quickstart.yaml\n"
    )
    assert TEST_SETUP.text == start + 'pip install -e ".[test]" && pytest\n'


def test_continuous_integration_runs_the_second_setup_command() -> None:
    (pattern,) = re.findall(r"readme_test_command=\$\(grep -E '(.*)' README\.md\)", (REPO / ".ci/run").read_text())
    assert [line for line in README.splitlines() if re.search(pattern, line)] == [TEST_SETUP.text.strip()]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_first_setup_command_installs_and_trains_in_an_empty_environment(checkout: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    # The interpreter behind a virtual environment, so that the new one borrows nothing from it.
    environment["PATH"] = f"{Path(sys.base_prefix) / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", RUN_SETUP.text],
        cwd=checkout,
        env=environment,
        timeout=880,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "Training loss:" in done.stdout


def test_links_inside_the_readme_lead_somewhere() -> None:
    headings = {
        re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", README, re.MULTILINE)
    }
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert target.removeprefix("#") in headings if target.startswith("#") else (REPO / target).exists()


def test_the_before_and_after_fit_on_the_first_screen() -> None:
    first = BLOCKS[0]
    assert len(first.text.splitlines()) <= 8
    assert README.index(first.text) < 900
    assert "Do not use it" in README[:1800]


def test_symptoms_in_the_troubleshooting_table_are_words_of_real_messages() -> None:
    sources = [*(REPO / "lightning_zenflow").rglob("*.py"), *(REPO / "cli").rglob("*.py")]
    connector = "lightning.pytorch.trainer.connectors.accelerator_connector"
    sources.append(Path(inspect.getfile(importlib.import_module(connector))))
    said = " ".join(path.read_text() for path in sources)
    symptoms = re.findall(r"^\| `([^`]+)` \|", README, re.MULTILINE)
    assert len(symptoms) == 4
    for symptom in symptoms:
        # What a message fills in is not in the source: names after dashes, and whatever the README leaves out.
        parts = [re.sub(r"--\S+ |: strategy=.*", "", part).strip() for part in symptom.split("...")]
        assert all(part in said for part in parts), symptom


def test_the_reason_shown_is_worded_as_the_tuner_words_it() -> None:
    from lightning_zenflow.tuner import Controller, Intervals, TunerOptions, Window

    controller = Controller(TunerOptions(tune_update=False), Intervals(4, 64))
    window = Window(16, 0.071, 0.0, 0.016, 0.001, 0.001, disagreement=0.5)
    reason = next(decision.reason for decision in map(controller.decide, [window] * 4) if decision.changed)
    (shown,) = of("text")
    assert re.sub(r"[\d.]+", "#", shown.text.strip()) == re.sub(r"[\d.]+", "#", f"ZenFlow, step 67: {reason}")


def test_limits_named_in_the_readme_are_those_of_the_package() -> None:
    from lightning_zenflow.config import AUTO_SELECT_INTERVAL_STEPS, AUTO_UPDATE_INTERVAL_STEPS

    assert f"where `auto` begins, at {AUTO_UPDATE_INTERVAL_STEPS} and {AUTO_SELECT_INTERVAL_STEPS}" in README
