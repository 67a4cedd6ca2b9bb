"""`examples/accuracy.md`: its tables are those of the runs that lie beside it, and its commands are understood."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from examples.accuracy import METHODS, arguments, read
from examples.accuracy_report import Column, overview, rows_of, tables

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RUNS = EXAMPLES / "accuracy_runs"
PAGE = (EXAMPLES / "accuracy.md").read_text()
COMMANDS = re.findall(r"^python -m examples\.accuracy (.*)$", PAGE.replace("\\\n", " "), re.MULTILINE)

PRETRAINING = [Column("pretrain", "loss", rate, f"{rate:g}") for rate in (0.002, 0.004, 0.008)]
FINE_TUNING = [
    Column("movie", "accuracy", 5e-5, "movie, accuracy"),
    *(Column(task, "pearson", 5e-5, f"{task}, Pearson") for task in ("amazon", "nyt", "tweets")),
]


@pytest.mark.parametrize("columns", [PRETRAINING, FINE_TUNING])
def test_the_tables_of_the_page_are_what_the_runs_came_to(columns: list[Column]) -> None:
    assert overview(rows_of(read(RUNS / "runs.jsonl")), columns, list(METHODS)) in PAGE


def test_the_report_beside_the_runs_is_theirs() -> None:
    assert tables(rows_of(read(RUNS / "runs.jsonl"))) == (RUNS / "accuracy.md").read_text()


def test_the_commands_of_the_page_are_understood() -> None:
    parts = [arguments().parse_args(shlex.split(command)).part for command in COMMANDS]
    assert set(parts) == {"pretrain", "finetune", "report"}


def test_its_picture_is_there() -> None:
    (picture,) = re.findall(r"!\[.+\]\((.+)\)", PAGE)
    assert (EXAMPLES / picture).is_file()
