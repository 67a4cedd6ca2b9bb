"""`HostClient`: the trainer's handle on the background process. Launch calls do not wait, collecting calls do."""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Sequence
from typing import Any

from lightning_zenflow.adamw import Hyper
from lightning_zenflow.offload.arena import Arena
from lightning_zenflow.offload.channel import Channel
from lightning_zenflow.offload.errors import WorkerDied, WorkerTimeout
from lightning_zenflow.offload.layout import ArenaLayout
from lightning_zenflow.offload.memory import check_host_memory
from lightning_zenflow.offload.process import WorkerProcess
from lightning_zenflow.offload.protocol import (
    Advance,
    Answer,
    Gradient,
    Ledger,
    Rebuild,
    Restore,
    Start,
    Update,
    Updated,
)
from lightning_zenflow.offload.watch import DeathWatch
from lightning_zenflow.schedule import block_range

START_TIMEOUT_SECS = 60.0
"""How long the worker may take until it is ready; 3 seconds are usual."""

_log = logging.getLogger(__name__)

__all__ = ["HostClient", "WorkerDied", "WorkerTimeout"]


class HostClient:
    """The host state of one rank, and the process that works on it.

    Used by one thread of the trainer. A forked child of the trainer that drops it or exits leaves the worker alone.

    Attributes:
        arena: The shared memory. Write the slot only after `wait_slot`, masters and moments only after `drain`.
        ledger: What the accumulator holds, per block, once `drain` has returned.
    """

    def __init__(self, process: WorkerProcess, arena: Arena, groups: int, timeout_secs: float) -> None:
        """Use `start` or `launch`."""
        self.arena = arena
        self.ledger = Ledger(arena.layout.blocks, groups)
        self._process = process
        self._owner_pid = os.getpid()
        self._channel = Channel(process, timeout_secs)
        self._watch = DeathWatch(process.pidfd, self._channel.death_to_tell)
        # Runs once: on close, when the client is dropped, or when the interpreter ends.
        self._release: weakref.finalize[..., HostClient] = weakref.finalize(
            self, _release, os.getpid(), self._watch, process, arena
        )

    @classmethod
    def start(cls, layout: ArenaLayout, group_ends: Sequence[int], *, pin: bool = False, **settings: Any) -> HostClient:
        """`launch`, page-lock the exchange region if `pin`, and `wait_ready`. Same settings and errors."""
        client = cls.launch(layout, group_ends, **settings)
        try:
            if pin:
                client.arena.pin()
            client.wait_ready()
        except BaseException:
            client.close()
            raise
        return client

    @classmethod
    def launch(
        cls,
        layout: ArenaLayout,
        group_ends: Sequence[int],
        *,
        cores: Sequence[int] | None,
        lr_scale: str,
        timeout_secs: float,
        local_ranks: int = 1,
        insist_on_cores: bool = True,
    ) -> HostClient:
        """Makes the shared memory and starts the worker, without waiting until it is ready.

        Args:
            layout: Of the shared memory.
            group_ends: Cumulative end of each parameter group in the shard, in elements.
            cores: Cores of the worker, one thread each; `None` for one thread on the trainer's cores.
            lr_scale: `deferred_lr_scale` of the config.
            timeout_secs: `worker_timeout_secs` of the config.
            local_ranks: Ranks on this machine, whose memory must suffice for all.
            insist_on_cores: Whether cores that the system refuses are an error, and not a warning.

        Raises:
            ValueError: `group_ends` does not end at `layout.numel`, or falls.
            MemoryError: The memory does not suffice, or the system refuses it.
        """
        ends = tuple(group_ends)
        if not ends or ends[-1] != layout.numel or list(ends) != sorted(ends) or ends[0] < 0:
            raise ValueError(f"`group_ends` must rise to `numel` {layout.numel}, got {ends}. Pass cumulative ends.")
        check_host_memory(layout.touched_nbytes, local_ranks, numel=layout.numel)
        arena = Arena.create(layout)
        try:
            process = WorkerProcess.start(arena.fd, timeout_secs)
        except BaseException:
            arena.close()
            raise
        client = cls(process, arena, len(ends), timeout_secs)
        with contextlib.suppress(OSError):  # died already: `wait_ready` says why
            wanted = None if cores is None else tuple(cores)
            process.send(Start(layout, ends, wanted, lr_scale, insist_on_cores))
        return client

    def wait_ready(self) -> None:
        """Waits until the worker has taken over the memory, at most `START_TIMEOUT_SECS`.

        Raises:
            WorkerDied: It failed; the message holds its traceback.
            WorkerTimeout: It did not answer.
        """
        ready = self._channel.wait_ready(START_TIMEOUT_SECS)
        if ready.refused:
            _log.warning(
                "The background process may not run on cores %s, and runs on %s instead: the cores of this job have changed."
                " Set `worker_cores` to choose others.",
                list(ready.refused),
                list(ready.cores),
            )

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        return self._process.pid

    @property
    def outstanding(self) -> int:
        """Updates launched and not yet collected."""
        return self._channel.running + len(self._channel.updated)

    def take_answers(self) -> list[Answer]:
        """What the worker has reported since the last call, in order. Does not wait."""
        answers, self._channel.answers = self._channel.answers, []
        return answers

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
        """Launches one AdamW step on `block`, result into outbox `half`. Does not wait.

        Args:
            block: The block, from 0.
            half: Outbox half, 0 or 1; it must not belong to an outstanding update.
            clock: The step number.
            look_ahead: How far the outbox is extrapolated, as a share of the master's move.
            groups: Settings of each group.
            gradient: Of this step, in the slot, if the update contains it.
            others: Whether the accumulators of all other blocks get it as well.
            delay_steps: By how many steps' beta1 the extrapolation fades.
        """
        self._channel.launch(Update(block, half, clock, look_ahead, tuple(groups), gradient, others, delay_steps))
        if others:
            assert gradient is not None
            self.ledger.add_to_others(block, gradient)
        self.ledger.take(block, gradient)

    def advance(self, clock: int, groups: Sequence[Hyper]) -> None:
        """Launches one AdamW step on every block that holds steps; the outboxes stay as they are. Does not wait.

        Args:
            clock: The step number.
            groups: Settings of each group.
        """
        self._channel.launch(Advance(clock, tuple(groups)))
        for block, held in enumerate(self.ledger.held):
            if held:
                self.ledger.take(block)

    def restore(self, held: Sequence[int], lr_sums: Sequence[Sequence[float]]) -> None:
        """Tells what the accumulator holds, per block; the caller fills the ledger's lanes. Does not wait."""
        command = Restore(tuple(held), tuple(tuple(sums) for sums in lr_sums))
        self._channel.launch(command)
        self.ledger.restore(command)

    def reset(self) -> None:
        """Forgets what is accumulated and under way, before a checkpoint is loaded. Waits until the worker is idle."""
        self.drain()
        self._channel.updated.clear()
        if any(self.ledger.held):
            self.restore([0] * len(self.ledger.held), [[0.0] * len(sums) for sums in self.ledger.lr_sums])

    def adopt(self, block: int, half: int) -> None:
        """Takes outbox `half` for a finished update of `block`, after it was filled from a checkpoint: collect it as usual."""
        self._channel.updated.append(Updated(block, half, 0, 0.0, 0.0))

    def rebuild(self, blocks: int) -> None:
        """Cuts the shard into another number of blocks. Waits until the worker is idle, at most `timeout_secs`.

        Raises:
            RuntimeError: A block holds steps, or an update has not been collected. Settle first.
        """
        if self.outstanding:
            raise RuntimeError(
                f"`blocks` must be changed with no update under way, got {self.outstanding}. Settle first."
            )
        self.drain()  # the worker must not read a slot while it is pinned anew
        self.ledger.rebuild(blocks)
        self.arena.rebuild(blocks)
        self.arena.trim()
        self._channel.launch(Rebuild(blocks))

    def collect(self) -> Updated:
        """Waits for the oldest outstanding update, at most `timeout_secs`; its outbox half is then complete.

        Raises:
            WorkerDied: The worker has ended.
            WorkerTimeout: It did not answer.
            RuntimeError: No update is outstanding.
        """
        if not self.outstanding:
            raise RuntimeError("`collect` must follow an `update`, got no outstanding one. Call `update` first.")
        self._channel.wait_until(lambda: bool(self._channel.updated))
        return self._channel.updated.popleft()

    def slot_is_read(self, start: int, stop: int) -> bool:
        """Whether the worker has read the slot's elements `start` to `stop`, so that they may be overwritten. Does not wait."""
        if self._was_read(start, stop):
            return True
        self._channel.take_over()
        return self._was_read(start, stop)

    def wait_slot(self, start: int, stop: int) -> None:
        """Waits until the slot's elements `start` to `stop` have been read, at most `timeout_secs`."""
        self._channel.wait_until(lambda: self._was_read(start, stop))

    def _was_read(self, start: int, stop: int) -> bool:
        return not any(self._reads(command, start, stop) for command in self._channel.unanswered)

    def _reads(self, command: Update | Advance, start: int, stop: int) -> bool:
        """Whether an unanswered command may still read elements of the slot."""
        layout = self.arena.layout
        if isinstance(command, Advance) or command.gradient is None:
            return False
        if not command.others:
            first, last = block_range(layout.numel, layout.blocks, command.block)
            return start < last and first < stop
        is_begun = command is self._channel.unanswered[0] and self._channel.read_from is not None
        return not is_begun or start < (self._channel.read_from or 0)

    def drain(self) -> None:
        """Waits until the worker is idle, at most `timeout_secs`. Updates stay to be collected."""
        self._channel.wait_until(lambda: not self._channel.unanswered)

    def check(self) -> None:
        """Raises `WorkerDied` if the worker has ended. Does not wait."""
        self._channel.check()

    @property
    def waiting(self) -> tuple[Updated, ...]:
        """Finished updates that nobody has collected, oldest first; complete once `drain` has returned."""
        return tuple(self._channel.updated)

    def retire(self) -> None:
        """Ends the worker and gives back all memory but masters and moments, which stay until `close`."""
        if self._channel.is_closed or os.getpid() != self._owner_pid:
            return
        self._channel.is_closed = True
        self._release.detach()
        self._release = weakref.finalize(self, _release_arena, os.getpid(), self.arena)
        self._watch.stop()
        self._process.stop()
        self.arena.keep_state()

    def close(self) -> None:
        """Ends the worker, unpins and returns the memory. Idempotent, bounded, and fine if the worker is dead."""
        self._channel.is_closed = True
        self._release()


def _release(owner_pid: int, watch: DeathWatch, process: WorkerProcess, arena: Arena) -> None:
    watch.stop()  # before the descriptor that it watches is closed
    if os.getpid() != owner_pid:  # a forked child that exits: worker and memory belong to the trainer
        return
    try:
        process.stop()
    finally:
        arena.close()


def _release_arena(owner_pid: int, arena: Arena) -> None:
    if os.getpid() == owner_pid:
        arena.close()
