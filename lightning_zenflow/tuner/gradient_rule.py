"""The upper bound of `update_interval`: how much gradient may wait on the host."""

from __future__ import annotations

import math

from lightning_zenflow.tuner.options import TunerOptions
from lightning_zenflow.tuner.windows import typical

NO_BOUND_STEPS = 10**9

LAST_MASSES = 5
"""Measurements that are averaged."""

GROW_MASS_RATIO = 1.1
"""To grow, the bound must hold for so many times the measured mass: noise in it must not move the interval to and fro."""


def gradient_bound(auto_ratio: float, memory_steps: float, deferred_mass_ratio: float) -> int:
    """Largest `update_interval` that the gradient rule allows, in steps, at least 1.

    This is our reading of the paper's rule (arXiv 2505.12242) that the accumulated deferred gradient must not outgrow the
    selected one. Taken literally it asks for `U = 1` wherever gradients have no dominant columns. Here: of the gradient mass
    that AdamW remembers (`memory_steps` steps), a share of `auto_ratio` must have reached the weights. A deferred element
    waits `(U + 1) / 2` steps on average, so `deferred_mass_ratio * (U + 1) / 2` steps' worth of gradient mass is waiting:

        U <= 2 * (1 - auto_ratio) * memory_steps / deferred_mass_ratio - 1

    Args:
        auto_ratio: From 0 to 1.
        memory_steps: `1 / (1 - beta2)`.
        deferred_mass_ratio: Share of the gradient's squared norm that is deferred, from 0 to 1.
    """
    waiting_steps = (1 - auto_ratio) * memory_steps
    if 2 * waiting_steps >= NO_BOUND_STEPS * deferred_mass_ratio:
        return NO_BOUND_STEPS  # also where nothing waits, and whatever rounding makes of 1 - auto_ratio
    return max(1, math.floor(2 * waiting_steps / deferred_mass_ratio - 1 + 1e-9))


class GradientRule:
    """The bound during a run, from the masses measured at re-selections; none as long as there are none."""

    def __init__(self, options: TunerOptions) -> None:
        self._options = options
        self.masses: list[float] = []

    def note(self, deferred_mass_ratio: float | None) -> None:
        """Takes in a measurement; what is absent or no ratio is ignored."""
        if deferred_mass_ratio is not None and 0 <= deferred_mass_ratio <= 1:
            self.masses = [*self.masses, deferred_mass_ratio][-LAST_MASSES:]

    def bound(self, current: int) -> int:
        """Largest interval now: it may be kept up to the bound, but only grow to where the bound is sure."""
        if not self.masses:
            return NO_BOUND_STEPS
        ratio, memory, mass = self._options.auto_ratio, self._options.memory_steps, typical(self.masses)
        kept = gradient_bound(ratio, memory, mass)
        return max(min(current, kept), gradient_bound(ratio, memory, GROW_MASS_RATIO * mass))

    def in_words(self, bound: int) -> str:
        """Why `bound`."""
        return (
            f"{100 * typical(self.masses):.0f} % of the gradient's squared norm waits on the host, so that above {bound}"
            f" less than {100 * self._options.auto_ratio:g} % of what AdamW remembers would have reached the weights"
        )
