"""The deferred elements of a shard: blocks that the host updates, and their way into the device's weights."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from lightning_zenflow.adamw import Hyper
from lightning_zenflow.offload.client import HostClient
from lightning_zenflow.offload.protocol import Gradient
from lightning_zenflow.schedule import block_range
from lightning_zenflow.shard_state import ShardState
from lightning_zenflow.stats import Timeline
from lightning_zenflow.transfer import Transfers
from lightning_zenflow.weights import ShardWeights


class DeferredBlocks:
    """Which blocks are under way, and what of the device's weights they have changed.

    Attributes:
        count: `U`, the number of blocks.
        is_settled: Whether the device shows the masters themselves, and the host holds no gradient.
        changed: Range of the shard whose deferred weights changed since `begin_step`; `(0, 0)` for none.
    """

    def __init__(
        self, host: HostClient, weights: ShardWeights, numel: int, transfers: Transfers, timeline: Timeline
    ) -> None:
        self._host, self._weights, self._numel = host, weights, numel
        self._transfers, self._timeline = transfers, timeline
        self.count = host.arena.layout.blocks
        self.is_settled = True
        self.changed = (0, 0)
        self._launched = 0
        self._in_flight: deque[int] = deque()  # how many steps each block under way stands for, oldest first

    def begin_step(self) -> None:
        """Nothing has changed yet."""
        self.changed = (0, 0)

    @property
    def oldest_age_steps(self) -> int:
        """Age of the oldest gradient that the device's weights do not contain."""
        return max(0, *self._in_flight, *self._host.ledger.held)

    def launch(
        self,
        block: int,
        clock: int,
        look_ahead: float,
        groups: tuple[Hyper, ...],
        gradient: Gradient | None = None,
        *,
        others: bool = False,
        delay_steps: float = 0.0,
    ) -> None:
        """Lets the host update a block while the device goes on, with the step's gradient if it is given.

        With `others`, all other blocks accumulate it.
        """
        half = self._launched % 2
        # The half was copied to the device two blocks ago; the host must not fill it before that copy is done.
        self._transfers.wait_to_device(half)
        self._in_flight.append(self._host.ledger.held[block] + (gradient is not None))
        self._host.update(block, half, clock, look_ahead, groups, gradient, others=others, delay_steps=delay_steps)
        self._launched += 1
        self.is_settled = False

    def collect(self, keep: int) -> list[tuple[int, int]]:
        """Copies finished blocks into the weights, oldest first, until only `keep` are under way; waits if need be.

        Returns the ranges of the shard that were copied.
        """
        copied = []
        while self._host.outstanding > keep:
            with self._timeline("wait for host"):
                done = self._host.collect()  # bounded by `worker_timeout_secs`
            self._in_flight.popleft()
            start, stop = block_range(self._numel, self.count, done.block)
            outbox = self._host.arena.outboxes[done.half]
            with self._timeline("copy block"):
                for offset, weights in self._weights.ranges(start, stop):
                    self._transfers.to_device(weights, outbox[offset : offset + weights.numel()], buffer=done.half)
            before = self.changed
            self.changed = (min(start, before[0]), max(stop, before[1])) if any(before) else (start, stop)
            copied.append((start, stop))
        return copied

    def update_all(
        self,
        clock: int,
        groups: tuple[Hyper, ...],
        gradient: Gradient | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Updates every block with what it holds, and a gradient, and shows the device the masters themselves.

        Once the host has as much to do as the outbox can hold, `meanwhile` is called. If no block holds anything and there is
        no gradient, the host only reads masters in that time, and does not touch moments.
        """
        self.collect(keep=0)
        for block in range(self.count):
            self.launch(block, clock, 0.0, groups, gradient)
            if block == min(1, self.count - 1):
                meanwhile()
            self.collect(keep=1)  # the copy of one block overlaps the update of the next
        self.collect(keep=0)
        self.is_settled = True
        self.changed = (0, self._numel)

    def advance(self, clock: int, groups: tuple[Hyper, ...]) -> None:
        """Lets the host update every block with what it holds; the device sees none of it until `update_all`.

        Does not wait: it is most of a settle, done while the device computes on.
        """
        if any(self._host.ledger.held):
            self._host.advance(clock, groups)

    def rebuild(self, count: int) -> None:
        """Another number of blocks, once settled."""
        for half in (0, 1):
            self._transfers.wait_to_device(half)  # the outbox halves are about to move
        self._host.rebuild(count)
        self.count = count

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The fields of `ShardState` that are about blocks, with tensors that are valid until the next step."""
        arena, ledger = self._host.arena, self._host.ledger
        ranges = [block_range(self._numel, self.count, block) for block in range(self.count)]
        return {
            "held": ledger.held,
            "lr_sums": ledger.lr_sums,
            "accumulated": [
                (start, arena.lane(ledger.lanes[block], stop - start))
                for block, (start, stop) in enumerate(ranges)
                if ledger.held[block] and start < stop
            ],
            "in_flight": list(self._in_flight),
            "waiting": [
                (done.block, arena.view(f"outbox{done.half}", 0, ranges[done.block][1] - ranges[done.block][0]))
                for done in self._host.waiting
            ],
            "device_is_settled": self.is_settled,
        }

    def reset(self, count: int) -> None:
        """Forgets what is held and under way; waits until the worker is idle."""
        self._host.reset()
        self._in_flight.clear()
        self._launched, self.is_settled = 0, True
        if count != self.count:
            self.rebuild(count)

    def load_state(self, state: ShardState) -> None:
        """Goes on where `state` was taken, after `reset`."""
        self._host.restore(state.held, state.lr_sums)
        size = self._host.arena.layout.block_numel
        for start, gradients in state.accumulated:
            self._host.arena.lane(self._host.ledger.lanes[start // size], gradients.numel()).copy_(gradients)
        for half, (block, values) in enumerate(state.waiting):
            self._host.arena.outboxes[half][: values.numel()] = values
            self._host.adopt(block, half)
        self._launched, self._in_flight = len(state.waiting), deque(state.in_flight)
        self.is_settled = state.device_is_settled
