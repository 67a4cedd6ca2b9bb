"""`lightning-zenflow report RUN`: where the time of a run went, from what `StallMonitor` recorded.

Writes a picture, a page that needs nothing but itself, and a trace for Perfetto or chrome://tracing.
"""

from __future__ import annotations

import argparse
import re
import reprlib
import sys
from pathlib import Path

from ..console import HelpfulParser, write
from .read import find_files, read_run
from .record import RecordError, Run

__all__ = ["main"]

PICTURE, PAGE, TRACE = "zenflow-report.png", "zenflow-report.html", "zenflow-trace.json"


def main(args: list[str]) -> None:
    """Runs `lightning-zenflow report`.

    Args:
        args: Arguments after `report`.

    Raises:
        SystemExit: With status 2 and one line on stderr, where `args` or the record cannot be used.
    """
    options = _parser().parse_args(args)
    try:
        first, last = _steps(options.steps)
        files = find_files(_path(options.run, "RUN"))
        run = read_run(files).zoom(first, last)
        lines = _write(run, files[0].parent if options.output is None else _path(options.output, "--output"))
    except (RecordError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
    write("\n".join(lines) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = HelpfulParser(
        prog="lightning-zenflow report",
        description="Shows where the time of a run went: a picture, a page, and a trace for Perfetto or chrome://tracing.",
    )
    parser.add_argument(
        "run",
        metavar="RUN",
        help="record of StallMonitor (zenflow.jsonl), or a folder: the record in it that was written last",
    )
    parser.add_argument("--output", metavar="DIR", help="folder for the three files (default: beside the record)")
    parser.add_argument(
        "--steps", metavar="A:B", default=":", help="only the steps from A to B; either may be left out"
    )
    return parser


def _path(text: str, name: str) -> Path:
    """`text` as a path; an empty one, as of a shell variable that is not set, would be the current folder."""
    if not text:
        raise RecordError(f"`{name}` must be a path, got an empty one. Write . for the current folder.")
    return Path(text)


def _steps(text: str) -> tuple[int | None, int | None]:
    """First and last step of `A:B`; `None` where left out."""
    match = re.fullmatch(r"(\d{0,18}):(\d{0,18})", text, re.ASCII)
    first, last = ((int(end) if end else None) for end in match.groups()) if match else (1, 0)
    if first is not None and last is not None and first > last:
        raise RecordError(
            f"`--steps` must be A:B with whole numbers of at most 18 digits, A at most B, got {reprlib.repr(text)}."
            " Write for example --steps 100:200."
        )
    return first, last


def _write(run: Run, folder: Path) -> list[str]:
    """Writes the three files into `folder`; returns what to tell the person at the terminal."""
    try:
        from .figure import figure_png
    except ModuleNotFoundError as error:
        raise RecordError(
            f"`report` must have matplotlib, got {str(error)!r}. Install it: python -m pip install matplotlib"
        ) from error
    from .page import page_html
    from .series import series_of
    from .summary import summary_lines
    from .trace import trace_json

    series = series_of(run)
    png = figure_png(run, series)
    folder.mkdir(parents=True, exist_ok=True)
    picture, page, trace = folder / PICTURE, folder / PAGE, folder / TRACE
    picture.write_bytes(png)
    page.write_text(page_html(run, series, png), encoding="utf-8", errors="replace")  # JSON may hold half a character
    trace.write_text(trace_json(run), encoding="utf-8")
    return [*summary_lines(run, series), *run.notes, f"Picture: {picture}", f"Page:    {page}", f"Trace:   {trace}"]
