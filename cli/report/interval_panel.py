"""The panel of the intervals, and the marks of the tuner's changes in all panels over steps."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, NullLocator

from . import style
from .bins import edges_of
from .panels import legend_above
from .record import Decision, Run
from .series import Series

MOST_LINES = 24
"""More lines than this through the other panels would bury the stall, which matters more."""

MOST_NUMBERS = 18
"""More numbers than this in a row could not be read: those that are close become one label."""


def draw_intervals(ax: Axes, series: Series, run: Run) -> None:
    """Both intervals as step lines, each with its own axis; the tuner's changes are marked by `draw_changes`."""
    right = ax.twinx()
    right.grid(False)
    edges = edges_of(series, np.arange(len(series)), np.arange(1, len(series) + 1))
    handles = []
    for axis, values, colour, name, line in (
        (ax, series.update_interval.astype(float), style.UPDATE_INTERVAL_COLOUR, "update interval", (0, ())),
        (right, series.select_interval, style.SELECT_INTERVAL_COLOUR, "select interval", (0, (5, 1.5))),
    ):
        same = (values[1:] == values[:-1]) | (np.isnan(values[1:]) & np.isnan(values[:-1]))
        starts = np.flatnonzero(np.r_[True, ~same])
        ends = np.r_[edges[starts], edges[-1]]
        axis.stairs(values[starts], ends, baseline=None, color=colour, linewidth=2.2, linestyle=line)
        axis.set_ylabel(name, color=colour)
        scale = "log scale at the right" if axis is right else "scale at the left"
        if not np.isnan(values).all():
            handles.append(Line2D([], [], color=colour, linewidth=2.2, linestyle=line, label=f"{name} ({scale})"))
        axis.tick_params(axis="y", colors=colour)
    ax.set_ylim(0, 1.6 * series.update_interval.max())
    ax.yaxis.set_major_locator(MaxNLocator(4, integer=True, min_n_ticks=2))
    right.spines["right"].set_visible(True)
    right.set_yscale("log", base=2)
    right.yaxis.set_minor_locator(NullLocator())
    right.yaxis.set_minor_formatter(NullFormatter())
    right.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    if np.isnan(series.select_interval).all():
        right.set_yticks([])
        right.set_ylabel("nothing is selected", color=style.SELECT_INTERVAL_COLOUR)
    else:
        low, high = np.nanmin(series.select_interval), np.nanmax(series.select_interval)
        # Room above the lines for the numbers of the changes.
        right.set_ylim(low / 4, low / 4 * (4 * high / low) ** 1.4)
    ax.set_title("Intervals, in steps" + (", and the tuner's changes" if run.changes else ", never changed"))
    ax.set_xlabel("step")
    legend_above(ax, handles)


def draw_changes(axes: list[Axes], changes: list[Decision], series: Series) -> None:
    """Marks the changes within `series` by lines through all of `axes`, with their numbers at the top of the last."""
    shown = [change for change in changes if series.step[0] <= change.step <= series.step[-1]]
    for ax in axes if len(shown) <= MOST_LINES else axes[-1:]:
        for change in shown:
            ax.axvline(change.step + 0.5, color="#555555", linewidth=0.8, linestyle=(0, (2, 2)), zorder=3)
    groups: list[list[Decision]] = []
    for change in shown:
        if groups and change.step - groups[-1][0].step < (series.step[-1] - series.step[0]) / MOST_NUMBERS:
            groups[-1].append(change)
        else:
            groups.append([change])
    edge = 0.012 * (series.step[-1] - series.step[0])
    for group in groups:
        middle = (group[0].step + group[-1].step) / 2 + 0.5
        axes[-1].annotate(
            f"{group[0].number}" + (f"-{group[-1].number}" if len(group) > 1 else ""),
            (min(max(middle, series.step[0] + edge), series.step[-1] - edge), 0.88),
            xycoords=axes[-1].get_xaxis_transform(),
            ha="center",
            va="center",
            fontsize=8.5,
            color="white",
            fontweight="bold",
            bbox={"boxstyle": "round,pad=0.25,rounding_size=0.6", "facecolor": "#333333"},
            zorder=6,
        )
