"""The page: the headline numbers, the figure, and every decision with its reason, in one file without anything outside."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable
from html import escape
from typing import Any

from lightning_zenflow.wording import in_words

from .record import Decision, Run
from .series import Headline, Series, since_last_change
from .words import count_text, interval_text, percent_text, what_ran

MOST_DECISION_CHARACTERS = 1_200_000
"""Of a run of days, only the latest decisions fit into a page that a browser and a mailbox take."""

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1400px; margin: 1.5em auto; padding: 0 1em; }
h1 { font-size: 1.5em; margin-bottom: 0; } h2 { font-size: 1.15em; margin-top: 1.8em; } p { margin: .4em 0; }
table { border-collapse: collapse; } th, td { padding: .25em .9em .25em 0; text-align: left; vertical-align: top; }
tr { border-bottom: 1px solid #e4e4e4; } td.number { text-align: right; font-variant-numeric: tabular-nums; }
td:not(:last-child), #headline td { white-space: nowrap; }
img { max-width: 100%; height: auto; } small, .muted { color: #666; } summary { cursor: pointer; }
.note { background: #fff6dd; padding: .3em .7em; } .over { color: #b00020; font-weight: bold; }
"""

_HOW_TO_READ = """
<details><summary>How to read the picture</summary>
<p><b>Step time.</b> Blue is the time in which the device computes. Orange is update stall: the training process waits for
a block of weights that the host has not finished. Pink is select stall: it waits in a re-selection, a barrier at which
other columns move to the device. With several ranks the stall is that of the rank that waits longest, since the others
wait for it.</p>
<p><b>Stall.</b> The same as a share of the time in steps; pauses between steps do not count. The line is the share over
whole selection intervals and is what the budget is about; a single re-selection stands above it by nature.</p>
<p><b>Intervals.</b> Every weight that is left to the host is updated once in <i>update interval</i> steps; columns are
selected anew once in <i>select interval</i> steps. The numbers stand for the decisions in the table below.</p>
<p><b>Lanes.</b> What device and host do in a few steps. A good picture has no hatched wait, and a host that is nearly
always busy while the device computes on. White is time for which nothing was recorded.</p></details>
"""


def page_html(run: Run, series: Series, png: bytes) -> str:
    """The whole page as one HTML document; `png` is the figure."""
    picture = base64.b64encode(png).decode()
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in run.notes)
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>ZenFlow report</title><style>{_STYLE}</style></head><body>
<h1>ZenFlow report</h1><p class="muted">{escape(what_ran(run))}</p>{notes}
{_headline_table(run, series)}
<h2>Where the time went</h2>
<img alt="{escape(_description(run, series))}" src="data:image/png;base64,{picture}">
{_HOW_TO_READ}
<h2>Decisions of the tuner</h2>{_decisions(run)}
<h2>Settings</h2>{_table(run.main.header["settings"].items())}
<h2>Versions</h2>{_table(run.main.header["versions"].items())}
<p class="muted">Record: {escape(", ".join(rank.path.name for rank in run.ranks))}</p>
</body></html>
"""


def _headline_table(run: Run, series: Series) -> str:
    columns = {"All steps shown": series}
    settled = since_last_change(run, series)
    if settled is not None:
        columns["Since the last change"] = settled
    numbers = [Headline.of(part) for part in columns.values()]
    several = len(run.ranks) > 1
    rows: dict[str, list[str]] = {
        "Steps": [f"{part.step[0]:,} to {part.step[-1]:,}" for part in columns.values()],
        "Median step": [in_words(n.median_step_secs) for n in numbers],
        "Slowest step": [f"{in_words(n.slowest_step_secs)} (step {n.slowest_step:,})" for n in numbers],
        "Time in steps": [in_words(n.in_steps_secs) for n in numbers],
        "Stall, share of the time" + " (the rank that waits longest)" * several: [
            _over_budget(n.stall_ratio, run) for n in numbers
        ],
        "of it update stall": [percent_text(n.update_stall_ratio) for n in numbers],
        "of it select stall": [percent_text(n.select_stall_ratio) for n in numbers],
        "Host busy, share of the time" + " (the busiest)" * several: [percent_text(n.host_busy_ratio) for n in numbers],
        "To the host, mean of a step": [count_text(n.to_host_bytes, "B") for n in numbers],
        "To the device, mean of a step": [count_text(n.to_device_bytes, "B") for n in numbers],
        "Re-selections": [f"{part.reselected.sum():,}" for part in columns.values()],
        **_of_the_run(run, series),
    }
    head = "".join(f"<th>{name}</th>" for name in columns)
    body = "".join(
        f"<tr><th>{name}</th>"
        + "".join(f'<td class="number" colspan="{len(columns) // len(cells)}">{cell}</td>' for cell in cells)
        + "</tr>"
        for name, cells in rows.items()
    )
    return f'<table id="headline"><tr><th></th>{head}</tr>{body}</table>'


def _of_the_run(run: Run, series: Series) -> dict[str, list[str]]:
    """Rows of which there is only one number."""
    last = run.main.steps[-1]
    pauses = series.gap_secs[series.gap_secs > series.longest_gap_secs]
    rows = {
        "Intervals at the end": [f"update every {last.update_interval}, select {interval_text(last.select_interval)}"],
        "Pauses between steps": [f"{len(pauses)}, {in_words(float(pauses.sum()))} together" if len(pauses) else "none"],
        "Skipped steps so far": [f"{last.skipped_steps:,}"],
    }
    if run.stall_budget_ratio is not None:
        rows["Stall budget"] = [percent_text(run.stall_budget_ratio)]
    odd = sum(not math.isfinite(step.grad_norm) for step in run.main.steps)
    if odd:
        rows["Steps whose gradient norm is not finite"] = [f'<span class="over">{odd:,}</span>']
    return rows


def _over_budget(ratio: float, run: Run) -> str:
    budget = run.stall_budget_ratio
    text = percent_text(ratio)
    return f'<span class="over">{text}, over the budget</span>' if budget is not None and ratio > budget else text


def _description(run: Run, series: Series) -> str:
    """What the picture shows, for those who cannot see it."""
    numbers = Headline.of(series)
    return (
        f"Step time, stall share and intervals over steps {series.step[0]} to {series.step[-1]}, and device and host over"
        f" time. Median step {in_words(numbers.median_step_secs)}, stall {percent_text(numbers.stall_ratio)},"
        f" host busy {percent_text(numbers.host_busy_ratio)}, {len(run.changes)} changes of the intervals."
    )


def _decisions(run: Run) -> str:
    kept = [decision for decision in run.main.decisions if decision.number is None]
    if not run.main.decisions:
        return "<p>None: the intervals are fixed, or the run ended before the first one.</p>"
    changes = _decision_table(run.changes, "changes") if run.changes else "<p>No interval was changed.</p>"
    times = "Once" if len(kept) == 1 else f"{len(kept):,} times"
    return changes + (
        f"<details><summary>{times} kept as it was</summary>{_decision_table(kept, 'kept')}</details>" if kept else ""
    )


def _decision_table(decisions: list[Decision], name: str) -> str:
    rows: list[str] = []
    room = MOST_DECISION_CHARACTERS
    for decision in reversed(decisions):
        row = _decision_row(decision)
        room -= len(row)
        if room < 0:
            break
        rows.insert(0, row)
    note = f'<p class="note">The last {len(rows):,}; the record has all.</p>' if len(rows) < len(decisions) else ""
    head = "<tr><th>#</th><th>Step</th><th>Update</th><th>Select</th><th>Reason</th></tr>"
    return f'{note}<table id="{name}">{head}{"".join(rows)}</table>'


def _decision_row(decision: Decision) -> str:
    window = ", ".join(f"{key} {_value(value)}" for key, value in decision.window.items())
    under = f"<br><small>{escape(window)}</small>" if decision.number is not None and window else ""
    cells = [
        f"<td>{decision.number or ''}</td>",
        f'<td class="number">{decision.step:,}</td>',
        f"<td>every {decision.update_interval}</td>",
        f"<td>{interval_text(decision.select_interval)}</td>",
        f"<td>{escape(decision.reason)}{under}</td>",
    ]
    return f"<tr>{''.join(cells)}</tr>"


def _table(rows: Iterable[tuple[str, Any]]) -> str:
    cells = "".join(f"<tr><th>{escape(str(key))}</th><td>{escape(_value(value))}</td></tr>" for key, value in rows)
    return f"<table>{cells}</table>"


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)
