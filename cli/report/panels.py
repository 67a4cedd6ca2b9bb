"""The panels of the figure over steps: step time and stall share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import Normal, Stroke
from matplotlib.ticker import FuncFormatter, MaxNLocator

from lightning_zenflow.wording import in_words

from . import style
from .bins import Bins, bins_of, edges_of, ratio_of, running_ratio, running_window_steps
from .series import Floats, Series
from .words import percent_text

MOST_STEPS = 1200
"""Up to this many steps are drawn one by one: the panels are about as many pixels wide."""

MOST_BINS = 400


def draw_step_time(ax: Axes, series: Series) -> None:
    """Step time stacked from its parts; in a long run the typical step of each bin, and how far the slowest goes."""
    cuts = _bins(series)
    typical, slowest = series[cuts.typical], series[cuts.slowest]
    unit, scale = ("ms", 1e3) if np.median(series.step_secs) < 1 else ("s", 1.0)
    edges = edges_of(series, cuts.start, cuts.stop)
    busy = typical.step_secs - typical.stall_secs
    handles: list[Patch | Line2D] = []
    stack = [
        ("device busy", style.DEVICE_COLOUR, busy),
        ("update stall: waits for a block", style.UPDATE_STALL_COLOUR, typical.update_stall_secs),
        ("select stall: waits in a re-selection", style.SELECT_STALL_COLOUR, typical.select_stall_secs),
    ]
    base = np.zeros(len(typical))
    for label, colour, part in stack:
        _fill(ax, edges, base * scale, (base + part) * scale, colour)
        base = base + part
        handles.append(Patch(color=colour, label=label))
    binned = len(cuts.start) < len(series)
    if binned:
        # Dots, since an area would say that time is spent there.
        colours = np.where(slowest.reselected, style.SELECT_STALL_COLOUR, style.SLOWEST_COLOUR)
        ax.scatter((edges[:-1] + edges[1:]) / 2, slowest.step_secs * scale, s=9, c=colours, linewidths=0, zorder=3)
        label = f"slowest of {int((cuts.stop - cuts.start).max())} steps"
        handles.append(Line2D([], [], color=style.SLOWEST_COLOUR, marker="o", ms=3.5, linestyle="", label=label))
    top = _top(slowest.step_secs, 1.25)
    beyond = series.step_secs > top
    if beyond.any():
        worst = int(series.step_secs.argmax())
        several = f"{beyond.sum():,} steps go beyond the top, most of all " if beyond.sum() > 1 else "Beyond the top: "
        _note(ax, f"{several}step {series.step[worst]:,} with {in_words(series.step_secs[worst])}")
    ax.set_title("Step time, the median of each bin" if binned else "Step time and what it is made of")
    ax.set_ylabel(f"{unit} a step")
    ax.set_ylim(0, top * scale)
    legend_above(ax, handles)


def draw_stall(ax: Axes, series: Series, budget_ratio: float | None) -> None:
    """Stall as a share of the time, over the length of a selection interval, with the budget."""
    cuts = _bins(series)
    edges = edges_of(series, cuts.start, cuts.stop)
    binned = len(cuts.start) < len(series)
    bin_steps = int((cuts.stop - cuts.start).max())
    window = running_window_steps(series, bin_steps)
    running = running_ratio(series, series.stall_secs, window)
    if binned:  # a bin may hold a re-selection or not: only over whole intervals do bins compare
        running = running[cuts.stop - 1]
        update = running_ratio(series, series.update_stall_secs, window)[cuts.stop - 1]
        select = running - update
    else:
        update, select = (
            ratio_of(part, series.step_secs) for part in (series.update_stall_secs, series.select_stall_secs)
        )
    _fill(ax, edges, np.zeros(len(update)), 100 * update, style.UPDATE_STALL_COLOUR)
    _fill(ax, edges, 100 * update, 100 * (update + select), style.SELECT_STALL_COLOUR)
    over = f"over the last {window} steps" if window > 1 else "of the step"
    (line,) = ax.plot(series.step[cuts.stop - 1], 100 * running, color=style.LINE_COLOUR, linewidth=1.8, label=over)
    line.set_path_effects([Stroke(linewidth=4, foreground="white"), Normal()])  # it crosses bars of every shade
    handles: list[Patch | Line2D] = [
        line,
        Patch(color=style.UPDATE_STALL_COLOUR, label="update stall"),
        Patch(color=style.SELECT_STALL_COLOUR, label="select stall"),
    ]
    top = 1.15 * float(running[min(window // 4 // bin_steps, len(running) - 1) :].max())
    if budget_ratio is not None:
        label, dashes = f"budget, {percent_text(budget_ratio)}", (0, (6, 3))
        budget = 100 * budget_ratio
        handles.append(ax.axhline(budget, color=style.BUDGET_COLOUR, linewidth=1.4, linestyle=dashes, label=label))
        top = max(top, 2.5 * budget_ratio)
    top = min(1.0, max(top, 1.3 * float(np.percentile(update, 95)), 0.02))
    ax.set_ylim(0, 100 * top)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))
    ax.yaxis.set_major_locator(MaxNLocator(5))
    if (update + select > top).any():
        _note(ax, f"Single steps go up to {percent_text(float(series.stall_ratio.max()))}")
    ax.set_title("Stall: share of the time blocked on the host")
    legend_above(ax, handles)


def _bins(series: Series) -> Bins:
    return bins_of(series, len(series) if len(series) <= MOST_STEPS else MOST_BINS)


def _fill(ax: Axes, edges: Floats, low: Floats, high: Floats, colour: str) -> None:
    ax.fill_between(edges, np.r_[low, low[-1]], np.r_[high, high[-1]], step="post", color=colour, linewidth=0)


def _top(step_secs: Floats, room: float) -> float:
    """Upper end of an axis that shows nearly all steps: a first step that is twenty times slower would hide the others."""
    return room * max(float(np.percentile(step_secs, 97)), 1.3 * float(np.median(step_secs))) or 1.0


def legend_above(ax: Axes, handles: Sequence[Patch | Line2D]) -> None:
    """A legend in one row over the right half of `ax`, beside its title."""
    ax.legend(handles=handles, loc="lower right", bbox_to_anchor=(1.005, 0.97), ncols=len(handles), borderaxespad=0.2)


def _note(ax: Axes, text: str) -> None:
    box = {"facecolor": "white", "alpha": 0.85, "pad": 1.5}
    ax.text(0.995, 0.93, text, transform=ax.transAxes, ha="right", va="top", fontsize=8.5, color="#444444", bbox=box)
