"""The intervals that an estimate recommends: those that the auto-tuner would settle on. Symbols as in `costs`."""

from __future__ import annotations

import math

from lightning_zenflow import costs, traffic
from lightning_zenflow.rates import Rates
from lightning_zenflow.tuner import copy_rule
from lightning_zenflow.tuner.host_model import HostModel
from lightning_zenflow.tuner.options import TunerOptions
from lightning_zenflow.tuner.update_rule import BEST_TOLERANCE_RATIO
from lightning_zenflow.work import Work

TUNER = TunerOptions()
"""What the auto-tuner keeps to, so that an estimate recommends the intervals that it would settle on."""


def smallest_update_interval(work: Work, rates: Rates) -> int:
    """The smallest `U` for which the host keeps up, or comes as close as it can.

    Updates are then as fresh as the hardware allows; not fresher, where the trainer copies blocks itself, than the
    auto-tuner's budget for copies. Where the host never keeps up, a larger `U` than the one returned would make the step
    less than 2 % shorter.
    """
    most = TUNER.max_update_interval
    steps = {interval: costs.zenflow(work, rates, interval) for interval in range(1, most + 1)}
    lowest = _smallest_copied_interval(work, rates, steps[most], most)
    for interval, step in steps.items():
        if step.stall_secs == 0 and interval >= lowest:
            return interval
    limit = (1 + BEST_TOLERANCE_RATIO) * steps[most].step_secs
    return next(interval for interval, step in steps.items() if step.step_secs <= limit)


def _smallest_copied_interval(work: Work, rates: Rates, step: costs.Step, update_interval: int) -> int:
    """The smallest `U` whose copies the auto-tuner allows, by a `step` with another one; 1 where copies do not wait."""
    if rates.link_overlaps and not work.offload_parameters:
        return 1
    whole_secs = work.shard_numel * costs.copy_secs(work, rates)
    device_secs = step.step_secs - step.stall_secs - whole_secs / update_interval
    model = HostModel(device_secs, 0.0, 0.0, whole_copy_secs=whole_secs)
    return min(TUNER.max_update_interval, copy_rule.smallest_interval(model, TUNER.share))


def barrier_secs(work: Work, rates: Rates, update_interval: int) -> float:
    """One re-selection: the rest of the updates that began with backward, the selected columns' state, all weights.

    Blocks travel while the next one is read from the masters, so that only the last one's way is added.
    """
    step = costs.zenflow(work, rates, update_interval)
    begin_secs = max(step.host_secs, step.compute_secs - costs.backward_secs(work, rates))
    held_numel = work.shard_numel * (1 - 1 / update_interval)
    late = max(0.0, begin_secs + held_numel * rates.update_secs - step.compute_secs)
    shown, copied = costs.show_secs(work, rates), costs.copy_secs(work, rates)
    settle = late + work.shard_numel * max(shown, copied)
    last = work.shard_numel / update_interval * min(shown, copied)
    moved = work.selected_shard_numel * rates.move_secs
    scores = traffic.score_bytes(work) / rates.interconnect_bandwidth
    exchanged = costs.between_devices_secs(work, rates, traffic.exchanged_numel(work, work.numel))
    return settle + last + moved + scores + exchanged


def smallest_select_interval(work: Work, rates: Rates, update_interval: int) -> int:
    """The smallest `S` for which re-selections stay within their half of the stall budget."""
    allowed_secs = TUNER.share * costs.zenflow(work, rates, update_interval).step_secs
    needed = math.ceil(barrier_secs(work, rates, update_interval) / allowed_secs)
    return min(TUNER.max_select_interval, max(TUNER.min_select_interval, needed))
