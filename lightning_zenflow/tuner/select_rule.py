"""The auto-tuner's rule for `select_interval`: as short as the cost of a re-selection allows, longer while it changes little.

Intervals are rungs of the ladder of `TunerOptions.select_intervals`, so that small differences in cost change nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_zenflow.tuner.options import TunerOptions
from lightning_zenflow.tuner.windows import MAX_SECS, Window
from lightning_zenflow.wording import in_words, percent

STEADY_DISAGREEMENT = 0.1
"""A re-selection that replaces at most this share of the columns could have come later."""

DRIFT_DISAGREEMENT = 0.25
"""A re-selection that replaces at least this share of the columns should have come earlier."""

MAX_STRETCH_RATIO = 4
"""How much longer than its cost requires an interval may become while selections agree."""

MAX_CHANGE_RATIO = 4
"""Largest change in one decision, but for the first ones that leave an interval that costs too much."""

FREE_CHANGES = 3
"""How many changes out of the budget may be of any size."""

AIM_RATIO = 0.9
"""Share of the allowed cost that an interval is chosen for."""

TOLERATED_RATIO = 1.05
"""Share of the allowed cost that it may then reach before a longer one is chosen."""

CLEAR_RATIO = 0.75
"""Share of the allowed cost that a shorter one must keep to."""

LAST_BARRIERS = 5

SURE_BARRIERS = 3
"""Measured costs before an interval is shortened: one odd cost among them does no harm."""

PAUSE_RATIO = 20
"""A lone re-selection that takes this many times a step and a whole update on the host may have been a pause."""


FASTER_HOST_RATIO = 0.6
"""A host that needs no more than this share of what it needed at the last re-selection has changed: so has their cost."""


@dataclass(frozen=True)
class Outlook:
    """The next steps, as far as `UpdateRule` knows them.

    Attributes:
        step_secs: Expected step without re-selections.
        saved_stall_secs: How much less the trainer will wait in each step, because `update_interval` changes now.
        whole_update_secs: Host time for one gradient and AdamW on everything.
        is_sure: Whether one odd window would not matter.
    """

    step_secs: float
    saved_stall_secs: float
    whole_update_secs: float
    is_sure: bool


class SelectRule:
    """Proposes `select_interval`, window by window."""

    def __init__(self, options: TunerOptions) -> None:
        self._options = options
        self._rungs = options.select_intervals()
        self._barriers: list[float] = []
        self._whole_update_secs = 0.0  # what the host needed for everything at the last of them
        self._base = -1  # index of the shortest rung within the budget; -1 as long as no cost is known
        self._stretch = 0  # rungs above it, earned by agreement
        self._stretched_at = 0.0  # disagreement at which the last of them was earned
        self._failed_stretch: int | None = None  # selections drifted here
        self._failed_at = 0.0  # disagreement before it was tried
        self._changes = 0

    def secs_per_step(self, interval: int | None) -> float:
        """What re-selections cost at `interval`, spread over all steps; 0 as long as it is not known."""
        return statistics.median_low(self._barriers) / interval if interval and self._barriers else 0.0

    def propose(self, current: int | None, window: Window, outlook: Outlook | None) -> tuple[int | None, str]:
        """The next `select_interval` and why; `current` if it should stay. Every window must be shown once.

        Args:
            current: In use.
            window: What has just been measured.
            outlook: What is known of the next steps; `None` if nothing is.
        """
        self._note(window, outlook)
        if current is None:
            return current, "nothing is selected"
        if not self._options.tune_select:
            return current, "select_interval is fixed"
        return self._within_ladder(current) or self._judge(current, window, outlook)

    def _note(self, window: Window, outlook: Outlook | None) -> None:
        whole_secs = outlook.whole_update_secs if outlook else 0.0
        if window.select_stall_secs is not None and 0 < window.select_stall_secs <= MAX_SECS:
            self._barriers = [*self._barriers, window.select_stall_secs][-LAST_BARRIERS:]
            self._whole_update_secs = whole_secs
        if outlook is None:
            return
        if outlook.is_sure and whole_secs < FASTER_HOST_RATIO * self._whole_update_secs:
            # The next one may be thousands of steps away. Too low a guess makes it come soon, and then it is measured.
            self._barriers = [secs * whole_secs / self._whole_update_secs for secs in self._barriers]
            self._whole_update_secs, self._base = whole_secs, -1
        # A barrier begins with the wait for the block under way, as every step ends with it.
        self._barriers = [max(0.1 * secs, secs - outlook.saved_stall_secs) for secs in self._barriers]

    def _within_ladder(self, current: int) -> tuple[int, str] | None:
        unit = self._options.select_unit_steps
        if self._rungs[0] <= current <= self._rungs[-1] and current % unit == 0:
            return None
        target = next((rung for rung in self._rungs if rung >= current), self._rungs[-1])
        units = f" in multiples of {unit}" if unit > 1 else ""
        return target, (
            f"select_interval {current} -> {target}: allowed are {self._rungs[0]} to {self._rungs[-1]} steps{units}"
        )

    def _judge(self, current: int, window: Window, outlook: Outlook | None) -> tuple[int, str]:
        if not self._barriers or outlook is None:
            return current, "no re-selection measured yet"
        barrier, step_secs = statistics.median_low(self._barriers), outlook.step_secs
        if len(self._barriers) == 1 and barrier > PAUSE_RATIO * (step_secs + outlook.whole_update_secs):
            return current, f"the only re-selection so far took {in_words(barrier)}, which may have been a pause"
        self._find_base(barrier, step_secs)
        allowed = self._options.share * step_secs
        why = self._follow_agreement(current, window.disagreement)
        is_over = barrier > allowed * current
        target = self._bounded(current, self._rungs[self._base + self._stretch], is_over)
        if target == current:
            return current, self._cost(barrier, current, step_secs)
        self._changes += 1
        cost = self._cost(barrier, target, step_secs)
        if is_over:
            cost = f"re-selections cost {percent(barrier / step_secs / current)} of the step time; {cost}"
        return target, f"select_interval {current} -> {target}: {why}{cost}"

    def _find_base(self, barrier: float, step_secs: float) -> None:
        """The shortest rung within the budget, kept until it clearly is another."""

        def first(ratio: float) -> int:
            allowed = ratio * self._options.share * step_secs
            within = (index for index, rung in enumerate(self._rungs) if barrier <= allowed * rung)
            return next(within, len(self._rungs) - 1)

        if self._base < first(TOLERATED_RATIO):
            self._base = first(AIM_RATIO)
        elif len(self._barriers) >= SURE_BARRIERS:
            self._base = min(self._base, first(CLEAR_RATIO))
        self._stretch = min(self._stretch, self._longest_stretch())

    def _longest_stretch(self) -> int:
        limit = MAX_STRETCH_RATIO * self._rungs[self._base]
        return sum(self._rungs[self._base] < rung <= limit for rung in self._rungs)

    def _follow_agreement(self, current: int, disagreement: float | None) -> str:
        """Lengthens or shortens by what the last re-selection replaced; returns that in words if it did."""
        if disagreement is None or not 0 <= disagreement <= 1:
            return ""
        if self._failed_stretch is not None and disagreement <= self._failed_at / 2:
            self._failed_stretch = None  # selections are clearly steadier than when that was tried
        kept = f"the last re-selection kept {percent(1 - disagreement)} of the columns; "
        if disagreement >= DRIFT_DISAGREEMENT and self._stretch > 0:
            self._failed_stretch, self._failed_at = self._stretch, self._stretched_at
            self._stretch = 0
            return kept
        reached = current == self._rungs[self._base + self._stretch]  # else it has not been tried yet
        limit = self._longest_stretch() if self._failed_stretch is None else self._failed_stretch - 1
        if disagreement <= STEADY_DISAGREEMENT and reached and self._stretch < min(limit, self._longest_stretch()):
            self._stretch += 1
            self._stretched_at = disagreement
            return kept
        return ""

    def _bounded(self, current: int, target: int, is_over: bool) -> int:
        if is_over and self._changes < FREE_CHANGES:
            return target
        if target > current * MAX_CHANGE_RATIO:
            return max(rung for rung in self._rungs if rung <= current * MAX_CHANGE_RATIO)
        if target * MAX_CHANGE_RATIO < current:
            return min(rung for rung in self._rungs if rung * MAX_CHANGE_RATIO >= current)
        return target

    def _cost(self, barrier: float, interval: int, step_secs: float) -> str:
        return (
            f"a re-selection of {in_words(barrier)} every {interval} steps of {in_words(step_secs)} costs"
            f" {percent(barrier / interval / step_secs)} (budget {percent(self._options.share)})"
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and lists."""
        return {
            "barriers": list(self._barriers),
            "whole_update_secs": self._whole_update_secs,
            "base_interval": self._rungs[self._base] if self._base >= 0 else None,
            "stretch": self._stretch,
            "stretched_at": self._stretched_at,
            "failed_stretch": self._failed_stretch,
            "failed_at": self._failed_at,
            "changes": self._changes,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` returned."""
        self._barriers = list(state["barriers"])
        self._whole_update_secs = state["whole_update_secs"]
        base = state["base_interval"]
        if base is None:
            self._base, self._stretch = -1, 0
        else:  # by value: with other bounds, or epochs of another length, the ladder is another one
            self._base = min(sum(rung < base for rung in self._rungs), len(self._rungs) - 1)
            self._stretch = min(state["stretch"], self._longest_stretch())
        self._stretched_at = state["stretched_at"]
        self._failed_stretch = state["failed_stretch"]
        self._failed_at = state["failed_at"]
        self._changes = state["changes"]
