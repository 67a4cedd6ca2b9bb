"""How `doctor` and `estimate` talk: short errors, plain tables of fixed width, no colour codes."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from jsonargparse import ArgumentParser
from rich.console import Console
from rich.table import Table


class Parser(ArgumentParser):
    """A parser whose errors are one line: the usage would hide it, and `--help` shows every option."""

    def print_usage(self, *args: Any, **kwargs: Any) -> None:
        """Writes nothing."""


def console() -> Console:
    """Standard output: as wide as the terminal, 80 columns where it is none; no colours, and nothing is markup."""
    return Console(color_system=None, highlight=False, markup=False, emoji=False)


def table(*columns: str, right: bool = False) -> Table:
    """An empty table; with `right`, all columns but the first hold numbers."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    for number, name in enumerate(columns):
        made.add_column(name, justify="right" if right and number else "left", overflow="fold")
    return made


def facts(rows: Iterable[tuple[str, str]]) -> Table:
    """Names and what is to be said of them, wrapped beside their name."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for row in rows:
        made.add_row(*row)
    return made


def quiet_deepspeed() -> None:
    """DeepSpeed's line about its choice of accelerator goes to standard output, in front of what is asked for."""
    logging.getLogger("DeepSpeed").addFilter(_is_wanted)


def _is_wanted(record: logging.LogRecord) -> bool:
    return "Setting accelerator to" not in record.getMessage()


def seconds(secs: float) -> str:
    """Seconds for people, with three digits."""
    return f"{_three_digits(secs)} s" if secs >= 1 else f"{_three_digits(1e3 * secs)} ms"


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def size(nbytes: float) -> str:
    """Bytes for people."""
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**29 else f"{nbytes / 2**20:.1f} MiB"
