"""The page on troubleshooting quotes what people see: each quote is looked up, and each message looked for on the page."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.messages import FILLED_IN, REPO, error_classes, matches, messages, one_line, texts

PAGE = REPO / "examples" / "troubleshooting.md"

OTHERS = {
    "What Lightning says": ("lightning", "pytorch/trainer/**/*.py"),
    "What DeepSpeed says": ("deepspeed", "**/*.py"),
    "What PyTorch says": ("torch", "utils/data/dataloader.py", "lib/libtorch_cpu.so"),
}
"""Sections on messages of other packages, and where in their installed files the quotes are."""

UNCHECKED = {"What the system says"}
"""The kernel, the shell, CUDA and NCCL are not at hand where tests run."""

NAMES_ITS_REMEDY = re.compile(r"\bmust .*\bgot\b")
"""The form of most messages: field, rule, value and what to do. They explain themselves."""

EXPLAINS_ITSELF = {
    # Parts of messages that name the file or the line around them.
    "it is empty",
    "it holds a ...",
    "it holds no tensor",
    "nested too deeply",
    "steps must rise from 0",
    "... has no file `latest`, but ...",
    "... does not exist. ...",
    "... is a file. ...",
    "`--offload-parameters` must be left out with",
}
"""Others that have no row."""

UNNAMED = {
    "TrainerGone",  # nobody sees it: the background process ends with its trainer
    "Refused",  # of these, which are the command line's, people see the message alone
    "RunFailed",
    "GrowthError",
}
"""Errors whose name is not on the page."""


class Row(NamedTuple):
    section: str
    quotes: list[str]
    cells: list[str]


def rows() -> list[Row]:
    found, section = [], ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        elif line.startswith("| ") and not line.startswith("| What you see"):
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            found.append(Row(section, [quote.strip() for quote in re.findall(r"``(.+?)``(?!`)", cells[0])], cells))
    return found


ROWS = rows()
OURS = [row for row in ROWS if row.section not in OTHERS.keys() | UNCHECKED]


def test_every_row_has_a_symptom_a_cause_and_a_remedy() -> None:
    assert len(ROWS) > 80
    assert [row for row in ROWS if len(row.cells) != 3 or not all(row.cells)] == []


def test_every_quote_is_what_the_package_says() -> None:
    known = texts()
    missing = [quote for row in OURS for quote in row.quotes if not any(matches(quote, text) for text in known)]
    assert missing == []


def test_every_quote_can_be_found_by_what_it_says() -> None:
    """Too little of a message would be found in many of them."""
    vague = [quote for row in ROWS for quote in row.quotes if len(quote.replace(FILLED_IN, "")) < 6]
    assert vague == []


@pytest.mark.parametrize("section", OTHERS)
def test_every_quote_of_another_package_is_in_its_files(section: str) -> None:
    package, *patterns = OTHERS[section]
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent
    contents = [path.read_bytes() for pattern in patterns for path in folder.glob(pattern)]
    quotes = [quote for row in ROWS if row.section == section for quote in row.quotes]
    assert quotes
    for quote in quotes:
        parts = [part.strip().encode() for part in quote.split(FILLED_IN) if part.strip()]
        assert any(all(part in content for part in parts) for content in contents), quote


def test_every_message_names_its_remedy_or_has_a_row() -> None:
    quotes = [quote for row in OURS for quote in row.quotes]
    without = [
        f"{message.place}: {one_line(message.text)}"
        for message in messages()
        if not NAMES_ITS_REMEDY.search(one_line(message.text))
        and not any(matches(quote, message.text) for quote in quotes)
        and not any(message.text.startswith(known) for known in EXPLAINS_ITSELF)
    ]
    assert without == [], (
        f"Give these a row in {PAGE.name}, or the form '`field` must be <rule>, got <value>. <remedy>.'"
    )


def test_no_message_is_listed_that_does_not_exist() -> None:
    said = [message.text for message in messages()]
    assert {known for known in EXPLAINS_ITSELF if not any(text.startswith(known) for text in said)} == set()


def test_every_error_of_the_package_is_on_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert {name for name in error_classes() if f"`{name}`" not in page} == UNNAMED


def test_links_within_the_page_and_to_it_lead_somewhere() -> None:
    page = PAGE.read_text(encoding="utf-8")
    anchors = {
        re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^## (.+)$", page, re.M)
    }
    assert {link for link in re.findall(r"\]\(#([^)]+)\)", page) if link not in anchors} == set()
    assert "(examples/troubleshooting.md)" in (REPO / "README.md").read_text(encoding="utf-8")
