"""ZenFlow with the auto-tuner's controller in charge of `update_interval`."""

from __future__ import annotations

from lightning_zenflow.schedule import Schedule
from lightning_zenflow.tuner import Controller, Intervals, Observation, TunerOptions, WindowCollector

from .methods import ShardMethod
from .pace import Clock
from .workload import Workload

MOST_WINDOWS = 8
"""After so many the interval in use is measured, whether the controller has settled or not."""


class TunedZenFlow(ShardMethod):
    """ZenFlow whose `update_interval` follows from what its own steps cost, as `AutoTuner` has it.

    It begins with 1, and at each ratio with what it has found at the one before: where the host becomes slower and slower
    the controller only has to go up, which it does in few windows.
    """

    def __init__(self, workload: Workload, bandwidth: float, clock: Clock) -> None:
        super().__init__(workload, bandwidth, clock, Schedule(1, None))
        self._gradient_secs = 0.0

    def tune(self, compute_secs: float) -> None:
        """Trains until the controller has kept its interval twice in a row."""
        controller = Controller(TunerOptions(tune_select=False), Intervals(self.update_interval, None))
        collector = WindowCollector(controller.window_steps)
        kept = windows = 0
        while kept < 2 and windows < MOST_WINDOWS:
            self.train(compute_secs)
            window = collector.add(self._observation())
            if window is None:
                continue
            windows += 1
            decision = controller.decide(window)
            kept = 0 if decision.changed else kept + 1
            if decision.changed:
                self.optimizer.change_intervals(decision.intervals.update_interval, None)
            collector.window_steps = controller.window_steps
            collector.restart(decision.skip_steps)

    def _observation(self) -> Observation:
        """The last step, as `AutoTuner` sees it on a device whose copies are asynchronous."""
        stats, blocks = self.stats, self.stats.update_interval
        if blocks > 1:  # as if the gradient had been added to all blocks first, so that intervals compare
            self._gradient_secs = stats.worker_accumulate_secs * blocks / (blocks - 1)
        return Observation(
            step_secs=stats.step_secs,
            update_stall_secs=stats.update_stall_secs,
            accumulate_secs=self._gradient_secs,
            update_secs=max(0.0, stats.worker_update_secs - self._gradient_secs / blocks),
        )
