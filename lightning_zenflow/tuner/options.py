"""`Intervals` and `TunerOptions`: what the auto-tuner decides on, and within which limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_zenflow.config import MAX_SELECT_INTERVAL_STEPS, MAX_UPDATE_INTERVAL_STEPS
from lightning_zenflow.shown import shown


@dataclass(frozen=True)
class Intervals:
    """The two intervals, in steps.

    Attributes:
        update_interval: `U`, the number of blocks; every deferred element is updated once in so many steps.
        select_interval: `S`, steps between selections; `None` if nothing is ever selected.
    """

    update_interval: int
    select_interval: int | None


@dataclass(frozen=True, kw_only=True)
class TunerOptions:
    """Settings of the auto-tuner.

    Attributes:
        stall_budget: Share of the step time that may be lost to stalls, above 0 and below 1; one half is for waiting
            for updates, the other for re-selections.
        tune_update: Whether `update_interval` may change.
        tune_select: Whether `select_interval` may change.
        overlap: Whether the host has the next step's time for a block (`overlap_step`).
        auto_ratio: Share of the remembered gradient mass that must have reached the weights, from 0 to 1.
        memory_steps: Steps of gradients that AdamW remembers, `1 / (1 - beta2)`.
        min_update_interval: Lower bound in steps.
        max_update_interval: Upper bound in steps.
        min_select_interval: Lower bound in steps.
        max_select_interval: Upper bound in steps; where it is below `select_unit_steps`, that unit is the bound.
        select_unit_steps: `select_interval` is a multiple of it: the steps of an epoch, or 1.

    Raises:
        TypeError: A field has the wrong type.
        ValueError: A field is out of range.
    """

    stall_budget: float = 0.05
    tune_update: bool = True
    tune_select: bool = True
    overlap: bool = True
    auto_ratio: float = 0.99
    memory_steps: float = 1000.0
    min_update_interval: int = 1
    max_update_interval: int = 16
    min_select_interval: int = 1
    max_select_interval: int = 4096
    select_unit_steps: int = 1

    def __post_init__(self) -> None:
        for name in ("tune_update", "tune_select", "overlap"):
            self._require(name, isinstance(getattr(self, name), bool), "true or false", TypeError)
        for name in ("stall_budget", "auto_ratio", "memory_steps"):
            self._require(name, _is_number(getattr(self, name)), "a number", TypeError)
        self._require("stall_budget", 0 < self.stall_budget < 1, "above 0 and below 1", remedy="0.05 is five percent.")
        self._require("auto_ratio", 0 <= self.auto_ratio <= 1, "a number from 0 to 1", remedy="0.99 is usual.")
        rule = "a number of steps from 1 to 1e9"
        self._require("memory_steps", 1 <= self.memory_steps <= 1e9, rule, remedy="It is 1 / (1 - beta2).")
        for name in ("min_update_interval", "max_update_interval", "min_select_interval", "max_select_interval"):
            self._check_steps(name)
        self._check_steps("select_unit_steps")
        for kind in ("update", "select"):
            lowest = getattr(self, f"min_{kind}_interval")
            name = f"max_{kind}_interval"
            holds = lowest <= getattr(self, name)
            self._require(name, holds, f"at least `min_{kind}_interval` ({lowest})", remedy="Exchange the two?")

    def _check_steps(self, name: str) -> None:
        value, rule = getattr(self, name), "a whole number of steps, 1 or more"
        self._require(name, isinstance(value, int) and not isinstance(value, bool), rule, TypeError)
        self._require(name, value >= 1, rule, remedy="1 is every step.")
        limit = MAX_UPDATE_INTERVAL_STEPS if name.endswith("update_interval") else MAX_SELECT_INTERVAL_STEPS
        self._require(name, value <= limit, f"at most {limit}", remedy="Intervals cannot be longer.")

    def _require(
        self, name: str, holds: bool, rule: str, error: type[Exception] = ValueError, remedy: str = ""
    ) -> None:
        if not holds:
            hint = f" {remedy}" if remedy else " Change it where the auto-tuner is set up."
            raise error(f"`{name}` must be {rule}, got {shown(getattr(self, name))}.{hint}")

    @property
    def share(self) -> float:
        """What each of the two kinds of stall may take of the step time."""
        return self.stall_budget / 2

    def select_intervals(self) -> list[int]:
        """The ladder of selection intervals, in steps: 1, 2, 3, 4, 6, 8, 12, ... units, as far as the bounds allow.

        If no rung lies within the bounds, the smallest multiple of the unit from the lower bound on.
        """
        lowest, highest, unit = self.min_select_interval, self.max_select_interval, self.select_unit_steps
        rungs, power = {1}, 2
        while power * unit <= highest:
            rungs |= {power, power // 2 * 3}
            power *= 2
        within = sorted(rung * unit for rung in rungs if lowest <= rung * unit <= highest)
        return within or [-(-lowest // unit) * unit]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
