"""Callbacks that put other weights into the module: averaging and pruning work where weights are whole, or refuse in words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, ModelPruning, WeightAveraging
from torch import Tensor, nn

from lightning_zenflow.checkpoint.errors import CheckpointError
from tests.cases import relative
from tests.modules import (
    EXPECTED_WARNINGS,
    EXTREMES,
    OFTEN,
    Small,
    batches,
    fit,
    fit_plainly,
    strategy_of,
    trainer,
    weights,
)
from tests.stage3 import Configured, cut_strategy

pytestmark = [
    *EXPECTED_WARNINGS,
    # A run may resume without the callbacks it was saved with.
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.usefixtures("own_process_group"),
]


def ema() -> EMAWeightAveraging:
    return EMAWeightAveraging(decay=0.8, update_starting_at_step=0)


def pruning(**settings: Any) -> ModelPruning:
    return ModelPruning("l1_unstructured", parameter_names=["weight"], use_lottery_ticket_hypothesis=False, **settings)


def average_of(callback: WeightAveraging) -> Tensor:
    assert callback._average_model is not None
    module: Any = callback._average_model.module
    return torch.cat([param.detach().flatten() for param in module.net.parameters()])


# -- averaging ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zenflow", EXTREMES, ids=["selected", "deferred"])
@pytest.mark.parametrize("make", [ema, WeightAveraging])
def test_averages_are_those_of_a_plain_trainer(make: Callable[[], WeightAveraging], zenflow: dict[str, Any]) -> None:
    ours, plain = Small(configure=large_eps), Small(configure=large_eps)
    fit(ours, validation=batches(2), callbacks=[make()], zenflow=zenflow, max_epochs=2)
    fit_plainly(plain, validation=batches(2), callbacks=[make()], max_epochs=2)
    unaveraged = Small(configure=large_eps)
    fit_plainly(unaveraged, max_epochs=2)
    assert relative(weights(ours), weights(plain)) < 1e-6 < relative(weights(unaveraged), weights(plain))


def large_eps(module: Small) -> torch.optim.Optimizer:
    """So that the size of gradients matters."""
    return torch.optim.AdamW(module.parameters(), lr=0.3, eps=1.0, weight_decay=0.05)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_run_with_an_average_resumes_with_both_weights(precision: Any, stage: int, tmp_path: Path) -> None:
    whole, resumed = Small(), Small()
    strategies = [strategy_of(OFTEN, stage=stage) for _ in range(2)]
    saves = ModelCheckpoint(tmp_path, "{epoch}", every_n_epochs=1, save_top_k=-1, enable_version_counter=False)
    first, second = ema(), ema()
    settings: dict[str, Any] = {"precision": precision, "max_epochs": 3}
    fit(whole, callbacks=[first, saves], strategy=strategies[0], enable_checkpointing=True, **settings)
    path = tmp_path / "epoch=1.ckpt"
    trainer(callbacks=[second], strategy=strategies[1], **settings).fit(resumed, batches(10), ckpt_path=path)
    assert resumed.losses == whole.losses[20:]
    assert torch.equal(average_of(second), average_of(first))
    assert torch.equal(weights(resumed), weights(whole))


def test_a_checkpoint_with_an_average_is_evaluated_with_it_at_every_stage(tmp_path: Path) -> None:
    """As with Lightning's own checkpoints; training goes on with the other weights, also without the callback."""
    seen: list[Tensor] = []
    path = tmp_path / "averaged.ckpt"

    class SavesAndKeeps(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint(path)
            seen.append(average_of(average).clone())

    average = ema()
    fit(Small(), callbacks=[average, SavesAndKeeps()])
    for strategy in (strategy_of(OFTEN), cut_strategy(OFTEN, "device")):
        module = Small()
        trainer(strategy=strategy).validate(module, batches(1), ckpt_path=path, verbose=False)
        assert torch.equal(weights(module), seen[0])
    resumed, alone = Small(), Small()
    trainer(max_epochs=2).fit(resumed, batches(10), ckpt_path=path)
    fit(alone, max_epochs=2)
    assert torch.equal(weights(resumed), weights(alone))


@pytest.mark.parametrize("kind", [Small, Configured])
@pytest.mark.parametrize("make", [ema, WeightAveraging, pruning])
def test_callbacks_that_need_whole_weights_are_refused_under_stage_3_before_a_layer_is_made(
    make: Callable[[], Callback], kind: type[Small]
) -> None:
    module, name = kind(), type(make()).__name__
    message = f"`{name}` must be left out with ZeRO stage 3: it works on whole weights, of which each rank has a part"
    with pytest.raises(ValueError, match=message):
        fit(module, strategy=cut_strategy(OFTEN, "device"), callbacks=[make()])
    assert isinstance(module.net, nn.Sequential) == (kind is Small)  # the other makes it in `configure_model`


# -- pruning -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("zenflow", EXTREMES, ids=["selected", "deferred"])
@pytest.mark.parametrize("everywhere", [True, False])
def test_pruned_weights_are_those_of_a_plain_trainer(everywhere: bool, zenflow: dict[str, Any], stage: int) -> None:
    settings: dict[str, Any] = {"amount": 0.4, "use_global_unstructured": everywhere}
    ours, plain = Small(configure=large_eps), Small(configure=large_eps)
    fit(ours, strategy=strategy_of(zenflow, stage=stage), callbacks=[pruning(**settings)], max_epochs=2)
    fit_plainly(plain, callbacks=[pruning(**settings)], max_epochs=2)
    assert relative(weights(ours), weights(plain)) < 1e-6
    assert torch.equal(weights(ours) == 0, weights(plain) == 0)
    assert (weights(ours) == 0).float().mean() > 0.4


def test_pruned_weights_are_saved_after_fit_and_not_before(tmp_path: Path) -> None:
    class Saves(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.current_epoch == 1:
                trainer.save_checkpoint(tmp_path / "early.ckpt")

    with pytest.raises(
        CheckpointError, match=r"early.ckpt' was not saved: weights are pruned now, .* Save after `fit`"
    ):
        fit(Small(), callbacks=[pruning(), Saves()], max_epochs=2)
    pruned, loaded = Small(), Small()
    made = fit(pruned, callbacks=[pruning()], max_epochs=2)
    made.save_checkpoint(tmp_path / "after.ckpt")
    trainer().validate(loaded, batches(1), ckpt_path=tmp_path / "after.ckpt", verbose=False)
    for name, param in loaded.net.named_parameters():
        assert torch.equal(param, pruned.net.get_parameter(name))
        assert name.endswith("bias") or "2." in name or (param == 0).any()  # a small LayerNorm may keep all


def test_pruning_that_would_lose_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`use_lottery_ticket_hypothesis` must be False for `ModelPruning`"):
        fit(Small(), callbacks=[ModelPruning("l1_unstructured", parameter_names=["weight"])])
    with pytest.raises(ValueError, match="`ModelCheckpoint` must be left out beside `ModelPruning`"):
        fit(Small(), callbacks=[pruning(), ModelCheckpoint(tmp_path)], enable_checkpointing=True)
