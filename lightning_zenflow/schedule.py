"""When things happen: pure arithmetic on the step number, without torch.

The order of events of DESIGN section 2, as numbers: warm-up, re-selection, the block of a step, lag and look-ahead. The
optimizer and `reference.py` both ask here, so that the schedule is written once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class StepPlan:
    """What step `step` does.

    Attributes:
        step: The step number, from 1.
        reselect: Columns are selected anew before this step's update, behind a barrier.
        block: The block of deferred elements updated at this step; `None` in warm-up, where all of them are.
        lag: How many later steps may pass before the device sees the block: 1 with overlap, else 0.
        look_ahead: How far the device's copy is extrapolated along the master's last move, as a share of that move.
        delay_steps: Steps from a gradient until the device has seen half of its update, if the device itself moves deferred
            weights in that time; 0 if it does not.
        interim: Whether it does so at this step.
    """

    step: int
    reselect: bool
    block: int | None
    lag: int
    look_ahead: float
    delay_steps: float = 0.0
    interim: bool = False


@dataclass(frozen=True)
class Schedule:
    """The fixed points of a run, until its intervals change.

    Attributes:
        update_interval: `U`, the number of blocks.
        select_interval: Steps between selections; `None` if nothing is ever selected.
        warm_up_steps: First steps in which everything is updated synchronously.
        overlap: Whether a block may arrive one step late.
        look_ahead: Whether the device's copy is extrapolated.
        select_from: Step of the selection from which `select_interval` counts; `None` for the first after warm-up.
        interim: Whether the device itself moves deferred weights until the host's update arrives.
    """

    update_interval: int
    select_interval: int | None
    warm_up_steps: int = 0
    overlap: bool = True
    look_ahead: bool = True
    select_from: int | None = None
    interim: bool = False

    def changed(self, clock: int, update_interval: int, select_interval: int | None) -> Schedule:
        """The schedule for the steps after `clock`, with other intervals.

        The next selection is `select_interval` steps after the last one, or at once if that has passed.

        Raises:
            ValueError: `select_interval` is `None` and was not, or the reverse: selecting is not an interval.
        """
        if (select_interval is None) != (self.select_interval is None):
            raise ValueError(
                f"`select_interval` must stay {'None' if self.select_interval is None else 'a number of steps'}, got"
                f" {select_interval!r}. Whether columns are selected is decided by `topk_ratio` before training."
            )
        origin = self._select_origin
        if select_interval is not None and self.select_interval is not None and clock >= origin:
            last = clock - (clock - origin) % self.select_interval
            origin = max(clock + 1, last + select_interval)
        return replace(self, update_interval=update_interval, select_interval=select_interval, select_from=origin)

    @property
    def _select_origin(self) -> int:
        return self.warm_up_steps + 1 if self.select_from is None else self.select_from

    def plan(self, step: int) -> StepPlan:
        """What happens at `step` (1, 2, ...)."""
        if step <= self.warm_up_steps:
            return StepPlan(step, reselect=False, block=None, lag=0, look_ahead=0.0)
        since_origin = step - self._select_origin
        reselect = self.select_interval is not None and since_origin >= 0 and since_origin % self.select_interval == 0
        lag = 1 if self.overlap else 0
        # The middle of the time during which the device sees the block: it arrives `lag` steps late and stays U steps.
        middle = lag + (self.update_interval - 1) / 2
        ahead = middle / self.update_interval if self.look_ahead else 0.0
        delay = middle if self.interim else 0.0
        # A re-selection shows the masters, which would be the end of any move.
        return StepPlan(step, reselect, step % self.update_interval, lag, ahead, delay, delay > 0 and not reselect)


def block_range(numel: int, blocks: int, block: int) -> tuple[int, int]:
    """Start and stop of `block` when `numel` elements are cut into `blocks` contiguous, equal ranges (the last is shorter)."""
    size = -(-numel // blocks)
    return min(numel, block * size), min(numel, (block + 1) * size)
