"""The record of a run as typed values: what `StallMonitor` writes, format 1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

FORMAT = 1
"""The format of the record that this report reads."""

LANES = ("device", "host")
"""Where a span can lie: the training process, and its background process."""


class RecordError(Exception):
    """The record cannot be shown; the message is one line for the person who asked for the report."""


class Span(NamedTuple):
    """A piece of work: `lane` is one of `LANES`, `start_secs` counts from the start of the run."""

    lane: str
    name: str
    start_secs: float
    secs: float


class Step(NamedTuple):
    """One applied optimizer step of one rank; the names are those of the record (`StepStats` explains them).

    `select_interval` is `None` where nothing is selected, `grad_norm` may be NaN or infinite, and a span on the lane
    `host` may belong to the step before: it is listed when the answer arrives.
    """

    step: int
    begin_secs: float
    step_secs: float
    update_stall_secs: float
    select_stall_secs: float
    worker_accumulate_secs: float
    worker_update_secs: float
    to_host_bytes: int
    to_device_bytes: int
    skipped_steps: int
    update_interval: int
    select_interval: int | None
    reselected: bool
    grad_norm: float
    spans: tuple[Span, ...]

    @property
    def stall_secs(self) -> float:
        """Time in which the training process was blocked on the host."""
        return self.update_stall_secs + self.select_stall_secs

    @property
    def stall_ratio(self) -> float:
        """The same as a share of the step, from 0 to 1; a step without a duration has 0."""
        return min(1.0, self.stall_secs / self.step_secs) if self.step_secs > 0 else 0.0


class Decision(NamedTuple):
    """What the tuner decided at the end of `step`.

    `number` counts the decisions that changed an interval, from 1; it is `None` where the intervals were kept.
    """

    number: int | None
    step: int
    update_interval: int
    select_interval: int | None
    reason: str
    window: Mapping[str, Any]


@dataclass(frozen=True)
class RankRecord:
    """The last run in one file.

    Attributes:
        path: The file.
        header: The line of kind `run`.
        runs: How many runs the file holds.
        torn: Whether the last line was cut off, as a killed run leaves it; it is not used.
        steps: Steps in ascending order.
        decisions: Decisions in the order of the file.
    """

    path: Path
    header: Mapping[str, Any]
    runs: int
    torn: bool
    steps: tuple[Step, ...]
    decisions: tuple[Decision, ...]

    @property
    def rank(self) -> int:
        """The rank that wrote the file."""
        return int(self.header["rank"])


@dataclass(frozen=True)
class Run:
    """One run, of all ranks whose records were found.

    Attributes:
        ranks: In ascending order; the first is the one whose steps and decisions are shown.
        notes: Whole sentences about what is missing or left out.
    """

    ranks: tuple[RankRecord, ...]
    notes: tuple[str, ...] = ()

    @property
    def main(self) -> RankRecord:
        """The first rank."""
        return self.ranks[0]

    @property
    def stall_budget_ratio(self) -> float | None:
        """Share of the step time that may be stall, or `None` if the run had no such budget."""
        budget = self.main.header.get("stall_budget")
        return None if budget is None else float(budget)

    @property
    def changes(self) -> list[Decision]:
        """The decisions that changed an interval, of the whole run, also where only some steps are shown."""
        return [decision for decision in self.main.decisions if decision.number is not None]

    def zoom(self, first: int | None, last: int | None) -> Run:
        """The same run with only the steps from `first` to `last`, both included and both optional.

        Raises:
            RecordError: There is no such step.
        """
        if first is None and last is None:
            return self
        every = self.main.steps
        low, high = every[0].step if first is None else first, every[-1].step if last is None else last
        ranks = [replace(r, steps=tuple(step for step in r.steps if low <= step.step <= high)) for r in self.ranks]
        if not ranks[0].steps:
            raise RecordError(
                f"`--steps` must hold a step of the record, got {low}:{high}. It has the steps"
                f" {every[0].step} to {every[-1].step}."
            )
        note = (
            f"Shows steps {ranks[0].steps[0].step} to {ranks[0].steps[-1].step} of {every[0].step} to {every[-1].step}."
        )
        return Run(tuple(rank for rank in ranks if rank.steps), (*self.notes, note))
