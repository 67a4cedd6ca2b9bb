"""The numbers of a report: the columns of a run as arrays, its headline, and bins for long runs."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from .record import RankRecord, Run

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Series:
    """What is shown of each step, all of shape [steps].

    Time is that of the first rank. Stall and host time are those of the rank that has most of them at that step: the
    others wait for it when they exchange gradients.

    Attributes:
        step: Step numbers, ascending.
        begin_secs: Start of the step, counted from the start of the run.
        step_secs: Duration of the step.
        update_stall_secs: Wait for a block of deferred updates.
        select_stall_secs: Wait in a re-selection. The two stalls together are at most `step_secs`.
        host_secs: Busy time of the background process.
        to_host_bytes: Traffic of the first rank.
        to_device_bytes: The same in the other direction.
        update_interval: Steps.
        select_interval: Steps; NaN where nothing is selected.
        reselected: Whether columns were selected anew.
    """

    step: Ints
    begin_secs: Floats
    step_secs: Floats
    update_stall_secs: Floats
    select_stall_secs: Floats
    host_secs: Floats
    to_host_bytes: Ints
    to_device_bytes: Ints
    update_interval: Ints
    select_interval: Floats
    reselected: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.step)

    def __getitem__(self, index: Any) -> Series:
        """The steps at `index`: a slice, a mask or positions."""
        return Series(**{field.name: getattr(self, field.name)[index] for field in fields(self)})

    @property
    def stall_secs(self) -> Floats:
        """Both stalls."""
        return self.update_stall_secs + self.select_stall_secs

    @property
    def stall_ratio(self) -> Floats:
        """Both stalls as a share of the step, from 0 to 1."""
        return np.divide(self.stall_secs, self.step_secs, out=np.zeros(len(self)), where=self.step_secs > 0)

    @property
    def gap_secs(self) -> Floats:
        """Time between the end of each step and the start of the next one, 0 where steps lack; shape [steps - 1]."""
        gaps = np.maximum(0.0, self.begin_secs[1:] - self.begin_secs[:-1] - self.step_secs[:-1])
        return np.where(np.diff(self.step) == 1, gaps, 0.0)

    @property
    def longest_gap_secs(self) -> float:
        """Gaps longer than this are pauses, such as an evaluation or a checkpoint, and not the loading of a batch."""
        step_secs = float(np.median(self.step_secs))
        usual_secs = float(np.median(self.gap_secs)) if len(self) > 1 else 0.0
        return max(0.5 * step_secs, min(5 * usual_secs, 3 * step_secs))


def series_of(run: Run) -> Series:
    """The columns of `run`."""
    steps = run.main.steps
    step_secs = np.array([step.step_secs for step in steps])
    step = np.array([step.step for step in steps])
    update, select, host = (np.zeros(len(steps)) for _ in range(3))
    for rank in run.ranks:
        _, here, there = np.intersect1d(step, [s.step for s in rank.steps], assume_unique=True, return_indices=True)
        own_update = np.array([s.update_stall_secs for s in rank.steps])[there]
        own_select = np.array([s.select_stall_secs for s in rank.steps])[there]
        own_host = np.array([s.worker_accumulate_secs + s.worker_update_secs for s in rank.steps])[there]
        worse = own_update + own_select > update[here] + select[here]
        update[here[worse]], select[here[worse]] = own_update[worse], own_select[worse]
        host[here] = np.maximum(host[here], own_host)
    # The worst rank's stall, or its clock, may be a little longer than the first rank's step.
    fits = np.minimum(1.0, np.divide(step_secs, update + select, out=np.ones(len(steps)), where=update + select > 0))
    return Series(
        step=step,
        begin_secs=np.array([s.begin_secs for s in steps]),
        step_secs=step_secs,
        update_stall_secs=update * fits,
        select_stall_secs=select * fits,
        host_secs=host,
        to_host_bytes=np.array([s.to_host_bytes for s in steps]),
        to_device_bytes=np.array([s.to_device_bytes for s in steps]),
        update_interval=np.array([s.update_interval for s in steps]),
        select_interval=np.array([np.nan if s.select_interval is None else s.select_interval for s in steps]),
        reselected=np.array([s.reselected for s in steps]),
    )


def clock_offset_secs(rank: RankRecord, main: RankRecord, first: int = 0, last: int | None = None) -> float:
    """How far the clock of `rank` is ahead of that of `main`, in seconds.

    Each counts from its own start, but they step together; so this is the median over the steps that both have, from
    `first` to `last`. Clocks of two machines drift apart in the course of hours: ask for the steps that matter.
    """
    begins = {s.step: s.begin_secs for s in main.steps if first <= s.step and (last is None or s.step <= last)}
    ahead = [step.begin_secs - begins[step.step] for step in rank.steps if step.step in begins]
    return float(np.median(ahead)) if ahead else 0.0


@dataclass(frozen=True)
class Headline:
    """The numbers that sum up some steps; shares are of the time spent in steps, pauses between them left out."""

    steps: int
    median_step_secs: float
    slowest_step_secs: float
    slowest_step: int
    in_steps_secs: float
    stall_ratio: float
    update_stall_ratio: float
    select_stall_ratio: float
    host_busy_ratio: float
    to_host_bytes: float
    to_device_bytes: float

    @classmethod
    def of(cls, series: Series) -> Headline:
        """Sums up `series`, which holds at least one step; the bytes are the mean of a step."""
        total = float(series.step_secs.sum())
        whole = total or math.inf  # of steps that took no time, nothing has a share
        slowest = int(series.step_secs.argmax())
        update, select = float(series.update_stall_secs.sum()), float(series.select_stall_secs.sum())
        return cls(
            steps=len(series),
            median_step_secs=float(np.median(series.step_secs)),
            slowest_step_secs=float(series.step_secs[slowest]),
            slowest_step=int(series.step[slowest]),
            in_steps_secs=total,
            stall_ratio=(update + select) / whole,
            update_stall_ratio=update / whole,
            select_stall_ratio=select / whole,
            host_busy_ratio=float(series.host_secs.sum()) / whole,
            to_host_bytes=float(series.to_host_bytes.mean()),
            to_device_bytes=float(series.to_device_bytes.mean()),
        )


def since_last_change(run: Run, series: Series) -> Series | None:
    """The steps after the tuner's last change within `series`; `None` if there was none, or no step came after it."""
    changes = [change.step for change in run.changes if series.step[0] <= change.step < series.step[-1]]
    return series[series.step > changes[-1]] if changes else None
