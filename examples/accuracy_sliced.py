"""`reference.py`, fast enough for whole trainings: slices and columns in the place of masks, the same results.

A block is one range of each flattened parameter as long as there is one rank, and columns are indices. Only what goes over all
elements is said anew; schedule, equations and order of events are those of `ZenFlowReference`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_zenflow.reference import ParameterState, ZenFlowReference
from lightning_zenflow.schedule import StepPlan

ALL: Any = ...
"""The index of all elements."""


def columns_of(state: ParameterState) -> Any:
    """The index of what is selected: everything of a vector."""
    return (slice(None), state.columns) if len(state.shape) >= 2 else ALL


class SlicedReference(ZenFlowReference):
    """`ZenFlowReference` for one rank, some ten times as fast on large models."""

    def _take(self, state: ParameterState, gradient: Tensor, plan: StepPlan) -> None:
        at_once = ALL if plan.block is None else columns_of(state)
        self._adamw(state, at_once, gradient, self.groups[state.group]["lr"], steps=1)
        if plan.block is None:
            self._round_moments(state, ~state.selected)
        state.visible[at_once] = state.master[at_once]
        state.accumulated += gradient
        state.accumulated[at_once] = 0

    def _update_deferred(
        self, state: ParameterState, block: int, lr: float, steps: int, last: Tensor | None
    ) -> tuple[ParameterState, Tensor, Tensor]:
        part, elements = self._part(state, block)
        before = [values.clone() for values in (part.master, part.exp_avg, part.exp_avg_sq)]
        mean = part.accumulated / steps
        spread = None if last is None else last.reshape(-1)[elements] - mean
        self._adamw(part, ALL, mean, lr, steps=steps, spread=spread)
        for values, old in zip((part.master, part.exp_avg, part.exp_avg_sq), before, strict=True):
            torch.where(part.selected, old, values, out=values)
        self._round_moments(part, ~part.selected)
        part.accumulated.zero_()  # of what is selected it is 0 at all times
        return part, ~part.selected, before[0]

    def _part(self, state: ParameterState, block: int) -> tuple[ParameterState, slice]:
        """The elements of a block, flat: views of the state's tensors, and which they are."""
        of_elements = state.block.view(-1)  # in ascending order, since there is one rank
        start, stop = torch.searchsorted(of_elements, torch.tensor([block, block + 1])).tolist()
        elements = slice(start, stop)
        names = ("place", "block", "master", "visible", "exp_avg", "exp_avg_sq", "accumulated", "selected")
        return replace(state, **{name: getattr(state, name).view(-1)[elements] for name in names}), elements

    def _arrive(self) -> None:
        for due, part, updated, shown in self._in_flight:
            if due == self.clock:
                torch.where(updated, shown, part.visible, out=part.visible)
        self._in_flight = [arrival for arrival in self._in_flight if arrival[0] > self.clock]

    def _move(self, gradients: Mapping[str, Tensor], plan: StepPlan) -> None:
        """Moves everything, and puts back what is not to move."""
        assert plan.block is not None
        for name, state in self.states.items():
            if len(state.shape) < 2:
                continue
            part = self._part(state, plan.block)[0]
            columns, arrived = state.visible[columns_of(state)], part.visible.clone() if plan.lag == 0 else None
            state.visible.sub_(self._move_of(state, gradients[name], plan))
            if arrived is not None:
                part.visible.copy_(arrived)
            state.visible[columns_of(state)] = columns
