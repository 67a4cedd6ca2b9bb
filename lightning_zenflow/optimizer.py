"""`ZenFlowAdamW`: the custom optimizer, and the order of one step (DESIGN section 2.2).

As a `torch.optim.Optimizer` it holds the user's parameter groups, so that schedulers and monitors work as usual. Its
work is done on shards: the ZeRO adapter attaches one, hands in gradient slices during backward and asks for the step.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from lightning_zenflow.adamw import Hyper
from lightning_zenflow.gradients import GradientInbox
from lightning_zenflow.offload.client import HostClient
from lightning_zenflow.schedule import Schedule, StepPlan, block_range
from lightning_zenflow.selected import HostState, SelectedState
from lightning_zenflow.shards import Segment, ShardTable
from lightning_zenflow.stats import StepStats
from lightning_zenflow.transfer import Transfers
from lightning_zenflow.weights import ShardWeights

SumOverRanks = Callable[[Tensor], None]
"""Adds a tensor up over all ranks, in place; every rank calls it at the same point."""


class ZenFlowAdamW(Optimizer):
    """AdamW for `ZenFlowStrategy`; return it from `configure_optimizers`, or return a torch AdamW, which is converted.

    Args:
        params: Parameters, or parameter groups with their own `lr`, `betas`, `eps`, `weight_decay`.
        lr: Learning rate.
        betas: Decay of the first and the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Weight decay.
        decoupled_weight_decay: `True` decays the weight itself (AdamW); `False` adds `weight_decay * weight` to the
            gradient (Adam).

    Raises:
        ValueError: A setting is out of range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        decoupled_weight_decay: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        super().__init__(params, defaults)
        for group in self.param_groups:
            _check_group(group)

    @classmethod
    def from_optimizer(cls, optimizer: Optimizer) -> ZenFlowAdamW:
        """Converts a supported optimizer; the group dicts are shared, so that its schedulers keep working.

        Raises:
            ValueError: The optimizer, or a flag of it, is not supported. The message names it and what is accepted.
        """
        from lightning_zenflow.conversion import convert

        return convert(optimizer)

    def hypers(self) -> tuple[Hyper, ...]:
        """The settings of every group as they are now."""
        return tuple(Hyper.of(group) for group in self.param_groups)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Not for direct use: ZeRO's engine drives the step on shards.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(
            "`ZenFlowAdamW.step` runs inside `ZenFlowStrategy` only. Use `Trainer(strategy='zenflow')`, or"
            " `torch.optim.AdamW` without it."
        )


def _check_group(group: dict[str, Any]) -> None:
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    rules = (
        ("lr", 0 <= lr < math.inf, "at least 0"),
        ("betas", 0 <= beta1 < 1 and 0 <= beta2 < 1, "two numbers from 0 to below 1"),
        ("eps", 0 <= group["eps"] < math.inf, "at least 0"),
        ("weight_decay", 0 <= group["weight_decay"] < math.inf, "at least 0"),
    )
    for name, holds, rule in rules:
        if not holds:
            raise ValueError(f"`{name}` must be {rule}, got {group[name]!r}. Change it where the optimizer is made.")


@dataclass(frozen=True)
class Outcome:
    """What a step did, for the adapter that exchanges weights between ranks.

    Attributes:
        applied: `False` if a gradient was not finite and the step was skipped.
        grad_norm: Global norm of the unscaled gradient before clipping; infinite or NaN if skipped.
        changed: Range of the shard whose deferred weights changed; selected weights change at every applied step.
    """

    applied: bool
    grad_norm: float
    changed: tuple[int, int] = (0, 0)


class ShardOptimizer:
    """One rank's shard at work: the step on device and host.

    Attributes:
        clock: Number of applied steps.
        columns: Selected columns by parameter index, int64 in ascending order; the same on every rank.
        selected: Device state of the selected elements.
        inbox: Where gradients arrive.
        host: The background process.
        stats: Figures of the last step.
    """

    def __init__(
        self,
        hypers: Callable[[], tuple[Hyper, ...]],
        table: ShardTable,
        weights: ShardWeights,
        host: HostClient,
        schedule: Schedule,
        *,
        topk_ratio: float,
        wire_dtype: torch.dtype,
        device: torch.device,
        sum_over_ranks: SumOverRanks,
        transfers: Transfers | None = None,
    ) -> None:
        """Takes over a shard whose fp32 masters already lie in `host.arena.master`."""
        self._hypers, self._table, self._weights, self.host = hypers, table, weights, host
        self._schedule, self._topk_ratio = schedule, topk_ratio
        self._sum_over_ranks = sum_over_ranks
        self._transfers = transfers or Transfers()
        self.clock = 0
        self.stats = StepStats()
        self._in_flight: deque[int] = deque()  # how many steps each block under way stands for, oldest first
        self._launched = 0
        self._changed = (0, 0)
        self._waited_secs = 0.0
        self._device_is_settled = True
        arena = host.arena
        self._host_state = HostState(arena.master, arena.exp_avg, arena.exp_avg_sq)
        self.selected = SelectedState(table, wire_dtype, device)
        self.columns: dict[int, Tensor] = {}
        self.selected.fetch(self._host_state, self.columns)
        self.inbox = GradientInbox(table, self.selected, self._transfers, device)
        self._squares: Tensor | None = None
        self._step_started = time.perf_counter()
        self._open_inbox()

    def _open_inbox(self) -> None:
        # Two slots, used in turn: the host may still read the gradient of the step before.
        slot = self.clock % 2
        self.host.wait_slot(slot)  # the gradient of two steps ago has been read: its block arrived at the last step
        self.inbox.open(self.host.arena.slots[slot], selecting=self._schedule.plan(self.clock + 1).reselect)
        self._squares = None

    def drop_gradients(self) -> None:
        """Forgets the gradients received since the last step."""
        self._transfers.wait_to_host()  # a late copy must not land on top of a gradient that comes next
        self._open_inbox()

    def begin_step(self) -> None:
        """Starts the clock of `StepStats.step_secs`; called at a step's first forward."""
        self._step_started = time.perf_counter()

    def receive(self, segment: Segment, grad: Tensor) -> None:
        """Takes the reduced gradient of a segment in the model's dtype, still times the loss scale; during backward."""
        self._squares = None
        self.inbox.receive(segment, grad)

    def grad_norm(self, loss_scale: float) -> float:
        """Global norm of the gradient received so far, unscaled, over all ranks. Every rank must call it."""
        if self._squares is None:
            self._squares = self.inbox.finish()
            self._sum_over_ranks(self._squares)
        return math.sqrt(self._squares.item()) / loss_scale

    def step(self, *, loss_scale: float, clip_norm: float) -> Outcome:
        """Applies or skips one step.

        Args:
            loss_scale: What the gradients were multiplied with.
            clip_norm: Largest allowed global norm of the unscaled gradient; 0 for no limit.
        """
        norm = self.grad_norm(loss_scale)
        if not math.isfinite(norm):  # all ranks see the same sum, so all of them skip
            self._finish_step(norm, math.nan, skipped=True)
            return Outcome(applied=False, grad_norm=norm)
        clip = min(1.0, clip_norm / (norm + 1e-6)) if clip_norm > 0 else 1.0
        factor, plan, groups = clip / loss_scale, self._schedule.plan(self.clock + 1), self._hypers()
        self._changed = (0, 0)
        select_secs = self._reselect() if plan.reselect else 0.0
        self._waited_secs = 0.0

        self._launch_accumulate(factor, groups)
        self._launch_block(plan, groups)
        self.selected.update(groups, factor, plan.step)
        self._receive_blocks(plan, groups)
        self.selected.write(self._weights.view)

        self.clock = plan.step
        self._finish_step(norm, norm * clip, update_stall_secs=self._waited_secs, select_stall_secs=select_secs)
        return Outcome(applied=True, grad_norm=norm, changed=self._changed)

    def _launch_accumulate(self, factor: float, groups: tuple[Hyper, ...]) -> None:
        self.host.accumulate(self.clock % 2, factor, tuple(group.lr for group in groups))

    def _launch_block(self, plan: StepPlan, groups: tuple[Hyper, ...]) -> None:
        """Lets the host update this step's block while the device goes on; warm-up has no block of its own."""
        if plan.block is not None:
            self._launch_update(plan.block, plan.step, plan.look_ahead, groups)
            self._device_is_settled = False

    def _launch_update(self, block: int, clock: int, look_ahead: float, groups: tuple[Hyper, ...]) -> None:
        half = self._launched % 2
        # The half was copied to the device two blocks ago; the host must not fill it before that copy is done.
        self._transfers.wait_to_device(half)
        self._in_flight.append(self.host.ledger.held[block])
        self.host.update(block, half, clock, look_ahead, groups)
        self._launched += 1

    def _receive_blocks(self, plan: StepPlan, groups: tuple[Hyper, ...]) -> None:
        """Brings to the device what is due at this step: always the same blocks, waiting if need be."""
        if plan.block is None:
            self._update_all_blocks(plan.step, groups)
        else:
            self._collect(keep=plan.lag)

    def _update_all_blocks(self, clock: int, groups: tuple[Hyper, ...]) -> None:
        """Updates every block with what it holds and shows the device the masters themselves."""
        for block in range(self._schedule.update_interval):
            self._launch_update(block, clock, 0.0, groups)
            self._collect(keep=1)  # the copy of one block overlaps the update of the next
        self._collect(keep=0)
        self._device_is_settled = True
        self._changed = (0, self._table.numel)

    def _collect(self, keep: int) -> None:
        """Copies finished blocks into the weights, oldest first, until only `keep` are under way."""
        while self.host.outstanding > keep:
            start_secs = time.perf_counter()
            done = self.host.collect()  # waits for the host, bounded by `worker_timeout_secs`
            self._waited_secs += time.perf_counter() - start_secs
            self._in_flight.popleft()
            start, stop = block_range(self._table.numel, self._schedule.update_interval, done.block)
            outbox = self.host.arena.outboxes[done.half]
            for offset, weights in self._weights.ranges(start, stop):
                self._transfers.to_device(weights, outbox[offset : offset + weights.numel()], buffer=done.half)
            self._changed = (
                (min(start, self._changed[0]), max(stop, self._changed[1])) if any(self._changed) else (start, stop)
            )

    def settle(self) -> bool:
        """Applies every gradient the host holds and shows the device the masters. Returns whether anything changed.

        The barrier of DESIGN section 2.3, and the end of training: no gradient is lost. Gradients that were received for
        the step to come stay as they are.
        """
        if self._device_is_settled:
            return False
        self._collect(keep=0)
        self._update_all_blocks(self.clock, self._hypers())
        self.selected.write_masters(self._weights.view)
        return True

    def _reselect(self) -> float:
        """Selects anew from this step's gradient; moments travel with their column. Returns the seconds it took."""
        start = time.perf_counter()
        self._sum_over_ranks(self.inbox.board.scores)
        # Settling also writes the columns that are about to leave, over the stale shadow that their blocks hold.
        self.settle()
        self._transfers.to_host_bytes += self.selected.send_home(self._host_state)
        self.columns = self.inbox.board.winners(self._topk_ratio)
        self._transfers.to_device_bytes += self.selected.fetch(self._host_state, self.columns)
        self.inbox.gather_selected()
        self._changed = (0, self._table.numel)
        return time.perf_counter() - start

    def complete_host_state(self) -> None:
        """Makes the host's fp32 masters and moments complete without changing the course of training.

        Waits until the host is idle, leaves a finished block where it is until its step, and copies the selected
        state over its shadow.
        """
        self.host.drain()  # waits until the host is idle; nobody else may write to its state
        self.selected.send_home(self._host_state)

    def _finish_step(self, norm: float, clipped: float, *, skipped: bool = False, **stalls: float) -> None:
        self.stats = replace(
            self.stats,
            step=self.clock,
            skipped_steps=self.stats.skipped_steps + skipped,
            step_secs=time.perf_counter() - self._step_started,
            update_stall_secs=stalls.get("update_stall_secs", 0.0),
            select_stall_secs=stalls.get("select_stall_secs", 0.0),
            to_host_bytes=self._transfers.to_host_bytes,
            to_device_bytes=self._transfers.to_device_bytes,
            worker_accumulate_secs=self.host.accumulate_secs,
            worker_update_secs=self.host.update_secs,
            deferred_age_steps=max(0, *self._in_flight, *self.host.ledger.held),
            grad_norm=norm,
            grad_norm_clipped=clipped,
        )
        self._step_started = time.perf_counter()
        self._transfers.reset_bytes()
        self._open_inbox()

    def close(self) -> None:
        """Ends the background process and gives its memory back. Safe to call again; nothing else may be called then."""
        for name in ("inbox", "_host_state"):  # their views would keep the memory mapped
            self.__dict__.pop(name, None)
        self.host.close()
