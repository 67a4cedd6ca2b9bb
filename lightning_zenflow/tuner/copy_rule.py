"""The lower bound of `update_interval` that keeps copying cheap.

Where copies are synchronous, as on CPU, the trainer copies one of `U` blocks into the weights in each step: a smaller
interval costs time although nobody waits for the host. Copying may take as much of a step as update stalls may. An interval
in use is left only if it is clearly too small, and a smaller one is allowed only where it clearly fits.
"""

from __future__ import annotations

import math

from lightning_zenflow.tuner.host_history import SURE_WINDOWS, HostHistory
from lightning_zenflow.tuner.host_model import HostModel
from lightning_zenflow.wording import in_words, percent

MOST_INTERVAL = 10**9

EXCESS_RATIO = 1.5
"""An interval in use may take this many times its share."""

CLEAR_RATIO = 0.9
"""Share of what is allowed that a smaller interval must keep to."""

SETTLED_CLEAR_RATIO = 0.75
"""The same where the interval in use has proven itself."""


def smallest_interval(model: HostModel, share: float) -> int:
    """Smallest `update_interval` at which copying takes at most `share` (above 0, below 1) of a step without stalls.

    From `copy / U <= share * (device + copy / U)`.
    """
    least_secs = model.whole_copy_secs * (1 - share) / share
    if least_secs >= MOST_INTERVAL * model.device_secs:
        return MOST_INTERVAL if least_secs > 0 else 1
    return max(1, math.ceil(least_secs / model.device_secs - 1e-9))


def lowest_interval(model: HostModel, history: HostHistory, current: int, share: float) -> int:
    """Smallest `update_interval` allowed now.

    Above `current` if that must be left, and `current` where it may stay although a shorter copy would be better.
    """
    within = smallest_interval(model, share)
    if current >= within:
        clear_ratio = SETTLED_CLEAR_RATIO if history.is_settled else CLEAR_RATIO
        return min(current, smallest_interval(model, clear_ratio * share))
    # One that has not proven itself has no right to stay more than one step off.
    is_far_off = current + 1 < within and not history.is_settled
    is_excessive = is_far_off or model.copy_ratio(current) > EXCESS_RATIO * share
    return within if is_excessive and history.is_sure else current


def in_use_in_words(model: HostModel, current: int, share: float) -> str:
    """What copying costs at the interval in use: `copying 1/2 of the weights takes 0.9 ms of 19 ms a step (...)`."""
    return f"copying {_block(current)} takes {_cost(model, current, share)}"


def why_kept(model: HostModel, history: HostHistory, current: int, share: float) -> str | None:
    """Why an interval in use stays as it is on account of its copies; `None` if they are no reason."""
    if model.copy_ratio(current) > share:
        later = "" if history.is_sure else f", to be judged after {SURE_WINDOWS} windows"
        return f"{in_use_in_words(model, current, share)}{later}"
    if current == 1 or lowest_interval(model, history, current, share) < current:
        return None
    return f"with {current - 1}, copying {_block(current - 1)} would take {_cost(model, current - 1, share)}"


def _block(update_interval: int) -> str:
    return f"1/{update_interval} of the weights" if update_interval > 1 else "all weights"


def _cost(model: HostModel, update_interval: int, share: float) -> str:
    secs, step_secs = model.whole_copy_secs / update_interval, model.device_step_secs(update_interval)
    ratio = model.copy_ratio(update_interval)
    return f"{in_words(secs)} of {in_words(step_secs)} a step ({percent(ratio)}, budget {percent(share)})"
