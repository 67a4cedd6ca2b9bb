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
        insist_on_cores: Whether the worker fails if the system refuses some of the cores.
    """

    layout: ArenaLayout
    group_ends: tuple[int, ...]
    cores: tuple[int, ...] | None
    lr_scale: str
    insist_on_cores: bool = True


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
class Gradient:
    """The gradient of a step, as it lies in the slot.

    Attributes:
        scale: What clips and unscales it.
        lrs: The step's rates, one per group.
    """

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
        groups: Settings of each group; their `lr` is not used, the sums of the steps are.
        gradient: Of this step, which the update contains; `None` for what is accumulated alone.
        others: Whether the accumulators of all other blocks get the gradient as well.
        delay_steps: Extrapolation fades by beta1 at each of these steps, since the device moves on by itself.
    """

    block: int
    half: int
    clock: int
    look_ahead: float
    groups: tuple[Hyper, ...]
    gradient: Gradient | None = None
    others: bool = False
    delay_steps: float = 0.0


@dataclass(frozen=True)
class Advance:
    """Trainer to worker: one AdamW step on every block that holds steps, for the masters alone: nothing goes to an outbox.

    Attributes:
        clock: Step number of the bias correction.
        groups: Settings of each group; their `lr` is not used.
    """

    clock: int
    groups: tuple[Hyper, ...]


@dataclass(frozen=True)
class Ready:
    """Worker to trainer, answers `Start`: the worker's process id, the cores it may run on, and those it did not get."""

    pid: int
    cores: tuple[int, ...]
    refused: tuple[int, ...] = ()


@dataclass(frozen=True)
class Read:
    """Worker to trainer, in the midst of an `Update` with others: the slot has been read from element `first` to its end."""

    first: int


@dataclass(frozen=True)
class Accumulated:
    """Worker to trainer, last answer to an `Update` with others: they have the gradient.

    Attributes:
        spans: When its parts began, on the system's one clock, and how many seconds each took.
    """

    spans: tuple[tuple[float, float], ...]

    @property
    def secs(self) -> float:
        """Busy time."""
        return sum(secs for _, secs in self.spans)


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
class Advanced:
    """Worker to trainer, answers `Advance`: it took `secs` seconds since `begin_secs` of the system's one clock."""

    secs: float
    begin_secs: float


@dataclass(frozen=True)
class Failure:
    """Worker to trainer, last: the exception in one line, and the formatted traceback."""

    message: str
    traceback: str


Command = Restore | Rebuild | Update | Advance
Answer = Accumulated | Updated | Advanced
Reply = Ready | Read | Answer | Failure


@dataclass(frozen=True)
class Others:
    """What becomes of the blocks that a step accumulates in.

    Attributes:
        fresh: Blocks that held nothing, whose accumulators are overwritten.
        waiting: The one of them that needs the lane of the updated block, and so has to wait for it; `None` if none does.
    """

    fresh: frozenset[int]
    waiting: int | None


class Ledger:
    """What the accumulators hold: per block, the steps added since its last update and, per group, their rates' sum.

    A block that holds steps has one of the lanes of the accumulator, of which there is one less than blocks: the block that
    is updated at a step holds none after it. Worker and trainer keep a ledger each and see the same commands in the same
    order, so both always agree: the worker computes with it, the trainer stores it in checkpoints without asking.
    """

    def __init__(self, blocks: int, groups: int) -> None:
        self._groups = groups
        self._clear(blocks)

    def _clear(self, blocks: int) -> None:
        self.held = [0] * blocks
        self.lr_sums = [[0.0] * self._groups for _ in range(blocks)]
        self.lanes: dict[int, int] = {}

    def rebuild(self, blocks: int) -> None:
        """Another number of blocks.

        Raises:
            RuntimeError: A block holds steps, which have no place in the new blocks.
        """
        if any(self.held):
            raise RuntimeError(f"`blocks` must be changed when no block holds a step, got {self.held}. Settle first.")
        self._clear(blocks)

    def add_to_others(self, block: int, gradient: Gradient) -> Others:
        """One more step is accumulated in all blocks but `block`, whose update contains it; before that is taken.

        A block that holds nothing gets a free lane, or else the one that `block` leaves.
        """
        others = [other for other in range(len(self.held)) if other != block]
        fresh = {other for other in others if not self.held[other]}
        left, spare = set(range(len(self.held) - 1)) - set(self.lanes.values()), self.lanes.get(block)
        # From the end to the start, as they are worked on.
        waiting = None
        for other in reversed(others):
            self._add(other, gradient.lrs)
            if other not in fresh:
                continue
            if left:
                self.lanes[other] = min(left)
                left.discard(self.lanes[other])
            else:
                assert spare is not None and waiting is None, "a block more holds steps than there are lanes"
                self.lanes[other] = spare
                waiting = other
        return Others(frozenset(fresh), waiting)

    def _add(self, block: int, lrs: tuple[float, ...]) -> None:
        self.held[block] += 1
        self.lr_sums[block] = [total + lr for total, lr in zip(self.lr_sums[block], lrs, strict=True)]

    def take(self, block: int, gradient: Gradient | None = None) -> tuple[int, list[float], int | None]:
        """Steps, sums and lane of `block`, with the step of `gradient`; the block is empty afterwards.

        The lane is `None` if nothing was accumulated.
        """
        if gradient is not None:
            self._add(block, gradient.lrs)
        held, sums = self.held[block], self.lr_sums[block]
        self.held[block], self.lr_sums[block] = 0, [0.0] * len(sums)
        return held, sums, self.lanes.pop(block, None)

    def restore(self, command: Restore) -> None:
        """Takes over the counts of a checkpoint; the blocks that hold steps get the first lanes, in order."""
        self.held = list(command.held)
        self.lr_sums = [list(sums) for sums in command.lr_sums]
        holding = [block for block, held in enumerate(self.held) if held]
        self.lanes = {block: lane for lane, block in enumerate(holding)}
