"""Everyday forms of checkpoints: what is written, when, and who can read it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict
from torch import Tensor, nn

from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.checkpoint.errors import CheckpointError
from lightning_zenflow.zero import files
from tests.modules import (
    CLASSES,
    EXPECTED_WARNINGS,
    FEATURES,
    OFTEN,
    Small,
    batches,
    fit,
    masters,
    strategy_of,
    trainer,
    weights,
)

pytestmark = [
    *EXPECTED_WARNINGS,
    pytest.mark.usefixtures("own_process_group"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:You.re resuming from a checkpoint that ended before the epoch ended"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]


class SavesOften(Small):
    """Saves in the middle of accumulation, after steps and after epochs."""

    folder: Path

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trainer.save_checkpoint(self.folder / f"{batch_idx}.ckpt")


def test_saving_changes_no_bit_of_training(tmp_path: Path) -> None:
    """FAULTS 4: with a block in flight, gradients held back and half a step accumulated."""
    saving, other = SavesOften(), Small()
    saving.folder = tmp_path
    checkpoints = ModelCheckpoint(tmp_path, "best", monitor="val_loss", save_last=True, every_n_epochs=1)
    settings: dict[str, Any] = {"max_epochs": 2, "accumulate_grad_batches": 2, "precision": "bf16-mixed"}
    fit(saving, validation=batches(2), callbacks=[checkpoints], enable_checkpointing=True, **settings)
    fit(other, validation=batches(2), **settings)
    assert torch.equal(weights(saving), weights(other))
    assert saving.losses == other.losses
    expected = {"best.ckpt", "last.ckpt", *(f"{index}.ckpt" for index in range(10))}
    assert {path.name for path in tmp_path.iterdir()} == expected  # nothing is left beside them


class SavesAt(Callback):
    """Saves after a batch, and keeps what the strategy knows then."""

    def __init__(self, path: Path, batch: int, weights_only: bool = False) -> None:
        self.path, self.batch, self.weights_only = path, batch, weights_only

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == self.batch:
            trainer.save_checkpoint(self.path, weights_only=self.weights_only)
            self.masters = masters(trainer)
            self.weights = weights(pl_module)  # type: ignore[arg-type]


def test_masters_are_evaluated_and_exported_and_not_the_extrapolated_weights(tmp_path: Path) -> None:
    """FAULTS 24, 25, 28, 34."""
    saves = SavesAt(tmp_path / "at.ckpt", 6)
    fit(Small(), callbacks=[saves], precision="bf16-true")
    flat = torch.cat([value.flatten() for value in saves.masters.values()])
    assert not torch.equal(saves.weights, flat.bfloat16().float())
    for evaluate in ("validate", "test", "predict"):
        module = Small()
        getattr(trainer(precision="bf16-true"), evaluate)(module, batches(1), ckpt_path=saves.path)
        assert torch.equal(weights(module), flat.bfloat16().float())
    exported = get_fp32_state_dict_from_zero_checkpoint(str(saves.path))
    converted = convert_zero_checkpoint_to_fp32_state_dict(saves.path, tmp_path / "one.pt")["state_dict"]
    for name, master in saves.masters.items():
        assert torch.equal(exported[f"net.{name}"], master) and torch.equal(converted[f"net.{name}"], master)
    module = Small.load_from_checkpoint(tmp_path / "one.pt", weights_only=False)
    assert torch.equal(weights(module), flat)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, FEATURES, bias=False), nn.Linear(FEATURES, FEATURES, bias=False)
        self.last.weight = self.first.weight
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.last(torch.tanh(self.first(inputs))))


def test_tied_weights_are_stored_once_and_tied_again(tmp_path: Path) -> None:
    """FAULTS 16."""
    saves = SavesAt(tmp_path / "tied.ckpt", 6)
    fit(Small(Tied), callbacks=[saves])
    exported = get_fp32_state_dict_from_zero_checkpoint(str(saves.path))
    assert exported["net.last.weight"] is exported["net.first.weight"]
    assert torch.equal(exported["net.first.weight"], saves.masters["first.weight"])
    resumed = Small(Tied)
    trainer(max_epochs=1).fit(resumed, batches(10), ckpt_path=saves.path)
    assert resumed.net.last.weight is resumed.net.first.weight  # type: ignore[union-attr]


def test_every_name_of_a_tied_weight_has_the_master_and_one_place_in_the_file(tmp_path: Path) -> None:
    """FAULTS 16: whichever name is loaded last decides what is evaluated."""
    saves = SavesAt(tmp_path / "tied.ckpt", 6)
    fit(Small(Tied), callbacks=[saves])
    master = saves.masters["first.weight"]
    assert not torch.equal(saves.weights[: master.numel()], master.flatten())  # the device's are extrapolated
    stored = torch.load(saves.path / "checkpoint" / "mp_rank_00_model_states.pt", weights_only=False)["module"]
    first, last = stored["net.first.weight"], stored["net.last.weight"]
    assert torch.equal(first, master) and torch.equal(last, master) and first.data_ptr() == last.data_ptr()
    module = Small(Tied)
    trainer().validate(module, batches(1), ckpt_path=saves.path, verbose=False)
    assert torch.equal(module.net.first.weight, master)  # type: ignore[union-attr, arg-type]


def test_our_own_state_is_tensors_and_plain_types_alone(tmp_path: Path) -> None:
    """FAULTS 24: `fit(weights_only=True)` resumes, since nothing else is in the files."""
    saves = SavesAt(tmp_path / "plain.ckpt", 6)
    whole = Small()
    fit(whole, callbacks=[saves])
    state = torch.load(saves.path / "checkpoint" / files.state_name(0), weights_only=True)
    assert state["clock"] == 7 and sum(state["held"]) > 0
    trainer().fit(Small(), batches(10), ckpt_path=saves.path, weights_only=True)


def test_weights_alone_are_smaller_and_cannot_resume(tmp_path: Path) -> None:
    """FAULTS 25."""
    whole, light = SavesAt(tmp_path / "whole.ckpt", 6), SavesAt(tmp_path / "light.ckpt", 6, weights_only=True)
    fit(Small(lambda: nn.Linear(FEATURES, 4000)), callbacks=[whole, light])
    assert size_of(light.path) < 0.5 * size_of(whole.path)
    exported = get_fp32_state_dict_from_zero_checkpoint(str(light.path))
    assert torch.equal(exported["net.weight"], light.masters["weight"])
    with pytest.raises(CheckpointError, match=r"must hold the optimizer to resume training.*with weights alone"):
        trainer().fit(Small(lambda: nn.Linear(FEATURES, 4000)), batches(10), ckpt_path=light.path)
    module = Small(lambda: nn.Linear(FEATURES, 4000))
    trainer().validate(module, batches(1), ckpt_path=light.path, verbose=False)
    assert torch.equal(weights(module)[: FEATURES * 4000], light.masters["weight"].flatten())


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.pt"))


def test_the_best_and_the_last_checkpoint_are_each_one_directory(tmp_path: Path) -> None:
    """FAULTS 23: `save_top_k=1` and `save_last` leave what they name, and nothing of what they replaced."""
    checkpoints = ModelCheckpoint(tmp_path, monitor="val_loss", save_top_k=1, save_last=True)
    made = fit(Small(), validation=batches(2), callbacks=[checkpoints], enable_checkpointing=True, max_epochs=3)
    assert {path.name for path in tmp_path.iterdir()} == {Path(checkpoints.best_model_path).name, "last.ckpt"}
    for which in ("best", "last"):
        made.test(Small(), batches(1), ckpt_path=which, verbose=False)


def test_the_last_checkpoint_may_be_a_link(tmp_path: Path) -> None:
    checkpoints = ModelCheckpoint(tmp_path, save_last="link", every_n_train_steps=4, save_top_k=1)
    fit(Small(), callbacks=[checkpoints], enable_checkpointing=True)
    link = tmp_path / "last.ckpt"
    assert link.is_symlink() and link.resolve() == Path(checkpoints.best_model_path).resolve()
    again = trainer(max_epochs=2, callbacks=[ModelCheckpoint(tmp_path, save_last="link")], enable_checkpointing=True)
    again.fit(Small(), batches(10), ckpt_path="last")
    assert again.global_step == 20
    assert link.is_symlink() and link.resolve().is_dir()


def test_a_save_after_fit_holds_everything_until_the_next_run(tmp_path: Path) -> None:
    class Settles(Small):
        def on_train_epoch_end(self) -> None:
            assert isinstance(self.trainer.strategy, ZenFlowStrategy)
            self.trainer.strategy.settle()

    made = fit(Small(), max_epochs=1)
    made.save_checkpoint(tmp_path / "after.ckpt")
    resumed, whole = Small(), Settles()
    trainer(max_epochs=2).fit(resumed, batches(10), ckpt_path=tmp_path / "after.ckpt")
    fit(whole, max_epochs=2)
    assert torch.equal(weights(resumed), weights(whole))
    made.validate(Small(), batches(1), verbose=False)
    with pytest.warns(UserWarning, match=r"later.ckpt' holds the weights alone: to be able to resume"):
        made.save_checkpoint(tmp_path / "later.ckpt")
    with pytest.raises(CheckpointError, match="with weights alone"):
        trainer(max_epochs=2).fit(Small(), batches(10), ckpt_path=tmp_path / "later.ckpt")


def test_what_a_callback_put_into_the_module_at_the_end_is_saved_after_fit(tmp_path: Path) -> None:
    average, module = EMAWeightAveraging(decay=0.8, update_starting_at_step=0), Small()
    made = fit(module, callbacks=[average])
    made.save_checkpoint(tmp_path / "averaged.ckpt")
    exported = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "averaged.ckpt"))
    for name, param in module.net.named_parameters():
        assert torch.equal(exported[f"net.{name}"], param)


@pytest.mark.parametrize("evaluate", ["validate", "test", "predict"])
def test_weights_can_be_saved_where_nothing_was_trained(evaluate: str, tmp_path: Path) -> None:
    made, module = trainer(), Small()
    getattr(made, evaluate)(module, batches(1))
    with pytest.warns(UserWarning, match="holds the weights alone"):
        made.save_checkpoint(tmp_path / "weights.ckpt")
    other = Small()
    with torch.no_grad():
        other.net[0].weight.zero_()  # type: ignore[index]
    trainer().test(other, batches(1), ckpt_path=tmp_path / "weights.ckpt", verbose=False)
    assert torch.equal(weights(other), weights(module))


class Early(Callback):
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        trainer.save_checkpoint("early.ckpt")


class Boom(Callback):
    def on_train_batch_end(self, *args: Any) -> None:
        raise ZeroDivisionError("boom")


def test_a_save_that_cannot_be_says_why(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"early.ckpt' was not saved: the strategy is not set up yet"):
        fit(Small(), callbacks=[Early()])
    made = trainer(callbacks=[Boom()])
    with pytest.raises(ZeroDivisionError, match="boom"):
        made.fit(Small(), batches(2))
    with pytest.raises(CheckpointError, match=r"`fit` ended with an exception, and its state with it"):
        made.save_checkpoint(tmp_path / "late.ckpt")


def test_a_failure_after_fit_does_not_lose_what_fit_has_kept(tmp_path: Path) -> None:
    made = fit(Small())
    with pytest.raises(ValueError, match="best"):  # Lightning then tears the strategy down a second time
        made.fit(Small(), batches(10), ckpt_path="best")
    made.strategy.teardown()
    made.save_checkpoint(tmp_path / "kept.ckpt")
    again = trainer(max_epochs=2)
    again.fit(Small(), batches(10), ckpt_path=tmp_path / "kept.ckpt")
    assert again.global_step == 20


# -- when it goes wrong ------------------------------------------------------------------------------------------------


def test_a_full_disk_stops_the_run_in_words_and_keeps_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write = tmp_path / "last.ckpt", files.write
    fit(Small(), callbacks=[SavesAt(path, 4)])
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    def fails(target: Path, *content: Any) -> None:
        if "model_states" in target.name:
            monkeypatch.setattr(os, "write", full)
        write(target, *content)

    monkeypatch.setattr(files, "write", fails)
    with pytest.raises(
        CheckpointError, match=r"last.ckpt' was not saved: rank 0 could not write the weights.*No space"
    ):
        fit(Small(), callbacks=[SavesAt(path, 6)])
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_module_whose_state_cannot_be_had_fails_the_save_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    """Told to the others by `Saving`, not raised past it: they would wait for a rank that is gone."""

    def fails(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("no state")

    monkeypatch.setattr(DeepSpeedEngine, "module_state_dict", fails)
    with pytest.raises(CheckpointError, match=r"rank 0 could not write the weights: no state.*is untouched"):
        fit(Small(), strategy=strategy_of(OFTEN, stage=stage), callbacks=[SavesAt(tmp_path / "last.ckpt", 4)])
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_path_is_answered_with_what_was_expected(tmp_path: Path) -> None:
    """FAULTS 27."""
    saves = SavesAt(tmp_path / "good.ckpt", 4)
    fit(Small(), callbacks=[saves])
    with pytest.raises(CheckpointError, match=r"does not exist.*good\.ckpt"):
        trainer().fit(Small(), batches(10), ckpt_path=tmp_path / "god.ckpt")
    with pytest.raises(CheckpointError, match="checkpoint"):
        trainer().test(Small(), batches(1), ckpt_path=saves.path / "checkpoint", verbose=False)
    (saves.path / "checkpoint" / files.state_name(0)).unlink()
    for run in (lambda made: made.fit(Small(), batches(10), ckpt_path=saves.path),):
        with pytest.raises(CheckpointError, match=r"zenflow_rank_0000\.pt"):
            run(trainer())


class Interrupted(SavesAt):
    """Is asked for a checkpoint by a signal in the middle of a step, as SLURM does."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        signal.signal(signal.SIGUSR2, lambda *_: trainer.save_checkpoint(self.path))

    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if trainer.global_step == self.batch:
            os.kill(os.getpid(), signal.SIGUSR2)

    def on_train_batch_end(self, *args: Any) -> None: ...


def test_a_signal_handler_may_save_while_an_update_is_in_flight(tmp_path: Path) -> None:
    """FAULTS 29."""
    before = signal.getsignal(signal.SIGUSR2)
    try:
        whole, saved, resumed = Small(), Interrupted(tmp_path / "hpc.ckpt", 6), Small()
        fit(whole, callbacks=[saved], zenflow=OFTEN)
        undisturbed = Small()
        fit(undisturbed)
        assert torch.equal(weights(whole), weights(undisturbed))
        trainer(max_epochs=1).fit(resumed, batches(10), ckpt_path=saved.path)
    finally:
        signal.signal(signal.SIGUSR2, before)
