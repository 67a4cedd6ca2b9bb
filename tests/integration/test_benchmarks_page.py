"""`examples/benchmarks.md`: its commands run, and its pictures are there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from lightning_zenflow.cli import growth
from tests.integration.test_readme import run

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PAGE = (EXAMPLES / "benchmarks.md").read_text()
COMMANDS = re.findall(r"^```bash\nlightning-zenflow (.*)\n```$", PAGE, re.MULTILINE)

SHORTER = {
    "bench": "--depth 1 --repeats 1 --steps 10 --no-memory --modes compute zenflow",
    "simulate": "--ratios 1 --numel 1000000 --steps 8",
}


def test_the_page_shows_each_command_and_its_picture() -> None:
    assert {command.split()[0] for command in COMMANDS} == {*SHORTER, "growth"}
    pictures = re.findall(r"!\[.+\]\((.+)\)", PAGE)
    assert len(pictures) == 3 and all((EXAMPLES / name).is_file() for name in pictures)


def test_growth_understands_the_arguments_of_the_page() -> None:
    """It takes minutes; `tests/unit/test_growth.py` runs it small."""
    (command,) = [command for command in COMMANDS if command.split()[0] == "growth"]
    options = growth._parser().parse_args(shlex.split(command)[1:])
    assert str(options.output) == "growth"


@pytest.mark.long
@pytest.mark.timeout(200)
@pytest.mark.parametrize("command", [command for command in COMMANDS if command.split()[0] in SHORTER])
def test_a_command_of_the_page_writes_what_it_says(command: str, tmp_path: Path) -> None:
    name, *words = shlex.split(command)
    run(["lightning-zenflow", name, *words, *shlex.split(SHORTER[name])], tmp_path, timeout=190)
    folder = tmp_path / words[words.index("--output") + 1]
    assert {path.suffix for path in folder.iterdir()} == {".json", ".png"}
