"""Checkpoints hold tensors and plain types alone, whatever schedulers, arguments and configs put into the run."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.checkpoint.errors import CheckpointError
from tests.modules import EXPECTED_WARNINGS, OFTEN, Small, batches, fit, trainer, weights

pytestmark = [
    *EXPECTED_WARNINGS,
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before"),
    pytest.mark.usefixtures("own_process_group"),
]


class SetsRates(torch.optim.lr_scheduler.LRScheduler):
    """A cosine in NumPy, as people write them."""

    def get_lr(self) -> list[Any]:
        return [base * (1 + np.cos(np.float64(self.last_epoch) / 20)) / 2 for base in self.base_lrs]


def with_numpy(module: Small) -> Any:
    optimizer = torch.optim.AdamW(
        module.parameters(),
        lr=np.float64(1e-2),
        betas=(np.float64(0.9), np.float64(0.95)),
        weight_decay=np.float64(0.1),
    )
    optimizer.param_groups[0]["eps"] = np.array(1e-8)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": SetsRates(optimizer), "interval": "step"}}


class SavesAt(Callback):
    def __init__(self, path: Path, batch: int) -> None:
        self.path, self.batch = path, batch

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_idx == self.batch and not self.path.exists():
            trainer.save_checkpoint(self.path)


def config(stage: int) -> dict[str, Any]:
    return {
        "zero_optimization": {"stage": stage, "reduce_bucket_size": np.float64(10_000)},
        "gradient_clipping": np.float64(0.5),
    }


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_numbers_of_numpy_are_saved_as_pythons(stage: int, tmp_path: Path) -> None:
    """FAULTS 24: every file of the checkpoint loads with `weights_only=True`, and the run goes on as it was."""
    whole, path = Small(configure=with_numpy), tmp_path / "numpy.ckpt"
    strategy = ZenFlowStrategy(OFTEN, config=config(stage))  # type: ignore[arg-type]
    fit(whole, strategy=strategy, callbacks=[SavesAt(path, 5)], max_epochs=2)
    files = list(path.rglob("*.pt"))
    assert len(files) == 3
    loaded = trainer(strategy=ZenFlowStrategy(OFTEN, config=config(stage)), max_epochs=2)  # type: ignore[arg-type]
    resumed = Small(configure=with_numpy)
    loaded.fit(resumed, batches(10), ckpt_path=path, weights_only=True)
    if stage < 3:
        assert loaded.global_step == 20 and weights(resumed).isfinite().all()


def test_the_groups_of_an_optimizer_file_are_plain(tmp_path: Path) -> None:
    """FAULTS 24."""
    path = tmp_path / "numpy.ckpt"
    fit(Small(configure=with_numpy), callbacks=[SavesAt(path, 5)])
    (file,) = path.rglob("*_optim_states.pt")
    stored = torch.load(file, weights_only=False)["optimizer_state_dict"]["base_optimizer_state"]
    (group,) = stored["param_groups"]
    assert type(group["lr"]) is type(group["eps"]) is type(group["weight_decay"]) is float
    assert [type(beta) for beta in group["betas"]] == [float, float]


class Puts(Callback):
    """Puts something into the optimizer's group, as schedulers do."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.optimizers[0].param_groups[0]["lr"] = Decimal("0.01")


def test_what_cannot_be_saved_safely_is_named_and_the_run_says_so(tmp_path: Path) -> None:
    """FAULTS 24: not in a file that nobody may read later."""
    path = tmp_path / "decimal.ckpt"
    message = r"`param_groups\[0\]\['lr'\]` must be a number, .* got Decimal\('0.01'\) of decimal.Decimal"
    with pytest.raises(CheckpointError, match=message):
        fit(Small(), callbacks=[Puts(), SavesAt(path, 5)])
    assert list(tmp_path.iterdir()) == []
