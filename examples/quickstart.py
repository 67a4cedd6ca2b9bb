"""Trains a small character model on the source of Python's standard library, with its optimizer state on the host.

Nothing is downloaded, and a CPU is enough. Either of these takes about a minute on two cores:

    python examples/quickstart.py
    lightning-zenflow fit --config examples/configs/quickstart.yaml

With `--trainer.strategy zenflow_stage_3` behind the second one, the weights are cut over the devices as well.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_zenflow import StallMonitor, ZenFlowConfig, ZenFlowStrategy

ASCII = 128


class CharGPT(LightningModule):
    """A decoder-only transformer that predicts the next character.

    Args:
        width: Of the hidden states.
        layers: Number of blocks.
        heads: Of attention.
        context: Characters that a prediction can see.
        lr: Highest learning rate.
        warm_up: Steps until it is reached.
        late: Makes the layers in `configure_model`, as models should that are too large for one device: ZeRO-3 then cuts each
            one over the devices as soon as it is made.
    """

    def __init__(
        self,
        width: int = 128,
        layers: int = 3,
        heads: int = 4,
        context: int = 64,
        lr: float = 2e-3,
        warm_up: int = 40,
        late: bool = False,
    ) -> None:
        super().__init__()
        self.sizes = width, layers, heads, context
        self.lr, self.warm_up = lr, warm_up
        if not late:
            self.configure_model()

    def configure_model(self) -> None:
        if hasattr(self, "head"):  # Lightning calls it before each fit, validate, test and predict
            return
        width, layers, heads, context = self.sizes
        self.characters = nn.Embedding(ASCII, width)
        self.positions = nn.Embedding(context, width)
        # One by one: nn.TransformerEncoder would copy its first layer, of which ZeRO-3 has left nothing to copy.
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, ASCII)
        # Not a parameter: every position sees itself and what came before.
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context), persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        places = torch.arange(text.shape[1], device=text.device)
        hidden = self.characters(text) + self.positions(places)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=self.mask, is_causal=True)
        return self.head(self.norm(hidden))

    def loss(self, windows: Tensor) -> Tensor:
        scores = self(windows[:, :-1])
        return nn.functional.cross_entropy(scores.flatten(0, 1).float(), windows[:, 1:].flatten())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch[0])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch[0]), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        # Plain AdamW and a plain scheduler: the strategy takes both over.
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0.01)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / self.warm_up) * max(0.02, 1.0 - step / steps)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class StandardLibraryText(LightningDataModule):
    """Windows of `context + 1` characters from the source of the installed Python."""

    def __init__(self, context: int = 64, batch_size: int = 16, characters: int = 2_000_000) -> None:
        super().__init__()
        self.context, self.batch_size, self.characters = context, batch_size, characters

    def setup(self, stage: str) -> None:
        sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = "".join(source.read_text(encoding="utf-8") for source in sources)[: self.characters]
        codes = torch.frombuffer(bytearray(text, "ascii", "replace"), dtype=torch.uint8).long()
        size = self.context + 1
        windows = codes[: len(codes) // size * size].view(-1, size)
        held_out = len(windows) // 20
        self.train, self.val = TensorDataset(windows[:-held_out]), TensorDataset(windows[-held_out:])

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.val, batch_size=self.batch_size)


class Summary(Callback):
    """Says at the end what came out."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.losses: list[Tensor] = []
        self.step_secs = self.stall_secs = 0.0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any) -> None:
        stats = trainer.strategy.step_stats  # type: ignore[attr-defined]
        self.losses.append(outputs["loss"].detach())
        self.step_secs += stats.step_secs
        self.stall_secs += stats.update_stall_secs + stats.select_stall_secs
        self.intervals = stats.update_interval, stats.select_interval

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        steps = len(self.losses)
        part = max(1, min(20, steps // 2))
        first, last = (torch.stack(losses).mean() for losses in (self.losses[:part], self.losses[-part:]))
        print(f"\nTraining loss: {first:.2f} over the first {part} steps, {last:.2f} over the last {part} of {steps}.")
        print(
            f"A step took {self.step_secs / steps * 1e3:.0f} ms; training waited for the host during"
            f" {self.stall_secs / self.step_secs:.1%} of it. Intervals at the end: update_interval {self.intervals[0]},"
            f" select_interval {self.intervals[1]}."
        )


def main() -> None:
    seed_everything(1)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        # strategy="zenflow" does the same with the default settings; both intervals are tuned while it trains.
        strategy=ZenFlowStrategy(zenflow=ZenFlowConfig(topk_ratio=0.1)),
        max_epochs=1,
        limit_train_batches=400,
        val_check_interval=200,
        limit_val_batches=20,
        gradient_clip_val=1.0,
        callbacks=[StallMonitor(record=True, progress_bar=True), Summary()],
        logger=CSVLogger("."),
        enable_checkpointing=False,
    )
    trainer.fit(CharGPT(), StandardLibraryText())


if __name__ == "__main__":
    main()
