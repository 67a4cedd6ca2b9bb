"""Lightning's callbacks that save: the best of a run, and what is left when a run fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from lightning_zenflow.checkpoint.errors import CheckpointError
from tests.modules import EXPECTED_WARNINGS, OFTEN, Small, batches, fit, strategy_of, trainer, weights
from tests.stage3 import cut_strategy

pytestmark = [
    *EXPECTED_WARNINGS,
    pytest.mark.usefixtures("own_process_group"),
    # A run may resume or be evaluated without the callbacks it was saved with.
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
    # With an OnExceptionCheckpoint, `fit` resumes by itself from what an earlier run has left.
    pytest.mark.filterwarnings("ignore:.*fit.ckpt_path=None.` was called without a model"),
    pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available"),
]

on_both = pytest.mark.parametrize(
    "make_strategy", [lambda: strategy_of(OFTEN), lambda: cut_strategy(OFTEN, "host")], ids=["stage 2", "stage 3"]
)


class Fails(Small):
    """In its fourth batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 3:
            raise ZeroDivisionError("the first error")
        return super().training_step(batch, batch_idx)


# -- the best ----------------------------------------------------------------------------------------------------------


class Scored(Small):
    """Its validation loss in each epoch is given."""

    scores = (5.0, 1.0, 3.0, 2.0, 4.0)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", self.scores[self.current_epoch], sync_dist=True)


@on_both
def test_the_best_k_are_kept_and_the_best_is_loaded(make_strategy: Callable[[], Any], tmp_path: Path) -> None:
    class Keeps(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.strategy.settle()  # what is evaluated are the masters, and now the weights are the same
            seen.append(weights(pl_module).clone())

    seen: list[torch.Tensor] = []
    saves = ModelCheckpoint(tmp_path, "{epoch}", monitor="score", save_top_k=2, save_last=True)
    settings: dict[str, Any] = {"callbacks": [Keeps(), saves], "enable_checkpointing": True, "max_epochs": 5}
    made = fit(Scored(), validation=batches(1), strategy=make_strategy(), num_sanity_val_steps=0, **settings)
    assert {path.name for path in tmp_path.iterdir()} == {"epoch=1.ckpt", "epoch=3.ckpt", "last.ckpt"}
    assert Path(saves.best_model_path).name == "epoch=1.ckpt" and saves.best_model_score == 1.0
    made.test(ckpt_path="best", dataloaders=batches(1), verbose=False)
    assert torch.equal(weights(made.lightning_module), seen[1])  # type: ignore[arg-type]


def test_several_callbacks_may_save_under_one_path(tmp_path: Path) -> None:
    first, second = (
        ModelCheckpoint(tmp_path, "same", every_n_train_steps=steps, enable_version_counter=False) for steps in (4, 6)
    )
    module, resumed = Small(), Small()
    fit(module, callbacks=[first, second], enable_checkpointing=True, max_steps=6)
    assert [path.name for path in tmp_path.iterdir()] == ["same.ckpt"]
    trainer(max_steps=6).fit(resumed, batches(10), ckpt_path=tmp_path / "same.ckpt")
    assert torch.equal(weights(resumed), weights(module))


@pytest.mark.parametrize("exclude", [True, False])
def test_frozen_weights_are_left_out_where_that_is_asked_for(exclude: bool, tmp_path: Path) -> None:
    module = Small()
    module.net[0].requires_grad_(False)  # type: ignore[index]
    made = fit(module, strategy=strategy_of(OFTEN, exclude_frozen_parameters=exclude))
    made.save_checkpoint(tmp_path / "saved.ckpt")
    exported = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "saved.ckpt"), exclude_frozen_parameters=exclude)
    frozen = {"net.0.weight", "net.0.bias"}
    assert exported.keys() == {name for name, _ in module.named_parameters()} - (frozen if exclude else set())
    loaded = Small()
    loaded.strict_loading = not exclude
    trainer().validate(loaded, batches(1), ckpt_path=tmp_path / "saved.ckpt", verbose=False)
    assert torch.equal(weights(loaded), weights(module))


# -- what is left of a run that fails ------------------------------------------------------------------------------------


@on_both
def test_what_is_saved_on_an_exception_is_resumed_and_goes_when_the_run_ends_well(
    make_strategy: Callable[[], Any], tmp_path: Path
) -> None:
    """By Lightning itself: no path is given."""

    def settings() -> dict[str, Any]:
        return {
            "strategy": make_strategy(),
            "callbacks": [OnExceptionCheckpoint(tmp_path)],
            "enable_checkpointing": True,
        }

    with pytest.raises(ZeroDivisionError, match="the first error"):
        fit(Fails(), **settings())
    assert (tmp_path / "on_exception.ckpt").is_dir()
    resumed = Small()
    assert fit(resumed, **settings()).global_step == 10
    assert len(resumed.losses) == 10 - 3
    assert list(tmp_path.iterdir()) == []
    assert fit(Small(), max_steps=2, **settings()).global_step == 2  # with nothing to resume from, or to take away


class FailsLate(Callback):
    """Puts a file in the way of a checkpoint, and fails."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            self.folder.write_text("in the way")
            raise ZeroDivisionError("the first error")


@on_both
@pytest.mark.parametrize(
    "make", [OnExceptionCheckpoint, lambda folder: ModelCheckpoint(folder, "late", save_on_exception=True)]
)
def test_a_save_that_fails_on_an_exception_is_a_warning_and_the_exception_is_shown(
    make: Callable[[Path], Callback], make_strategy: Callable[[], Any], tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    made = trainer(strategy=make_strategy(), callbacks=[make(folder), FailsLate(folder)], enable_checkpointing=True)
    message = r"Nothing was saved after ZeroDivisionError, which ends the run: .*ckpt' was not saved: .* is a file"
    with pytest.warns(RuntimeWarning, match=message), pytest.raises(ZeroDivisionError, match=r"^the first error$"):
        made.fit(Small(), batches(10))
    with pytest.raises(CheckpointError, match="was not saved"):  # once it is over, whoever saves is told as ever
        made.save_checkpoint(tmp_path / "after.ckpt")


def test_an_error_before_there_is_anything_to_save_is_shown(tmp_path: Path) -> None:
    class FailsEarly(Small):
        def configure_optimizers(self) -> Any:
            raise ZeroDivisionError("the first error")

    callbacks = [OnExceptionCheckpoint(tmp_path)]
    with (
        pytest.warns(RuntimeWarning, match="the strategy is not set up yet"),
        pytest.raises(ZeroDivisionError, match=r"^the first error$"),
    ):
        fit(FailsEarly(), callbacks=callbacks, enable_checkpointing=True)
    assert list(tmp_path.iterdir()) == []
