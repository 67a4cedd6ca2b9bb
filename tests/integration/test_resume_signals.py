"""A checkpoint that a signal handler saves in the middle of a batch: resuming trains each batch once, bit for bit."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim.lr_scheduler import ExponentialLR

from tests.modules import EXPECTED_WARNINGS, Small
from tests.resuming import BATCHES, Case, Numbered, batches_done, differences, run

pytestmark = [
    *EXPECTED_WARNINGS,
    pytest.mark.filterwarnings("ignore:.*resuming from a checkpoint that ended before the epoch ended"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks"),
    pytest.mark.usefixtures("own_process_group"),
    pytest.mark.timeout(120),
]

HIT = 5
"""The batch that the signal comes in."""


def configured(module: Small) -> Any:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    return {
        "optimizer": optimizer,
        "lr_scheduler": {"scheduler": ExponentialLR(optimizer, 0.9), "interval": "step"},
    }


class Hit(Numbered):
    """Sends itself SIGUSR1 once, at `moment` of batch `HIT`; never if `moment` is empty."""

    def __init__(self, moment: str = "") -> None:
        super().__init__(configure=configured)
        self.moment = moment

    def reach(self, moment: str) -> None:
        if moment == self.moment and self.trainer.training and batches_done(self.trainer) == HIT:
            self.moment = ""
            os.kill(os.getpid(), signal.SIGUSR1)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.reach("before the forward pass")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.reach("after the forward pass")
        return loss

    def on_after_backward(self) -> None:
        self.reach("after the backward pass")

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.reach("after the step")

    def lr_scheduler_step(self, *args: Any) -> None:
        self.reach("before the rate")
        super().lr_scheduler_step(*args)
        self.reach("after the rate")


class SavesWhenAsked(Callback):
    """A handler as users write it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._before = signal.signal(signal.SIGUSR1, lambda *_: trainer.save_checkpoint(self.path))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        signal.signal(signal.SIGUSR1, self._before)


MOMENTS = (
    "before the forward pass",
    "after the forward pass",
    "after the backward pass",
    "after the step",
    "before the rate",
    "after the rate",
)


@pytest.mark.parametrize(
    ("moment", "accumulate"),
    [(moment, each) for moment in MOMENTS for each in (1, 2, 5) if each != 2 or moment in MOMENTS[:3]],  # 2: no step
)
def test_a_run_that_a_handler_has_saved_goes_on_as_if_never_stopped(
    moment: str, accumulate: int, tmp_path: Path
) -> None:
    """29."""
    case = Case(settings={"accumulate_grad_batches": accumulate}, module=Hit)
    whole = run(case)
    saved = run(case.but(module=lambda: Hit(moment)), callbacks=[SavesWhenAsked(tmp_path / "asked")])
    assert differences(saved, whole) == []
    resumed = run(case, resume=tmp_path / "asked")
    assert min(resumed.trace.shown) == HIT + 1, "the batch is whole before the handler runs"
    assert differences(resumed, whole, HIT) == []


class Counted:
    """A data loader that knows where it is, as torchdata's `StatefulDataLoader`."""

    def __init__(self) -> None:
        self.done = 0

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[Any]:
        self.done %= BATCHES
        while self.done < BATCHES:
            self.done += 1
            yield [torch.full((1, 1), float(self.done)), torch.zeros(1)]

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = state["done"]


class Listing(Hit):
    """Notes which batches of the loader it trains."""

    def __init__(self, moment: str = "") -> None:
        super().__init__(moment)
        self.trained: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trained.append(int(batch[0].item()))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("moment", MOMENTS)
def test_no_batch_of_a_loader_that_knows_its_place_is_skipped_or_repeated(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """29."""
    monkeypatch.setattr("tests.resuming.batches", lambda count: Counted())
    whole = run(Case(module=Listing))
    run(Case(module=lambda: Listing(moment)), callbacks=[SavesWhenAsked(tmp_path / "asked")])
    resumed = run(Case(module=Listing), resume=tmp_path / "asked")
    assert isinstance(resumed.module, Listing)
    assert resumed.module.trained == [*range(HIT + 1, BATCHES + 1), *range(1, BATCHES + 1)]
    assert differences(resumed, whole, HIT) == []
