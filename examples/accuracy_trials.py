"""Algorithms to compare ZenFlow with, as variants of its reference: the paper's form, and other ways to select columns.

Each says only what it does otherwise. `accuracy_emulated.py` trains with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from examples.accuracy_sliced import ALL, SlicedReference, columns_of
from lightning_zenflow.reference import ParameterState
from lightning_zenflow.schedule import StepPlan

SCORE_DECAY = 0.95
"""Of smoothed scores: they remember about 20 steps."""


class PaperForm(SlicedReference):
    """The form of arXiv 2505.12242: all deferred elements at once, at every U-th step, by the mean of U gradients.

    Learning rate and betas are those of a single step. With overlap the host has until the next such step, so the device sees a
    gradient U to 2U - 1 steps late. Moments move with their column, and corrections for their start count the updates
    that a column has had. Give it a schedule without look-ahead and interim step.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        if self.schedule.look_ahead or self.schedule.interim:
            raise ValueError(
                "`look_ahead` and `interim_step` must be False for the paper's form, got True. Set both to False."
            )
        # Updates so far: of each column, or of a whole vector.
        self._updates = {
            id(state): torch.zeros(state.master.shape[1:] if len(state.shape) >= 2 else (), dtype=torch.float64)
            for state in self.states.values()
        }

    def _take(self, state: ParameterState, gradient: Tensor, plan: StepPlan) -> None:
        at_once = columns_of(state)[1] if len(state.shape) >= 2 and plan.block is not None else ALL
        self._updates[id(state)][at_once] += 1
        super()._take(state, gradient, plan)

    def _update_due(self, block: int, clipped: Mapping[str, Tensor], plan: StepPlan) -> None:
        if block == 0:
            due = plan.step + plan.lag * self.schedule.update_interval
            for state, updated, _ in self._update_block(0):
                self._in_flight.append((due, state, updated, state.master.clone()))
            self.held = [0] * len(self.held)

    def _update_block(
        self, block: int, last: Mapping[str, Tensor] | None = None
    ) -> list[tuple[ParameterState, Tensor, Tensor]]:
        """Block 0 stands for all."""
        steps, self.held[block] = self.held[block], 0
        if block > 0:
            return []
        return [
            self._update_deferred(state, 0, self.groups[state.group]["lr"], steps, None)
            for state in self.states.values()
            if len(state.shape) >= 2
        ]

    def _update_deferred(
        self, state: ParameterState, block: int, lr: float, steps: int, last: Tensor | None
    ) -> tuple[ParameterState, Tensor, Tensor]:
        selected, values = columns_of(state), (state.master, state.exp_avg, state.exp_avg_sq)
        before, kept = state.master.clone(), [one[selected] for one in values]
        deferred = torch.ones(state.master.shape[1], dtype=torch.bool)
        deferred[state.columns] = False
        self._updates[id(state)] += deferred
        self._adamw(state, ALL, state.accumulated / steps, lr, steps=1)
        for one, old in zip(values, kept, strict=True):
            one[selected] = old
        state.accumulated.zero_()
        return state, ~state.selected, before

    def _adamw(
        self, state: ParameterState, mask: Any, gradient: Tensor, lr: float, *, steps: int, spread: Tensor | None = None
    ) -> None:
        settings, updates = self.groups[state.group], self._updates[id(state)]
        if not settings.get("decoupled_weight_decay", True):
            raise ValueError("`decoupled_weight_decay` must be True for the paper's form, got False. Use AdamW.")
        updates = updates[mask[1]] if isinstance(mask, tuple) else updates.clamp(min=1)
        w, m, v, g = (x[mask] for x in (state.master, state.exp_avg, state.exp_avg_sq, gradient))
        beta1, beta2 = settings["betas"]
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        m_hat, v_hat = (x / (1 - beta**updates).float() for x, beta in ((m, beta1), (v, beta2)))
        w = w - lr * settings["weight_decay"] * w - lr * m_hat / (v_hat.sqrt() + settings["eps"])
        state.master[mask], state.exp_avg[mask], state.exp_avg_sq[mask] = w, m, v


class SmoothedScores(SlicedReference):
    """Columns are selected by a moving average of their scores, and not by those of the one gradient at hand."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._smoothed = {name: torch.zeros(state.master.shape[1:]) for name, state in self.states.items()}

    def _scores(self, name: str, gradient: Tensor) -> Tensor:
        return SCORE_DECAY * self._smoothed[name] + (1 - SCORE_DECAY) * super()._scores(name, gradient)

    def _observe(self, gradients: Mapping[str, Tensor]) -> None:
        super()._observe(gradients)
        for name, state in self.states.items():
            if len(state.shape) >= 2:
                self._smoothed[name] = self._scores(name, gradients[name])


class ScoresByAdam(SlicedReference):
    """Columns are selected by what Adam would make of the gradient: the sum of g**2 / v_hat, with v as this step leaves it.

    Before the first step every gradient would score the same, so the first selection is the plain one.
    """

    def _scores(self, name: str, gradient: Tensor) -> Tensor:
        if self.clock == 0:
            return super()._scores(name, gradient)
        state = self.states[name]
        settings, square = self.groups[state.group], gradient.square()
        beta2 = settings["betas"][1]
        v_hat = (beta2 * state.exp_avg_sq + (1 - beta2) * square) / (1 - beta2 ** (self.clock + 1))
        return (square / (v_hat.sqrt() + settings["eps"]).square()).sum(0)


class OneBudget(SlicedReference):
    """One budget over all matrices: the columns with the largest mean square, until `topk_ratio` of all elements are selected.

    A matrix may have none. The first column that no longer fits is the end.
    """

    def _select(self, gradients: Mapping[str, Tensor]) -> None:
        matrices = {name: state for name, state in self.states.items() if len(state.shape) >= 2}
        rows = [torch.full((state.master.shape[1],), state.master.shape[0]) for state in matrices.values()]
        means = [self._scores(name, gradients[name]) / state.master.shape[0] for name, state in matrices.items()]
        budget = self.topk_ratio * sum(state.master.numel() for state in matrices.values())
        order = torch.cat(means).sort(descending=True, stable=True).indices
        taken = order[torch.cat(rows)[order].cumsum(0) <= budget]
        start = 0
        for state, own in zip(matrices.values(), rows, strict=True):
            mine = (taken >= start) & (taken < start + len(own))
            self._set_columns(state, taken[mine] - start)
            start += len(own)
