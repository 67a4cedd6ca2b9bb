"""A background process that takes made-up times on a made-up clock, for tests of who waits for whom."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_zenflow.adamw import Hyper
from lightning_zenflow.offload.layout import ArenaLayout
from lightning_zenflow.offload.protocol import Gradient, Ledger, Restore, Update, Updated
from lightning_zenflow.schedule import block_range


class FakeClock:
    """Time passes only when somebody sleeps."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def sleep_until(self, deadline_secs: float) -> None:
        self._now = max(self._now, deadline_secs)


class FakeArena:
    """What trainers look at of the shared memory."""

    def __init__(self, layout: ArenaLayout) -> None:
        self.layout = layout
        self.slot = torch.zeros(layout.numel, dtype=layout.wire_dtype)
        self.outboxes = tuple(torch.zeros(layout.block_numel, dtype=layout.wire_dtype) for _ in range(2))
        self.master, self.exp_avg, self.exp_avg_sq = (torch.zeros(layout.numel) for _ in range(3))


class FakeClient:
    """Has `HostClient`'s calls; does one command after the other, each in `update_secs` for all elements.

    Its slot is free when the command that reads it is done. `commands` are all it was sent.
    """

    def __init__(self, layout: ArenaLayout, clock: FakeClock, update_secs: float) -> None:
        self.arena, self.ledger = FakeArena(layout), Ledger(layout.blocks, 1)
        self.commands: list[Update | Restore] = []
        self.is_closed = False
        self._clock, self._update_secs = clock, update_secs
        self._queue: deque[tuple[float, Update]] = deque()
        self._free_secs = self._read_secs = 0.0

    def update(
        self,
        block: int,
        half: int,
        clock: int,
        look_ahead: float,
        groups: Sequence[Hyper],
        gradient: Gradient | None = None,
        *,
        others: bool = False,
        delay_steps: float = 0.0,
    ) -> None:
        command = Update(block, half, clock, look_ahead, tuple(groups), gradient, others, delay_steps)
        assert all(half != running.half for done, running in self._queue if done > self._clock.now()), "half in use"
        layout = self.arena.layout
        start, stop = block_range(layout.numel, layout.blocks, block)
        secs = self._update_secs * (stop - start) / layout.numel
        self._free_secs = max(self._clock.now(), self._free_secs) + secs
        if gradient is not None:
            self._read_secs = self._free_secs
        if others:
            assert gradient is not None
            self.ledger.add_to_others(block, gradient)
        self.ledger.take(block, gradient)
        self._queue.append((self._free_secs, command))
        self.commands.append(command)

    def advance(self, clock: int, groups: Sequence[Hyper]) -> None:
        self._free_secs = max(self._clock.now(), self._free_secs) + self._update_secs
        for block, held in enumerate(self.ledger.held):
            if held:
                self.ledger.take(block)

    def restore(self, held: Sequence[int], lr_sums: Sequence[Sequence[float]]) -> None:
        command = Restore(tuple(held), tuple(tuple(sums) for sums in lr_sums))
        self.ledger.restore(command)
        self.commands.append(command)

    @property
    def outstanding(self) -> int:
        return len(self._queue)

    @property
    def waiting(self) -> tuple[Updated, ...]:
        return tuple(_updated(command) for done, command in self._queue if done <= self._clock.now())

    def collect(self) -> Updated:
        done_secs, command = self._queue.popleft()
        self._clock.sleep_until(done_secs)
        return _updated(command)

    def slot_is_read(self, start: int, stop: int) -> bool:
        return self._clock.now() >= self._read_secs

    def wait_slot(self, start: int, stop: int) -> None:
        self._clock.sleep_until(self._read_secs)

    def drain(self) -> None:
        self._clock.sleep_until(self._free_secs)

    def take_answers(self) -> list[Any]:
        return []

    def close(self) -> None:
        self.is_closed = True


def _updated(command: Update) -> Updated:
    return Updated(command.block, command.half, 1, 0.0, 0.0)


@dataclass
class FakeHosts:
    """Starts fake processes; `update_secs` are those of each, in the order of their start."""

    clock: FakeClock
    update_secs: list[float]
    started: list[FakeClient] = field(default_factory=list)

    def start(self, layout: ArenaLayout, group_ends: Sequence[int], **settings: Any) -> FakeClient:
        assert list(group_ends) == [layout.numel]
        self.started.append(FakeClient(layout, self.clock, self.update_secs[len(self.started)]))
        return self.started[-1]
