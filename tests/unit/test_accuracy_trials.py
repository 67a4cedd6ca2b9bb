"""The emulations of `examples/accuracy.py`: slices give what masks give, and each variant differs in what it says."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from examples.accuracy import METHODS
from examples.accuracy_emulated import Emulation, trained_by
from examples.accuracy_sliced import SlicedReference
from examples.accuracy_trials import OneBudget, PaperForm, ScoresByAdam, SmoothedScores
from lightning_zenflow.reference import ZenFlowReference
from lightning_zenflow.schedule import Schedule
from tests.modules import EXPECTED_WARNINGS, OFTEN, Small, fit_plainly, three_groups

pytestmark = EXPECTED_WARNINGS

SHAPES = {"conv": (3, 2, 2, 2), "bias": (5,), "matrix": (4, 6), "scalar": (), "square": (5, 5)}


def settings_of(**changed: Any) -> dict[str, Any]:
    return {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1, **changed}


def parameters() -> list[tuple[str, Tensor, int]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (name, 0.2 * torch.randn(shape, generator=generator), at % 2) for at, (name, shape) in enumerate(SHAPES.items())
    ]


def gradients(step: int) -> dict[str, Tensor]:
    """Columns differ in size from step to step, so that selections do."""
    generator = torch.Generator().manual_seed(1000 + step)
    return {
        name: torch.randn(s, generator=generator) * torch.rand(s[1:], generator=generator) for name, s in SHAPES.items()
    }


def one_matrix(kind: type[ZenFlowReference], schedule: Schedule, cols: int = 2, rows: int = 2, **settings: Any) -> Any:
    ratio = settings.pop("topk_ratio", 0.0)
    return kind([("w", torch.zeros(rows, cols), 0)], [settings_of(**settings)], schedule, topk_ratio=ratio)


@pytest.mark.parametrize(
    ("schedule", "settings"),
    [
        (Schedule(4, 5, interim=True), {}),
        (Schedule(3, 4, warm_up_steps=2, overlap=False, interim=True), {"deferred_lr_scale": "sqrt"}),
        (Schedule(4, 5), {"moments_dtype": "bf16"}),
        (Schedule(2, 3, warm_up_steps=3, look_ahead=False), {"moments_dtype": "bf16", "deferred_lr_scale": "none"}),
        (Schedule(4, None, interim=True), {"topk_ratio": 0}),
        (Schedule(4, 5), {"topk_ratio": 1}),
        (Schedule(60, 7, interim=True), {}),  # more blocks than elements of some parameters
    ],
)
def test_slices_give_what_masks_give(schedule: Schedule, settings: dict[str, Any]) -> None:
    made = {
        kind: kind(
            parameters(),
            [settings_of(), settings_of(lr=3e-3, decoupled_weight_decay=False)],
            schedule,
            **{"topk_ratio": 0.3, "clip_norm": 1.0, **settings},
        )
        for kind in (ZenFlowReference, SlicedReference)
    }
    plain, sliced = made.values()
    for step in range(1, 20):
        for one in made.values():
            for group in one.groups:
                group["lr"] *= 1.1 if step % 3 else 0.7
            bad = {"matrix": torch.full((4, 6), torch.nan)} if step in (6, 8) else {}
            assert one.step({**gradients(step), **bad}) == (step not in (6, 8))
            if step == 17:
                one.settle()
        for name in SHAPES:
            torch.testing.assert_close(sliced.weights(name), plain.weights(name), rtol=0, atol=1e-6)
            torch.testing.assert_close(sliced.masters(name), plain.masters(name), rtol=0, atol=1e-6)
            assert torch.equal(sliced.selected_columns(name), plain.selected_columns(name))


def signs(schedule: Schedule) -> PaperForm:
    """Every step is `w -= lr * sign(mean gradient)`: only rates and timing are left."""
    made: PaperForm = one_matrix(PaperForm, schedule, lr=1.0, betas=(0.0, 0.0), eps=1e-12, weight_decay=0.0)
    return made


@pytest.mark.parametrize(("overlap", "late"), [(True, 2), (False, 0)])
def test_the_papers_form_updates_all_at_once_and_shows_it_an_interval_later(overlap: bool, late: int) -> None:
    paper = signs(Schedule(2, None, overlap=overlap, look_ahead=False))
    masters, shown = [], []
    for step in range(1, 9):
        assert paper.step({"w": torch.full((2, 2), 3.0 if step % 2 else -1.0)})
        assert paper.held == [step % 2] * 2
        masters.append(paper.masters("w"))
        shown.append(paper.weights("w"))
    # One rate for two steps, along their mean, on every element at once.
    expected = [0.0, -1, -1, -2, -2, -3, -3, -4]
    assert all(torch.equal(now, torch.full((2, 2), value)) for now, value in zip(masters, expected, strict=True))
    late_ones = [0.0] * late + expected[: len(expected) - late]
    assert all(torch.equal(now, torch.full((2, 2), value)) for now, value in zip(shown, late_ones, strict=True))


def test_a_rest_that_fills_no_interval_is_applied_at_the_end() -> None:
    paper = signs(Schedule(4, None, look_ahead=False))
    for _ in range(6):
        paper.step({"w": torch.ones(2, 2)})
    paper.settle()
    assert torch.equal(paper.weights("w"), torch.full((2, 2), -2.0))
    paper.settle()
    assert torch.equal(paper.weights("w"), torch.full((2, 2), -2.0))


def torch_weights(means: int, steps: int) -> dict[str, Tensor]:
    """What torch's AdamW makes of matrices given the mean of every `means` gradients, and of vectors given each gradient."""
    weights = {name: nn.Parameter(weight.clone()) for name, weight, _ in parameters()}
    for name, weight in weights.items():
        every = means if weight.dim() >= 2 else 1
        optimizer = torch.optim.AdamW([weight], **settings_of())
        for first in range(1, steps + 1, every):
            weight.grad = torch.stack([gradients(step)[name] for step in range(first, first + every)]).mean(0)
            optimizer.step()
    return {name: weight.detach() for name, weight in weights.items()}


@pytest.mark.parametrize(
    ("schedule", "topk_ratio", "means"),
    [
        (Schedule(3, None, look_ahead=False), 0, 3),
        (Schedule(3, 5, look_ahead=False), 1, 1),  # all selected
        (Schedule(1, 5, overlap=False, look_ahead=False), 0.4, 1),  # columns come and go with their moments
        (Schedule(3, 5, 12, look_ahead=False), 0.4, 1),  # warm-up
    ],
)
def test_the_papers_form_is_torch_adamw_on_mean_gradients(schedule: Schedule, topk_ratio: float, means: int) -> None:
    paper = PaperForm(parameters(), [settings_of(), settings_of()], schedule, topk_ratio=topk_ratio)
    for step in range(1, 13):
        paper.step(gradients(step))
    for name, expected in torch_weights(means, 12).items():
        torch.testing.assert_close(paper.masters(name), expected, rtol=0, atol=1e-6)


def test_the_papers_form_refuses_what_it_does_not_have() -> None:
    with pytest.raises(ValueError, match="`look_ahead` and `interim_step` must be False for the paper's form"):
        signs(Schedule(2, None))
    paper = one_matrix(PaperForm, Schedule(1, None, look_ahead=False), decoupled_weight_decay=False)
    with pytest.raises(ValueError, match="`decoupled_weight_decay` must be True"):
        paper.step({"w": torch.ones(2, 2)})


def selected_at_last(kind: type[ZenFlowReference], columns: list[list[float]]) -> list[int]:
    """What is selected in the last of several steps; the gradient of a step is the same in all rows."""
    made = one_matrix(kind, Schedule(4, len(columns) - 1), cols=len(columns[0]), topk_ratio=1 / len(columns[0]))
    for values in columns:
        made.step({"w": torch.tensor(values).expand(2, -1)})
    chosen: list[int] = made.selected_columns("w").tolist()
    return chosen


def test_smoothed_scores_are_not_misled_by_one_gradient() -> None:
    spike = [[1.0, 3.0, 0.1]] * 20 + [[1.0, 0.1, 5.0]]
    assert selected_at_last(SlicedReference, spike) == [2]
    assert selected_at_last(SmoothedScores, spike) == [1]
    assert selected_at_last(SmoothedScores, spike[-1:] * 2) == [2]


def test_scores_by_adam_are_relative_to_what_gradients_were() -> None:
    grown = [[10.0, 0.1, 0.3]] * 10 + [[10.0, 1.0, 0.3]]
    assert selected_at_last(SlicedReference, grown) == [0]
    assert selected_at_last(ScoresByAdam, grown) == [1]
    first = one_matrix(ScoresByAdam, Schedule(4, 9), topk_ratio=0.5)
    first.step({"w": torch.tensor([[1.0, 5.0], [1.0, 0.0]])})
    assert first.selected_columns("w").tolist() == [1]


def budget(kind: type[ZenFlowReference], of_tall: list[float], of_flat: list[float], ratio: float) -> list[list[int]]:
    """Columns that are selected of a matrix with 8 rows and of one with 2, whose gradients are the same in all rows."""
    given = {"tall": torch.tensor(of_tall).expand(8, -1), "flat": torch.tensor(of_flat).expand(2, -1)}
    made = kind(
        [(name, torch.zeros(one.shape), 0) for name, one in given.items()] + [("bias", torch.zeros(3), 0)],
        [settings_of()],
        Schedule(4, 4),
        topk_ratio=ratio,
    )
    made.step({**given, "bias": torch.full((3,), 100.0)})
    assert made.states["bias"].selected.all()
    return [made.selected_columns(name).tolist() for name in given]


def test_one_budget_goes_where_elements_have_the_largest_gradients() -> None:
    tall, flat = [1.0, 1.0, 1.0, 1.1], [1.5, 1.2, 1.3, 0.5]  # 32 and 8 elements
    assert budget(SlicedReference, tall, flat, 0.25) == [[3], [0]]
    assert budget(OneBudget, tall, flat, 0.1) == [[], [0, 2]]  # 4 elements
    assert budget(OneBudget, tall, flat, 0.15) == [[], [0, 1, 2]]  # 6
    assert budget(OneBudget, tall, flat, 0.34) == [[], [0, 1, 2]]  # 13.6: a column of 8 does not fit behind 6
    assert budget(OneBudget, tall, flat, 0.35) == [[3], [0, 1, 2]]  # 14
    assert budget(OneBudget, tall, flat, 1) == [[0, 1, 2, 3], [0, 1, 2, 3]]


EMULATIONS = {name: method for name, method in METHODS.items() if isinstance(method, Emulation)}


@pytest.mark.parametrize("method", EMULATIONS.values(), ids=list(EMULATIONS))
def test_every_emulation_trains_under_a_plain_trainer_and_ends_with_its_masters(method: Emulation) -> None:
    emulation = Emulation(method.algorithm, {**OFTEN, **method.settings})
    strategy, callbacks = trained_by(emulation)
    module = Small(configure=three_groups)
    made = fit_plainly(module, strategy=strategy, callbacks=callbacks, gradient_clip_val=0.5, max_epochs=4)
    assert sum(module.losses[-10:]) < 0.9 * sum(module.losses[:10])
    reference = callbacks[0].optimizer.reference  # type: ignore[attr-defined]
    assert type(reference) is method.algorithm and reference.clock == 40 and reference.clip_norm == 0.5
    assert made.gradient_clip_val == 0.5 and not any(state.accumulated.any() for state in reference.states.values())
    for param, state in zip(module.net.parameters(), reference.states.values(), strict=True):
        assert torch.equal(param.detach(), state.master.view(param.shape))


def test_no_two_emulations_are_the_same() -> None:
    final = {}
    for name, method in EMULATIONS.items():
        strategy, callbacks = trained_by(Emulation(method.algorithm, {**OFTEN, **method.settings}))
        module = Small()
        fit_plainly(module, strategy=strategy, callbacks=callbacks, gradient_clip_val=0.5)
        final[name] = torch.cat([param.detach().flatten() for param in module.net.parameters()])
    for (one, a), (other, b) in itertools.combinations(final.items(), 2):
        assert (a - b).abs().max() > 1e-4, (one, other)
