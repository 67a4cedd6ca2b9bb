"""The picture: one panel for everything that grows, against what it grows with."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patheffects import Normal, Stroke
from matplotlib.style import context
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from ..report import style
from ..report.words import count_text
from .results import Growth

SIZE_INCHES = (14.0, 8.2)
ACCUMULATE_COLOUR, UPDATE_COLOUR = style.COLOURS["accumulate"], style.COLOURS["update"]
IDEAL_COLOUR = style.OTHER_COLOUR
MARKS: dict[str, Any] = {"marker": "o", "markersize": 5, "linewidth": 1.8}


def picture_png(found: Growth) -> bytes:
    """The picture as a PNG, 1400 by 820 pixels."""
    with context(["default", style.STYLE]):
        figure = Figure(figsize=SIZE_INCHES)
        axes = figure.subplots(2, 3)
        draws: Sequence[Callable[[Axes, Growth], None]] = (_sizes, _tensors, _ranks, _speed_up, _share, _traffic)
        for ax, draw in zip(axes.flat, draws, strict=True):
            draw(ax, found)
        title = f"How ZenFlow's own cost grows: bf16, {found.available_cores} cores, PyTorch {found.torch}"
        figure.suptitle(title, x=0.052, y=0.975, ha="left", fontsize=14, fontweight="bold")
        figure.subplots_adjust(left=0.055, right=0.985, top=0.88, bottom=0.075, wspace=0.24, hspace=0.42)
        png = io.BytesIO()
        FigureCanvasAgg(figure).print_png(png)
    return png.getvalue()


def _x(ax: Axes, values: Sequence[int], label: str, base: float = 10) -> None:
    """A logarithmic axis with a tick at each point."""
    ax.set_xscale("log", base=base)
    ax.xaxis.set_major_locator(FixedLocator(sorted(set(values))))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))
    margin = (max(values) / min(values)) ** 0.06 if max(values) > min(values) else 1.5
    ax.set_xlim(min(values) / margin, max(values) * margin)
    ax.set_xlabel(label)


def _tick(value: float) -> str:
    return (
        f"{value / 1e6:.2g} M"
        if value < 1e8 and value >= 5e5
        else f"{value / 1e6:.0f} M"
        if value >= 1e8
        else f"{value:,.0f}"
    )


def _label(ax: Axes, x: float, y: float, text: str) -> None:
    halo = [Stroke(linewidth=3, foreground="white"), Normal()]  # lines pass behind
    ax.annotate(text, (x, y), (0, 7), textcoords="offset points", ha="center", fontsize=8.5, path_effects=halo)


def _from_zero(ax: Axes, values: Sequence[float]) -> None:
    """Room for the labels above; below zero only where noise goes there."""
    top = max(max(values), 0.0) * 1.2 or 1.0
    ax.set_ylim(min(0.0, 1.2 * min(values)), top)


def _sizes(ax: Axes, found: Growth) -> None:
    x = [point.numel for point in found.sizes]
    y = [1e9 * point.per_parameter_secs for point in found.sizes]
    ax.plot(x, y, color=style.COLOURS["optimizer"], **MARKS)
    for at, value in zip(x, y, strict=True):
        _label(ax, at, value, f"{value:.2f}")
    ax.set_title("Beyond forward and backward, per parameter")
    ax.set_ylabel("ns a parameter")
    _x(ax, x, f"parameters, in {found.sizes[0].tensors} tensors")
    _from_zero(ax, y)


def _tensors(ax: Axes, found: Growth) -> None:
    x = [point.tensors for point in found.tensors]
    y = [1e3 * point.overhead_secs for point in found.tensors]
    ax.plot(x, y, color=style.COLOURS["launch"], **MARKS)
    for at, value in zip(x, y, strict=True):
        _label(ax, at, value, f"{value:.1f}" if value < 100 else f"{value:.0f}")
    ax.set_title(f"The same in more tensors: {1e6 * found.per_tensor_secs:.0f} µs a tensor")
    ax.set_ylabel("ms a step")
    _x(ax, x, f"tensors, {count_text(found.tensors[0].numel)} parameters in all")
    _from_zero(ax, y)


def _ranks(ax: Axes, found: Growth) -> None:
    x = [point.ranks for point in found.ranks]
    step = [1e3 * point.step_secs for point in found.ranks]
    plain = [1e3 * point.plain_secs for point in found.ranks]
    ax.plot(x, step, color=style.COLOURS["optimizer"], label="step", **MARKS)
    ax.plot(x, plain, color=style.COLOURS["forward and backward"], label="forward and backward alone", **MARKS)
    for at, value in zip(x, step, strict=True):
        _label(ax, at, value, f"{value:.0f}")
    ax.set_title(f"Ranks that share {found.available_cores} cores")
    ax.set_ylabel("ms a step")
    ax.legend(loc="upper left")
    _x(ax, x, f"ranks, {count_text(found.ranks[0].numel)} parameters", base=2)
    _from_zero(ax, [*step, *plain])


def _speed_up(ax: Axes, found: Growth) -> None:
    x = [cores for cores, _, _ in found.speed_ups]
    ax.plot(x, x, color=IDEAL_COLOUR, linestyle="--", label="as many times as cores")
    copy = [point.copy_bandwidth / found.cores[0].copy_bandwidth for point in found.cores]
    ax.plot(x, copy, color=style.OTHER_COLOUR, label="a copy", **MARKS)
    ax.plot(x, [ratio for _, ratio, _ in found.speed_ups], color=ACCUMULATE_COLOUR, label="accumulate", **MARKS)
    ax.plot(x, [ratio for _, _, ratio in found.speed_ups], color=UPDATE_COLOUR, label="update", **MARKS)
    ax.set_title("Host passes on more cores")
    ax.set_ylabel("times faster than on one")
    ax.legend(loc="upper left")
    _x(ax, x, "cores", base=2)
    ax.set_ylim(0, max(*x, *copy, *(max(ratios) for _, *ratios in found.speed_ups)) * 1.35)


def _share(ax: Axes, found: Growth) -> None:
    x = [point.cores for point in found.cores]
    shares = (
        ("accumulate", ACCUMULATE_COLOUR, [100 * point.accumulate_share_ratio for point in found.cores]),
        ("update", UPDATE_COLOUR, [100 * point.update_share_ratio for point in found.cores]),
    )
    for name, colour, y in shares:
        ax.plot(x, y, color=colour, label=name, **MARKS)
    ax.axhline(100, color=IDEAL_COLOUR, linestyle="--", label="a copy on the same cores")
    ax.set_title("Their bytes a second, as a share of a copy's")
    ax.set_ylabel("%")
    ax.legend(loc="lower left")
    _x(ax, x, "cores", base=2)
    ax.set_ylim(0, 1.15 * max(100, *(max(y) for _, _, y in shares)))


def _traffic(ax: Axes, found: Growth) -> None:
    x = [point.ranks for point in found.ranks]
    reduced = [point.reduced_bytes / 1e6 for point in found.ranks]
    gathered = [point.gathered_bytes / 1e6 for point in found.ranks]
    ax.axhline(found.ranks[0].weights_bytes / 1e6, color=IDEAL_COLOUR, linestyle="--", label="all weights")
    ax.plot(x, reduced, color=style.COLOURS["gradient norm"], label="gradients, summed", **MARKS)
    ax.plot(x, gathered, color=style.COLOURS["exchange"], label="what changed, gathered", **MARKS)
    for at, value in zip(x, gathered, strict=True):
        _label(ax, at, value, f"{value:.1f}")
    ax.set_title("Between ranks, in a step")
    ax.set_ylabel("MB of a rank")
    ax.legend(loc="center right")
    _x(ax, x, f"ranks, {count_text(found.ranks[0].numel)} parameters", base=2)
    _from_zero(ax, [*reduced, *gathered, found.ranks[0].weights_bytes / 1e6])
