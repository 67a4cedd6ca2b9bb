"""The gradients of a step: what becomes of each while backward goes on."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_zenflow import gradients
from lightning_zenflow.adamw import Hyper
from lightning_zenflow.gradients import GradientInbox
from lightning_zenflow.interim import InterimStep
from lightning_zenflow.schedule import StepPlan
from lightning_zenflow.selected import HostState, SelectedState
from lightning_zenflow.shards import ParamSpec, ShardTable
from lightning_zenflow.transfer import Transfers
from lightning_zenflow.weights import ShardWeights

CPU = torch.device("cpu")
SPECS = [ParamSpec("w", (7, 10), 0, 0), ParamSpec("v", (4,), 0, 70), ParamSpec("u", (5, 3), 0, 74)]
COLUMNS = {0: torch.tensor([0, 3, 9]), 2: torch.tensor([1])}


def received(
    rank: int, *, by_parameter: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[tuple[int, int]]]:
    """Slot, packed columns and sum of squares after the gradients of one step, and what of the slot was waited for."""
    torch.manual_seed(0)
    table = ShardTable.build(SPECS, [45], rank)
    selected = SelectedState(table, torch.bfloat16, CPU)
    selected.fetch(HostState(*(torch.zeros(table.numel) for _ in range(3))), COLUMNS)
    slot, waits = torch.full((table.numel,), 7.0, dtype=torch.bfloat16), []
    inbox = GradientInbox(table, selected, Transfers(), CPU, slot, lambda start, stop: waits.append((start, stop)))
    inbox.open(selecting=False)
    for segment in reversed(table.segments):
        inbox.receive(segment, torch.randn(segment.numel).bfloat16())
    return slot, selected.wire, inbox.finish(by_parameter=by_parameter), waits


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("band_numel", [3, 25, 1000])
def test_bands_of_any_size_measure_pack_and_copy_the_same(
    rank: int, band_numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradients, "_CPU_BAND_NUMEL", band_numel)
    slot, packed, squares, waits = received(rank)
    table = ShardTable.build(SPECS, [45], rank)
    owned = torch.cat([torch.arange(segment.start, segment.stop) for segment in table.segments])
    assert squares.shape == (1,) and squares.item() == pytest.approx(slot[owned].double().square().sum().item(), 1e-6)
    by_parameter = received(rank, by_parameter=True)[2]
    assert by_parameter.shape == (len(SPECS),)
    for segment in table.segments:
        own = slot[segment.start : segment.stop].double().square().sum().item()
        assert by_parameter[segment.param].item() == pytest.approx(own, 1e-6)
    expected = []
    for segment in table.segments:
        for offset in range(segment.numel):
            column = (segment.param_start + offset) % segment.spec.cols
            if not segment.spec.is_matrix or column in COLUMNS[segment.param].tolist():
                expected.append(slot[segment.start + offset])
    assert torch.equal(packed, torch.stack(expected))
    assert waits == [(segment.start, segment.stop) for segment in reversed(table.segments)]


@pytest.mark.parametrize("loss_scale", [1.0, 1024.0])
@pytest.mark.parametrize("band_numel", [3, 1000])
def test_a_gradient_is_part_of_the_mean_square_that_its_move_is_divided_by(
    band_numel: int, loss_scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradients, "_CPU_BAND_NUMEL", band_numel)
    table = ShardTable.build(SPECS, [90], 0)
    selected = SelectedState(table, torch.float32, CPU)
    selected.fetch(HostState(*(torch.zeros(table.numel) for _ in range(3))), {})
    flat = torch.zeros(90)
    interim = InterimStep(table, ShardWeights(table, [flat]), Transfers(), CPU)
    interim.load_state({"w": 0.02, "v": 0.02, "u": 0.02}, 1, [])  # a usual gradient is 1
    inbox = GradientInbox(table, selected, Transfers(), CPU, torch.zeros(90), lambda start, stop: None, interim)
    interim.open(StepPlan(2, False, 0, 1, 0.0, delay_steps=1.0, interim=True))
    interim.begin([Hyper(1.0, 0.0, 0.0, 1e-8, 0.0, True)], loss_scale)
    for segment, size in zip(table.segments, (2.0, 1.0, 100.0), strict=True):
        inbox.receive(segment, torch.full((segment.numel,), size * loss_scale))
    moves = {size: 1.5 * size / math.sqrt(0.98 + 0.02 * size**2) for size in (2.0, 100.0)}
    for start, stop, moved in ((0, 70, moves[2.0]), (70, 74, 0.0), (74, 89, moves[100.0])):
        assert flat[start:stop].tolist() == pytest.approx([-moved] * (stop - start))


def test_a_step_without_gradients_has_zeros_everywhere() -> None:
    table = ShardTable.build(SPECS, [90], 0)
    selected = SelectedState(table, torch.float32, CPU)
    selected.fetch(HostState(*(torch.zeros(table.numel) for _ in range(3))), COLUMNS)
    selected.wire.fill_(5)
    slot = torch.full((table.numel,), 7.0)
    inbox = GradientInbox(table, selected, Transfers(), CPU, slot, lambda start, stop: None)
    inbox.open(selecting=False)
    assert inbox.finish().tolist() == [0] and not selected.wire.any() and not slot[:89].any()
