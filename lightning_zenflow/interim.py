"""What the device itself does to deferred weights between two of the host's updates.

A gradient reaches a deferred weight as soon as the host's update arrives, which takes half an interval on average. In
directions of high curvature such a delay lets weights swing where AdamW's would settle. So the device moves its own copy at
once, by what it knows without any state for each element::

    w_device = w_device - 1.5 * (1 - beta1**delay) * lr * g / sqrt(0.98 * mean + 0.02 * now)

`mean` is the mean square of the matrix's gradients, a moving average over the steps before, and `now` that of this gradient,
over the rank's part of the matrix; `1 - beta1**delay` is how much of a gradient AdamW's first moment has let through in the
time that the update takes on average. AdamW divides by each element's own root, which for most elements is below that of
their matrix: hence the 1.5, which has been measured (`examples/accuracy.md`). The look-ahead, which goes on along the last
move, fades by `beta1**delay` in turn. The master never sees any of it: the next update of the block overwrites the device's
copy.

Clipping comes too late for a move, since it needs the norm of everything. That one batch with a gradient far beyond all
before does not throw the weights away is due to `now`: no gradient moves a matrix further than seven usual ones.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_zenflow.adamw import Hyper
from lightning_zenflow.schedule import StepPlan
from lightning_zenflow.shards import Segment, ShardTable
from lightning_zenflow.transfer import Transfers
from lightning_zenflow.weights import ShardWeights

SCALE = 1.5
"""Of all moves: stands for roots of single elements, which are not known here."""

DECAY = 0.98
"""Of the moving average of squared gradients, per step."""

SLOT = 2
"""Number by which `Transfers` knows copies out of the slot; those of the outbox halves are 0 and 1."""

_CHUNK_NUMEL = 1 << 18
_DEVICE_CHUNK_NUMEL = 1 << 24


class InterimStep:
    """Moves the deferred weights of one rank; vectors are never deferred, and selected elements are overwritten anyway.

    Attributes:
        is_due: Whether weights move at this step, on whichever rank.
        mean_squares: fp32 `[parameters]` on the device: average of the squared, unscaled gradient, not bias-corrected.
        observed_steps: Steps that are in it.
    """

    def __init__(self, table: ShardTable, weights: ShardWeights, transfers: Transfers, device: torch.device) -> None:
        self._table, self._weights, self._transfers, self._device = table, weights, transfers, device
        self._starts = [segment.start for segment in table.segments]
        self._numels = torch.tensor([max(1, spec.numel) for spec in table.params], dtype=torch.float32, device=device)
        self._chunk_numel = _CHUNK_NUMEL if device.type == "cpu" else _DEVICE_CHUNK_NUMEL
        self.mean_squares = torch.zeros_like(self._numels)
        self.observed_steps = 0
        self.is_due = False
        self._in_parts: set[int] = set()
        self._late: frozenset[int] = frozenset()
        self._knows_parts = False  # once a whole step of this process was seen
        self._means: Sequence[Tensor] = ()  # of the steps before, as far as they count in this one
        self._squares: dict[int, tuple[int, Tensor]] = {}  # elements and sum of squares of the gradient at hand
        self._inverses: dict[int, Tensor] = {}  # what a move multiplies by, once it is known
        self._loss_scale = 1.0
        self._rates: list[float] | None = None

    def open(self, plan: StepPlan) -> None:
        """Begins the step of `plan`, before its forward, on the stream that those of gradients wait for."""
        self.is_due = plan.interim and self.observed_steps > 0
        self._delay_steps, self._rates = plan.delay_steps, None
        self._squares.clear()
        self._inverses.clear()
        self._late = frozenset(self._in_parts if self._knows_parts else range(len(self._table.params)))
        if self.is_due:
            means = DECAY * (self.mean_squares / (1 - DECAY**self.observed_steps))
            # A matrix without any gradient so far stays where it is.
            self._means = torch.where(means > 0, means, math.inf).unbind()

    @property
    def needs_rates(self) -> bool:
        """Whether `begin` must come before the next gradient. Asked with each one, of which a step has thousands."""
        return self.is_due and self._rates is None

    def begin(self, groups: Sequence[Hyper], loss_scale: float) -> None:
        """With the first gradient of a step: how far each group's weights go."""
        self._loss_scale = loss_scale
        self._rates = [SCALE * group.lr * (1 - group.beta1**self._delay_steps) / loss_scale for group in groups]

    def measure(self, segment: Segment, squares: Sequence[Tensor]) -> None:
        """Before any move by a gradient: its sums of squares, fp32 scalars on the device, still scaled as the gradient is."""
        if self.is_due and squares and segment.spec.is_matrix:
            self._squares[segment.param] = segment.numel, torch.stack(list(squares)).sum()
            self._inverses.pop(segment.param, None)

    def comes_in_parts(self, segment: Segment) -> None:
        """From the next step on, these weights move at its end: after the first part of a gradient they are read again.

        So it is where reentrant activation checkpointing uses a layer several times, and in manual optimization with several
        backward passes for one step, of which some may be dropped.
        """
        self._in_parts.add(segment.param)

    def is_late(self, segment: Segment) -> bool:
        """Whether these weights move at the end of the step: all of them in a step that may be the first to show parts."""
        return segment.param in self._late

    def move(self, segment: Segment, start: int, stop: int, grad: Tensor) -> None:
        """Elements `start` to `stop` of the shard, by a gradient that arrives during backward, still times the loss scale.

        `grad` is flat `[stop - start]` on the device. Nobody reads these weights any more in this step: autograd has
        finished their gradient. Does nothing where they are late.
        """
        if self._rates is not None and segment.spec.is_matrix and not self.is_late(segment):
            self._add(segment, start, stop, grad)

    def move_late(self, received: Sequence[Segment], slot: Tensor) -> None:
        """At the end of a step: what has waited for all of its gradient, which lies in `slot`, as for `move_again`."""
        if self._late:
            for segment in filter(self.is_late, received):
                self.move_again(segment.start, segment.stop, slot)

    def move_again(self, start: int, stop: int, slot: Tensor) -> None:
        """In a range that a block has just been copied to, whose update does not know this step's gradient yet.

        `slot` is the host's, flat `[shard numel]`; it must not be overwritten before `Transfers.wait_to_device(SLOT)`.
        """
        if self._rates is None:
            return
        segments = self._table.segments
        for segment in segments[max(0, bisect_right(self._starts, start) - 1) : bisect_left(self._starts, stop)]:
            first, last = max(start, segment.start), min(stop, segment.stop)
            if segment.spec.is_matrix:
                for at in range(first, last, self._chunk_numel):
                    end = min(last, at + self._chunk_numel)
                    self._add(segment, at, end, self._transfers.fetch(slot[at:end], self._device, buffer=SLOT))

    def _add(self, segment: Segment, start: int, stop: int, grad: Tensor) -> None:
        assert self._rates is not None
        inverse, rate = self._inverse(segment.param), self._rates[segment.spec.group]
        for offset, weights in self._weights.ranges(start, stop):
            weights.addcmul_(grad[offset : offset + weights.numel()], inverse, value=-rate)

    def _inverse(self, param: int) -> Tensor:
        """What a move multiplies a gradient by: one over the root of the mean square that takes it in."""
        if param not in self._inverses:
            mean = self._means[param]
            if param in self._squares:
                numel, squares = self._squares[param]
                mean = mean + squares * ((1 - DECAY) / (numel * self._loss_scale**2))
            self._inverses[param] = mean.rsqrt()
        return self._inverses[param]

    def observe(self, squares: Tensor, loss_scale: float) -> None:
        """After an applied step: sums of squares of its gradient over all ranks, fp32 `[parameters]` on the device."""
        mean = squares / (self._numels * loss_scale**2)
        self.mean_squares.lerp_(mean, 1 - DECAY)
        self.observed_steps += 1
        self._knows_parts = True

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The fields of `ShardState` that are about it."""
        names = [spec.name for spec in self._table.params]
        return {
            "mean_squares": dict(zip(names, self.mean_squares.tolist(), strict=True)),
            "observed_steps": self.observed_steps,
            "in_parts": [names[index] for index in sorted(self._in_parts)] if self._knows_parts else None,
        }

    def load_state(
        self, mean_squares: Mapping[str, float], observed_steps: int, in_parts: Sequence[str] | None = None
    ) -> None:
        """Goes on from the averages by parameter name; those of no checkpoint begin anew."""
        self._knows_parts = in_parts is not None
        self._in_parts = {index for index, spec in enumerate(self._table.params) if spec.name in (in_parts or ())}
        known = [mean_squares.get(spec.name, 0.0) for spec in self._table.params]
        self.mean_squares.copy_(torch.tensor(known, dtype=torch.float32))
        self.observed_steps = observed_steps
