"""What the auto-tuner sees: observations of single steps, summed up in windows that one odd step cannot distort.

Without torch. `Window.to_numbers` is made for an element-wise maximum over ranks, so that all ranks decide alike.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Any

START_SKIP_STEPS = 2
"""First steps of a run, which allocate and compile."""

MAX_SECS = 1e6
"""Longer times (11 days) are damage and no measurement."""

MIN_SECS = 1e-9
"""No device takes less for a step, and no clock sees less."""

_ABSENT = -math.inf  # loses against every present value in a maximum

_OPTIONAL = ("select_stall_secs", "disagreement", "deferred_mass_ratio")


@dataclass(frozen=True)
class Observation:
    """One applied step of this rank, as measured.

    Attributes:
        step_secs: The whole step.
        update_stall_secs: Time the trainer was blocked waiting for the host's blocks.
        select_stall_secs: Time it was blocked in a re-selection; above 0 at steps with one.
        accumulate_secs: Busy time of the host for one gradient (whole shard).
        update_secs: Busy time of the host for one block.
        agreement: Share of the columns that a re-selection in this step kept; `None` without one, and at the first.
        deferred_mass_ratio: Share of the gradient's squared norm in columns that are not selected; `None` without a
            selection in this step.
        copy_secs: Time the trainer spent copying a finished block into the weights; part of the device's time.
    """

    step_secs: float
    update_stall_secs: float = 0.0
    select_stall_secs: float = 0.0
    accumulate_secs: float = 0.0
    update_secs: float = 0.0
    agreement: float | None = None
    deferred_mass_ratio: float | None = None
    copy_secs: float = 0.0

    @property
    def is_sound(self) -> bool:
        """Whether all times are numbers that a clock can have measured."""
        times = (self.update_stall_secs, self.select_stall_secs, self.accumulate_secs, self.update_secs, self.copy_secs)
        return 0 < self.step_secs <= MAX_SECS and all(0 <= secs <= MAX_SECS for secs in times)

    @property
    def selects(self) -> bool:
        """Whether columns were selected in this step."""
        return self.select_stall_secs > 0 or self.agreement is not None or self.deferred_mass_ratio is not None

    @property
    def device_secs(self) -> float:
        """The step without its stalls."""
        return max(0.0, self.step_secs - self.update_stall_secs - self.select_stall_secs)


@dataclass(frozen=True)
class Window:
    """What a window of steps was like.

    Attributes:
        steps: Steps with sound times; 0 if there are too few to learn from.
        device_secs: A step without its stalls. Over ranks the least: a rank waits in collectives for another one whose
            host stalls, and that must not look like computing.
        update_stall_secs: Mean per step; a stall that comes once in the window does not count, one that returns does.
        select_stall_secs: Cost of one re-selection; `None` if there was none to measure.
        accumulate_secs: Busy time of the host for one gradient.
        update_secs: Busy time of the host for one block.
        device_jitter_secs: Standard deviation of the device's time from step to step.
        host_jitter_secs: The same of the host's.
        disagreement: Share of the columns that a re-selection replaced; `None` without one.
        deferred_mass_ratio: Share of the gradient's squared norm that waits; `None` without a selection.
        copy_secs: Part of `device_secs` that copying a finished block into the weights takes.
    """

    steps: int
    device_secs: float
    update_stall_secs: float
    select_stall_secs: float | None
    accumulate_secs: float
    update_secs: float
    device_jitter_secs: float = 0.0
    host_jitter_secs: float = 0.0
    disagreement: float | None = None
    deferred_mass_ratio: float | None = None
    copy_secs: float = 0.0

    @classmethod
    def of(cls, observations: Sequence[Observation]) -> Window:
        """Sums up observations; those that are not sound are left out."""
        agreements = _ratios([seen.agreement for seen in observations])
        disagreement = 1 - statistics.fmean(agreements) if agreements else None
        masses = _ratios([seen.deferred_mass_ratio for seen in observations])
        mass = statistics.fmean(masses) if masses else None
        sound = [seen for seen in observations if seen.is_sound]
        if not sound or 2 * len(sound) < len(observations):
            return cls(0, 0.0, 0.0, None, 0.0, 0.0, disagreement=disagreement, deferred_mass_ratio=mass)
        # A re-selecting step also scores columns, and its barrier has done the waiting: it is no ordinary step.
        regular = [seen for seen in sound if not seen.selects]
        if 4 * len(regular) < len(sound):
            regular = sound
        # The first selection has no agreement; it settles nothing, so it does not tell what the next ones cost.
        barriers = [seen.select_stall_secs for seen in sound if seen.agreement is not None and seen.select_stall_secs]
        device = [seen.device_secs for seen in regular]
        return cls(
            steps=len(sound),
            device_secs=typical(device),
            update_stall_secs=_recurring([seen.update_stall_secs for seen in regular]),
            select_stall_secs=statistics.median_low(barriers) if barriers else None,
            accumulate_secs=typical([seen.accumulate_secs for seen in sound]),
            update_secs=typical([seen.update_secs for seen in sound]),
            device_jitter_secs=_jitter(device),
            host_jitter_secs=_jitter([seen.accumulate_secs + seen.update_secs for seen in sound]),
            disagreement=disagreement,
            deferred_mass_ratio=mass,
            copy_secs=typical([seen.copy_secs for seen in regular]),
        )

    @property
    def is_usable(self) -> bool:
        """Whether there is something to learn from: sound times, and steps that took some."""
        times = [self.device_secs, self.update_stall_secs, self.accumulate_secs, self.update_secs]
        times += [self.device_jitter_secs, self.host_jitter_secs, self.copy_secs]
        return self.steps > 0 and self.device_secs >= MIN_SECS and all(0 <= secs <= MAX_SECS for secs in times)

    def to_numbers(self) -> list[float]:
        """The window as finite numbers or minus infinity, of which the element-wise maximum over ranks is taken.

        What must become the minimum is negated; what is absent is minus infinity, so that a present value wins. If the
        window of one rank is not usable, that of all ranks is not.
        """
        steps, device, *rest = astuple(self)
        if not self.is_usable:
            steps = device = 0.0
        values = [-float(steps), -device, *rest]
        return [_ABSENT if value is None or math.isnan(value) else float(value) for value in values]

    @classmethod
    def from_numbers(cls, numbers: Sequence[float]) -> Window:
        """The window behind `to_numbers`, after the maximum over ranks.

        Raises:
            ValueError: There are too many or too few numbers.
        """
        names = [field.name for field in fields(cls)]
        if len(numbers) != len(names):
            raise ValueError(
                f"`numbers` must be {len(names)} numbers, got {len(numbers)}. Pass what `Window.to_numbers` returned."
            )
        steps, device, *rest = numbers
        absent = [None if name in _OPTIONAL else 0.0 for name in names[2:]]
        found: list[Any] = [none if value == _ABSENT else value for value, none in zip(rest, absent, strict=True)]
        return cls(round(-steps), -device, *found)


class WindowCollector:
    """Decides which observations count, and when a window is full.

    Only the number of observations matters, never what they hold: all ranks close their windows at the same step.

    Attributes:
        window_steps: Observations that fill the next window; set it to `Controller.window_steps` after each decision.
    """

    def __init__(self, window_steps: int, skip_steps: int = START_SKIP_STEPS) -> None:
        self.window_steps = window_steps
        self.restart(skip_steps)

    def restart(self, skip_steps: int) -> None:
        """Drops what was collected, and the times of the next `skip_steps` observations.

        Their agreement and gradient mass are no times, and count in the next window.
        """
        self._skip_steps = skip_steps
        self._seen: list[Observation] = []
        self._skipped: list[Observation] = []

    def add(self, observation: Observation) -> Window | None:
        """Takes in a step; returns a window whenever one is full, and begins the next."""
        if self._skip_steps > 0:
            self._skip_steps -= 1
            self._skipped.append(observation)
            return None
        self._seen.append(observation)
        if len(self._seen) < self.window_steps:
            return None
        window, selections = Window.of(self._seen), Window.of([*self._skipped, *self._seen])
        self.restart(0)
        return replace(window, disagreement=selections.disagreement, deferred_mass_ratio=selections.deferred_mass_ratio)


def typical(values: Sequence[float]) -> float:
    """Mean of the middle half: as good as a mean for noise, and blind to a few odd values. At least one value."""
    ordered, cut = sorted(values), (len(values) + 1) // 4
    return statistics.fmean(ordered[cut : len(ordered) - cut])


def _recurring(stalls: Sequence[float]) -> float:
    """Mean with the largest value cut to the second largest: what happens once in a window was an accident."""
    ordered = sorted(stalls)
    return statistics.fmean(min(secs, ordered[-2]) for secs in ordered) if len(ordered) > 1 else ordered[0]


def _jitter(values: Sequence[float]) -> float:
    """Standard deviation by way of the median absolute deviation, which odd values do not move."""
    middle = statistics.median(values)
    return 1.4826 * statistics.median(abs(value - middle) for value in values)


def _ratios(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None and 0 <= value <= 1]
