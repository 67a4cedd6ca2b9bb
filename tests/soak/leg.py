"""One process of a soak: `python -m tests.soak.leg SETTINGS FOLDER [CHECKPOINT]`."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import warnings
from collections import deque
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_zenflow import ZenFlowStrategy
from tests.modules import FEATURES, OFTEN, Small, batches, strategy_of, trainer, weights
from tests.soak.plan import EPOCH, Soak


class EndOfLeg(Exception):
    """Ends a leg; the next one resumes."""


def number_of(made: Trainer) -> int:
    """Number of the batch that a run is at, from 1, over all epochs."""
    return made.current_epoch * EPOCH + made.fit_loop.epoch_loop.batch_progress.current.ready


class Soaked(Small):
    """Makes each batch from its number, since a data loader begins anew where a run resumes."""

    def __init__(self, soak: Soak) -> None:
        super().__init__(configure=_with_schedule)
        self.soak = soak
        self.losses = deque(maxlen=1)  # type: ignore[assignment]  # it may not grow

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        number = self.current_epoch * EPOCH + batch_idx + 1
        generator = torch.Generator().manual_seed(1000 * self.global_rank + number)
        inputs = torch.randn(8, FEATURES, generator=generator)
        targets = (inputs.sum(1) > 0).long() + 2 * (inputs[:, 0] > 0).long()
        loss = self.loss(self.net, [inputs.to(batch[0].dtype), targets])
        return loss * (math.inf if self.soak.overflows(number) else 1.0)


def _with_schedule(module: Small) -> Any:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 + 0.5 * math.cos(step / 50))
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Disturbs(Callback):
    """Changes intervals, saves, tells how far it is, and ends the leg."""

    def __init__(self, soak: Soak, folder: Path) -> None:
        self._soak, self._folder = soak, folder
        self._leaked: list[bytes] = []
        self._progress = os.open(folder / f"progress{os.environ.get('RANK', '0')}", os.O_WRONLY | os.O_CREAT)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        assert isinstance(trainer.strategy, ZenFlowStrategy)
        number = number_of(trainer)
        if self._soak.leak:
            self._leaked.append(number.to_bytes(self._soak.leak, "little"))
        intervals = self._soak.intervals_after(number)
        if intervals is not None:
            trainer.strategy.change_intervals(*intervals)
        if self._soak.saves_after(number):
            trainer.save_checkpoint(self._folder / "last.ckpt")
        os.pwrite(self._progress, f"{number:12}".encode(), 0)
        if not self._soak.quiet and number in self._soak.ends:
            if self._soak.is_killed_after(number):
                os.kill(os.getpid(), signal.SIGKILL)
            raise EndOfLeg

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        os.close(self._progress)


def run(soak: Soak, folder: Path, resume: str | None) -> None:
    """Trains until the leg ends, or all steps are done: then the weights are written."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    module = Soaked(soak)
    scale = {"initial_scale_power": 8, "loss_scale_window": 50} if soak.precision == "16-mixed" else {}
    validation = {} if soak.quiet else {"val_check_interval": 50, "num_sanity_val_steps": 2}
    made = trainer(
        strategy=strategy_of(OFTEN, stage=soak.stage, **scale),
        callbacks=[Disturbs(soak, folder)],
        precision=soak.precision,
        devices=soak.ranks,
        accumulate_grad_batches=soak.accumulate,
        gradient_clip_val=1.0,
        max_epochs=-1,
        max_steps=soak.steps,
        **validation,
    )
    try:
        made.fit(module, batches(EPOCH, 1), None if soak.quiet else batches(2, 1, seed=1), ckpt_path=resume)
    except EndOfLeg:
        return
    flat = weights(module)
    if made.is_global_zero:
        torch.save(flat, folder / "weights.pt")


if __name__ == "__main__":
    run(Soak(**json.loads(sys.argv[1])), Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None)
