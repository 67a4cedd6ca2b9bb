"""The panels of the figure over time: what device and host do in a few steps."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from lightning_zenflow.wording import in_words

from . import style
from .lanes import Window
from .record import LANES
from .words import drawable

LABEL_INCHES = 0.75
"""Room that the number of a step takes."""


def draw_window(ax: Axes, window: Window, ranks: list[int], width_inches: float, labelled: bool) -> None:
    """Draws one window with two lanes a rank, the first rank on top; `labelled` writes the names of the lanes."""
    rows = [(rank, lane) for rank in ranks for lane in LANES]
    scale, unit = (1e3, "ms") if window.secs < 3 else (1.0, "s")
    for row, (rank, lane) in enumerate(rows):
        bars = [bar for bar in window.bars if (bar.rank, bar.lane) == (rank, lane)]
        # The longest first, so that a wait within the work around it stays in sight.
        for bar in sorted(bars, key=lambda bar: -bar.secs):
            ax.broken_barh(
                [(bar.start_secs * scale, bar.secs * scale)],
                (row - 0.38, 0.76),
                facecolor=style.COLOURS.get(bar.name, style.OTHER_COLOUR),
                hatch="///" if bar.name == "wait for host" else None,
                edgecolor="white",
                linewidth=0,
            )
    labelled_secs = -window.secs
    for step, begin in window.begins:
        ax.axvline(begin * scale, color="#777777", linewidth=0.8, zorder=0.5)
        if begin - labelled_secs < LABEL_INCHES / width_inches * window.secs:
            continue  # would lie on the label before it
        labelled_secs = begin
        ax.annotate(
            f"step {step}",
            (begin * scale, 1.0),
            (2, 1),
            xycoords=ax.get_xaxis_transform(),
            textcoords="offset points",
            fontsize=8,
            color="#555555",
        )
    for left, right, secs in window.cuts:
        ax.axvspan(left * scale, right * scale, facecolor="#F1F1F1", hatch="xx", edgecolor="#CCCCCC", zorder=5)
        middle = (left + right) / 2 * scale
        text, box = f"pause of {in_words(secs)}\nleft out", {"facecolor": "white", "alpha": 0.85, "pad": 2}
        place: dict[str, Any] = {"rotation": 90, "ha": "center", "va": "center"}
        ax.text(middle, len(rows) / 2 - 0.5, text, fontsize=8, zorder=6, bbox=box, **place)
    ax.set_xlim(0, window.secs * scale)
    ax.set_ylim(len(rows) - 0.5, -0.5)
    names = [lane if len(ranks) == 1 else f"rank {rank} {lane}" for rank, lane in rows]
    ax.set_yticks(range(len(rows)), names if labelled else [""] * len(rows))
    ax.tick_params(axis="y", length=0)
    ax.grid(False)
    ax.set_title(window.title, pad=16)
    ax.set_xlabel(f"{unit} from the start of step {window.begins[0][0]}")


def legend_of(windows: list[Window]) -> list[Patch]:
    """A patch for each kind of work that occurs: device first, names that nobody knows last."""
    present = {bar.name: bar.lane for window in windows for bar in window.bars}
    names = [name for name in style.COLOURS if name in present] + sorted(present.keys() - style.COLOURS.keys())
    return [
        Patch(
            facecolor=style.COLOURS.get(name, style.OTHER_COLOUR),
            hatch="///" if name == "wait for host" else None,
            edgecolor="white",
            label=drawable(name, 40) + (" (host)" if present[name] == "host" else ""),
        )
        for name in names
    ]
