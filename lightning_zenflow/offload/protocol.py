"""What trainer and background process say to each other: small frozen dataclasses, pickled over one socket pair.

Importing this file does not import PyTorch, so that even a failing `import torch` of the child can be reported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_zenflow.adamw import Hyper
    from lightning_zenflow.offload.layout import ArenaLayout


@dataclass(frozen=True)
class Start:
    """Trainer to worker, first: what to work on.

    Attributes:
        layout: Of the shared memory.
        group_ends: Cumulative end of each parameter group in the shard, in elements; the last is `layout.numel`.
        cores: Cores the worker binds itself to; `None` leaves its affinity alone.
        lr_scale: `deferred_lr_scale` of the config.
    """

    layout: ArenaLayout
    group_ends: tuple[int, ...]
    cores: tuple[int, ...] | None
    lr_scale: str


@dataclass(frozen=True)
class Restore:
    """Trainer to worker: what the accumulator holds, after it was filled from a checkpoint. Not answered."""

    held: tuple[int, ...]
    lr_sums: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Rebuild:
    """Trainer to worker: cut the shard into `blocks` blocks from now on. Nothing may be held or under way. Not answered."""

    blocks: int


@dataclass(frozen=True)
class Accumulate:
    """Trainer to worker: accumulator += `scale` * gradient slot `slot`, for a step with rates `lrs` (one per group)."""

    slot: int
    scale: float
    lrs: tuple[float, ...]


@dataclass(frozen=True)
class Update:
    """Trainer to worker: one AdamW step on `block`, result into outbox `half`.

    Attributes:
        block: The block, from 0.
        half: The outbox half, 0 or 1.
        clock: Step number of the bias correction.
        look_ahead: How far the outbox is extrapolated, as a share of the master's move.
        groups: Settings of each group; their `lr` is not used, the sums of the accumulated steps are.
    """

    block: int
    half: int
    clock: int
    look_ahead: float
    groups: tuple[Hyper, ...]


@dataclass(frozen=True)
class Ready:
    """Worker to trainer, answers `Start`: the worker's process id and the cores it may run on."""

    pid: int
    cores: tuple[int, ...]


@dataclass(frozen=True)
class Accumulated:
    """Worker to trainer, answers `Accumulate`: busy for `secs` seconds since `begin_secs` of the system's one clock."""

    secs: float
    begin_secs: float


@dataclass(frozen=True)
class Updated:
    """Worker to trainer, answers `Update`: the block lies in outbox `half`.

    It was updated for `held_steps` steps (0: no update) in `secs` seconds since `begin_secs` of the system's one clock.
    """

    block: int
    half: int
    held_steps: int
    secs: float
    begin_secs: float


@dataclass(frozen=True)
class Failure:
    """Worker to trainer, last: the exception in one line, and the formatted traceback."""

    message: str
    traceback: str


Command = Restore | Rebuild | Accumulate | Update
Reply = Ready | Accumulated | Updated | Failure


class Ledger:
    """What the accumulator holds: per block, the steps added since its last update and, per group, their rates' sum.

    Worker and trainer keep one each and see the same commands in the same order, so both always agree: the worker
    computes with it, the trainer stores it in checkpoints without asking.
    """

    def __init__(self, blocks: int, groups: int) -> None:
        self._groups = groups
        self._clear(blocks)

    def _clear(self, blocks: int) -> None:
        self.held = [0] * blocks
        self.lr_sums = [[0.0] * self._groups for _ in range(blocks)]

    def rebuild(self, blocks: int) -> None:
        """Another number of blocks.

        Raises:
            RuntimeError: A block holds steps, which have no place in the new blocks.
        """
        if any(self.held):
            raise RuntimeError(f"`blocks` must be changed when no block holds a step, got {self.held}. Settle first.")
        self._clear(blocks)

    def add(self, lrs: tuple[float, ...]) -> None:
        """One more step was accumulated, in all blocks."""
        for block, sums in enumerate(self.lr_sums):
            self.held[block] += 1
            sums[:] = [total + lr for total, lr in zip(sums, lrs, strict=True)]

    def take(self, block: int) -> tuple[int, list[float]]:
        """Steps and sums of `block`, which is empty afterwards."""
        held, sums = self.held[block], self.lr_sums[block]
        self.held[block], self.lr_sums[block] = 0, [0.0] * len(sums)
        return held, sums

    def restore(self, command: Restore) -> None:
        """Takes over the counts of a checkpoint."""
        self.held = list(command.held)
        self.lr_sums = [list(sums) for sums in command.lr_sums]
