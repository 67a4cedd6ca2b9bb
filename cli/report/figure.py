"""The figure: one picture that tells where the time of a run went."""

from __future__ import annotations

import io
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.style import context
from matplotlib.ticker import FuncFormatter, MaxNLocator

from lightning_zenflow.wording import in_words

from . import style
from .interval_panel import draw_changes, draw_intervals
from .lane_panels import draw_window, legend_of
from .lanes import Window, lane_ranks, windows_of
from .panels import draw_stall, draw_step_time
from .record import Run
from .series import Headline, Series
from .words import drawable, percent_text, what_ran

WIDTH_INCHES = 14.0
PANEL_INCHES = (2.3, 1.7, 1.4)
"""Heights of the panels over steps: step time, stall share, intervals."""

MOST_COLUMNS = 9
"""As many names of work as fit beside each other."""

REASONS = 4
"""How many reasons stand under the figure; all are in the page."""


def figure_png(run: Run, series: Series) -> bytes:
    """The figure as a PNG, 1400 pixels wide and about 1100 high; of many ranks higher."""
    # Whoever has a matplotlibrc of their own gets the same figure; on leaving, everything is as it was.
    with context(["default", style.STYLE]):
        png = io.BytesIO()
        FigureCanvasAgg(_draw(run, series)).print_png(png)
    return png.getvalue()


class _Sheet:
    """A figure that is filled from the top; `y` is what is still free, in inches from the bottom."""

    def __init__(self, height: float, left: float, right: float) -> None:
        self.figure = Figure(figsize=(WIDTH_INCHES, height))
        self.height, self.y, self.left, self.width = height, height, left, WIDTH_INCHES - left - right

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Inches as shares of the figure."""
        return x / WIDTH_INCHES, y / self.height

    def axes(self, x: float, width: float, height: float) -> Axes:
        """Axes whose lower edge is at `y`."""
        return self.figure.add_axes((*self.place(x, self.y), *self.place(width, height)))

    def text(self, y: float, text: str, **options: Any) -> None:
        """Text at the left edge of the panels."""
        self.figure.text(*self.place(self.left, y), text, **options)


def _draw(run: Run, series: Series) -> Figure:
    windows = windows_of(run, series)
    ranks = [rank.rank for rank in lane_ranks(run)] if windows else []
    footer = _footer(run, series, len(ranks))
    lane_inches = 0.4 + 2 * len(ranks) * (0.3 if len(ranks) <= 2 else 0.2)
    legend = legend_of(windows)
    legend_rows = -(-len(legend) // MOST_COLUMNS)
    legend_inches = 0.15 + 0.2 * legend_rows
    below_panels = 0.95 + lane_inches + legend_inches if windows else 0.0
    sheet = _Sheet(
        height=0.95 + sum(PANEL_INCHES) + 2 * 0.55 + below_panels + 0.55 + 0.2 * len(footer),
        left=0.75 if len(ranks) <= 1 else 1.15,
        right=0.75,
    )
    sheet.text(sheet.height - 0.12, _headline(run, series), fontsize=14, fontweight="bold", va="top")
    subtitle = f"{drawable(what_ran(run), 140)}, steps {series.step[0]:,} to {series.step[-1]:,}"
    sheet.text(sheet.height - 0.42, subtitle, fontsize=10, va="top", color="#555555")
    sheet.y -= 0.95
    _draw_panels(sheet, run, series)
    if windows:
        sheet.y -= 0.95 + lane_inches
        _draw_windows(sheet, windows, ranks, lane_inches)
        corner = sheet.place(sheet.left, sheet.y - 0.5)
        columns = max(1, -(-len(legend) // max(1, legend_rows)))
        sheet.figure.legend(
            handles=legend, loc="upper left", ncols=columns, bbox_to_anchor=corner, borderaxespad=0, borderpad=0
        )
    sheet.text(0.1, "\n".join(footer), fontsize=9, va="bottom", linespacing=1.5)
    return sheet.figure


def _draw_panels(sheet: _Sheet, run: Run, series: Series) -> None:
    panels: list[Axes] = []
    for height in PANEL_INCHES:
        sheet.y -= height + (0.55 if panels else 0.0)
        panels.append(sheet.axes(sheet.left, sheet.width, height))
    draw_step_time(panels[0], series)
    draw_stall(panels[1], series, run.stall_budget_ratio)
    draw_intervals(panels[2], series, run)
    draw_changes(panels, run.changes, series)
    for ax in panels:
        ax.set_xlim(series.step[0] - 0.5, series.step[-1] + 0.5)
        ax.xaxis.set_major_locator(MaxNLocator(10, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        ax.tick_params(axis="x", labelbottom=ax is panels[-1])


def _draw_windows(sheet: _Sheet, windows: list[Window], ranks: list[int], height: float) -> None:
    """Draws the windows side by side, at the same scale as far as each stays wide enough to be read."""
    space = 0.3
    whole = sum(window.secs for window in windows)
    x = sheet.left
    for window in windows:
        share = min(max(window.secs / whole, 0.3), 0.7) if len(windows) == 2 else 1.0
        width = share * (sheet.width - space * (len(windows) - 1))
        draw_window(sheet.axes(x, width, height), window, ranks, width, labelled=window is windows[0])
        x += width + space


def _headline(run: Run, series: Series) -> str:
    numbers, budget = Headline.of(series), run.stall_budget_ratio
    parts = [
        f"Median step {in_words(numbers.median_step_secs)}",
        f"stall {percent_text(numbers.stall_ratio)} of the time"
        + ("" if budget is None else f" (budget {percent_text(budget)})"),
        f"host busy {percent_text(numbers.host_busy_ratio)}",
    ]
    return "  ·  ".join(parts)


def _footer(run: Run, series: Series, lanes: int) -> list[str]:
    """Which ranks have lanes, if not all, and the last reasons, shortened."""
    shown = [change for change in run.changes if series.step[0] <= change.step <= series.step[-1]]
    lines = []
    if 0 < lanes < len(run.ranks):
        lines.append(
            f"Lanes of {lanes} of {len(run.ranks)} ranks: the first, and those with most stall. The trace has all."
        )
    if len(shown) > REASONS:
        lines.append(f"The last {REASONS} of {len(shown)} changes (the page has all):")
    lines += [f"{change.number}   step {change.step}: {drawable(change.reason, 165)}" for change in shown[-REASONS:]]
    return lines
