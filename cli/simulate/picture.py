"""The picture: step time and stall of each method, over how much slower the host is than the device."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.style import context
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from lightning_zenflow.wording import in_words

from ..report import style
from .experiment import METHODS, SYNCHRONOUS, TUNED, WHOLE_MODEL, ZENFLOW, Point, Simulation
from .view import NAMES, PUBLISHED_RATIO, TITLE

COLOURS = {
    SYNCHRONOUS: style.SLOWEST_COLOUR,
    WHOLE_MODEL: style.UPDATE_STALL_COLOUR,
    ZENFLOW: style.DEVICE_COLOUR,
    TUNED: "#0072B2",
}
MARKERS = {SYNCHRONOUS: "s", WHOLE_MODEL: "^", ZENFLOW: "o", TUNED: "D"}

HIDDEN_RATIO = 0.1
"""A stall of no more than this is worth a headline."""

LABEL_DISTANCE = 0.055
"""Between two labels of lines that end close to each other, as a share of the panel's height."""


def picture_png(found: Simulation) -> bytes:
    """The picture as a PNG, 1400 pixels wide and 640 high."""
    with context(["default", style.STYLE]):
        png = io.BytesIO()
        FigureCanvasAgg(_draw(found)).print_png(png)
    return png.getvalue()


def _draw(found: Simulation) -> Figure:
    figure = Figure(figsize=(14.0, 6.4))
    left, right = figure.subplots(1, 2)
    figure.subplots_adjust(left=0.05, right=0.88, top=0.82, bottom=0.235, wspace=0.38)
    figure.text(0.05, 0.965, _headline(found), fontsize=14, fontweight="bold", va="top")
    figure.text(0.05, 0.91, TITLE, fontsize=10, va="top", color="#555555")
    left.set_yscale("log")
    _lines(left, found, lambda point: point.step_secs / point.compute_secs)
    left.axhline(1, color="#999999", linewidth=1)
    left.set_title("Step time, as a multiple of forward and backward")
    low, high = left.get_ylim()
    left.yaxis.set_major_locator(FixedLocator([tick for tick in (1, 2, 5, 10, 20, 50, 100) if low < tick < high]))
    left.yaxis.set_minor_locator(NullLocator())
    left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    _lines(right, found, lambda point: point.stall_ratio)
    right.set_ylim(-0.02, 1.02)
    right.set_title("Stall: share of the step without computing")
    right.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    for ax in (left, right):
        _label_ends(ax, found)
    figure.text(0.05, 0.025, _caption(found), fontsize=9, va="bottom", linespacing=1.5)
    return figure


def _lines(ax: Axes, found: Simulation, value: Callable[[Point], float]) -> None:
    ratios = found.ratios
    if PUBLISHED_RATIO in ratios:
        ax.axvline(PUBLISHED_RATIO, color="#BBBBBB", linewidth=1, linestyle=":")
        ax.text(
            *(0.96 * PUBLISHED_RATIO, 0.02),
            "published case",
            transform=ax.get_xaxis_transform(),
            rotation=90,
            ha="right",
            va="bottom",
            fontsize=9,
            color="#555555",
        )
    for method in METHODS:
        points = [found.point(method, ratio) for ratio in ratios]
        values = [value(point) for point in points]
        ax.plot(ratios, values, color=COLOURS[method], marker=MARKERS[method], ms=4.5, linewidth=1.8, label=method)
    ax.set_xscale("log")
    ax.set_xlim(ratios[0] / 1.15, ratios[-1] * 1.15)
    ax.xaxis.set_major_locator(FixedLocator(_apart(ratios)))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda ratio, _: f"{ratio:g}"))
    ax.set_xlabel("Host's time for one update of everything, as a multiple of forward and backward")


def _apart(ratios: Sequence[float]) -> list[float]:
    """As many of the ratios as can stand beside each other on a logarithmic axis."""
    kept: list[float] = []
    for ratio in ratios:
        if not kept or ratio >= 1.25 * kept[-1]:
            kept.append(ratio)
    return kept


def _label_ends(ax: Axes, found: Simulation) -> None:
    """Names each line at its end; names that would lie over each other move apart."""
    lines = [line for line in ax.get_lines() if line.get_label() in METHODS]
    to_axes = ax.transData + ax.transAxes.inverted()
    ends = [(float(to_axes.transform(np.asarray(line.get_xydata())[-1])[1]), line) for line in lines]
    ends.sort(key=lambda end: end[0])
    places = spread([end for end, _ in ends], LABEL_DISTANCE)
    for place, (_, line) in zip(places, ends, strict=True):
        method = str(line.get_label())
        interval = {TUNED: "U auto", SYNCHRONOUS: ""}.get(method, f"U = {found.update_interval}")
        named = f"{NAMES[method].partition(',')[0]}  {interval}"
        ax.text(1.015, place, named, transform=ax.transAxes, color=line.get_color(), va="center", fontweight="bold")


def spread(places: Sequence[float], distance: float) -> list[float]:
    """Ascending places moved so that neighbours are at least `distance` apart, about where they were and at most 1."""
    moved = list(places)
    for _ in range(100):
        moved[-1] = min(moved[-1], 1.0)
        for low in range(len(moved) - 1):
            lack = distance - (moved[low + 1] - moved[low])
            if lack > 0:
                moved[low] -= lack / 2
                moved[low + 1] += lack / 2
    return moved


def _headline(found: Simulation) -> str:
    """Up to which ratio ZenFlow hides the host, or what it comes to where it never does."""
    best = [min((found.point(name, ratio) for name in (ZENFLOW, TUNED)), key=_stall) for ratio in found.ratios]
    hidden = [point for point in best if point.stall_ratio <= HIDDEN_RATIO]
    point = hidden[-1] if hidden else best[0]
    return (
        f"Simulated device, real host: at ratio {point.ratio:g} ZenFlow stalls {point.stall_ratio:.0%} of the time,"
        f" synchronous offload {found.point(SYNCHRONOUS, point.ratio).stall_ratio:.0%}"
    )


def _stall(point: Point) -> float:
    return point.stall_ratio


def _caption(found: Simulation) -> str:
    cores = len(found.workload.host_cores)
    intervals = ", ".join(f"{found.point(TUNED, ratio).update_interval} at {ratio:g}" for ratio in found.ratios)
    host = (
        f"Host: {cores} core{'s' if cores > 1 else ''}, {in_words(found.host_update_secs)} for one update of"
        f" {found.workload.numel:,} parameters. Link: {found.link_bandwidth / 1e9:.3g} GB/s in each direction, simulated."
    )
    chosen = f"U auto, as the auto-tuner's controller chose it by ratio: {intervals}."
    lines = [host, chosen]
    if PUBLISHED_RATIO in found.ratios:
        lines.append(
            "Published case: Llama-2-7B on four A100s, 0.5 s of computing and over 7 s a step with ZeRO-Offload (arXiv"
            " 2505.12242). The ratio is the published one, the times are this host's."
        )
    return "\n".join(lines)
