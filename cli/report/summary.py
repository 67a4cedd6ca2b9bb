"""The summary that `report` prints: what ran and where its time went, in a few lines."""

from __future__ import annotations

from lightning_zenflow.wording import in_words

from .record import Run
from .series import Headline, Series, since_last_change
from .words import drawable, interval_text, percent_text, what_ran


def summary_lines(run: Run, series: Series) -> list[str]:
    """Four or five lines of plain text."""
    numbers, last = Headline.of(series), run.main.steps[-1]
    budget = "" if run.stall_budget_ratio is None else f" (budget {percent_text(run.stall_budget_ratio)})"
    settled = since_last_change(run, series)
    slowest = f"{in_words(numbers.slowest_step_secs)} (step {numbers.slowest_step})"
    steps = f"{numbers.steps:,} in {in_words(numbers.in_steps_secs)}, median {in_words(numbers.median_step_secs)}"
    parts = f"update {percent_text(numbers.update_stall_ratio)}, select {percent_text(numbers.select_stall_ratio)}"
    intervals = f"update every {last.update_interval}, select {interval_text(last.select_interval)}"
    times = {0: "never changed", 1: "changed once"}.get(len(run.changes), f"changed {len(run.changes)} times")
    lines = [
        drawable(what_ran(run)),
        f"Steps:     {steps}, slowest {slowest}",
        f"Stall:     {percent_text(numbers.stall_ratio)} of the time{budget}: {parts}",
        f"Host:      busy {percent_text(numbers.host_busy_ratio)} of the time",
        f"Intervals: {intervals} at the end, {times}",
    ]
    if settled is not None:
        after = Headline.of(settled)
        lines.append(
            f"Since the last change: median step {in_words(after.median_step_secs)}, stall {percent_text(after.stall_ratio)}"
        )
    return lines
