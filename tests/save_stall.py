"""How long training stands still for a save: this package against plain DeepSpeed offload, in turn, in one process.

    python -m tests.save_stall

The 67 M-parameter model of the two-core setting in bf16. Prints one line of JSON: the medians in seconds, and their ratio.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_zenflow import ZenFlowConfig, ZenFlowStrategy
from lightning_zenflow.any_accelerator import _AnyAcceleratorStrategy

WIDTH, DEPTH, TOKENS = 1024, 8, 32
TURNS, SAVES = 3, 4


class Mlp(LightningModule):
    """The two-core model; its loss does not matter."""

    def __init__(self) -> None:
        super().__init__()
        layers = [(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(DEPTH)]
        self.layers = nn.Sequential(*[layer for block in layers for layer in block])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layers(batch[0]).float().pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-5)


class Saves(Callback):
    """Saves after every third step, over the save before, as `save_last` does."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.secs = folder, list[float]()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.global_step % 3 == 0:
            begin = time.perf_counter()
            trainer.save_checkpoint(self.folder / "last.ckpt")
            self.secs.append(time.perf_counter() - begin)


def plain() -> _AnyAcceleratorStrategy:
    strategy = _AnyAcceleratorStrategy(stage=2, offload_optimizer=True)
    assert isinstance(strategy.config, dict)
    # DeepSpeed's own CPU Adam needs a compiler; what is saved is the same.
    strategy.config.update(zero_force_ds_cpu_optimizer=False, zero_allow_untested_optimizer=True)
    return strategy


def zenflow() -> ZenFlowStrategy:
    return ZenFlowStrategy(
        ZenFlowConfig(worker_cores=[1], update_interval=4, select_strategy="step", select_interval=1000)
    )


def save_secs(strategy: Any, folder: Path) -> list[float]:
    """How long each save took."""
    saves = Saves(folder)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        precision="bf16-true",
        max_steps=3 * SAVES,
        strategy=strategy,
        callbacks=[saves],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Mlp(), DataLoader(TensorDataset(torch.randn(10 * TOKENS, WIDTH).bfloat16()), batch_size=TOKENS))
    return saves.secs


def main() -> dict[str, float]:
    torch.set_num_threads(1)
    secs: dict[str, list[float]] = {"plain": [], "zenflow": []}
    for _ in range(TURNS):
        for name, make in (("plain", plain), ("zenflow", zenflow)):
            folder = Path(tempfile.mkdtemp(dir=os.environ.get("TMPDIR")))
            try:
                secs[name] += save_secs(make(), folder)
            finally:
                shutil.rmtree(folder)
    medians = {name: statistics.median(values) for name, values in secs.items()}
    return {**medians, "ratio": medians["zenflow"] / medians["plain"]}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main()) + "\n")
