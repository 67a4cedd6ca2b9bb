"""What the programs of `tests.live` train with: a small model, a callback that tells how far it is, a quiet Trainer."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_zenflow import ZenFlowConfig, ZenFlowStrategy
from tests.fp16 import allow_fp16_on_any_cpu
from tests.live import is_worker

allow_fp16_on_any_cpu()

FEATURES = 6


def say(*words: Any) -> None:
    """Tells the test something, in one write: the ranks of a program share its output."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


class Tiny(LightningModule):
    """A small regression.

    Args:
        width: Hidden units; 14 times as many parameters.
        pause_secs: How long the device seems to compute in each step.
    """

    def __init__(self, width: int = 8, pause_secs: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(FEATURES, width), nn.GELU(), nn.Linear(width, FEATURES))
        self.pause_secs = pause_secs

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        time.sleep(self.pause_secs)
        return (self.net(batch) - batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        time.sleep(self.pause_secs)
        self.net(batch)

    test_step = validation_step

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Batches(IterableDataset[Tensor]):
    """Random batches, endless with `count=None`; calls `before` ahead of each, in the process that makes the batch."""

    def __init__(self, count: int | None = None, before: Callable[[int], None] = lambda number: None) -> None:
        self.count, self.before = count, before

    def __iter__(self) -> Iterator[Tensor]:
        generator, number = torch.Generator().manual_seed(0), 0
        while self.count is None or number < self.count:
            number += 1
            self.before(number)
            yield torch.randn(4, FEATURES, generator=generator)


def batches(count: int | None = None, **settings: Any) -> DataLoader[Tensor]:
    before = settings.pop("before", lambda number: None)
    return DataLoader(Batches(count, before), batch_size=None, **settings)


class Tell(Callback):
    """Says `started`, `step N`, `validating` and `train end`, each when it is so."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        say("started")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        say("step", trainer.global_step)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        say("validating")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        say("train end")


class At(Callback):
    """Calls `action(trainer)` at the end of step `step`, counted from 1."""

    def __init__(self, step: int, action: Callable[[Trainer], Any]) -> None:
        self.step, self.action = step, action

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.global_step == self.step:
            self.action(trainer)


def trainer(zenflow: dict[str, Any] | None = None, callbacks: tuple[Callback, ...] = (), **settings: Any) -> Trainer:
    defaults = {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": 20,
        "strategy": "zenflow" if zenflow is None else ZenFlowStrategy(ZenFlowConfig(**zenflow)),
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "limit_val_batches": 0,
    }
    return Trainer(**{**defaults, **settings}, callbacks=[Tell(), *callbacks])


def fit(
    module: LightningModule | None = None,
    *,
    train: DataLoader[Tensor] | None = None,
    val: DataLoader[Tensor] | None = None,
    ckpt_path: str | None = None,
    **settings: Any,
) -> Trainer:
    """Trains, 20 steps unless `max_steps` says otherwise, and validates if there is `val`."""
    if val is not None:
        settings = {"limit_val_batches": None, "val_check_interval": 2, "num_sanity_val_steps": 0, **settings}
    made = trainer(**settings)
    made.fit(Tiny() if module is None else module, batches() if train is None else train, val, ckpt_path=ckpt_path)
    return made


def workers() -> list[psutil.Process]:
    """Background processes that this process has now."""
    return [child for child in psutil.Process().children(recursive=True) if is_worker(child)]


def in_thread(target: Callable[[], Any]) -> None:
    """Runs `target` in a thread; its exception comes back here."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            target()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
