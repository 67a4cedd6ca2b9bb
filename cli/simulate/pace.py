"""A device and a link that take the time they are given, on a machine that has neither.

The device sleeps until a deadline, so the trainer's core is free meanwhile. A copy is a deadline as well: whoever needs it
does not go on before the link would have done it. So device, link and host run beside each other as they would, and only
the host's time is the machine's own.

Nothing is copied: a link takes no core, while here one would have to copy, at 2 to 10 GB/s where a link has 25, and the
methods that copy most would look slower than they are. Nobody reads what would arrive, since gradients are constant. What
is lost is the link's own traffic in the host's memory, some 4 bytes per element of the 30 that an update moves.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from lightning_zenflow.transfer import Transfers


class Clock(Protocol):
    """What tells the time and lets it pass; tests bring one whose time is made up."""

    def now(self) -> float: ...

    def sleep_until(self, deadline_secs: float) -> None: ...


class RealClock:
    """The machine's clock."""

    def now(self) -> float:
        """Seconds, monotonic."""
        return time.perf_counter()

    def sleep_until(self, deadline_secs: float) -> None:
        """Yields the core until `deadline_secs`; returns at once if that has passed."""
        while (left_secs := deadline_secs - self.now()) > 0:
            time.sleep(left_secs)


class PacedTransfers(Transfers):
    """Copies over a link of `bandwidth` bytes/s in each direction: one after the other, and both directions at a time.

    Attributes:
        up_done_secs: When the last copy to the device is done; the next forward needs it.
    """

    def __init__(self, bandwidth: float, clock: Clock) -> None:
        # Not the base's: it would ask DeepSpeed which accelerator this is.
        self._bandwidth, self._clock = bandwidth, clock
        self._down_done_secs = self.up_done_secs = 0.0
        self._read_until_secs: dict[int, float] = {}
        self.reset_bytes()

    def to_host(self, host: Tensor, device: Tensor) -> None:
        self._down_done_secs = self._after(self._down_done_secs, host.nbytes)
        self.to_host_bytes += host.nbytes

    def to_device(self, device: Tensor, host: Tensor, *, buffer: int) -> None:
        self.up_done_secs = self._read_until_secs[buffer] = self._after(self.up_done_secs, host.nbytes)
        self.to_device_bytes += host.nbytes

    def wait_to_host(self) -> None:
        self._clock.sleep_until(self._down_done_secs)

    def wait_to_device(self, buffer: int) -> None:
        self._clock.sleep_until(self._read_until_secs.pop(buffer, 0.0))

    def _after(self, before_done_secs: float, nbytes: int) -> float:
        """When a copy is done that is launched now, and begins after those before it."""
        return max(self._clock.now(), before_done_secs) + nbytes / self._bandwidth


@dataclass(frozen=True)
class StepCost:
    """What a step took, in seconds.

    Attributes:
        step_secs: All of it.
        host_wait_secs: The device had nothing to do because of the background process.
        link_wait_secs: It waited for copies: for those of the step before at its begin, and for the gradients that computing
            did not hide.
    """

    step_secs: float
    host_wait_secs: float
    link_wait_secs: float


class PacedDevice:
    """An accelerator that computes for as long as it is told.

    Work is launched one piece ahead, as by a backward pass that runs ahead of its device: while the trainer waits for the
    host, the device finishes that piece, and only then has nothing to do.

    Attributes:
        slot_wait_secs: How long its trainer waited in `slot_wait` since `begin_step`.
    """

    def __init__(self, transfers: PacedTransfers, clock: Clock) -> None:
        self._transfers, self._clock = transfers, clock
        self.begin_step()

    def begin_step(self) -> None:
        """The forward pass may be launched; it starts once the weights that are on their way have arrived."""
        self._begin_secs = self._launched_secs = self._launching_secs = self._clock.now()
        self._done_secs = max(self._begin_secs, self._transfers.up_done_secs)
        self._link_wait_secs = self._done_secs - self._begin_secs
        self._host_wait_secs = self.slot_wait_secs = 0.0

    def compute(self, secs: float) -> None:
        """Returns when a piece of work of `secs` is done, which is behind those before it."""
        start_secs = max(self._done_secs, self._launched_secs)
        self._host_wait_secs += start_secs - self._done_secs
        self._done_secs = start_secs + secs
        self._clock.sleep_until(self._done_secs)

    @contextmanager
    def slot_wait(self) -> Iterator[None]:
        """Around a wait, during backward, for the host to have read a slot. Only the piece after the next is late for it."""
        begin_secs = self._clock.now()
        yield
        self._launched_secs, self._launching_secs = self._launching_secs, self._clock.now()
        self.slot_wait_secs += self._launching_secs - begin_secs

    def idle(self, secs: float) -> None:
        """The trainer waited for the host after backward, when nothing was launched any more."""
        self._host_wait_secs += secs

    def wait_for_gradients(self) -> None:
        """Backward is over: waits until its gradients have arrived on the host."""
        begin_secs = self._clock.now()
        late_secs = max(0.0, begin_secs - self._done_secs)  # the last gradients had to wait for their slot
        self._host_wait_secs += min(late_secs, self.slot_wait_secs)
        self._transfers.wait_to_host()
        self._link_wait_secs += self._clock.now() - begin_secs

    def end_step(self) -> StepCost:
        """What it took since `begin_step`."""
        return StepCost(self._clock.now() - self._begin_secs, self._host_wait_secs, self._link_wait_secs)
