"""Who computes with how many threads where the CPU is the accelerator."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_zenflow import ZenFlowConfig, ZenFlowStrategy
from tests.modules import EXPECTED_WARNINGS

pytestmark = EXPECTED_WARNINGS


class ThreadsDuringFit(Callback):
    def on_train_start(self, *_: Any) -> None:
        self.threads = torch.get_num_threads()


class Module(BoringModel):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


@pytest.mark.usefixtures("own_process_group")
@pytest.mark.parametrize("given", [None, "1"])
def test_torch_leaves_the_workers_share_of_cores_alone_until_the_end_of_fit(
    monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    cores = sorted(os.sched_getaffinity(0))
    before = torch.get_num_threads()
    torch.set_num_threads(len(cores))
    callback = ThreadsDuringFit()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=ZenFlowStrategy(ZenFlowConfig(worker_cores=cores[1:] or cores)),
        max_steps=1,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
    )
    try:
        trainer.fit(Module())
        assert callback.threads == (len(cores) if given else 1)
        assert torch.get_num_threads() == len(cores)
    finally:
        torch.set_num_threads(before)
