"""The background process: owns the AdamW state of one shard and works through the trainer's commands in order.

Per step of the trainer it does, on one block, one AdamW step that stands for all steps since that block's last update,
this one included, and then adds the gradient to the accumulators of the others (DESIGN section 2.2). It ends with the
trainer, at once and whatever it is doing.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Container, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from lightning_zenflow.adamw import Hyper, adamw_, add_spread_, deferred_lr
from lightning_zenflow.offload.affinity import bind
from lightning_zenflow.offload.arena import Arena
from lightning_zenflow.offload.layout import ArenaLayout
from lightning_zenflow.offload.lifeline import Lifeline, TrainerGone
from lightning_zenflow.offload.protocol import (
    Accumulated,
    Advance,
    Advanced,
    Gradient,
    Ledger,
    Read,
    Ready,
    Rebuild,
    Restore,
    Start,
    Update,
    Updated,
)
from lightning_zenflow.rounding import round_into
from lightning_zenflow.schedule import block_range

CHUNK_NUMEL = 1 << 19
"""Elements that all operations of a pass run over before the next are touched, so that they are still in cache."""

T = TypeVar("T")

READS = 16
"""How often it is told, in a step, how far the slot has been read."""

Piece = tuple[int, int, int]
"""Start, stop and group of a run of elements, at most `CHUNK_NUMEL` long."""


class HostMemory(Protocol):
    """A shard's tensors, as `Arena` describes them."""

    layout: ArenaLayout
    slot: Tensor
    outboxes: tuple[Tensor, Tensor]
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    accumulator: Tensor

    def rebuild(self, blocks: int) -> None: ...


@dataclass(frozen=True)
class _BlockStep:
    """One AdamW step on a block.

    Attributes:
        lane_start: What to add to an element's place in the shard for its place in the accumulator; `None` if it has none.
        steps: For how many steps it stands; 0 for none, so that only the outbox is filled.
        hypers: Settings of each group.
        clock: Step number of the bias correction, and of the noise that rounds moments.
        gradient: What the slot holds of it; `None` for nothing.
        look_ahead: How far the outbox is extrapolated.
        delay_steps: By how many steps' beta1 that fades, since the device moves on by itself; 0 if it does not, and then second
            moments take no share of the spread either.
        outbox: What the device will see, in the dtype of the weights; `None` if it shall see nothing.
        outbox_start: Place in the shard of the outbox's first element.
    """

    lane_start: int | None
    steps: int
    hypers: Sequence[Hyper]
    clock: int
    gradient: Gradient | None = None
    look_ahead: float = 0.0
    delay_steps: float = 0.0
    outbox: Tensor | None = None
    outbox_start: int = 0


class HostAdamW:
    """The passes over the shard.

    The passes are cut into the same pieces whatever the number of threads, and each piece is computed by one thread, so
    results do not depend on it.

    Args:
        arena: The shared memory.
        start: What the trainer asked for.
        threads: How many threads work on a pass.
        check: Called between pieces; an exception it raises ends the pass.
    """

    def __init__(self, arena: HostMemory, start: Start, threads: int, check: Callable[[], None]) -> None:
        layout = arena.layout
        self._arena = arena
        self._group_ends = start.group_ends
        self._lr_scale = start.lr_scale
        self._check = check
        self.ledger = Ledger(layout.blocks, len(start.group_ends))
        self._cut_blocks(layout.blocks)
        self._is_narrow = arena.exp_avg.dtype != torch.float32
        rows = 4 if self._is_narrow else 2
        self._scratch = [torch.empty(rows, min(CHUNK_NUMEL, layout.numel)) for _ in range(threads)]
        self._pool = ThreadPoolExecutor(threads - 1) if threads > 1 else None

    def _cut_blocks(self, blocks: int) -> None:
        numel = self._arena.layout.numel
        ranges = [block_range(numel, blocks, block) for block in range(blocks)]
        self._starts = [first for first, _ in ranges]
        self._blocks = [cut(first, last, self._group_ends) for first, last in ranges]

    def rebuild(self, command: Rebuild) -> None:
        """Another number of blocks, at a moment when none holds a step."""
        self.ledger.rebuild(command.blocks)
        self._arena.rebuild(command.blocks)
        self._cut_blocks(command.blocks)

    def update(self, command: Update, tell: Callable[[Read | Accumulated | Updated], None]) -> None:
        """One AdamW step on the block for the steps that it holds, and this one; the device's copy goes to the outbox.

        If the command says so, the other blocks get the gradient: from the end of the shard to its start, in the order in
        which backward delivers the next one, so that the trainer can write that behind this pass. The updated block has its
        turn among them, but comes first if another one waits for its lane. `tell` gets the answers.
        """
        before: list[int] = []
        after: list[int] = []
        fresh: frozenset[int] = frozenset()
        lane_start = self._lane_start(command.block)
        if command.others:
            assert command.gradient is not None
            others = self.ledger.add_to_others(command.block, command.gradient)
            fresh, blocks = others.fresh, reversed(range(len(self._blocks)))
            for block in blocks:
                if block != command.block:
                    is_above = block > command.block and not (others.waiting or 0) > command.block
                    (before if is_above else after).append(block)
        spans = self._accumulate(before, command, fresh, tell)
        begin = time.perf_counter()
        in_turn = command.others and all(block < command.block for block in after)
        steps = self._update(command, lane_start, tell if in_turn else None)
        tell(Updated(command.block, command.half, steps, time.perf_counter() - begin, begin))
        if command.others:
            tell(Accumulated(spans + self._accumulate(after, command, fresh, tell)))

    def _lane_start(self, block: int) -> int | None:
        """What to add to an element's place in the shard for its place in the accumulator; `None` if it has none there."""
        lane = self.ledger.lanes.get(block)
        return None if lane is None else lane * self._arena.layout.block_numel - self._starts[block]

    def _accumulate(
        self, blocks: Sequence[int], command: Update, fresh: Container[int], tell: Callable[[Read], None]
    ) -> tuple[tuple[float, float], ...]:
        """Adds the gradient to the accumulators of `blocks`; returns when it began and how long it took, or nothing."""
        if not blocks:
            return ()
        assert command.gradient is not None
        begin, slot, scale = time.perf_counter(), self._arena.slot, command.gradient.scale
        places = [
            (piece, self._lane_start(block), block in fresh)
            for block in blocks
            for piece in reversed(self._blocks[block])
        ]

        def work(place: tuple[Piece, int | None, bool], scratch: Tensor) -> None:
            (first, last, _), lane_start, is_fresh = place
            assert lane_start is not None
            sums, grad = self._arena.accumulator[lane_start + first : lane_start + last], slot[first:last]
            if is_fresh:
                sums.copy_(grad)
                if scale != 1:
                    sums.mul_(scale)
                return
            if grad.dtype != torch.float32:  # adding 16 bit to 32 bit directly is several times slower than via a copy
                grad = scratch[0, : last - first].copy_(grad)
            sums.add_(grad, alpha=scale)

        self._sweep_telling(places, work, lambda place: tell(Read(place[0][0])))
        return ((begin, time.perf_counter() - begin),)

    def advance(self, command: Advance) -> Advanced:
        """One AdamW step on every block that holds steps; the outboxes stay as they are."""
        begin = time.perf_counter()
        for block in [block for block, held in enumerate(self.ledger.held) if held]:
            lane_start = self._lane_start(block)
            steps, lr_sums, _ = self.ledger.take(block)
            step = _BlockStep(lane_start, steps, self._hypers(command.groups, lr_sums, steps), command.clock)
            self._sweep(self._blocks[block], partial(self._adamw, step))
        return Advanced(time.perf_counter() - begin, begin)

    def _update(self, command: Update, lane_start: int | None, tell: Callable[[Read], None] | None) -> int:
        """The AdamW step; returns for how many steps it stands."""
        steps, lr_sums, _ = self.ledger.take(command.block, command.gradient)
        step = _BlockStep(
            lane_start,
            steps,
            self._hypers(command.groups, lr_sums, steps),
            command.clock,
            command.gradient,
            command.look_ahead,
            command.delay_steps,
            outbox=self._arena.outboxes[command.half],
            outbox_start=self._starts[command.block],
        )
        pieces, work = list(reversed(self._blocks[command.block])), partial(self._adamw, step)
        if tell is None:
            self._sweep(pieces, work)
        else:
            self._sweep_telling(pieces, work, lambda piece: tell(Read(piece[0])))
        return steps

    def _hypers(self, groups: Sequence[Hyper], lr_sums: Sequence[float], steps: int) -> list[Hyper]:
        """The settings of one AdamW step that stands for `steps` steps."""
        if not steps:
            return list(groups)
        return [
            dataclasses.replace(hyper, lr=deferred_lr(lr_sum, steps, self._lr_scale))
            for hyper, lr_sum in zip(groups, lr_sums, strict=True)
        ]

    def _adamw(self, step: _BlockStep, piece: Piece, scratch: Tensor) -> None:
        """The part of an AdamW step that falls on `piece`."""
        (first, last, group), arena = piece, self._arena
        master, visible = arena.master[first:last], arena.master[first:last]
        if step.steps:
            grad, hyper = self._mean_gradient(step, first, last, scratch[0]), step.hypers[group]
            stored = arena.exp_avg[first:last], arena.exp_avg_sq[first:last]
            wide = scratch[2:, : last - first] if self._is_narrow else None
            moments = stored if wide is None else (wide[0].copy_(stored[0]), wide[1].copy_(stored[1]))
            if step.delay_steps and step.gradient is not None and step.steps > 1:
                last_grad = scratch[1, : last - first].copy_(arena.slot[first:last])
                difference = torch.sub(last_grad.mul_(step.gradient.scale), grad, out=last_grad)
                add_spread_(moments[1], difference, hyper.beta2, step.steps)
            if step.look_ahead:
                visible = scratch[1, : last - first].copy_(master)
            adamw_(master, grad, *moments, hyper, clock=step.clock, steps=step.steps)
            if wide is not None:
                round_into(stored, wide, first, step.clock)
            if step.look_ahead:  # w + look_ahead * (w - w_before), rounded once, by the copy into the outbox
                torch.sub(master, visible, out=visible)
                torch.add(master, visible, alpha=step.look_ahead * hyper.beta1**step.delay_steps, out=visible)
        if step.outbox is not None:
            step.outbox[first - step.outbox_start : last - step.outbox_start].copy_(visible)

    def _mean_gradient(self, step: _BlockStep, first: int, last: int, scratch: Tensor) -> Tensor:
        """Of all steps that the block holds, and this one; may lie in the accumulator."""
        sums = None
        if step.lane_start is not None:
            sums = self._arena.accumulator[step.lane_start + first : step.lane_start + last]
        if step.gradient is None:
            assert sums is not None
            mean = sums
        else:
            mean = scratch[: last - first].copy_(self._arena.slot[first:last])
            if sums is not None:
                torch.add(sums, mean, alpha=step.gradient.scale, out=mean)
            elif step.gradient.scale != 1:
                mean.mul_(step.gradient.scale)
        return mean.div_(step.steps) if step.steps > 1 else mean

    def _sweep_telling(self, pieces: Sequence[T], work: Callable[[T, Tensor], None], tell: Callable[[T], None]) -> None:
        """A sweep that tells now and then which piece was the last."""
        # Of all pieces of a step: many blocks or groups cut many small ones, and a message takes as long as such a piece.
        size = max(len(self._scratch), -(-sum(map(len, self._blocks)) // READS))
        for start in range(0, len(pieces), size):
            batch = pieces[start : start + size]
            self._sweep(batch, work)
            tell(batch[-1])

    def _sweep(self, pieces: Sequence[T], work: Callable[[T, Tensor], None]) -> None:
        queue = iter(pieces)  # shared by the threads: `next` of a list's iterator is atomic

        def lane(scratch: Tensor, check: Callable[[], None] | None = None) -> None:
            for piece in queue:
                if check:
                    check()
                work(piece, scratch)

        others = [self._pool.submit(lane, scratch) for scratch in self._scratch[1:]] if self._pool else []
        try:
            lane(self._scratch[0], self._check)
        finally:
            for _ in queue:  # after an exception: leaves the other threads nothing more to start
                pass
            wait(others)  # no thread touches the arena after this; at most one piece each is left, so it is short
        for other in others:
            other.result()


def cut(first: int, last: int, group_ends: Sequence[int]) -> list[Piece]:
    """Cuts the elements from `first` to `last` at group ends and into pieces of at most `CHUNK_NUMEL`."""
    pieces, position = [], first
    for group, end in enumerate(group_ends):
        while position < min(end, last):
            stop = min(end, last, position + CHUNK_NUMEL)
            pieces.append((position, stop, group))
            position = stop
    return pieces


def serve(connection: Connection, memory_fd: int, trainer_fd: int) -> None:
    """Runs until the trainer ends or hangs up.

    Args:
        connection: To the trainer.
        memory_fd: The shared memory.
        trainer_fd: pidfd of the trainer, or -1 where the system has none.
    """
    lifeline = Lifeline(connection, trainer_fd)
    arena: Arena | None = None
    try:
        start: Start = lifeline.receive()
        cores = start.cores or ()
        refused = bind(cores, insist=start.insist_on_cores) if start.cores is not None else []
        torch.set_num_threads(1)  # passes are shared by pieces instead: faster, and the same bits for any number
        arena = Arena.open(memory_fd, start.layout)
        adamw = HostAdamW(arena, start, max(1, len(cores) - len(refused)), lifeline.check)
        lifeline.send(Ready(os.getpid(), tuple(sorted(os.sched_getaffinity(0))), tuple(refused)))
        while True:
            _handle(lifeline.receive(), adamw, lifeline)
    except TrainerGone:
        if arena is not None and lifeline.trainer_ended():
            arena.free()  # forked children of the dead trainer may live on, and they map the memory too


def _handle(command: Any, adamw: HostAdamW, lifeline: Lifeline) -> None:
    if isinstance(command, Update):
        adamw.update(command, lifeline.send)
    elif isinstance(command, Advance):
        lifeline.send(adamw.advance(command))
    elif isinstance(command, Rebuild):
        adamw.rebuild(command)
    elif isinstance(command, Restore):
        adamw.ledger.restore(command)
    else:
        raise TypeError(
            f"`command` must be Update, Advance, Rebuild or Restore, got {command!r}. Is the trainer of another version?"
        )
