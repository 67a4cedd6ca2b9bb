"""How the tools talk: short errors, plain tables of fixed width, no colour codes, to any reader."""

from __future__ import annotations

import argparse
import io
import logging
import os
import sys
from collections.abc import Iterable
from typing import Any

from jsonargparse import ArgumentParser
from rich.console import Console
from rich.table import Table


class HelpfulParser(argparse.ArgumentParser):
    """A parser whose help goes to any reader, as `write` has it."""

    def print_help(self, file: Any = None) -> None:
        """Writes the help to `file`, or to standard output."""
        if file is None:
            write(self.format_help())
        else:
            super().print_help(file)


class Parser(HelpfulParser, ArgumentParser):
    """A parser whose errors are one line: the usage would hide it, and `--help` shows every option."""

    def print_usage(self, *args: Any, **kwargs: Any) -> None:
        """Writes nothing."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Goes on: rich would end the program with 1, which says that ZenFlow will not run here."""
        self.quiet = True
        _forget_reader()


def console() -> Console:
    """Standard output: as wide as the terminal, 80 columns where it is none; no colours, and nothing is markup."""
    _escape_letters()
    return _Console(color_system=None, highlight=False, markup=False, emoji=False)


def write(text: str) -> None:
    """Writes `text` to standard output: letters that it lacks are escaped, and a reader who has left is no error."""
    _escape_letters()
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        _forget_reader()


def _escape_letters() -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _forget_reader() -> None:
    """Sends the rest nowhere: Python flushes standard output once more when it ends, and would complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def table(*columns: str, right: bool = False) -> Table:
    """An empty table; with `right`, all columns but the first hold numbers."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    for number, name in enumerate(columns):
        made.add_column(name, justify="right" if right and number else "left", overflow="fold")
    return made


def facts(rows: Iterable[tuple[str, str]]) -> Table:
    """Names and what is to be said of them, wrapped beside their name."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    made.add_column(no_wrap=True)
    made.add_column(overflow="fold")  # a long path goes on in the next line, instead of losing its end
    for row in rows:
        made.add_row(*row)
    return made


def quiet_deepspeed() -> None:
    """DeepSpeed's line about its choice of accelerator goes to standard output, in front of what is asked for."""
    logging.getLogger("DeepSpeed").addFilter(_is_wanted)


def _is_wanted(record: logging.LogRecord) -> bool:
    return "Setting accelerator to" not in record.getMessage()


def size(nbytes: float) -> str:
    """Bytes for people."""
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**29 else f"{nbytes / 2**20:.1f} MiB"
