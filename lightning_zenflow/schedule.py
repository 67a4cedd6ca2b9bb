"""When things happen: pure arithmetic on the step number, without torch.

The order of events of DESIGN section 2, as numbers: warm-up, re-selection, the block of a step, lag and look-ahead. The
optimizer and `reference.py` both ask here, so that the schedule is written once.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepPlan:
    """What step `step` does.

    Attributes:
        step: The step number, from 1.
        reselect: Columns are selected anew before this step's update, behind a barrier.
        block: The block of deferred elements updated at this step; `None` in warm-up, where all of them are.
        lag: How many later steps may pass before the device sees the block: 1 with overlap, else 0.
        look_ahead: How far the device's copy is extrapolated along the master's last move, as a share of that move.
    """

    step: int
    reselect: bool
    block: int | None
    lag: int
    look_ahead: float


@dataclass(frozen=True)
class Schedule:
    """The fixed points of a run.

    Attributes:
        update_interval: `U`, the number of blocks.
        select_interval: Steps between selections; `None` if nothing is ever selected.
        warm_up_steps: First steps in which everything is updated synchronously.
        overlap: Whether a block may arrive one step late.
        look_ahead: Whether the device's copy is extrapolated.
    """

    update_interval: int
    select_interval: int | None
    warm_up_steps: int = 0
    overlap: bool = True
    look_ahead: bool = True

    def plan(self, step: int) -> StepPlan:
        """What happens at `step` (1, 2, ...)."""
        since_warm_up = step - self.warm_up_steps - 1
        if since_warm_up < 0:
            return StepPlan(step, reselect=False, block=None, lag=0, look_ahead=0.0)
        reselect = self.select_interval is not None and since_warm_up % self.select_interval == 0
        lag = 1 if self.overlap else 0
        # The middle of the time during which the device sees the block: it arrives `lag` steps late and stays U steps.
        ahead = (lag + (self.update_interval - 1) / 2) / self.update_interval if self.look_ahead else 0.0
        return StepPlan(step, reselect, step % self.update_interval, lag, ahead)


def block_range(numel: int, blocks: int, block: int) -> tuple[int, int]:
    """Start and stop of `block` when `numel` elements are cut into `blocks` contiguous, equal ranges (the last is shorter)."""
    size = -(-numel // blocks)
    return min(numel, block * size), min(numel, (block + 1) * size)
