"""A run that saves, stops and resumes goes on as if it had never stopped, bit for bit: one rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR

from lightning_zenflow.callbacks import AutoTuner
from lightning_zenflow.checkpoint.errors import CheckpointError
from lightning_zenflow.checkpoint.reader import StoredCheckpoint
from tests.integration.test_trainer_life import children
from tests.modules import CLASSES, EXPECTED_WARNINGS, FEATURES, Small, batches, three_groups, two_layers
from tests.resuming import (
    BATCHES,
    Case,
    Numbered,
    Run,
    batches_done,
    check_resumes,
    check_schedule,
    differences,
    run,
    schedules,
    state_differences,
)

pytestmark = [
    *EXPECTED_WARNINGS,
    pytest.mark.filterwarnings("ignore:Step after .* skipped"),
    pytest.mark.filterwarnings("ignore:.*resuming from a checkpoint that ended before the epoch ended"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks"),
    pytest.mark.filterwarnings("ignore:.*The dirpath has changed from"),
    pytest.mark.usefixtures("own_process_group"),
    pytest.mark.timeout(240),
]


# -- at every batch ----------------------------------------------------------------------------------------------------

BY_THREE: dict[str, Any] = {"accumulate_grad_batches": 3}
FP16: dict[str, Any] = {"initial_scale_power": 8, "loss_scale_window": 2}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.second.weight = self.first.weight
        self.last = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.first(inputs).relu()))


def with_frozen() -> nn.Module:
    net = two_layers()
    net[0].weight.requires_grad_(False)  # type: ignore[index]
    return net


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, CLASSES))


def scheduled(make: Callable[[Any], Any], **how: Any) -> Callable[..., Numbered]:
    """A module whose learning rates follow a scheduler."""

    def configure(module: Small) -> Any:
        optimizer = three_groups(module)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make(optimizer), **how}}

    return partial(Numbered, configure=configure)


class StepsLate(Numbered):
    """Applies a gradient at the beginning of the next batch."""

    def __init__(self) -> None:
        super().__init__(manual=1000)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.current_epoch or batch_idx:
            optimizer: Any = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()
        return super().training_step(batch, batch_idx)


def adam(module: Small) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), lr=1e-2, weight_decay=0.1)


CASES = {
    "stage 1, in threes": Case(arguments={"stage": 1}, settings=BY_THREE),
    "stage 2, in threes, bf16": Case(settings={**BY_THREE, "precision": "bf16-mixed"}),
    "fp16 with skipped steps": Case(
        arguments=FP16, settings={"precision": "16-mixed"}, module=partial(Numbered, infinite=(4, 5, 11))
    ),
    "intervals change": Case(changes={5: (2, 3), 6: (6, 3), 12: (1, 5), 15: (3, 2)}),
    "warm-up": Case(zenflow={"full_warm_up_rounds": 6}),
    "manual, in threes": Case(module=partial(Numbered, manual=3)),
    "moments in bf16": Case(zenflow={"moments_dtype": "bf16"}, settings=BY_THREE),
    "the device does not move, in threes": Case(
        zenflow={"interim_step": False}, settings={**BY_THREE, "precision": "bf16-mixed"}
    ),
}
SELDOM_CASES = {
    "plain": Case(),
    "stage 1": Case(arguments={"stage": 1}),
    "stage 1, in threes, bf16-true": Case(arguments={"stage": 1}, settings={**BY_THREE, "precision": "bf16-true"}),
    "bf16-true": Case(settings={"precision": "bf16-true"}),
    "fp16 in threes, stage 1": Case(
        arguments={**FP16, "stage": 1},
        settings={**BY_THREE, "precision": "16-true"},
        module=partial(Numbered, infinite=(4, 11)),
    ),
    "fp16 with hysteresis": Case(
        arguments={**FP16, "hysteresis": 2},
        settings={"precision": "16-mixed"},
        module=partial(Numbered, infinite=(4, 6, 11)),
    ),
    "warm-up in threes": Case(zenflow={"full_warm_up_rounds": 3}, settings=BY_THREE),
    "intervals change, in threes": Case(changes={6: (2, 3), 10: (1, 5), 16: (3, 2)}, settings=BY_THREE),
    "three groups, clipped": Case(
        settings={"gradient_clip_val": 0.3}, module=partial(Numbered, configure=three_groups)
    ),
    "tied weights": Case(module=partial(Numbered, Tied)),
    "frozen parameter": Case(module=partial(Numbered, with_frozen)),
    "batch norm": Case(module=partial(Numbered, with_batch_norm)),
    "no overlap": Case(zenflow={"overlap_step": False}),
    "the device moves, skipped steps": Case(zenflow={"interim_step": True}, module=partial(Numbered, infinite=(4, 11))),
    "the device moves, manual": Case(zenflow={"interim_step": True}, module=partial(Numbered, manual=3)),
    "the device moves, a step late": Case(zenflow={"interim_step": True}, module=StepsLate),
    "no look-ahead": Case(zenflow={"look_ahead": False}),
    "all deferred": Case(zenflow={"topk_ratio": 0}),
    "moments in bf16, all deferred": Case(zenflow={"moments_dtype": "bf16", "topk_ratio": 0}),
    "moments in bf16, warm-up, intervals change": Case(
        zenflow={"moments_dtype": "bf16", "full_warm_up_rounds": 4}, changes={8: (2, 3), 13: (5, 2)}
    ),
    "all selected": Case(zenflow={"topk_ratio": 1}),
    "rates by root": Case(zenflow={"deferred_lr_scale": "sqrt"}),
    "mean rates": Case(zenflow={"deferred_lr_scale": "none"}),
    "interval above the steps": Case(zenflow={"update_interval": 50}),
    "intervals of 1": Case(zenflow={"update_interval": 1, "select_interval": 1}),
    "by epoch": Case(zenflow={"select_strategy": "epoch", "select_interval": 1}),
    "Adam": Case(module=partial(Numbered, configure=adam)),
    "manual, stage 1": Case(arguments={"stage": 1}, module=partial(Numbered, manual=3)),
    "StepLR": Case(module=scheduled(lambda optimizer: StepLR(optimizer, 3, 0.7), interval="step")),
    "ExponentialLR by epoch": Case(module=scheduled(lambda optimizer: ExponentialLR(optimizer, 0.5))),
    "OneCycleLR": Case(
        module=scheduled(lambda optimizer: OneCycleLR(optimizer, 3e-2, total_steps=2 * BATCHES), interval="step")
    ),
    "rates from NumPy": Case(
        module=scheduled(lambda optimizer: LambdaLR(optimizer, lambda step: np.float64(0.9) ** step), interval="step")
    ),
    "ReduceLROnPlateau": Case(
        module=scheduled(lambda optimizer: ReduceLROnPlateau(optimizer, patience=0, threshold=0.5), monitor="val_loss"),
        settings={"val_check_interval": 5},
        validates=True,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_run_that_saves_after_every_batch_and_resumes_is_the_same(name: str, tmp_path: Path) -> None:
    """Before and after selections (every 4 steps), with a block in flight, within a step, at the end of an epoch."""
    assert check_resumes(CASES[name], tmp_path, range(1, 2 * BATCHES), resumes=(5, 8, 13)) == []


@pytest.mark.long
@pytest.mark.parametrize("name", [*CASES, *SELDOM_CASES])
def test_a_run_resumes_after_any_batch(name: str, tmp_path: Path) -> None:
    assert check_resumes({**CASES, **SELDOM_CASES}[name], tmp_path, range(1, 2 * BATCHES)) == []


@pytest.mark.real_worker
def test_a_run_resumes_with_the_worker_that_users_have(tmp_path: Path) -> None:
    assert check_resumes(CASES["stage 2, in threes, bf16"], tmp_path, [7]) == []


# -- at odd moments ----------------------------------------------------------------------------------------------------


class SaveIn(Callback):
    """Saves once, in the hook `name` of batch `number`."""

    def __init__(self, name: str, number: int, path: Path) -> None:
        self._number, self._path = number, path
        setattr(self, name, self._save)

    def _save(self, trainer: Trainer, *args: Any) -> None:
        if batches_done(trainer) == self._number and not self._path.exists():
            trainer.save_checkpoint(self._path)


CHECKED = Case(settings={"val_check_interval": 4}, validates=True)
HOOKS = {
    "before the first batch": ("on_train_start", 0, 1, Case()),
    "when a batch begins": ("on_train_batch_start", 5, 5, CASES["stage 1, in threes"]),
    "within a step": ("on_before_optimizer_step", 5, 5, Case()),
    "in validation": ("on_validation_batch_end", 14, 15, CHECKED),
    "after validation within a step": (
        "on_validation_end",
        4,
        5,
        CHECKED.but(settings={**CHECKED.settings, **BY_THREE}),
    ),
    "at the end of an epoch": ("on_train_epoch_end", 10, 11, CASES["stage 2, in threes, bf16"]),
}


@pytest.mark.parametrize("name", HOOKS)
def test_a_run_resumes_from_a_save_in_any_hook(name: str, tmp_path: Path) -> None:
    hook, number, first, case = HOOKS[name]
    whole, path = run(case), tmp_path / "saved.ckpt"
    assert differences(run(case, callbacks=[SaveIn(hook, number, path)]), whole) == []
    assert differences(run(case, resume=path), whole, first - 1) == []


@pytest.mark.parametrize("name", ["stage 1, in threes", "stage 2, in threes, bf16", "manual, in threes"])
def test_a_save_before_the_first_batch_of_a_resumed_run_holds_the_step_that_is_not_complete(
    name: str, tmp_path: Path
) -> None:
    case, again = CASES[name], tmp_path / "again.ckpt"
    whole = run(case)
    run(case, tmp_path, [5])
    run(case, resume=tmp_path / "5.ckpt", callbacks=[SaveIn("on_train_start", 5, again)])
    assert differences(run(case, resume=again), whole, 5) == []


def test_a_save_within_the_backward_pass_tells_that_earlier_micro_batches_are_missing(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="does not hold gradients of earlier micro-batches of this step"):
        run(CASES["stage 1, in threes"], callbacks=[SaveIn("on_after_backward", 5, tmp_path / "saved.ckpt")])


class Fails(Numbered):
    """Whose training step raises, once the backward passes of a step have begun."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 4:
            raise ZeroDivisionError
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("stage", [1, 2])
def test_what_is_saved_because_of_an_exception_resumes_exactly(stage: int, tmp_path: Path) -> None:
    case = Case(arguments={"stage": stage}, settings=BY_THREE)
    saves = ModelCheckpoint(tmp_path, save_last=True, save_top_k=0, save_on_exception=True)
    with pytest.raises(ZeroDivisionError):
        run(case.but(module=Fails), callbacks=[saves], enable_checkpointing=True)
    assert differences(run(case, resume=tmp_path / "last.ckpt"), run(case), 4) == []


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_save_after_fit_resumes_from_the_settled_weights(precision: str, tmp_path: Path) -> None:
    case = Case(settings={"precision": precision})
    done = run(case)
    done.trainer.save_checkpoint(tmp_path / "done.ckpt")
    with torch.no_grad():
        done.module.net[0].weight.mul_(1.5)  # type: ignore[index]
    done.trainer.save_checkpoint(tmp_path / "edited.ckpt")

    longer = run(case.but(settles=[2 * BATCHES]), max_epochs=3)
    resumed = run(case, resume=tmp_path / "done.ckpt", max_epochs=3)
    assert differences(resumed, longer, 2 * BATCHES) == []
    edited = run(case, resume=tmp_path / "edited.ckpt", max_epochs=3)
    assert torch.equal(
        edited.trace.began["master net.0.weight 0"],
        done.module.net[0].weight.detach().float().flatten(),  # type: ignore[index]
    )


def test_a_save_after_the_last_batch_goes_on_when_max_epochs_is_raised(tmp_path: Path) -> None:
    run(Case(), tmp_path, [2 * BATCHES])
    resumed = run(Case(), resume=tmp_path / f"{2 * BATCHES}.ckpt", max_epochs=3)
    assert differences(resumed, run(Case(), max_epochs=3), 2 * BATCHES) == []


def test_a_finished_run_that_is_resumed_ends_with_the_same_weights_and_can_be_saved(tmp_path: Path) -> None:
    """Lightning calls no hook then, but weights must not stay as the device showed them last."""
    whole = run(Case(), callbacks=[SaveIn("on_train_epoch_end", 2 * BATCHES, tmp_path / "last.ckpt")])
    resumed = run(Case(), resume=tmp_path / "last.ckpt")
    assert resumed.trace.shown == {} and torch.equal(resumed.weights, whole.weights)
    resumed.trainer.save_checkpoint(tmp_path / "again.ckpt")
    longer = run(Case(), resume=tmp_path / "again.ckpt", max_epochs=3)
    assert state_differences(longer.trace.began, whole.trace.ended) == []


def test_the_same_trainer_resumes_after_a_fit(tmp_path: Path) -> None:
    whole = run(Case(), tmp_path, [7])
    first = whole.weights.clone()
    whole.trainer.fit_loop.epoch_progress.reset()
    whole.trainer.fit(whole.module, batches(BATCHES), ckpt_path=str(tmp_path / "7.ckpt"))
    assert torch.equal(torch.cat([p.detach().flatten() for p in whole.module.net.parameters()]), first)


# -- random runs -------------------------------------------------------------------------------------------------------

QUIET = settings(
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@settings(QUIET, max_examples=4)
@given(drawn=schedules())
def test_random_runs_that_stop_twice_are_the_same(drawn: dict[str, Any], tmp_path_factory: Any) -> None:
    assert check_schedule(drawn, tmp_path_factory.mktemp("saves")) == []


@pytest.mark.long
@settings(QUIET, max_examples=40)
@given(drawn=schedules())
def test_many_random_runs_that_stop_twice_are_the_same(drawn: dict[str, Any], tmp_path_factory: Any) -> None:
    assert check_schedule(drawn, tmp_path_factory.mktemp("saves")) == []


# -- other settings ----------------------------------------------------------------------------------------------------

BF16: dict[str, Any] = {"precision": "bf16-mixed"}
SETTLING = {
    "update interval": (Case(), Case(zenflow={"update_interval": 2})),
    "nothing selected": (Case(), Case(zenflow={"topk_ratio": 0})),
    "selected again": (Case(zenflow={"topk_ratio": 0}), Case()),
    "no overlap": (Case(), Case(zenflow={"overlap_step": False})),
    "no look-ahead": (Case(), Case(zenflow={"look_ahead": False})),
    "the device moves": (Case(zenflow={"interim_step": False}), Case()),
    "the device moves no more": (Case(), Case(zenflow={"interim_step": False})),
    "precision": (Case(settings=BF16), Case()),
    "back to bf16": (Case(), Case(settings=BF16)),
}


@pytest.mark.parametrize("name", SETTLING)
def test_other_settings_go_on_from_settled_weights_and_lose_nothing(name: str, tmp_path: Path) -> None:
    """As if the run had settled before it was saved."""
    before, after = SETTLING[name]
    settled_folder = tmp_path / "settled"
    settled = run(before.but(settles=[7]), settled_folder, [7])
    run(before, tmp_path, [7])
    resumed, expected = run(after, resume=tmp_path / "7.ckpt"), run(after, resume=settled_folder / "7.ckpt")
    assert state_differences(resumed.trace.began, expected.trace.began) == []
    assert differences(resumed, expected, 7) == []
    assert not torch.equal(resumed.weights, settled.weights)
    saved_there = run(before.but(settles=[7]), resume=settled_folder / "7.ckpt")
    assert state_differences(resumed.trace.began, saved_there.trace.began) == []


MOMENTS: Case = Case(zenflow={"moments_dtype": "bf16"})


def test_moments_of_an_fp32_run_are_rounded_to_the_nearest_where_they_are_kept_in_bf16(tmp_path: Path) -> None:
    run(Case(), tmp_path, [7])
    before = run(Case(), resume=tmp_path / "7.ckpt").trace.began
    after = run(MOMENTS, resume=tmp_path / "7.ckpt").trace.began
    expected = {
        name: values if name.startswith("master") else values.to(torch.bfloat16) for name, values in before.items()
    }
    assert state_differences(after, expected) == []
    assert any(not torch.equal(before[name], values.float()) for name, values in expected.items())


def test_moments_of_a_bf16_run_are_exact_in_its_checkpoint_and_where_they_are_kept_in_fp32(tmp_path: Path) -> None:
    run(MOMENTS, tmp_path, [7])
    rounded = run(MOMENTS, resume=tmp_path / "7.ckpt").trace
    exact = run(Case(), resume=tmp_path / "7.ckpt").trace
    stored, selected = StoredCheckpoint.open(tmp_path / "7.ckpt"), 0
    for name, values in exact.began.items():
        kind, param, _ = name.split()
        if kind == "master":
            assert torch.equal(values, rounded.began[name])
            continue
        narrow = rounded.began[name].float()
        assert torch.equal(narrow, stored.read(param, kind)) and stored.read(param, kind).dtype == torch.float32
        differs = values != narrow
        if len(stored.shapes[param]) > 1:  # vectors lived on the device in fp32, and of matrices few columns
            assert differs.float().mean() < 0.6
        assert (values - narrow).abs().le(values.abs() / 128).all()
        selected += int(differs.sum())
    assert selected > 0
    assert torch.equal(exact.shown[8], rounded.shown[8]), "no re-selection: nothing but rounding after the step differs"


@pytest.mark.parametrize(
    ("zenflow", "counted"), [({"select_interval": 3}, [5, 8, 11, 14, 17, 20]), ({"topk_ratio": 0.6}, [5, 9, 13, 17])]
)
def test_another_selection_interval_or_share_holds_from_the_next_selection_on(
    zenflow: dict[str, Any], counted: list[int], tmp_path: Path
) -> None:
    run(Case(), tmp_path, [6])
    whole, resumed = run(Case()), run(Case(zenflow=zenflow), resume=tmp_path / "6.ckpt")
    until = next(step for step in counted if step > 6)
    for number in range(7, until):
        assert torch.equal(resumed.trace.shown[number], whole.trace.shown[number])
    columns = [facts[-1] for facts in (whole.trace.facts[5], *resumed.trace.facts.values())]
    selections = {number for number, (one, two) in enumerate(pairwise(columns), 7) if one != two}
    assert selections and selections <= set(counted)


# -- automatic intervals -----------------------------------------------------------------------------------------------


def test_a_resumed_run_goes_on_with_tuned_intervals_and_what_the_tuner_has_learned(tmp_path: Path) -> None:
    automatic = Case(zenflow={"update_interval": "auto", "select_interval": "auto", "select_strategy": "auto"})

    class Looks(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            (tuner,) = (one for one in trainer.callbacks if isinstance(one, AutoTuner))  # type: ignore[attr-defined]
            self.learned, self.intervals = tuner.learned, trainer.strategy.intervals  # type: ignore[attr-defined]

    class Learns(Looks):
        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
            if batches_done(trainer) == 38:
                self.on_train_start(trainer, pl_module)
                trainer.save_checkpoint(tmp_path / "38.ckpt")

    fresh, before, after = Looks(), Learns(), Looks()
    run(automatic, callbacks=[fresh, before], max_epochs=4)
    run(automatic, resume=tmp_path / "38.ckpt", callbacks=[after], max_epochs=5)
    assert before.learned != fresh.learned
    assert (after.learned, after.intervals) == (before.learned, before.intervals)


def test_a_replayed_run_resumes_with_the_intervals_of_its_step(tmp_path: Path) -> None:
    automatic = Case(zenflow={"update_interval": "auto", "select_interval": "auto", "select_strategy": "auto"})
    replay: list[tuple[int, int, int | None]] = [(0, 3, 5), (6, 2, 5), (12, 5, 4)]

    def replayed(**how: Any) -> Run:
        return run(automatic, callbacks=[AutoTuner(replay=replay)], **how)

    whole = replayed(folder=tmp_path, saves=[5, 6, 9, 12])
    for number in (5, 6, 9, 12):
        assert differences(replayed(resume=tmp_path / f"{number}.ckpt"), whole, number) == []


# -- wrong models ------------------------------------------------------------------------------------------------------


def renamed() -> nn.Module:
    net = nn.Sequential(nn.Linear(FEATURES, 8), nn.GELU(), nn.LayerNorm(8))
    net.add_module("head", nn.Linear(8, CLASSES))
    return net


def extra() -> nn.Module:
    net = two_layers()
    net.add_module("4", nn.Linear(CLASSES, CLASSES))
    return net


def fewer() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.GELU(), nn.LayerNorm(8))


def wider() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 9), nn.GELU(), nn.LayerNorm(9), nn.Linear(9, CLASSES))


WRONG: dict[str, tuple[Callable[[], Small], str]] = {
    "renamed": (partial(Numbered, renamed), r"without `net\.head\.weight`"),
    "extra": (partial(Numbered, extra), r"without `net\.4\.weight`"),
    "missing": (partial(Numbered, fewer), r"without `net\.3\.bias` \(2 in all\)"),
    "another shape": (partial(Numbered, wider), r"`net\.0\.weight` must have the shape of the checkpoint, \[8, 6\]"),
    "frozen": (partial(Numbered, with_frozen), r"without `net\.0\.weight` \(1 in all\).*frozen now"),
    "groups": (partial(Numbered, configure=three_groups), r"as many parameter groups as in the checkpoint, 1, got 3"),
}


@pytest.mark.parametrize("name", WRONG)
def test_another_model_is_refused_by_the_name_of_what_differs(name: str, tmp_path: Path) -> None:
    module, message = WRONG[name]
    run(Case(), tmp_path, [3])
    with pytest.raises((CheckpointError, ValueError), match=message):
        run(Case(module=module), resume=tmp_path / "3.ckpt")
    assert children() == []


def test_a_parameter_that_was_frozen_then_is_refused(tmp_path: Path) -> None:
    run(Case(module=partial(Numbered, with_frozen)), tmp_path, [3])
    with pytest.raises(CheckpointError, match=r"without `net\.0\.weight`.*frozen then"):
        run(Case(), resume=tmp_path / "3.ckpt")
