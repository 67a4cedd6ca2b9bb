"""The auto-tuner's rule for `update_interval`: as small as the hardware allows, so that updates are as fresh as can be.

Predictions of `HostModel` choose the next interval, the measured stall judges it. An interval that has stalled is
remembered and not tried again before the host has become clearly faster, so that the rule cannot swing. `copy_rule` keeps
the interval from becoming so small that copying blocks costs what waiting for them must not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from lightning_zenflow.tuner import copy_rule
from lightning_zenflow.tuner.gradient_rule import GradientRule
from lightning_zenflow.tuner.host_history import SURE_WINDOWS, Failure, HostHistory
from lightning_zenflow.tuner.host_model import HostModel
from lightning_zenflow.tuner.options import TunerOptions
from lightning_zenflow.tuner.windows import Window

URGENT_RATIO = 3.0
"""So many times the allowed stall, if busy times explain it, is acted on after one window."""

SETTLED_RATIO = 1.3
"""What has proven itself may exceed its allowed stall this much, if re-selections leave so much of the whole budget."""

GROW_AIM_RATIO = 0.95
"""Share of the allowed stall that a larger interval is chosen for, since it will be judged by the whole."""

SHRINK_AIM_RATIO = 0.85
"""Share of the allowed stall that a smaller interval must keep to."""

SERIAL_AIM_RATIO = 0.97
"""The same without overlap, where the stall is the host's time itself and known as well as that."""

SETTLED_AIM_RATIO = 0.6
"""The same where the interval in use has proven itself."""

BEST_TOLERANCE_RATIO = 0.02
"""Where the host cannot keep up: the step may be this much longer than the shortest possible."""


class UpdateRule:
    """Proposes `update_interval`, window by window.

    Attributes:
        history: What was measured at the interval in use.
        model: The machine according to it; `None` before the first usable window.
    """

    def __init__(self, options: TunerOptions) -> None:
        self._options = options
        self.history = HostHistory()
        self.model: HostModel | None = None
        self._gradient = GradientRule(options)
        self._failure: Failure | None = None
        self._cannot_keep_up = False

    def propose(self, current: int, window: Window, select_stall_secs: float = 0.0) -> tuple[int, str]:
        """The next `update_interval` and why; `current` if it should stay. Every window must be shown once.

        Args:
            current: In use.
            window: What has just been measured.
            select_stall_secs: What re-selections cost, spread over all steps.
        """
        self._gradient.note(window.deferred_mass_ratio)
        if window.is_usable:
            self.history.note(window, self._options.share)
            self._summarize(current)
        if not self._options.tune_update:
            return current, "update_interval is fixed"
        return self._within_bounds(current) or self._judge(current, select_stall_secs)

    def restart(self) -> None:
        """Forgets what belongs to the interval in use; to be called when that changes."""
        self.history.clear()
        self.model = None

    def limits(self, current: int) -> tuple[int, int]:
        """Smallest and largest `update_interval` by the options and the gradient rule."""
        lowest = self._options.min_update_interval
        return lowest, max(lowest, min(self._options.max_update_interval, self._gradient.bound(current)))

    def bounds(self, current: int) -> tuple[int, int]:
        """Smallest and largest `update_interval` allowed now, where the host keeps up.

        Where it does not, copying costs nothing: the trainer would wait for the host instead.
        """
        lowest, highest = self.limits(current)
        if self.model is not None:
            copies = copy_rule.lowest_interval(self.model, self.history, current, self._options.share)
            lowest = min(highest, max(lowest, copies))
        return lowest, highest

    def _summarize(self, current: int) -> None:
        self.model = self.history.model(current, self._options.overlap)
        is_settled = self.history.is_settled
        if self.history.is_sure and self._failure and self._failure.is_outdated(self.model, is_settled=is_settled):
            self._failure = None

    @property
    def _failed_interval(self) -> int:
        return self._failure.interval if self._failure else 0

    def _within_bounds(self, current: int) -> tuple[int, str] | None:
        lowest, highest = self.limits(current)
        if lowest <= current <= highest:
            return None
        target = min(max(current, lowest), highest)
        if current > highest and highest < self._options.max_update_interval:
            why = self._gradient.in_words(highest)
        else:
            why = f"allowed are {lowest} to {highest}"
        return target, f"update_interval {current} -> {target}: {why}"

    def _judge(self, current: int, select_stall_secs: float) -> tuple[int, str]:
        model, share = self.model, self._options.share
        if model is None:
            return current, "no usable times in this window"
        stall = self.history.stall_secs
        step = model.device_step_secs(current) + stall
        limit = share * step
        if not self._cannot_keep_up:
            # What noise may have added is no reason to change, as long as re-selections leave so much of the budget.
            noise = (SETTLED_RATIO - 1) * limit
            if not self.history.is_settled:
                noise = min(noise, self.history.stall_error_secs(model, current))
            limit += min(noise, max(0.0, self._options.stall_budget * step - select_stall_secs - limit))
        if stall <= limit:
            if stall <= SHRINK_AIM_RATIO * share * step and self.history.is_settled:
                self._cannot_keep_up = False
                if self._failed_interval >= current:  # it stalled here or above, and no longer does
                    self._failure = None
            lowest = self.bounds(current)[0]
            if lowest > current:
                why = f"{copy_rule.in_use_in_words(model, current, share)}; {model.stall_in_words(current, stall)}"
                return lowest, f"update_interval {current} -> {lowest}: {why}"
            return self._shrink(current, model, stall)
        is_urgent = min(stall, model.stall_secs(current)) > URGENT_RATIO * limit
        if not is_urgent and not self.history.is_sure:
            return current, f"{model.stall_in_words(current, stall)}, to be judged after {SURE_WINDOWS} windows"
        return self._grow(current, model, stall)

    def _shrink(self, current: int, model: HostModel, stall: float) -> tuple[int, str]:
        """The host keeps up: the smallest interval at which it clearly would as well."""
        share, keeps = self._options.share, model.stall_in_words(current, stall)
        model = replace(model, delay_secs=self._failure.delay_secs if self._failure else 0.0)
        # Where a stall can be seen at all, its size says more than the difference of two large times.
        visible = max(stall, 0.2 * share * model.step_secs(current))
        if stall == visible or model.stall_secs(current) > visible:
            model = replace(model, delay_secs=0.0).corrected(current, visible)
        allowed = self.bounds(current)[0]
        lowest = max(allowed, self._failed_interval + 1)
        if current <= lowest:
            why = f"{allowed} is the smallest allowed" if lowest == allowed else f"{lowest - 1} stalled"
            if lowest == allowed > self._failed_interval:
                why = copy_rule.why_kept(model, self.history, current, share) or why
            return current, f"{keeps}; {why}"
        aim = share * self._shrink_aim_ratio()
        for candidate in range(lowest, current):
            margin = self.history.margin_secs(model, candidate, careful=False)
            if model.stall_secs(candidate, margin) <= aim * model.step_secs(candidate):
                if not self.history.is_sure:
                    return current, f"{keeps}; {candidate} may do, to be judged after {SURE_WINDOWS} windows"
                return candidate, f"update_interval {current} -> {candidate}: {model.in_words(candidate)}; {keeps}"
        return current, f"{keeps}; with {current - 1}, {model.in_words(current - 1)}"

    def _shrink_aim_ratio(self) -> float:
        if self.history.is_settled:
            return SETTLED_AIM_RATIO
        return SHRINK_AIM_RATIO if self._options.overlap else SERIAL_AIM_RATIO

    def _grow(self, current: int, model: HostModel, stall: float) -> tuple[int, str]:
        """The host is too slow: the smallest interval that should do, or else the smallest that is about the fastest."""
        lowest, highest = self.limits(current)
        share, problem = self._options.share, model.stall_in_words(current, stall)
        if model.need_secs(current) <= 0:
            return current, f"{problem}, but the host reports no work"
        need_ratio, model = model.need_secs(current) / model.device_step_secs(current), model.corrected(current, stall)
        if self._failed_interval <= current:
            self._failure = Failure(current, need_ratio, model.delay_secs)
        failed = self._failed_interval
        # What is left for its stall should not have to be left for its copies next.
        cheap = min(highest, copy_rule.smallest_interval(model, share))
        for candidate in range(max(failed + 1, cheap), highest + 1):
            margin, aim = 0.0, GROW_AIM_RATIO * share
            if self._cannot_keep_up:  # a guess was not good enough: it must be sure now
                margin = self.history.margin_secs(model, candidate, careful=True)
                aim = SHRINK_AIM_RATIO * share
            if model.stall_secs(candidate, margin) <= aim * model.step_secs(candidate):
                self._cannot_keep_up = False
                return candidate, f"update_interval {current} -> {candidate}: {model.in_words(current)}; {problem}"
        may_do = model.stall_secs(highest) <= SETTLED_RATIO * share * model.step_secs(highest)
        if may_do and failed < highest and not self._cannot_keep_up:
            why = f"{model.in_words(current)}; {problem}; {highest}, the largest allowed, may just do"
            return highest, f"update_interval {current} -> {highest}: {why}"
        target = model.about_fastest(current, lowest, highest, BEST_TOLERANCE_RATIO)
        self._cannot_keep_up = True
        change = f"update_interval {current} -> {target}: " if target != current else ""
        return target, (
            f"{change}{model.in_words(current)}; {problem}; no interval up to {highest} is enough, and with {target} the step"
            " is within 2 % of the fastest"
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, lists and dicts."""
        return {
            "history": self.history.state(),
            "masses": list(self._gradient.masses),
            "failure": asdict(self._failure) if self._failure else None,
            "cannot_keep_up": self._cannot_keep_up,
        }

    def load_state_dict(self, state: Mapping[str, Any], current: int) -> None:
        """Takes over what `state_dict` returned at `update_interval` `current`."""
        self.history.load_state(state["history"])
        self.model = None
        if not self.history.is_empty:
            self._summarize(current)
        self._gradient.masses = list(state["masses"])
        self._failure = Failure(**state["failure"]) if state["failure"] else None
        self._cannot_keep_up = state["cannot_keep_up"]
