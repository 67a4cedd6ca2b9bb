"""`ShardOptimizer`: one rank's shard at work, and the order of one step (DESIGN section 2.2)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_zenflow.adamw import Hyper
from lightning_zenflow.blocks import DeferredBlocks
from lightning_zenflow.gradients import GradientInbox
from lightning_zenflow.interim import SLOT, InterimStep
from lightning_zenflow.offload.client import HostClient
from lightning_zenflow.offload.protocol import Accumulated, Gradient, Updated
from lightning_zenflow.schedule import Schedule, StepPlan
from lightning_zenflow.selected import HostState, SelectedState
from lightning_zenflow.selection import agreement
from lightning_zenflow.shard_state import ShardState, StoredLayout
from lightning_zenflow.shards import Segment, ShardTable
from lightning_zenflow.stats import Span, StepStats, Timeline
from lightning_zenflow.transfer import Transfers
from lightning_zenflow.weights import ShardWeights

SumOverRanks = Callable[[Tensor], None]
"""Adds a tensor up over all ranks, in place; every rank calls it at the same point."""


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
        interim: What the device does to deferred weights until the host's update arrives.
        host: The background process.
        has_whole_gradient: Whether the gradient of a step is complete and waits for it: from the end of the last backward on.
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
        self._transfers, self._device = transfers or Transfers(), device
        self.clock = 0
        self.has_whole_gradient = False
        self.stats = StepStats()
        self._timeline = Timeline()
        self._figures: dict[str, Any] = {}
        self._host_secs = {"accumulate": 0.0, "update": 0.0}
        self._blocks = DeferredBlocks(host, weights, table.numel, self._transfers, self._timeline)
        arena = host.arena
        self._host_state = HostState(arena.master, arena.exp_avg, arena.exp_avg_sq)
        self.selected = SelectedState(table, wire_dtype, device, weights.device)
        self.columns: dict[int, Tensor] = {}
        self.selected.fetch(self._host_state, self.columns)
        self.interim = InterimStep(table, weights, self._transfers, device)
        self.inbox = GradientInbox(
            table, self.selected, self._transfers, device, arena.slot, self._wait_slot, self.interim
        )
        self._squares: Tensor | None = None
        self._step_started = time.perf_counter()
        self._open_inbox()

    def _open_inbox(self) -> None:
        plan = self._schedule.plan(self.clock + 1)
        self.inbox.open(selecting=plan.reselect)
        self.interim.open(plan)
        self._settles_ahead = plan.reselect
        self._squares = None

    def _wait_slot(self, start: int, stop: int) -> None:
        """Until the host has read what the step before has left there; it has a whole step of time for that."""
        self._transfers.wait_to_device(SLOT)  # and the device what it has fetched of it
        if not self.host.slot_is_read(start, stop):
            with self._timeline("wait for host"):
                self.host.wait_slot(start, stop)

    def drop_gradients(self) -> None:
        """Forgets the gradients received since the last step."""
        self.has_whole_gradient = False
        if not self.inbox.has_gradients:
            return
        self._transfers.wait_to_host()  # a late copy must not land on top of a gradient that comes next
        for segment in self.inbox.received():
            self.interim.comes_in_parts(segment)  # this one, and maybe others that nobody applies
        if self.interim.is_due:  # it has moved weights, until their blocks arrive or a settle shows the masters
            self._blocks.is_settled = False
        self._open_inbox()

    def begin_step(self) -> None:
        """Starts the clock of `StepStats.step_secs`; called at a step's first forward."""
        self._step_started = time.perf_counter()

    def receive(self, segment: Segment, grad: Tensor, loss_scale: float = 1.0, *, is_stored: bool = False) -> None:
        """Takes the reduced gradient of a segment in the model's dtype, still times the loss scale; during backward.

        One that is stored, from a checkpoint, has moved the weights before it was saved.
        """
        self._squares = None
        if self.interim.needs_rates and not is_stored:
            self.interim.begin(self._hypers(), loss_scale)
        if self._settles_ahead:  # the host has all of backward for what the coming barrier needs
            self._settles_ahead = False
            self._blocks.advance(self.clock, self._hypers())
        self.inbox.receive(segment, grad)

    def grad_norm(self, loss_scale: float) -> float:
        """Global norm of the gradient received so far, unscaled, over all ranks. Every rank must call it."""
        if self._squares is None:
            self._squares = self.inbox.finish(by_parameter=self._schedule.interim)
            self._sum_over_ranks(self._squares)
        total = self._squares.sum() if self._schedule.interim else self._squares
        return math.sqrt(total.item()) / loss_scale

    def step(self, *, loss_scale: float, clip_norm: float) -> Outcome:
        """Applies or skips one step. `finish_step` must follow, once the ranks have exchanged what changed.

        Args:
            loss_scale: What the gradients were multiplied with.
            clip_norm: Largest allowed global norm of the unscaled gradient; 0 for no limit.
        """
        start_secs = time.perf_counter()
        self._timeline.fill("forward and backward", self._step_started, start_secs)
        with self._timeline("gradient norm"):
            norm = self.grad_norm(loss_scale)
        self.has_whole_gradient = False
        self._blocks.begin_step()
        if not math.isfinite(norm):  # all ranks see the same sum, so all of them skip
            self._figures = {"grad_norm": norm, "grad_norm_clipped": math.nan}
            if self.interim.is_due:  # what that gradient has made of the weights goes
                self._show_masters()
            return Outcome(applied=False, grad_norm=norm, changed=self._blocks.changed)
        clip = min(1.0, clip_norm / (norm + 1e-6)) if clip_norm > 0 else 1.0
        factor, plan, groups = clip / loss_scale, self._schedule.plan(self.clock + 1), self._hypers()
        self._figures = {"grad_norm": norm, "grad_norm_clipped": norm * clip}
        if plan.reselect:
            with self._timeline("select"):
                self._reselect()

        gradient = Gradient(factor, tuple(group.lr for group in groups))
        with self._timeline("launch"):
            if plan.block is not None:
                self._blocks.launch(
                    plan.block,
                    plan.step,
                    plan.look_ahead,
                    groups,
                    gradient,
                    others=True,
                    delay_steps=plan.delay_steps,
                )
        with self._timeline("optimizer"):
            self.selected.update(groups, factor, plan.step)
        if self.interim.is_due:
            if self.interim.needs_rates:  # all of the gradient is from a checkpoint
                self.interim.begin(groups, loss_scale)
            self.interim.move_late(self.inbox.received(), self.host.arena.slot)
        self._receive_blocks(plan, groups, gradient)
        with self._timeline("write weights"):
            self.selected.write(self._weights.view)
        assert self._squares is not None
        if self._schedule.interim:
            self.interim.observe(self._squares, loss_scale)

        self.clock = plan.step
        changed = (0, self._table.numel) if self.interim.is_due else self._blocks.changed
        return Outcome(applied=True, grad_norm=norm, changed=changed)

    def _receive_blocks(self, plan: StepPlan, groups: tuple[Hyper, ...], gradient: Gradient) -> None:
        """Brings to the device what is due at this step: always the same blocks, waiting if need be."""
        if plan.block is None:  # in warm-up
            self._blocks.update_all(plan.step, groups, gradient)
            return
        copied = self._blocks.collect(keep=plan.lag)
        if plan.lag > 0:  # without a lag, the block knows this step's gradient
            with self._timeline("copy block"):
                for start, stop in copied:
                    self.interim.move_again(start, stop, self.host.arena.slot)

    def _show_masters(self) -> None:
        """A settle, whether or not the host holds a gradient."""
        self._blocks.update_all(self.clock, self._hypers())
        self.selected.write_masters(self._weights.view)

    def settle(self) -> bool:
        """Applies every gradient the host holds and shows the device the masters. Returns whether anything changed.

        The barrier of DESIGN section 2.3, and the end of training: no gradient is lost. Gradients that were received for
        the step to come stay as they are.
        """
        if self._blocks.is_settled:
            return False
        self._show_masters()
        for segment in self.inbox.received():  # of the step to come, whose moves the masters have replaced
            if not self.interim.is_late(segment):
                self.interim.move_again(segment.start, segment.stop, self.host.arena.slot)
        return True

    def _reselect(self) -> None:
        """Selects anew from this step's gradient; moments travel with their column."""
        board, before = self.inbox.board, self.columns
        self._sum_over_ranks(board.scores)
        self._blocks.advance(self.clock, self._hypers())  # usually under way since backward began, or done
        self.columns = board.winners(self._topk_ratio)
        self.host.drain()  # every block is advanced, and the host idle: nobody else writes to its state
        # Masters first: the device is shown all of them, columns that have just left included, while moments move. The host
        # only reads masters in that time, since no block holds a step.
        moves = self.selected.move_masters(self._host_state, self.columns, self.clock)
        move_moments = partial(self.selected.move_moments, moves, self._host_state, self.clock)
        if self._blocks.is_settled:
            move_moments()
        else:
            self._blocks.update_all(self.clock, self._hypers(), meanwhile=move_moments)
        self._transfers.to_host_bytes += moves.home_bytes
        self._transfers.to_device_bytes += moves.fetched_bytes
        self.inbox.gather_selected()
        self._blocks.changed = (0, self._table.numel)
        self._figures["selection_agreement"] = agreement(before, self.columns)
        self._figures["deferred_mass_ratio"] = board.deferred_mass_ratio(self.columns)

    @property
    def intervals(self) -> tuple[int, int | None]:
        """The update interval and the selection interval, in steps."""
        return self._schedule.update_interval, self._schedule.select_interval

    def change_intervals(self, update_interval: int, select_interval: int | None) -> bool:
        """Other intervals from the next step on; settles if the blocks change. Returns whether weights have changed.

        Raises:
            RuntimeError: The next step has gradients already.
            ValueError: Selecting is switched on or off.
        """
        if self.inbox.has_gradients:
            raise RuntimeError(
                "Intervals must be changed between two steps, got gradients of the next one. Wait for it."
            )
        schedule = self._schedule.changed(self.clock, update_interval, select_interval)
        settled = False
        with self._timeline("settle"):
            if update_interval != self._schedule.update_interval:
                settled = self.settle()
                self._blocks.rebuild(update_interval)
        self._schedule = schedule
        self._open_inbox()  # whether columns are selected at the next step may be different now
        return settled

    def complete_host_state(self) -> None:
        """Makes the host's fp32 masters and moments complete without changing the course of training.

        Waits until the host is idle, leaves a finished block where it is until its step, and copies the selected
        state over its shadow.
        """
        self.host.drain()  # waits until the host is idle; nobody else may write to its state
        self.selected.send_home(self._host_state, self.clock)

    def state(self, layout: StoredLayout, lr_scale: str) -> ShardState:
        """Where this rank stands, with tensors that are valid until the next step; after `complete_host_state`."""
        moments_dtype = self.host.arena.layout.moments_dtype
        is_rounded = moments_dtype != torch.float32
        return ShardState(
            layout=layout,
            clock=self.clock,
            skipped_steps=self.stats.skipped_steps,
            schedule=self._schedule,
            lr_scale=lr_scale,
            columns={self._table.params[param].name: columns.cpu() for param, columns in self.columns.items()},
            weights=[weights.cpu() for _, weights in self._weights.ranges(0, self._table.numel)],
            moments_dtype=moments_dtype,
            selected_moments=[moment.cpu() for moment in self.selected.moments()] if is_rounded else (),
            **self._blocks.state(),
            **self.interim.state(),
        )

    def load_state(self, state: ShardState) -> None:
        """Goes on where `state` was taken; masters and moments lie in the arena already, and the worker is idle."""
        self._start_at(state.clock, state.skipped_steps, state.schedule, state.columns)
        if state.selected_moments:  # the arena has them rounded
            for moment, stored in zip(self.selected.moments(), state.selected_moments, strict=True):
                moment.copy_(stored)
        self._blocks.load_state(state)
        self.interim.load_state(state.mean_squares, state.observed_steps, state.in_parts)
        for (_, weights), stored in zip(self._weights.ranges(0, self._table.numel), state.weights, strict=True):
            weights.copy_(stored)
        self._open_inbox()

    def load_masters(
        self,
        clock: int,
        skipped_steps: int = 0,
        schedule: Schedule | None = None,
        columns: Mapping[str, Tensor] | None = None,
        mean_squares: Mapping[str, float] | None = None,
        observed_steps: int = 0,
    ) -> None:
        """Goes on after step `clock` from masters and moments in the arena, with no gradient held back.

        Without a `schedule` that says otherwise, columns are selected at the next step.
        """
        if schedule is None:
            schedule = self._schedule
            if schedule.select_interval is not None and clock >= schedule.warm_up_steps:
                schedule = replace(schedule, select_from=clock + 1)
        self._start_at(clock, skipped_steps, schedule, columns or {})
        self.interim.load_state(mean_squares or {}, observed_steps)
        for start, weights in self._weights.ranges(0, self._table.numel):
            weights.copy_(self.host.arena.master[start : start + weights.numel()])
        self._open_inbox()

    def _start_at(self, clock: int, skipped_steps: int, schedule: Schedule, columns: Mapping[str, Tensor]) -> None:
        self._blocks.reset(schedule.update_interval)
        self.clock, self._schedule = clock, schedule
        self.stats = StepStats(step=clock, skipped_steps=skipped_steps)
        self.columns = {param: chosen.to(self._device) for param, chosen in self._table.by_index(columns).items()}
        self.selected.fetch(self._host_state, self.columns)

    def follow(self, wanted: Schedule) -> bool:
        """Goes on by other settings than those of a checkpoint; settles if blocks or lags change.

        Returns whether weights have changed.
        """
        now, settled = self._schedule, False
        selects = wanted.select_interval is not None
        if selects != (now.select_interval is not None) or _is_cut_otherwise(now, wanted):
            settled = self.settle()
        if not selects and self.columns:
            self.columns = {}
            self.selected.move(self._host_state, self.columns, self.clock)
        if wanted.update_interval != now.update_interval:
            self._blocks.rebuild(wanted.update_interval)
        if selects and now.select_interval is not None:
            counted = now.changed(self.clock, wanted.update_interval, wanted.select_interval).select_from
            if wanted.select_interval == now.select_interval:
                counted = now.select_from
        else:
            counted = max(self.clock, wanted.warm_up_steps) + 1
        self._schedule = replace(wanted, select_from=counted)
        self._open_inbox()
        return settled

    def retire(self) -> None:
        """Ends the background process; the host's masters and moments, complete, stay until `close`, and no other state."""
        self.complete_host_state()
        self.selected.give_back(keep_moments=self.host.arena.layout.moments_dtype != torch.float32)
        self.host.retire()

    def finish_step(self, *, applied: bool) -> None:
        """Closes the step's figures and opens the next one."""
        stall_secs = {name: self._timeline.total_secs(name) for name in ("wait for host", "select")}
        # Blocks that a settle has copied since the step before belong to no step.
        copy_secs = self._timeline.total_secs("copy block", since_secs=self._step_started)
        for answer in self.host.take_answers():
            kind = "accumulate" if isinstance(answer, Accumulated) else "update"
            spans = answer.spans if isinstance(answer, Accumulated) else ((answer.begin_secs, answer.secs),)
            self._timeline.spans += [Span("host", kind, begin_secs, secs) for begin_secs, secs in spans]
            if isinstance(answer, Accumulated) or (isinstance(answer, Updated) and answer.held_steps):
                self._host_secs[kind] = answer.secs  # of one block: neither of all of them, nor of a copy alone
        self.stats = StepStats(
            step=self.clock,
            skipped_steps=self.stats.skipped_steps + (not applied),
            begin_secs=self._step_started,
            step_secs=time.perf_counter() - self._step_started,
            update_stall_secs=stall_secs["wait for host"],
            select_stall_secs=stall_secs["select"],
            copy_secs=copy_secs,
            update_interval=self._schedule.update_interval,
            select_interval=self._schedule.select_interval,
            to_host_bytes=self._transfers.to_host_bytes,
            to_device_bytes=self._transfers.to_device_bytes,
            worker_accumulate_secs=self._host_secs["accumulate"],
            worker_update_secs=self._host_secs["update"],
            deferred_age_steps=self._blocks.oldest_age_steps,
            spans=self._timeline.take(),
            **self._figures,
        )
        self._step_started = time.perf_counter()
        self._transfers.reset_bytes()
        self._open_inbox()

    def time(self, name: str) -> AbstractContextManager[None]:
        """Times what the adapter does within a step."""
        return self._timeline(name)

    def close(self) -> None:
        """Ends the background process and gives its memory back. Safe to call again; nothing else may be called then."""
        for name in ("inbox", "_host_state"):  # their views would keep the memory mapped
            self.__dict__.pop(name, None)
        self.selected.give_back(keep_moments=False)
        self.host.close()


def _is_cut_otherwise(now: Schedule, wanted: Schedule) -> bool:
    """Whether blocks are others, or reach the device at another time."""
    names = ("update_interval", "warm_up_steps", "overlap", "look_ahead", "interim")
    return any(getattr(now, name) != getattr(wanted, name) for name in names)
