"""What the runs of `accuracy.py` come to: means and spreads over seeds, differences of pairs, tables and curves."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from examples.accuracy import Result

BASELINE = "AdamW"
LOWER_IS_BETTER = {"loss"}


@dataclass(frozen=True)
class Row:
    """One method on one task at one rate, over the seeds that it has.

    Attributes:
        task: Its task.
        method: Its name.
        lr: Its rate.
        figure: Which of the figures of its runs.
        seeds: How many.
        mean: Over them.
        spread: Standard deviation over them; NaN for one.
        difference: Mean over seeds of its figure less the baseline's with the same seed; NaN without any pair.
        error: Standard error of that difference; NaN for fewer than two pairs.
    """

    task: str
    method: str
    lr: float
    figure: str
    seeds: int
    mean: float
    spread: float
    difference: float
    error: float


def sizes_apart(results: Sequence[Result]) -> list[Result]:
    """The results, with the size in the name of each task that was run in several: a short run and a long one are no pair."""
    sizes: dict[str, set[int]] = {}
    for one in results:
        sizes.setdefault(one.run.task, set()).add(one.run.size)
    return [
        one
        if len(sizes[one.run.task]) == 1
        else replace(one, run=replace(one.run, task=f"{one.run.task}, size {one.run.size}"))
        for one in results
    ]


def rows_of(results: Sequence[Result]) -> list[Row]:
    """A row for each task, figure, rate and method, in the order in which they first appear."""
    values: dict[tuple[str, str, float, str], dict[int, float]] = {}
    for result in sizes_apart(results):
        run = result.run
        for figure, value in result.figures.items():
            values.setdefault((run.task, figure, run.lr, run.method), {})[run.seed] = value
    rows = []
    for (task, figure, lr, method), by_seed in values.items():
        baseline = values.get((task, figure, lr, BASELINE), {})
        differences = [value - baseline[seed] for seed, value in by_seed.items() if seed in baseline]
        rows.append(
            Row(
                task,
                method,
                lr,
                figure,
                seeds=len(by_seed),
                mean=statistics.fmean(by_seed.values()),
                spread=_deviation(list(by_seed.values())),
                difference=statistics.fmean(differences) if differences else math.nan,
                error=_deviation(differences) / math.sqrt(max(1, len(differences))),
            )
        )
    return rows


def _deviation(values: Sequence[float]) -> float:
    # Of a run that diverged there is no spread, and stdev() fails on it.
    return statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else math.nan


def best_rates(rows: Sequence[Row]) -> list[Row]:
    """Of each task, figure and method the row of its own best rate."""
    best: dict[tuple[str, str, str], Row] = {}
    for row in rows:
        key = row.task, row.figure, row.method
        if key not in best or _cost(row) < _cost(best[key]):
            best[key] = row
    return list(best.values())


def _cost(row: Row) -> float:
    """Lower is better; a rate at which a run diverged is the worst."""
    if math.isnan(row.mean):
        return math.inf
    return row.mean if row.figure in LOWER_IS_BETTER else -row.mean


def tables(rows: Sequence[Row]) -> str:
    """Markdown: all rates, then each method at its own best rate where there are several."""
    parts = []
    for task, figure in dict.fromkeys((row.task, row.figure) for row in rows):
        own = [row for row in rows if (row.task, row.figure) == (task, figure)]
        parts.append(f"## {task}: {figure}\n\n{_table(own, paired=True)}")
        if len({row.lr for row in own}) > 1:
            parts.append(f"Each method at its own best rate:\n\n{_table(best_rates(own), paired=False)}")
    return "\n".join(parts)


def _table(rows: Sequence[Row], *, paired: bool) -> str:
    baseline = next((row.mean for row in rows if row.method == BASELINE), math.nan)
    lines = ["| method | rate | mean | spread | less AdamW's | seeds |", "|---|---|---|---|---|---|"]
    for row in sorted(rows, key=lambda row: row.lr):
        if row.method == BASELINE:
            less = ""
        elif paired:
            less = f"{row.difference:+.4f} ± {row.error:.4f}"
        else:
            less = f"{row.mean - baseline:+.4f}"
        lines.append(f"| {row.method} | {row.lr:g} | {row.mean:.4f} | {row.spread:.4f} | {less} | {row.seeds} |")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Column:
    """What a column of an overview shows.

    Attributes:
        task: Of its runs.
        figure: Of what they came to.
        lr: Their rate.
        title: Above it.
    """

    task: str
    figure: str
    lr: float
    title: str


def overview(rows: Sequence[Row], columns: Sequence[Column], methods: Sequence[str]) -> str:
    """Markdown: a line for each method; each cell the mean over seeds and, in brackets, the paired difference to the baseline.

    Differences are with their standard error. Methods without any run are left out.
    """
    found = {(row.task, row.figure, row.lr, row.method): row for row in rows}
    lines = [
        f"| method | {' | '.join(column.title for column in columns)} | seeds |",
        "|---" * (len(columns) + 2) + "|",
    ]
    for method in methods:
        own = [found.get((column.task, column.figure, column.lr, method)) for column in columns]
        seeds = sorted({row.seeds for row in own if row is not None})
        if seeds:
            counts = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
            lines.append(f"| {method} | {' | '.join(_cell(row) for row in own)} | {counts} |")
    return "\n".join(lines) + "\n"


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    if row.method == BASELINE:
        return f"{row.mean:.4f}"
    return f"{row.mean:.4f} ({row.difference:+.4f} ± {row.error:.4f})"


def write_report(results: Sequence[Result], folder: Path, curves: Sequence[str] | None = None) -> None:
    """Writes `accuracy.md` and `accuracy.png`, the latter of the methods in `curves` alone if they are given.

    Raises:
        ValueError: There are no results, or none of the methods in `curves`.
    """
    if not results:
        raise ValueError(
            f"`output` must be a folder with runs.jsonl, got {str(folder)!r}. Run `pretrain` or `finetune` first."
        )
    drawn = [one for one in results if curves is None or one.run.method in curves]
    if not drawn:
        methods = list(dict.fromkeys(one.run.method for one in results))
        raise ValueError(f"`curves` must name methods with runs, got {curves}. There are runs of {', '.join(methods)}.")
    (folder / "accuracy.md").write_text(tables(rows_of(results)))
    _draw(sizes_apart(drawn), folder / "accuracy.png")


def _draw(results: Sequence[Result], path: Path) -> None:
    """A panel for each task and rate: the course of the loss, a band from the lowest to the highest seed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys((result.run.task, result.run.lr) for result in results))
    columns = min(3, len(panels))
    figure = Figure(figsize=(5 * columns, 3.6 * math.ceil(len(panels) / columns)), layout="constrained")
    FigureCanvasAgg(figure)
    methods = list(dict.fromkeys(result.run.method for result in results))
    for number, (task, lr) in enumerate(panels, start=1):
        axes = figure.add_subplot(math.ceil(len(panels) / columns), columns, number)
        for place, method in enumerate(methods):
            curves = [one.curve for one in results if (one.run.task, one.run.lr, one.run.method) == (task, lr, method)]
            if not curves:
                continue
            steps = list(zip(*curves, strict=False))
            shares = [(at + 0.5) / len(steps) for at in range(len(steps))]
            colour = f"C{place}"
            axes.plot(shares, [statistics.fmean(step) for step in steps], color=colour, label=method)
            lowest, highest = [min(step) for step in steps], [max(step) for step in steps]
            axes.fill_between(shares, lowest, highest, alpha=0.15, color=colour)
        axes.set_title(f"{task}, rate {lr:g}")
        axes.set_xlabel("share of the run")
        axes.set_ylabel("training loss")
        axes.set_yscale("log")
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=110)
