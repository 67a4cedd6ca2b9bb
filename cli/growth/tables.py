"""The tables, none wider than 100 columns."""

from __future__ import annotations

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from lightning_zenflow.wording import in_words

from ..console import table
from ..report.words import count_text
from .results import Growth, StepPoint

WIDTH = 100
BUSY_RATIO = 0.9
"""With less of its core, something else was at work: page faults and interrupts take a few percent."""


def show(found: Growth, out: Console) -> None:
    """Writes all tables to `out`."""
    out.print(Group(*parts(found)), width=WIDTH)


def parts(found: Growth) -> list[Table | Text]:
    """Titles and tables, in order."""
    tensors = f"{count_text(found.tensors[0].numel)} parameters in more and more tensors"
    made: list[Table | Text] = [
        Text("Larger and larger models, each in eight tensors"),
        _steps(found.sizes),
        Text(f"\n{tensors}: {1e6 * found.per_tensor_secs:.1f} µs a tensor"),
        _steps(found.tensors),
        Text("\nThe background process's passes on more and more cores"),
        _cores(found),
        Text(
            f"\nRanks on this machine, which has {found.available_cores} cores for them and their background processes"
        ),
        _ranks(found),
    ]
    if found.core_ratio < BUSY_RATIO:
        busy = (
            f"a trainer had only {found.core_ratio:.0%} of its core. Times are too long: measure again when it is idle."
        )
        made.append(Text(f"\nThis machine was busy: {busy}"))
    return made


def _steps(points: tuple[StepPoint, ...]) -> Table:
    made = table("parameters", "tensors", "passes", "step", "overhead", "a parameter", "a tensor", "stall", right=True)
    for point in points:
        made.add_row(
            count_text(point.numel),
            f"{point.tensors:,}",
            in_words(point.plain_secs),
            in_words(point.step_secs),
            _signed(point.overhead_secs),
            f"{1e9 * point.per_parameter_secs:.2f} ns",
            f"{1e6 * point.overhead_secs / point.tensors:,.0f} µs",
            in_words(point.stall_secs),
        )
    return made


def _signed(secs: float) -> str:
    """A difference, which noise can turn below zero."""
    return f"-{in_words(-secs)}" if secs < 0 else in_words(secs)


def _cores(found: Growth) -> Table:
    made = table("cores", "copy", "accumulate", "of copy", "speed-up", "update", "of copy", "speed-up", right=True)
    for point, (_, accumulate_ratio, update_ratio) in zip(found.cores, found.speed_ups, strict=True):
        made.add_row(
            str(point.cores),
            f"{point.copy_bandwidth / 1e9:.1f} GB/s",
            f"{point.accumulate_bandwidth / 1e9:.1f} GB/s",
            f"{point.accumulate_share_ratio:.0%}",
            f"{accumulate_ratio:.2f}x",
            f"{point.update_bandwidth / 1e9:.1f} GB/s",
            f"{point.update_share_ratio:.0%}",
            f"{update_ratio:.2f}x",
        )
    return made


def _ranks(found: Growth) -> Table:
    made = table("ranks", "parameters", "passes", "step", "collectives", "reduced", "gathered", "weights", right=True)
    for point in found.ranks:
        made.add_row(
            str(point.ranks),
            count_text(point.numel),
            in_words(point.plain_secs),
            in_words(point.step_secs),
            str(point.calls),
            count_text(point.reduced_bytes, "B"),
            count_text(point.gathered_bytes, "B"),
            count_text(point.weights_bytes, "B"),
        )
    return made
