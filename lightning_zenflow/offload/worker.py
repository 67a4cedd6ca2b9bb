"""The background process: owns the AdamW state of one shard and works through the trainer's commands in order.

Per step of the trainer it adds the gradient slot to the accumulator, and then does, on one block, one AdamW step that
stands for all steps since that block's last update (DESIGN section 2.2). It ends with the trainer, at once and whatever
it is doing.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_zenflow.adamw import adamw_, deferred_lr
from lightning_zenflow.offload.affinity import bind
from lightning_zenflow.offload.arena import Arena
from lightning_zenflow.offload.layout import ArenaLayout
from lightning_zenflow.offload.lifeline import Lifeline, TrainerGone
from lightning_zenflow.offload.protocol import (
    Accumulate,
    Accumulated,
    Ledger,
    Ready,
    Rebuild,
    Restore,
    Start,
    Update,
    Updated,
)
from lightning_zenflow.schedule import block_range

CHUNK_NUMEL = 1 << 19
"""Elements that all operations of a pass run over before the next are touched, so that they are still in cache."""

Piece = tuple[int, int, int]
"""Start, stop and group of a run of elements, at most `CHUNK_NUMEL` long."""


class HostMemory(Protocol):
    """A shard's tensors, as `Arena` describes them."""

    layout: ArenaLayout
    slots: tuple[Tensor, Tensor]
    outboxes: tuple[Tensor, Tensor]
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    accumulator: Tensor

    def rebuild(self, blocks: int) -> None: ...


class HostAdamW:
    """The two passes over the shard.

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
        self._all = cut(0, layout.numel, (layout.numel,))
        self._cut_blocks(layout.blocks)
        self._scratch = [torch.empty(min(CHUNK_NUMEL, layout.numel)) for _ in range(threads)]
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

    def accumulate(self, command: Accumulate) -> None:
        """Adds scale * slot to the accumulator, everywhere."""
        slot, accumulator = self._arena.slots[command.slot], self._arena.accumulator

        def work(piece: Piece, scratch: Tensor) -> None:
            first, last, _ = piece
            grad = slot[first:last]
            if grad.dtype != torch.float32:  # adding 16 bit to 32 bit directly is several times slower than via a copy
                grad = scratch[: last - first].copy_(grad)
            accumulator[first:last].add_(grad, alpha=command.scale)

        self._sweep(self._all, work)
        self.ledger.add(command.lrs)

    def update(self, command: Update) -> int:
        """One AdamW step on the block for the steps it holds (returned); the device's copy goes to the outbox."""
        arena, block = self._arena, command.block
        steps, lr_sums = self.ledger.take(block)
        outbox, block_start = arena.outboxes[command.half], self._starts[block]
        hypers = [
            dataclasses.replace(hyper, lr=deferred_lr(lr_sum, steps, self._lr_scale)) if steps else hyper
            for hyper, lr_sum in zip(command.groups, lr_sums, strict=True)
        ]

        def work(piece: Piece, scratch: Tensor) -> None:
            first, last, group = piece
            master, visible = arena.master[first:last], arena.master[first:last]
            if steps:
                grad = arena.accumulator[first:last]
                if command.look_ahead:
                    visible = scratch[: last - first].copy_(master)
                if steps > 1:
                    grad.div_(steps)
                moments = arena.exp_avg[first:last], arena.exp_avg_sq[first:last]
                adamw_(master, grad, *moments, hypers[group], clock=command.clock, steps=steps)
                if command.look_ahead:  # w + look_ahead * (w - w_before), rounded once, by the copy into the outbox
                    torch.sub(master, visible, out=visible)
                    torch.add(master, visible, alpha=command.look_ahead, out=visible)
                grad.zero_()
            outbox[first - block_start : last - block_start].copy_(visible)

        self._sweep(self._blocks[block], work)
        return steps

    def _sweep(self, pieces: Sequence[Piece], work: Callable[[Piece, Tensor], None]) -> None:
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
        if start.cores is not None:
            bind(start.cores)
        torch.set_num_threads(1)  # passes are shared by pieces instead: faster, and the same bits for any number
        arena = Arena.open(memory_fd, start.layout)
        adamw = HostAdamW(arena, start, len(start.cores or (0,)), lifeline.check)
        lifeline.send(Ready(os.getpid(), tuple(sorted(os.sched_getaffinity(0)))))
        while True:
            _handle(lifeline.receive(), adamw, lifeline)
    except TrainerGone:
        if arena is not None and lifeline.trainer_ended():
            arena.free()  # forked children of the dead trainer may live on, and they map the memory too


def _handle(command: Any, adamw: HostAdamW, lifeline: Lifeline) -> None:
    begin = time.perf_counter()
    if isinstance(command, Accumulate):
        adamw.accumulate(command)
        lifeline.send(Accumulated(time.perf_counter() - begin, begin))
    elif isinstance(command, Update):
        steps = adamw.update(command)
        lifeline.send(Updated(command.block, command.half, steps, time.perf_counter() - begin, begin))
    elif isinstance(command, Rebuild):
        adamw.rebuild(command)
    elif isinstance(command, Restore):
        adamw.ledger.restore(command)
    else:
        raise TypeError(
            f"`command` must be Accumulate, Update, Rebuild or Restore, got {command!r}. Is the trainer of another version?"
        )
