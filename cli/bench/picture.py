"""`bench.png`: the step of every mode as a bar, cut into what its time goes to."""

from __future__ import annotations

import io

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.style import context

from ..report import style
from .figures import Figures
from .result import Result
from .view import heading

WIDTH_INCHES, ROW_INCHES = 10.0, 0.5
PARTS = {
    "forward and backward": style.COLOURS["forward and backward"],
    "gradients, within backward": style.COLOURS["accumulate"],
    "rest of the optimizer step": style.COLOURS["optimizer"],
    "waiting for the host": style.COLOURS["wait for host"],
}


def bench_png(result: Result) -> bytes:
    """The picture as a PNG, 1000 pixels wide."""
    with context(["default", style.STYLE]):
        png = io.BytesIO()
        FigureCanvasAgg(_draw(result)).print_png(png)
    return png.getvalue()


def parts_of(row: Figures) -> dict[str, float]:
    """Milliseconds of each part; together they are the mean step.

    What forward and backward take beyond those of `compute` goes to gradients: they are reduced, cast, copied to the host.
    """
    stall = min(row.stall_ms or 0.0, row.mean_ms)
    passes = min(row.passes_ms, row.mean_ms - stall)
    bare = passes if row.to_compute_ratio is None else min(passes, row.mean_ms / row.to_compute_ratio)
    return dict(zip(PARTS, (bare, passes - bare, row.mean_ms - stall - passes, stall), strict=True))


def _draw(result: Result) -> Figure:
    figures = result.figures
    modes = list(result.measured)
    bars_inches = ROW_INCHES * len(modes) + 0.3
    height = 1.05 + bars_inches + 1.05
    figure = Figure(figsize=(WIDTH_INCHES, height))
    facts = dict(heading(result))
    left = 1.25 / WIDTH_INCHES
    figure.text(left, 1 - 0.15 / height, "Time of a training step", fontsize=14, fontweight="bold", va="top")
    subtitle = f"{facts['Model']}; {facts['Step']}\n{facts['Machine']}"
    figure.text(left, 1 - 0.45 / height, subtitle, fontsize=9, va="top", color="#555555", linespacing=1.4)
    ax = figure.add_axes((left, 1.0 / height, 1 - left - 0.3 / WIDTH_INCHES, bars_inches / height))
    longest = max((row.most_ms for row in figures.values()), default=1.0)
    for place, mode in enumerate(modes):
        if mode not in figures:
            ax.text(0.01 * longest, place, "not run", va="center", color="#777777")
            continue
        row, at = figures[mode], 0.0
        for name, ms in parts_of(row).items():
            ax.barh(place, ms, left=at, height=0.62, color=PARTS[name])
            at += ms
        errors = [[row.mean_ms - row.least_ms], [row.most_ms - row.mean_ms]]
        if row.most_ms > row.least_ms:
            ax.errorbar(row.mean_ms, place, xerr=errors, color=style.LINE_COLOUR, capsize=3, linewidth=1.1)
        ratio = "" if row.to_compute_ratio is None else f"  {row.to_compute_ratio:.2f}x compute"
        ax.text(row.most_ms + 0.012 * longest, place, f"{row.mean_ms:.0f} ms{ratio}", va="center", fontsize=9)
    ax.set_yticks(range(len(modes)), modes)
    ax.set_ylim(len(modes) - 0.5, -0.5)
    ax.set_xlim(0, 1.3 * longest)
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=False, axis="y")
    ax.grid(visible=True, axis="x")
    ax.set_xlabel("ms, mean of a step; lines: least and greatest mean of a repeat")
    for name, colour in PARTS.items():
        ax.barh(0, 0, color=colour, label=name)
    figure.legend(loc="lower left", bbox_to_anchor=(left, 0.05 / height), ncols=len(PARTS), borderaxespad=0)
    return figure
