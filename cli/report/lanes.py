"""Which steps the lanes show, and what lies in them: the usual picture, and a re-selection."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .record import RankRecord, Run
from .series import Series, clock_offset_secs

USUAL_STEPS = 5
MOST_RANKS = 12
"""More ranks than this have no room; the trace has all of them."""


@dataclass(frozen=True)
class Bar:
    """A piece of work in a window; `start_secs` counts from the window's start, with pauses cut out."""

    rank: int
    lane: str
    name: str
    start_secs: float
    secs: float


@dataclass(frozen=True)
class Window:
    """A few consecutive steps.

    Attributes:
        title: What it shows.
        secs: Its length, with pauses cut out.
        begins: Step number and start of each step, in seconds from the window's start.
        cuts: Where a pause was cut out: start and end of the space left for it, and its true length, in seconds.
        bars: The work of all ranks.
    """

    title: str
    secs: float
    begins: tuple[tuple[int, float], ...]
    cuts: tuple[tuple[float, float, float], ...]
    bars: tuple[Bar, ...]


def windows_of(run: Run, series: Series) -> list[Window]:
    """The usual picture, and a re-selection if there is one; after the tuner's last change where there are such steps."""
    changes = [change.step for change in run.changes if change.step < series.step[-1]]
    settled = series.step > (changes[-1] if changes else 0)
    windows = []
    usual = _usual(series, settled)
    if usual is not None:
        first, last = usual
        steps = f"step {series.step[first]}" if first == last else f"steps {series.step[first]} to {series.step[last]}"
        windows.append(_window(run, series, first, last, f"The usual picture: {steps}"))
    selection = _selection(series, settled)
    if selection is not None:
        near = [at for at in (selection - 1, selection, selection + 1) if _has(series, at, selection)]
        first, last = near[0], near[-1]
        windows.append(_window(run, series, first, last, f"A re-selection: step {series.step[selection]}"))
    return [window for window in windows if window.secs > 0]


def lane_ranks(run: Run) -> list[RankRecord]:
    """The ranks that have room: the first one, and of the others those with most stall."""
    if len(run.ranks) <= MOST_RANKS:
        return list(run.ranks)
    others = sorted(run.ranks[1:], key=lambda rank: -sum(step.stall_secs for step in rank.steps))
    return sorted([run.main, *others[: MOST_RANKS - 1]], key=lambda rank: rank.rank)


def _usual(series: Series, settled: np.ndarray) -> tuple[int, int] | None:
    """First and last position of the consecutive steps whose durations and stalls are closest to the usual ones."""
    plain = ~series.reselected
    plain[:1] &= len(series) == 1  # the first step starts everything up
    if not plain.any():
        return None
    if (settled & plain).any():
        plain &= settled
    stall = series.stall_secs
    unusual = np.abs(series.step_secs - np.median(series.step_secs[plain])) + np.abs(stall - np.median(stall[plain]))
    paused, lacking = np.zeros((2, len(series)), dtype=bool)  # after the step
    paused[:-1], lacking[:-1] = series.gap_secs > series.longest_gap_secs, np.diff(series.step) > 1
    for count in range(min(USUAL_STEPS, len(series)), 0, -1):
        firsts = [a for a in range(len(series) - count + 1) if plain[a : a + count].all()]
        firsts = [a for a in firsts if not lacking[a : a + count - 1].any()]
        # A run that pauses after every step has no stretch without one: then the pause is cut out of two steps.
        firsts = [a for a in firsts if not paused[a : a + count - 1].any()] or (firsts if count == 2 else [])
        if firsts:
            best = min(firsts, key=lambda a: float(unusual[a : a + count].sum()))
            return best, best + count - 1
    return None


def _selection(series: Series, settled: np.ndarray) -> int | None:
    """Position of the re-selection of median duration; the first selection of a run only if there is no other."""
    found = np.flatnonzero(series.reselected)
    for among in (found[settled[found] & (found > 0)], found[found > 0], found):
        if len(among):
            return int(among[np.argsort(series.step_secs[among], kind="stable")[(len(among) - 1) // 2]])
    return None


def _has(series: Series, at: int, beside: int) -> bool:
    """Whether the record holds the step at position `at`, as near to the one at `beside` as the positions say."""
    return 0 <= at < len(series) and bool(series.step[at] - series.step[beside] == at - beside)


def _window(run: Run, series: Series, first: int, last: int, title: str) -> Window:
    begins, ends = series.begin_secs[first : last + 1], (series.begin_secs + series.step_secs)[first : last + 1]
    space = 0.3 * float(np.median(series.step_secs))
    cuts = []
    for end, begin in zip(ends[:-1], begins[1:], strict=True):
        if begin - end > max(series.longest_gap_secs, space):
            cuts.append((end, begin))
    start = float(begins[0])

    def place(moment: float) -> float:
        """Seconds from the window's start; a moment within a cut lies in the space left for it."""
        place = moment - start
        for end, begin in cuts:
            inside = min(max(moment - end, 0.0), begin - end)
            place -= inside * (1 - space / (begin - end))
        return place

    bars = []
    for rank in lane_ranks(run):
        ahead = clock_offset_secs(rank, run.main, int(series.step[first]), int(series.step[last]))
        # The host's work for a step is listed a step later, and that of the step before may reach into this one.
        near = [s for s in rank.steps if series.step[first] - 1 <= s.step <= series.step[last] + 2]
        for span in (span for step in near for span in step.spans):
            left = max(span.start_secs - ahead, start)
            right = min(span.start_secs - ahead + span.secs, float(ends[-1]))
            if right > left:
                bars.append(Bar(rank.rank, span.lane, span.name, place(left), place(right) - place(left)))
    return Window(
        title=title,
        secs=place(float(ends[-1])),
        begins=tuple((int(s), place(float(b))) for s, b in zip(series.step[first : last + 1], begins, strict=True)),
        cuts=tuple((place(end), place(begin), float(begin - end)) for end, begin in cuts),
        bars=tuple(bars),
    )
