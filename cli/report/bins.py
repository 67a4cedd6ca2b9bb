"""Bins for long runs, and shares over the last steps: what the panels draw of a `Series`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .series import Floats, Ints, Series


@dataclass(frozen=True)
class Bins:
    """Equal cuts of consecutive steps; `start` and `stop` are positions, `typical` and `slowest` one step of each bin.

    The typical step is the one of median duration (the lower of two), so that its parts add up to it.
    """

    start: Ints
    stop: Ints
    typical: Ints
    slowest: Ints


def bins_of(series: Series, most: int) -> Bins:
    """Cuts `series` into at most `most` bins; few steps have a bin each."""
    edges = np.linspace(0, len(series), min(most, len(series)) + 1).round().astype(np.int64)
    start, stop = edges[:-1], edges[1:]
    order = [a + np.argsort(series.step_secs[a:b], kind="stable") for a, b in zip(start, stop, strict=True)]
    return Bins(start, stop, np.array([o[(len(o) - 1) // 2] for o in order]), np.array([o[-1] for o in order]))


def running_window_steps(series: Series, bin_steps: int = 1) -> int:
    """Over how many steps the stall share is taken, at most half of them all.

    Whole selection intervals, as long as they are in the end, and at least `bin_steps`: so the same number of
    re-selections lies in the window at every step.
    """
    known = series.select_interval[~np.isnan(series.select_interval)]
    interval = int(known[-1]) if len(known) else 16
    return max(1, min(-(-bin_steps // interval) * interval, len(series) // 2))


def running_ratio(series: Series, part_secs: Floats, window: int) -> Floats:
    """`part_secs` as a share of the time of the last `window` steps, at first of all steps so far; shape [steps]."""
    part, total = (np.r_[0.0, np.cumsum(values)] for values in (part_secs, series.step_secs))
    stop = np.arange(1, len(series) + 1)
    start = np.maximum(0, stop - window)
    return ratio_of(part[stop] - part[start], total[stop] - total[start])


def ratio_of(part: Floats, whole: Floats) -> Floats:
    """`part` as a share of `whole`, elementwise; 0 of nothing."""
    return np.divide(part, whole, out=np.zeros(len(whole)), where=whole > 0)


def edges_of(series: Series, start: np.ndarray, stop: np.ndarray) -> Floats:
    """Edges of bins on the axis of steps, half a step before the first one of each."""
    return np.r_[series.step[start], series.step[stop[-1] - 1] + 1] - 0.5
