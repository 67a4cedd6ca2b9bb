"""How the figure looks: colours that colour-blind people tell apart, and matplotlib's settings."""

from __future__ import annotations

from typing import Any

# Okabe and Ito, Color Universal Design (2008), with three of Paul Tol's muted colours for what is short or rare. The parts
# of a step have the colours of the work that causes them.
COLOURS = {
    "forward and backward": "#56B4E9",
    "gradient norm": "#000000",
    "select": "#CC79A7",
    "launch": "#999933",
    "optimizer": "#0072B2",
    "wait for host": "#E69F00",
    "copy block": "#332288",
    "write weights": "#F0E442",
    "exchange": "#8C8C8C",
    "settle": "#882255",
    "accumulate": "#009E73",
    "update": "#D55E00",
}
"""Colour of each name a span can have, in the order of the legend."""

OTHER_COLOUR = "#C8C8C8"
DEVICE_COLOUR, UPDATE_STALL_COLOUR, SELECT_STALL_COLOUR = "#56B4E9", "#E69F00", "#CC79A7"
SLOWEST_COLOUR, LINE_COLOUR, BUDGET_COLOUR = "#666666", "#222222", "#B00020"
UPDATE_INTERVAL_COLOUR, SELECT_INTERVAL_COLOUR = "#D55E00", "#8E3A6B"

STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so the figure is the same everywhere
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#666666",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "legend.frameon": False,
    "legend.fontsize": 9,
    "legend.handlelength": 2.0,
    "legend.handletextpad": 0.6,
    "legend.columnspacing": 1.5,
    "text.parse_math": False,  # a dollar sign in the record is a dollar sign
    "figure.dpi": 100,
    "savefig.dpi": 100,
    "patch.linewidth": 0,
}
