"""The trace: device and host lanes of all ranks for Perfetto (ui.perfetto.dev) or chrome://tracing.

Trace Event Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. A rank is a process,
each of its lanes a thread, an interval or a stall share a counter; times are microseconds from the start of the run.
"""

from __future__ import annotations

import json
import math
from typing import Any

from .record import LANES, Decision, RankRecord, Run, Step
from .series import clock_offset_secs

MOST_EVENTS = 16_000
"""About 2 MB. Of a longer run, the steps around changes and re-selections, the slowest, the first and the last are kept."""

AROUND_STEPS = 8
THREADS = {lane: number for number, lane in enumerate(("steps", *LANES))}

Event = dict[str, Any]


def trace_json(run: Run) -> str:
    """The trace as strict JSON: no NaN, events in the order of time, the names of the lanes first."""
    names: list[Event] = []
    events: list[Event] = []
    kept = _kept_steps(run)
    for rank in run.ranks:
        names += _names(rank)
        events += _rank_events(rank, kept, clock_offset_secs(rank, run.main))
    at = {step.step: step for step in run.main.steps if step.step in kept}
    events += [_change_event(change, at[change.step], run.main.rank) for change in run.changes if change.step in at]
    # Work of before the run, or of a rank whose clock was shifted to the first one's, may lie before its start.
    origin = min(0.0, min((event["ts"] for event in events), default=0.0))
    for event in events:
        event["ts"] = round(event["ts"] - origin, 3)
    # At the same moment the longer event is the outer one.
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    _nest(events)
    header = run.main.header
    about = {"started": str(header.get("started")), "versions": json.dumps(header["versions"])}
    trace = {"displayTimeUnit": "ms", "otherData": about, "traceEvents": names + events}
    return json.dumps(trace, allow_nan=False, separators=(",", ":"))


def _nest(events: list[Event]) -> None:
    """Ends what would reach over the end of the work around it: the viewers drop an event that overlaps half."""
    around: dict[tuple[int, int], list[Event]] = {}
    for event in events:
        if event["ph"] != "X":
            continue
        open_events = around.setdefault((event["pid"], event["tid"]), [])
        while open_events and _end(open_events[-1]) < _end(event):
            before = open_events.pop()
            before["dur"] = round(min(before["dur"], event["ts"] - before["ts"]), 3)
        open_events.append(event)


def _end(event: Event) -> float:
    return round(event["ts"] + event["dur"], 3)


def _kept_steps(run: Run) -> set[int]:
    """The steps that the trace shows: all, or those of a long run at which somebody may want to look."""
    steps = run.main.steps
    spans = max(1.0, sum(len(step.spans) for rank in run.ranks for step in rank.steps) / len(steps))
    room = max(1, int(MOST_EVENTS / (spans + 2 * len(run.ranks))))
    if len(steps) <= room:
        return {step.step for rank in run.ranks for step in rank.steps}
    numbers = [step.step for step in steps]
    around = [near for change in run.changes for near in range(change.step - AROUND_STEPS, change.step + AROUND_STEPS)]
    slowest = [step.step for step in sorted(steps, key=lambda step: -step.step_secs)[: room // 8]]
    selections = [step.step + near for step in steps if step.reselected for near in (-1, 0, 1)]
    wanted = [
        *numbers[: room // 8],
        *numbers[-room // 4 :],
        *_thinned(around, room // 4),
        *(step + near for step in slowest for near in (0, 1)),
        *_thinned(selections, room // 4),
        *reversed(numbers),
    ]
    known = set(numbers)
    return set(list(dict.fromkeys(step for step in wanted if step in known))[:room])


def _thinned(steps: list[int], most: int) -> list[int]:
    """At most `most` of `steps`, spread evenly over them."""
    return steps[:: math.ceil(len(steps) / most)] if len(steps) > most > 0 else steps


def _names(rank: RankRecord) -> list[Event]:
    label = f"rank {rank.rank} ({rank.header.get('device', '?')})"
    process: Event = {"ph": "M", "pid": rank.rank, "tid": 0, "name": "process_name", "args": {"name": label}}
    order: Event = {
        "ph": "M",
        "pid": rank.rank,
        "tid": 0,
        "name": "process_sort_index",
        "args": {"sort_index": rank.rank},
    }
    threads = []
    for lane, thread in THREADS.items():
        about: Event = {"ph": "M", "pid": rank.rank, "tid": thread}
        threads.append({**about, "name": "thread_name", "args": {"name": lane}})
        threads.append({**about, "name": "thread_sort_index", "args": {"sort_index": thread}})
    return [process, order, *threads]


def _rank_events(rank: RankRecord, kept: set[int], ahead_secs: float) -> list[Event]:
    events: list[Event] = []
    intervals: tuple[int, int | None] | None = None
    skipped: list[Step] = []
    for step in rank.steps:
        if step.step not in kept:
            skipped.append(step)
            continue
        if skipped:
            events.append(_left_out(rank.rank, skipped, ahead_secs))
            skipped = []
        events.append(_step_event(rank.rank, step, ahead_secs))
        for span in step.spans:
            thread = THREADS[span.lane]
            events.append(_work(rank.rank, thread, span.name, span.start_secs - ahead_secs, span.secs))
        begin = step.begin_secs - ahead_secs
        events.append(_counter(rank.rank, "stall share, %", begin, round(100 * step.stall_ratio, 2)))
        if intervals != (step.update_interval, step.select_interval):
            intervals = step.update_interval, step.select_interval
            events.append(_counter(rank.rank, "update interval, steps", begin, step.update_interval))
            events.append(_counter(rank.rank, "select interval, steps", begin, step.select_interval or 0))
    if skipped:
        events.append(_left_out(rank.rank, skipped, ahead_secs))
    return events


def _step_event(rank: int, step: Step, ahead_secs: float) -> Event:
    name = f"step {step.step}" + (", re-selection" if step.reselected else "")
    event = _work(rank, THREADS["steps"], name, step.begin_secs - ahead_secs, step.step_secs)
    # Strict JSON has no NaN, and a gradient that is not finite is what somebody may be looking for.
    norm = step.grad_norm if math.isfinite(step.grad_norm) else str(step.grad_norm)
    event["args"] = {
        "update stall, ms": round(1e3 * step.update_stall_secs, 3),
        "select stall, ms": round(1e3 * step.select_stall_secs, 3),
        "gradient norm": norm,
        "skipped so far": step.skipped_steps,
    }
    return event


def _left_out(rank: int, steps: list[Step], ahead_secs: float) -> Event:
    begin, end = steps[0].begin_secs, steps[-1].begin_secs + steps[-1].step_secs
    name = f"steps {steps[0].step} to {steps[-1].step} left out; --steps shows them"
    return _work(rank, THREADS["steps"], name, begin - ahead_secs, end - begin)


def _change_event(change: Decision, step: Step, rank: int) -> Event:
    ts = (step.begin_secs + step.step_secs) * 1e6
    about: Event = {"ph": "i", "s": "p", "pid": rank, "tid": THREADS["steps"], "ts": ts}
    return {**about, "name": f"change {change.number}", "args": {"reason": change.reason}}


def _work(rank: int, thread: int, name: str, start_secs: float, secs: float) -> Event:
    # From both ends rounded, so that neighbours meet and never overlap.
    start, stop = round(start_secs * 1e6, 3), round((start_secs + secs) * 1e6, 3)
    dur = round(max(0.0, stop - start), 3)
    return {"ph": "X", "pid": rank, "tid": thread, "ts": start, "dur": dur, "name": name}


def _counter(rank: int, name: str, begin_secs: float, value: float) -> Event:
    return {"ph": "C", "pid": rank, "ts": begin_secs * 1e6, "name": name, "args": {"value": value}}
