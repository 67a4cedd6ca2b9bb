"""The algorithm of DESIGN sections 2.1 to 2.3 (after ZenFlow, arXiv 2505.12242) in slow, obvious, single-process fp32.

Everything else in the package is compared with this file, so it shares nothing with the rest but `schedule.py` and
`rounding.py`: no shards, no queue, no device, and the AdamW equations written out. Every tensor of a parameter is whole;
which elements are selected and which block an element belongs to are masks. Weights are fp32 throughout: their rounding to
16 bits is not stated here, that of moments is.

Where we deviate from the paper: deferred elements are updated block by block instead of all at every U-th step, one update
stands for n steps, and the device is shown an extrapolated weight (DESIGN section 2.2 says why).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_zenflow.rounding import noise_at, rounded
from lightning_zenflow.schedule import Schedule, StepPlan, block_range

INTERIM_SCALE = 1.5
"""Of the moves of the device itself: AdamW divides by an element's own root, which most often is below that of its matrix."""

INTERIM_DECAY = 0.98
"""Of the moving average of squared gradients by which the device moves deferred weights."""


@dataclass
class ParameterState:
    """All that is known of one parameter; tensors are `[rows, cols]` for a matrix, else in the parameter's own shape.

    Selected and deferred elements share these tensors, so master and moments move with their column by themselves.

    Attributes:
        shape: The parameter's own shape.
        group: Index of its parameter group.
        place: int64, where in its rank's shard each element lies.
        block: int64, the block of each element.
        master: fp32 master weight.
        visible: fp32 weight as the device shows it.
        mean_square: Moving average of the squared gradient, over all elements, without the correction for its start.
        exp_avg: fp32 first moment m.
        exp_avg_sq: fp32 second moment v.
        accumulated: fp32 sum `a` of the clipped gradients a deferred element holds; 0 where selected.
        columns: int64, selected columns in ascending order; empty for a vector, which is selected as a whole.
        selected: bool, whether an element is selected.
    """

    shape: torch.Size
    group: int
    place: Tensor
    block: Tensor
    master: Tensor
    visible: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    accumulated: Tensor
    columns: Tensor
    selected: Tensor
    mean_square: float = 0.0

    @classmethod
    def of(cls, weight: Tensor, group: int, place: Tensor, block: Tensor) -> ParameterState:
        """The state before the first step: every vector selected, no column of any matrix."""
        vector = weight.dim() < 2
        shape = weight.shape if vector else (weight.shape[0], math.prod(weight.shape[1:]))
        master = weight.detach().to(torch.float32, copy=True).reshape(shape)
        return cls(
            shape=weight.shape,
            group=group,
            place=place.reshape(shape),
            block=block.reshape(shape),
            master=master,
            visible=master.clone(),
            exp_avg=torch.zeros_like(master),
            exp_avg_sq=torch.zeros_like(master),
            accumulated=torch.zeros_like(master),
            columns=torch.empty(0, dtype=torch.long),
            selected=torch.full_like(master, vector, dtype=torch.bool),
        )


def places_of_elements(
    sizes: Sequence[tuple[int, int]], *, ranks: int, stage3: bool = False
) -> tuple[list[Tensor], int]:
    """Where every element of every parameter lies in the shard of its rank.

    ZeRO concatenates the flattened parameters of a group, pads them to a multiple of `2 * ranks` and cuts the result into
    `ranks` equal partitions. A rank's shard is its partitions of all groups in a row, padding included. ZeRO-3 cuts each
    flattened parameter into `ranks` parts, padded to equal size, and a rank's partition of a group is its parts of the
    parameters in a row.

    Args:
        sizes: `(numel, group)` of each parameter, in order.
        ranks: The ZeRO world size.
        stage3: Whether parameters are cut instead of groups.

    Returns:
        One flat int64 tensor of `numel` elements for each parameter, and the size of a shard.
    """
    groups = range(1 + max((group for _, group in sizes), default=0))
    # What a parameter takes up in a flat group, or in a rank's partition of it.
    lengths = [math.ceil(numel / ranks) if stage3 else numel for numel, _ in sizes]
    totals = [sum(length for length, (_, g) in zip(lengths, sizes, strict=True) if g == group) for group in groups]
    partition_numels = totals if stage3 else [math.ceil(total / (2 * ranks)) * 2 for total in totals]
    result = []
    offsets = [0] * len(groups)  # where the next parameter starts
    for length, (numel, group) in zip(lengths, sizes, strict=True):
        elements = torch.arange(numel)
        if stage3:
            in_partition = offsets[group] + elements % max(1, length)
        else:
            in_partition = (offsets[group] + elements) % max(1, partition_numels[group])
        result.append(sum(partition_numels[:group]) + in_partition)
        offsets[group] += length
    return result, sum(partition_numels)


def block_of_elements(
    sizes: Sequence[tuple[int, int]], *, ranks: int, blocks: int, stage3: bool = False
) -> list[Tensor]:
    """The block of every element of every parameter, one flat int64 tensor of `numel` elements for each.

    Blocks are ranges of a shard (DESIGN section 2.1). So vectors and padding take up room in a block, and a boundary may cut
    a row. Arguments as for `places_of_elements`, and `blocks`: `U`.
    """
    places, shard_numel = places_of_elements(sizes, ranks=ranks, stage3=stage3)
    block_in_shard = torch.empty(shard_numel, dtype=torch.long)
    for block in range(blocks):
        start, stop = block_range(shard_numel, blocks, block)
        block_in_shard[start:stop] = block
    return [block_in_shard[place] for place in places]


class ZenFlowReference:
    """ZenFlow on a list of parameters: give it gradients, it says what the device shows.

    Args:
        parameters: `(name, initial weight, group index)` in the order of the groups' parameters. Weights are copied.
        groups: `lr`, `betas`, `eps`, `weight_decay` and optionally `decoupled_weight_decay` (default `True`, AdamW; `False`
            is Adam's L2 term). Read anew at each step: a scheduler may change them in place.
        schedule: When things happen. Where it plans a re-selection there is a barrier, even if `topk_ratio` is 0.
        topk_ratio: Share of a matrix's columns that are selected.
        deferred_lr_scale: Rate of one update for n steps: `linear` (sum of n rates), `sqrt` (sum / sqrt(n)), `none` (mean).
        clip_norm: Largest global gradient norm; 0 or `None` clips nothing.
        ranks: ZeRO world size. The cut into blocks depends on it, and which parts of a matrix move by a bounded gradient.
        stage3: Whether ZeRO cuts parameters instead of groups. What depends on `ranks` depends on it.
        moments_dtype: What the host keeps the moments of deferred elements in: `fp32`, or `bf16`, to which they are rounded
            as `rounding.py` says, at each update with its clock. Those of selected elements are fp32, until a selection
            rounds those of the columns that leave, with the clock of the step before.

    Attributes:
        states: The state of each parameter, by name.
        clock: Applied steps so far.
        skipped_steps: Steps not applied because the gradient norm was not finite.
        grad_norm: Global gradient norm of the last call of `step`, before clipping.
        held: For each block, how many steps' gradients it holds.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, Tensor, int]],
        groups: Sequence[dict[str, Any]],
        schedule: Schedule,
        *,
        topk_ratio: float,
        deferred_lr_scale: str = "linear",
        clip_norm: float | None = None,
        ranks: int = 1,
        stage3: bool = False,
        moments_dtype: str = "fp32",
    ) -> None:
        self.groups, self.schedule = groups, schedule
        self.topk_ratio, self.deferred_lr_scale, self.clip_norm = topk_ratio, deferred_lr_scale, clip_norm
        sizes = [(weight.numel(), group) for _, weight, group in parameters]
        self._blocks_of_elements = partial(block_of_elements, sizes, ranks=ranks, stage3=stage3)
        cuts = self._blocks_of_elements(blocks=schedule.update_interval)
        places, _ = places_of_elements(sizes, ranks=ranks, stage3=stage3)
        self.states = {
            name: ParameterState.of(weight, group, place, cut)
            for (name, weight, group), place, cut in zip(parameters, places, cuts, strict=True)
        }
        self._rounds_moments = moments_dtype == "bf16"
        self.clock, self.skipped_steps, self.grad_norm = 0, 0, 0.0
        self._observed_steps = 0  # of `mean_square`
        self.held = [0] * schedule.update_interval
        self._lr_sums = [[0.0] * schedule.update_interval for _ in groups]
        # The step it is due at, whose it is, which elements (bool), and their values (fp32).
        self._in_flight: list[tuple[int, ParameterState, Tensor, Tensor]] = []

    def weights(self, name: str) -> Tensor:
        """The fp32 weights the device shows, in the parameter's shape (a copy)."""
        return self.states[name].visible.clone().reshape(self.states[name].shape)

    def masters(self, name: str) -> Tensor:
        """The fp32 masters, in the parameter's shape (a copy)."""
        return self.states[name].master.clone().reshape(self.states[name].shape)

    def selected_columns(self, name: str) -> Tensor:
        """The selected columns of a matrix, int64, ascending; empty in warm-up and for vectors."""
        return self.states[name].columns.clone()

    @torch.no_grad()
    def step(self, grads: Mapping[str, Tensor | None]) -> bool:
        """One optimizer step.

        Args:
            grads: The averaged, unscaled fp32 gradient of each parameter: over ranks, and over the micro-batches of
                gradient accumulation, averaged by the caller. `None` or missing is a zero gradient: there is one clock, so
                moments and weights decay as everywhere else.

        Returns:
            Whether the step was applied. If the norm is not finite nothing changes and the clock stands still.

        Raises:
            KeyError: `grads` names a parameter that does not exist.
        """
        unknown = set(grads) - set(self.states)
        if unknown:
            raise KeyError(
                f"`grads` must name known parameters, got {sorted(unknown)}. Known: {', '.join(self.states)}."
            )
        gradients = {}
        for name, state in self.states.items():
            grad = grads.get(name)
            gradients[name] = torch.zeros_like(state.master) if grad is None else grad.reshape(state.master.shape)
        plan = self.schedule.plan(self.clock + 1)
        if plan.reselect:  # a barrier, prepared while backward runs: even if the step is skipped then
            self._update_blocks()
        # One norm over selected and deferred together: clipping must not depend on what is selected.
        squares = [gradient.double().square().sum().item() for gradient in gradients.values()]
        self.grad_norm = math.sqrt(sum(squares))
        moves = plan.interim and self._observed_steps > 0
        if not math.isfinite(self.grad_norm):
            self.skipped_steps += 1
            if moves:  # the device had moved by this gradient already
                self.settle()
            return False
        clip_factor = min(1.0, self.clip_norm / (self.grad_norm + 1e-6)) if self.clip_norm else 1.0
        if plan.reselect:
            self.settle()
            self._select(gradients)
        self.clock = plan.step

        clipped = {name: clip_factor * gradient for name, gradient in gradients.items()}
        for name, state in self.states.items():
            self._take(state, clipped[name], plan)
        if plan.block is not None:
            self.held = [n + 1 for n in self.held]
            for sums, settings in zip(self._lr_sums, self.groups, strict=True):
                sums[:] = [lr_sum + settings["lr"] for lr_sum in sums]
            self._update_due(plan.block, clipped, plan)
            self._arrive()
            if moves:
                self._move(gradients, plan)
        self._observe(gradients)
        return True

    def _take(self, state: ParameterState, gradient: Tensor, plan: StepPlan) -> None:
        """Updates selected elements, in warm-up all; the others hold their clipped gradient back."""
        at_once = state.selected if plan.block is not None else torch.ones_like(state.selected)
        self._adamw(state, at_once, gradient, self.groups[state.group]["lr"], steps=1)
        self._round_moments(state, at_once & ~state.selected)  # deferred ones, in warm-up
        state.visible[at_once] = state.master[at_once]
        # a = a + clip_factor * g
        state.accumulated[~at_once] += gradient[~at_once]

    def _update_due(self, block: int, clipped: Mapping[str, Tensor], plan: StepPlan) -> None:
        """Updates the block whose turn it is, and sends it to the device."""
        for state, updated, before in self._update_block(block, clipped if plan.delay_steps else None):
            # what the device will see = w + beta1**delay * alpha * (w - w_before); the master stays w
            fade = self.groups[state.group]["betas"][0] ** plan.delay_steps
            shown = state.master + fade * plan.look_ahead * (state.master - before)
            self._in_flight.append((plan.step + plan.lag, state, updated, shown))

    def _move(self, gradients: Mapping[str, Tensor], plan: StepPlan) -> None:
        """What the device itself does to deferred elements until the host's update arrives; no master sees it.

        w_device = w_device - 1.5 * (1 - beta1**delay) * lr * g / sqrt(0.98 * mean + 0.02 * now), where `mean` is the
        mean square over the steps before, and `now` that of this gradient, of the rank's part.
        """
        for name, state in self.states.items():
            moved = ~state.selected
            if plan.lag == 0:  # what has just arrived knows this gradient
                moved &= state.block != plan.block
            state.visible[moved] -= self._move_of(state, gradients[name], plan)[moved]

    def _move_of(self, state: ParameterState, gradient: Tensor, plan: StepPlan) -> Tensor:
        """What the device subtracts: 0 for vectors, and for a matrix that never had a gradient."""
        mean = state.mean_square / (1 - INTERIM_DECAY**self._observed_steps)
        move = torch.zeros_like(gradient)
        if len(state.shape) < 2 or mean == 0:
            return move
        settings = self.groups[state.group]
        rate = INTERIM_SCALE * (1 - settings["betas"][0] ** plan.delay_steps) * settings["lr"]
        place = state.place.flatten()
        starts = (place[1:] <= place[:-1]).nonzero().flatten() + 1  # where the shard of the next rank begins
        parts = zip(gradient.flatten().tensor_split(starts), move.view(-1).tensor_split(starts), strict=True)
        for part, moved in parts:
            now = part.double().square().mean().item()
            moved[:] = part * (rate / math.sqrt(INTERIM_DECAY * mean + (1 - INTERIM_DECAY) * now))
        return move

    def _observe(self, gradients: Mapping[str, Tensor]) -> None:
        if self.schedule.interim:
            for name, state in self.states.items():
                mean = gradients[name].square().mean().item()
                state.mean_square = INTERIM_DECAY * state.mean_square + (1 - INTERIM_DECAY) * mean
            self._observed_steps += 1

    @torch.no_grad()
    def settle(self) -> None:
        """Applies every gradient held and shows the masters: before a re-selection and at the end of training."""
        self._update_blocks()
        self._in_flight.clear()  # older than the masters that now replace it
        for state in self.states.values():
            state.visible = state.master.clone()

    def change_intervals(self, update_interval: int, select_interval: int | None) -> None:
        """Between two steps: settles if the blocks change, and cuts them anew; the next selection counts from the last."""
        blocks_change = update_interval != self.schedule.update_interval
        self.schedule = self.schedule.changed(self.clock, update_interval, select_interval)
        if not blocks_change:
            return
        self.settle()
        cuts = self._blocks_of_elements(blocks=update_interval)
        for state, cut in zip(self.states.values(), cuts, strict=True):
            state.block = cut.reshape(state.block.shape)
        self.held = [0] * update_interval
        self._lr_sums = [[0.0] * update_interval for _ in self.groups]

    def _arrive(self) -> None:
        """Shows the device each block that is due at the end of this step; no mask holds a selected element."""
        for due, state, updated, shown in self._in_flight:
            if due == self.clock:
                state.visible[updated] = shown[updated]
        self._in_flight = [arrival for arrival in self._in_flight if arrival[0] > self.clock]

    def _select(self, gradients: Mapping[str, Tensor]) -> None:
        """Selects the columns with the largest squared norm of this step's gradient (DESIGN section 2.3)."""
        for name, state in self.states.items():
            if len(state.shape) < 2 or self.topk_ratio == 0:
                continue
            score = self._scores(name, gradients[name])
            count = max(1, round(self.topk_ratio * len(score)))
            # A stable sort leaves equal scores in the order of their columns: ties go to the lower index.
            self._set_columns(state, score.sort(descending=True, stable=True).indices[:count])

    def _scores(self, name: str, gradient: Tensor) -> Tensor:
        """A score for each column of a matrix, fp32 `[cols]`."""
        return gradient.square().sum(0)

    def _set_columns(self, state: ParameterState, columns: Tensor) -> None:
        state.columns = columns.sort().values
        before, state.selected = state.selected, torch.zeros_like(state.selected)
        state.selected[:, state.columns] = True
        self._round_moments(state, before & ~state.selected)

    def _update_blocks(self) -> None:
        """Updates the masters with every gradient held; the clock still shows the last step whose gradient that is."""
        for block, steps in enumerate(self.held):
            if steps > 0:
                self._update_block(block)

    def _update_block(
        self, block: int, last: Mapping[str, Tensor] | None = None
    ) -> list[tuple[ParameterState, Tensor, Tensor]]:
        """One AdamW step for the n >= 1 steps that `block` holds; `last` is the gradient of the last one, if its spread counts.

        Returns:
            For each parameter: its state, which elements were updated (bool), and the masters before (fp32).
        """
        steps, moved = self.held[block], []
        divisor = {"linear": 1.0, "sqrt": math.sqrt(steps), "none": float(steps)}[self.deferred_lr_scale]
        for name, state in self.states.items():
            lr = self._lr_sums[state.group][block] / divisor
            moved.append(self._update_deferred(state, block, lr, steps, None if last is None else last[name]))
        self.held[block] = 0
        for sums in self._lr_sums:
            sums[block] = 0.0
        return moved

    def _update_deferred(
        self, state: ParameterState, block: int, lr: float, steps: int, last: Tensor | None
    ) -> tuple[ParameterState, Tensor, Tensor]:
        """The part of `_update_block` that concerns one parameter."""
        updated, before = (state.block == block) & ~state.selected, state.master.clone()
        mean = state.accumulated / steps
        spread = None if last is None else last - mean
        self._adamw(state, updated, mean, lr, steps=steps, spread=spread)
        self._round_moments(state, updated)
        state.accumulated[updated] = 0
        return state, updated, before

    def _adamw(
        self,
        state: ParameterState,
        mask: Tensor,
        gradient: Tensor,
        lr: float,
        *,
        steps: int,
        spread: Tensor | None = None,
    ) -> None:
        """AdamW (arXiv 1711.05101) on the elements in `mask`, standing for `steps` steps and ending at the clock.

        `spread` is how far the last of several gradients is from their mean: its square, which estimates their variance, goes
        into v.
        """
        settings = self.groups[state.group]
        w, m, v, g = (x[mask] for x in (state.master, state.exp_avg, state.exp_avg_sq, gradient))
        beta1, beta2 = settings["betas"]
        if settings.get("decoupled_weight_decay", True):
            w = w - lr * settings["weight_decay"] * w
        else:
            g = g + settings["weight_decay"] * w
        m = beta1**steps * m + (1 - beta1**steps) * g
        square = g * g if spread is None else g * g + spread[mask] ** 2
        v = beta2**steps * v + (1 - beta2**steps) * square
        m_hat = m / (1 - beta1**self.clock)
        v_hat = v / (1 - beta2**self.clock)
        w = w - lr * m_hat / (v_hat.sqrt() + settings["eps"])
        state.master[mask], state.exp_avg[mask], state.exp_avg_sq[mask] = w, m, v

    def _round_moments(self, state: ParameterState, mask: Tensor) -> None:
        """Moments of the elements in `mask` as the host keeps them."""
        if not self._rounds_moments:
            return
        for moment, values in enumerate((state.exp_avg, state.exp_avg_sq)):
            values[mask] = rounded(values[mask], noise_at(state.place[mask], self.clock, moment)).float()
