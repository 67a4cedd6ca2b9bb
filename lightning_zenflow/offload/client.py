"""`HostClient`: the trainer's handle on the background process. Launch calls do not wait, collecting calls do."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from lightning_zenflow.adamw import Hyper
from lightning_zenflow.offload.arena import Arena
from lightning_zenflow.offload.errors import WorkerDied, WorkerTimeout
from lightning_zenflow.offload.layout import ArenaLayout
from lightning_zenflow.offload.memory import check_host_memory
from lightning_zenflow.offload.process import WorkerProcess
from lightning_zenflow.offload.protocol import (
    Accumulate,
    Accumulated,
    Command,
    Failure,
    Ledger,
    Ready,
    Reply,
    Restore,
    Start,
    Update,
    Updated,
)

START_TIMEOUT_SECS = 60.0
"""How long the worker may take until it is ready; 3 seconds are usual."""

__all__ = ["HostClient", "WorkerDied", "WorkerTimeout"]


class HostClient:
    """The host state of one rank, and the process that works on it.

    Used by one thread of the trainer. A forked child of the trainer that drops it or exits leaves the worker alone.

    Attributes:
        arena: The shared memory. Write a slot only after `wait_slot`, masters and moments only after `drain`.
        ledger: What the accumulator holds, per block, once `drain` has returned.
        accumulate_secs: Busy time of the worker's last accumulation.
        update_secs: Busy time of the worker's last update.
    """

    def __init__(self, process: WorkerProcess, arena: Arena, groups: int, timeout_secs: float) -> None:
        """Use `start` or `launch`."""
        self.arena = arena
        self.ledger = Ledger(arena.layout.blocks, groups)
        self.accumulate_secs = 0.0
        self.update_secs = 0.0
        self._process = process
        self._timeout_secs = timeout_secs
        self._unanswered: deque[Accumulate | Update] = deque()
        self._updated: deque[Updated] = deque()
        self._last_clock = 0
        self._death: WorkerDied | None = None
        self._busy = False
        # Runs once: on close, when the client is dropped, or when the interpreter ends.
        self._release = weakref.finalize(self, _release, os.getpid(), process, arena)

    @classmethod
    def start(
        cls,
        layout: ArenaLayout,
        group_ends: Sequence[int],
        *,
        cores: Sequence[int] | None,
        lr_scale: str,
        timeout_secs: float,
        local_ranks: int = 1,
        pin: bool = False,
    ) -> HostClient:
        """`launch`, page-lock the exchange region if `pin`, and `wait_ready`. Same arguments and errors."""
        client = cls.launch(
            layout, group_ends, cores=cores, lr_scale=lr_scale, timeout_secs=timeout_secs, local_ranks=local_ranks
        )
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
    ) -> HostClient:
        """Makes the shared memory and starts the worker, without waiting until it is ready.

        Args:
            layout: Of the shared memory.
            group_ends: Cumulative end of each parameter group in the shard, in elements.
            cores: Cores of the worker, one thread each; `None` for one thread on the trainer's cores.
            lr_scale: `deferred_lr_scale` of the config.
            timeout_secs: `worker_timeout_secs` of the config.
            local_ranks: Ranks on this machine, whose memory must suffice for all.

        Raises:
            ValueError: `group_ends` does not end at `layout.numel`, or falls.
            MemoryError: The memory does not suffice, or the system refuses it.
        """
        ends = tuple(group_ends)
        if not ends or ends[-1] != layout.numel or list(ends) != sorted(ends) or ends[0] < 0:
            raise ValueError(f"`group_ends` must rise to `numel` {layout.numel}, got {ends}. Pass cumulative ends.")
        check_host_memory(layout.nbytes, local_ranks, numel=layout.numel)
        arena = Arena.create(layout)
        try:
            process = WorkerProcess.start(arena.fd, timeout_secs)
        except BaseException:
            arena.close()
            raise
        client = cls(process, arena, len(ends), timeout_secs)
        with contextlib.suppress(OSError):  # died already: `wait_ready` says why
            process.send(Start(layout, ends, None if cores is None else tuple(cores), lr_scale))
        return client

    def wait_ready(self) -> None:
        """Waits until the worker has taken over the memory, at most `START_TIMEOUT_SECS`.

        Raises:
            WorkerDied: It failed; the message holds its traceback.
            WorkerTimeout: It did not answer.
        """
        with self._alone():
            reply = self._receive(START_TIMEOUT_SECS)
            if not isinstance(reply, Ready):
                remedy = "Its start takes too long: look at the load of this machine."
                raise WorkerTimeout.after(self.pid, START_TIMEOUT_SECS, self._process.state(), remedy)

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        return self._process.pid

    @property
    def outstanding(self) -> int:
        """Updates launched and not yet collected."""
        return len(self._updated) + sum(isinstance(command, Update) for command in self._unanswered)

    def accumulate(self, slot: int, scale: float, lrs: Sequence[float]) -> None:
        """Launches accumulator += `scale` * slot, for a step with rates `lrs` (one per group). Does not wait."""
        command = Accumulate(slot, scale, tuple(lrs))
        self._launch(command)
        self.ledger.add(command.lrs)

    def update(self, block: int, half: int, clock: int, look_ahead: float, groups: Sequence[Hyper]) -> None:
        """Launches one AdamW step on `block`, result into outbox `half`. Does not wait.

        Args:
            block: The block, from 0.
            half: Outbox half, 0 or 1; it must not belong to an outstanding update.
            clock: The step number.
            look_ahead: How far the outbox is extrapolated, as a share of the master's move.
            groups: Settings of each group.
        """
        self._launch(Update(block, half, clock, look_ahead, tuple(groups)))
        self._last_clock = clock
        self.ledger.take(block)

    def restore(self, held: Sequence[int], lr_sums: Sequence[Sequence[float]]) -> None:
        """Tells what the accumulator holds, per block, after it was filled from a checkpoint. Does not wait."""
        command = Restore(tuple(held), tuple(tuple(sums) for sums in lr_sums))
        self._launch(command)
        self.ledger.restore(command)

    def collect(self) -> Updated:
        """Waits for the oldest outstanding update, at most `timeout_secs`; its outbox half is then complete.

        Raises:
            WorkerDied: The worker has ended.
            WorkerTimeout: It did not answer.
            RuntimeError: No update is outstanding.
        """
        if not self.outstanding:
            raise RuntimeError("`collect` must follow an `update`, got no outstanding one. Call `update` first.")
        with self._alone():
            self._wait_until(lambda: bool(self._updated))
        return self._updated.popleft()

    def wait_slot(self, slot: int) -> None:
        """Waits until gradient slot `slot` has been read, at most `timeout_secs`; it may be overwritten then."""
        with self._alone():
            self._wait_until(lambda: all(getattr(command, "slot", None) != slot for command in self._unanswered))

    def drain(self) -> None:
        """Waits until the worker is idle, at most `timeout_secs`. Updates stay to be collected."""
        with self._alone():
            self._wait_until(lambda: not self._unanswered)

    def check(self) -> None:
        """Raises `WorkerDied` if the worker has ended. Does not wait."""
        with self._alone():
            self._take_answers()
            if self._process.has_ended():
                self._take_answers()
                raise self._died()

    def close(self) -> None:
        """Ends the worker, unpins and returns the memory. Idempotent, bounded, and fine if the worker is dead."""
        self._release()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """A signal handler or a thread that calls in here in the middle of a call would tear messages apart."""
        if self._busy:
            raise RuntimeError(
                "`HostClient` must be used by one call at a time, got a call from inside another (a signal handler or a"
                " thread). Set a flag there and act at the end of the step."
            )
        if self._death is not None:
            raise self._death
        if not self._release.alive:
            raise RuntimeError("`HostClient` must be open, got a call after `close`. Start a new one.")
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    def _launch(self, command: Command) -> None:
        with self._alone():
            self._take_answers()  # so that neither side's socket ever fills up
            try:
                self._process.send(command)
            except BlockingIOError as error:
                raise self._timeout() from error
            except OSError as error:
                self._take_answers()  # there may be a traceback
                raise self._died() from error
            if not isinstance(command, Restore):
                self._unanswered.append(command)

    def _wait_until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self._timeout_secs
        while not done():
            reply = self._receive(max(0.0, deadline - time.monotonic()))
            if reply is None:
                raise self._timeout()

    def _take_answers(self) -> None:
        while self._receive(0) is not None:
            pass

    def _receive(self, timeout_secs: float) -> Reply | None:
        """Takes over the next reply, or `None` if there is none in time."""
        try:
            reply: Reply | None = self._process.receive(timeout_secs)
        except EOFError as error:
            raise self._died() from error
        if isinstance(reply, Failure):
            raise self._died(reply)
        if isinstance(reply, Accumulated):
            self._unanswered.popleft()  # answered in order
            self.accumulate_secs = reply.secs
        elif isinstance(reply, Updated):
            self._unanswered.popleft()
            self._updated.append(reply)
            self.update_secs = reply.secs
        return reply

    def _died(self, failure: Failure | None = None) -> WorkerDied:
        self._death = WorkerDied.because(self.pid, self._process.cause_of_death(), self._last_clock, failure)
        return self._death

    def _timeout(self) -> WorkerTimeout:
        return WorkerTimeout.after(self.pid, self._timeout_secs, self._process.state())


def _release(owner_pid: int, process: WorkerProcess, arena: Arena) -> None:
    if os.getpid() != owner_pid:  # a forked child that exits: worker and memory belong to the trainer
        return
    try:
        process.stop()
    finally:
        arena.close()
