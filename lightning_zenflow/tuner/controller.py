"""`Controller`: from measured stalls to intervals (DESIGN section 2.4), without torch and without side effects.

A callback feeds `WindowCollector` with one `Observation` per step. When it returns a `Window`, the callback takes the
element-wise maximum of `Window.to_numbers` over ranks and shows `Window.from_numbers` of it to `Controller.decide`. All
ranks then hold the same intervals, since nothing else enters a decision.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lightning_zenflow.tuner.options import Intervals, TunerOptions
from lightning_zenflow.tuner.select_rule import Outlook, SelectRule
from lightning_zenflow.tuner.update_rule import UpdateRule
from lightning_zenflow.tuner.windows import Window

MIN_WINDOW_STEPS = 8
MAX_WINDOW_STEPS = 16
"""Above this only where there are more blocks."""

MAX_SKIP_STEPS = 16

STATE_FORMAT = 1


@dataclass(frozen=True)
class Decision:
    """What follows from a window.

    Attributes:
        intervals: To use from the next step on.
        previous: In use so far.
        reason: Why, in words and numbers.
        window: What was measured.
    """

    intervals: Intervals
    previous: Intervals
    reason: str
    window: Window

    @property
    def changed(self) -> bool:
        """Whether there is anything to do."""
        return self.intervals != self.previous

    @property
    def skip_steps(self) -> int:
        """How many of the next steps are a transition, for `WindowCollector.restart`; 0 if nothing must be dropped."""
        if self.intervals.update_interval == self.previous.update_interval:
            return 0
        return min(MAX_SKIP_STEPS, self.intervals.update_interval)


class Controller:
    """Decides on both intervals, window by window.

    Args:
        options: Budget and bounds.
        start: The intervals in use. If they are out of bounds, the first decision moves them in.

    Raises:
        ValueError: `start` holds an interval below 1.
    """

    def __init__(self, options: TunerOptions, start: Intervals) -> None:
        for name, steps in asdict(start).items():
            if steps is not None and steps < 1:
                raise ValueError(f"`{name}` must be at least 1 step, got {steps}. Start with 4 and 64, for example.")
        self._options = options
        self._intervals = start
        self._update = UpdateRule(options)
        self._select = SelectRule(options)

    @property
    def intervals(self) -> Intervals:
        """In use, as last decided."""
        return self._intervals

    @property
    def window_steps(self) -> int:
        """How many steps the next window should have: few after a change, and enough to see each block."""
        blocks = self._intervals.update_interval
        # Two rounds of the blocks, so that a stall at one of them is seen to return.
        usual = max(MIN_WINDOW_STEPS, 2 * blocks) if self._update.history.is_empty else MAX_WINDOW_STEPS
        return max(blocks, min(MAX_WINDOW_STEPS, usual))

    def decide(self, window: Window) -> Decision:
        """The intervals after `window`, which was measured at the present ones. Never raises for odd measurements."""
        previous = self._intervals
        barriers = self._select.secs_per_step(previous.select_interval)
        update, update_why = self._update.propose(previous.update_interval, window, barriers)
        select, select_why = self._select.propose(previous.select_interval, window, self._outlook(update))
        if update != previous.update_interval:
            self._update.restart()
        self._intervals = Intervals(update, select)
        changes = [update_why] * (update != previous.update_interval) + [select_why] * (
            select != previous.select_interval
        )
        reason = ". ".join(changes) if changes else f"kept: {update_why}. {select_why[:1].upper()}{select_why[1:]}"
        return Decision(self._intervals, previous, f"{reason}.", window)

    def _outlook(self, update_interval: int) -> Outlook | None:
        model, history = self._update.model, self._update.history
        if model is None:
            return None
        stays = update_interval == self._intervals.update_interval
        saved_secs = 0.0 if stays else history.stall_secs - model.stall_secs(update_interval)
        return Outlook(
            step_secs=model.device_step_secs(update_interval) + history.stall_secs - saved_secs,
            saved_stall_secs=saved_secs,
            whole_update_secs=model.accumulate_secs + model.adam_secs,
            is_sure=history.is_sure,
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything that later decisions depend on, as plain numbers, strings, lists and dicts."""
        return {
            "format": STATE_FORMAT,
            "intervals": asdict(self._intervals),
            "update": self._update.state_dict(),
            "select": self._select.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state_dict` was called; the options may be others.

        Raises:
            ValueError: The state is of another version.
        """
        if state.get("format") != STATE_FORMAT:
            raise ValueError(
                f"`format` of the tuner's state must be {STATE_FORMAT}, got {state.get('format')!r}. Resume with the version"
                " of lightning-zenflow that saved it, or without the tuner's state."
            )
        self._intervals = Intervals(**state["intervals"])
        self._update.load_state_dict(state["update"], self._intervals.update_interval)
        self._select.load_state_dict(state["select"])
