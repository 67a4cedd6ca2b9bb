"""ZenFlow and ZeRO-Offload's schedule, both by the package's own `ShardOptimizer`."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from lightning_zenflow.gradients import GradientInbox
from lightning_zenflow.schedule import Schedule
from lightning_zenflow.shard_optimizer import ShardOptimizer
from lightning_zenflow.shards import Segment
from lightning_zenflow.stats import StepStats
from lightning_zenflow.weights import ShardWeights

from .pace import Clock, PacedDevice, PacedTransfers, StepCost
from .workload import FORWARD_RATIO, GROUPS, WIRE_DTYPE, Workload

CPU = torch.device("cpu")


class Method(ABC):
    """A way to update a shard whose optimizer state lives on the host.

    Attributes:
        device: The device that trains.
        transfers: The link.
        clock: What tells the time.
    """

    def __init__(self, workload: Workload, bandwidth: float, clock: Clock) -> None:
        self.workload, self.clock = workload, clock
        self.transfers = PacedTransfers(bandwidth, clock)
        self._gradients = workload.device_memory()
        self.device = PacedDevice(self.transfers, clock)

    @property
    @abstractmethod
    def update_interval(self) -> int:
        """Steps in which each element is updated once."""

    def train(self, compute_secs: float) -> StepCost:
        """One step, of which forward and backward take `compute_secs`."""
        segments = self.workload.table.segments
        self.device.begin_step()
        self.device.compute(compute_secs * FORWARD_RATIO)
        for segment in reversed(segments):
            self.device.compute(compute_secs * (1 - FORWARD_RATIO) * segment.numel / self.workload.numel)
            self._receive(segment, self._gradients[segment.start : segment.stop])
        self.device.wait_for_gradients()
        self._finish()
        return self.device.end_step()

    @abstractmethod
    def _receive(self, segment: Segment, grad: Tensor) -> None:
        """Takes a gradient, during backward."""

    @abstractmethod
    def _finish(self) -> None:
        """The optimizer's step; all gradients have arrived."""

    @abstractmethod
    def close(self) -> None:
        """Ends the background processes and returns their memory. Safe to call again."""


class PacedInbox(GradientInbox):
    """Waits for its place and copies, and measures nothing: that is the device's work, and part of its given time."""

    _UNMEASURED = torch.zeros(())

    def receive(self, segment: Segment, grad: Tensor) -> None:
        self._wait_slot(segment.start, segment.stop)
        self._transfers.to_host(self._slot[segment.start : segment.stop], grad)
        self._squares[segment.param] = [self._UNMEASURED]


class ShardMethod(Method):
    """`ShardOptimizer` at work, with nothing selected: what selected columns cost is part of the device's given time."""

    def __init__(self, workload: Workload, bandwidth: float, clock: Clock, schedule: Schedule) -> None:
        super().__init__(workload, bandwidth, clock)
        client = workload.launch(schedule.update_interval)
        try:
            self.optimizer = ShardOptimizer(
                lambda: GROUPS,
                workload.table,
                ShardWeights(workload.table, [workload.device_memory()]),
                client,
                schedule,
                topk_ratio=0.0,
                wire_dtype=WIRE_DTYPE,
                device=CPU,
                sum_over_ranks=lambda tensor: None,
                transfers=self.transfers,
            )
        except BaseException:
            client.close()
            raise
        self.optimizer.inbox = PacedInbox(
            workload.table, self.optimizer.selected, self.transfers, CPU, client.arena.slot, self._wait_slot
        )
        self.optimizer.inbox.open(selecting=False)

    @classmethod
    def zenflow(cls, workload: Workload, bandwidth: float, clock: Clock, update_interval: int) -> ShardMethod:
        """ZenFlow as it trains by default: blocks, a step late, with look-ahead.

        But for `interim_step`: its pass would run at the speed of this CPU, not of the device that is simulated.
        """
        return cls(workload, bandwidth, clock, Schedule(update_interval, None))

    @classmethod
    def synchronous(cls, workload: Workload, bandwidth: float, clock: Clock) -> ShardMethod:
        """ZeRO-Offload's schedule: at each step the device waits for the update of everything, and for all weights.

        As it would like to be: gradients go down during backward, the host's pass is this package's, and reads them as
        they come, without the fp32 copy that DeepSpeed makes.
        """
        return cls(workload, bandwidth, clock, Schedule(1, None, overlap=False, look_ahead=False))

    @property
    def stats(self) -> StepStats:
        """Of the last step."""
        return self.optimizer.stats

    @property
    def update_interval(self) -> int:
        return self.optimizer.intervals[0]

    def _wait_slot(self, start: int, stop: int) -> None:
        with self.device.slot_wait():
            self.optimizer._wait_slot(start, stop)

    def train(self, compute_secs: float) -> StepCost:
        self.optimizer.begin_step()
        return super().train(compute_secs)

    def _receive(self, segment: Segment, grad: Tensor) -> None:
        self.optimizer.receive(segment, grad)

    def _finish(self) -> None:
        outcome = self.optimizer.step(loss_scale=1.0, clip_norm=0.0)
        self.optimizer.finish_step(applied=outcome.applied)
        # The wait for the block is what is left; both clocks are read a little apart.
        self.device.idle(max(0.0, self.stats.update_stall_secs - self.device.slot_wait_secs))

    def close(self) -> None:
        self.optimizer.close()
