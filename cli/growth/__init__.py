"""`lightning-zenflow growth`: how the package's own cost grows on this machine.

With parameters, with tensors, with the background process's cores and with ranks. Writes tables, numbers and a picture.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ..console import HelpfulParser, console, quiet_deepspeed, write

__all__ = ["main"]

NUMBERS, PICTURE = "growth.json", "growth.png"
LEAST, MOST = 1_000_000, 500_000_000


def main(args: list[str] | None = None) -> int:
    """Runs the subcommand and returns its exit code: 1 if a measurement fails, with one line on stderr.

    Args:
        args: Arguments after `growth`; `None` takes them from `sys.argv`.
    """
    options = _parser().parse_args(args)
    quiet_deepspeed()
    from .run import GrowthError, Plan, measure_all  # imported late: it takes seconds, and --help needs none of it

    try:
        options.output.mkdir(parents=True, exist_ok=True)
        found = measure_all(Plan(largest=options.largest), _tell)
    except (GrowthError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    from .picture import picture_png
    from .tables import show

    numbers = json.dumps(found.as_dict(), indent=2, allow_nan=False) + "\n"
    (options.output / NUMBERS).write_text(numbers, encoding="utf-8")
    (options.output / PICTURE).write_bytes(picture_png(found))
    if options.json:
        write(numbers)
    else:
        show(found, console())
        write(f"\nNumbers: {options.output / NUMBERS}\nPicture: {options.output / PICTURE}\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = HelpfulParser(
        prog="lightning-zenflow growth",
        description="Measures how ZenFlow's own cost grows with parameters, tensors, cores and ranks on this machine, in some"
        " three minutes. The machine should have nothing else to do.",
    )
    parser.add_argument(
        "--output", metavar="DIR", type=Path, default=Path(), help="folder for the two files (default: .)"
    )
    largest = "parameters of the largest model, such as 128M (default), up to 500M; 24 bytes of memory each"
    parser.add_argument("--largest", metavar="N", type=_numel, default=128_000_000, help=largest)
    parser.add_argument(
        "--json", action="store_true", help="print the numbers, in seconds and bytes, instead of tables"
    )
    return parser


def _numel(text: str) -> int:
    """A number of parameters, from 1 M to 500 M."""
    from ..sizes import size_of

    try:
        numel = size_of(text).numel
    except ValueError:
        numel = 0
    if not LEAST <= numel <= MOST:
        raise argparse.ArgumentTypeError(f"must be from 1M to 500M parameters, got {text!r}. Write for example 64M.")
    return numel


def _tell(what: str) -> None:
    sys.stderr.write(f"measuring {what}\n")
    sys.stderr.flush()
