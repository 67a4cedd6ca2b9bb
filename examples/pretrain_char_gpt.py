"""Trains the quickstart's model for longer, with any method and rate: the hard case for updates that come late.

From scratch weights move far and gradients differ from step to step, so a gradient that is applied some steps later than it was
computed is applied to other weights than its own. A minute or two on a CPU:

    python -m examples.pretrain_char_gpt --method adamw --lr 4e-3
    python -m examples.pretrain_char_gpt --method zenflow --update-interval 4 --lr 4e-3

Prints the mean training loss of the last 50 steps. `accuracy.py` repeats it over seeds, rates and settings.
"""

from __future__ import annotations

import argparse
import logging
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor

from examples.accuracy_emulated import Method, trained_by
from examples.quickstart import CharGPT, StandardLibraryText

LAST_STEPS = 50
"""Over which the final loss is a mean: single batches differ by more than methods do."""


class Losses(Callback):
    """The loss of each training step."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any) -> None:
        self.values.append(outputs["loss"].detach())


class SameBatches(Callback):
    """Seeds anew before the first batch: strategies for several devices do so at other times than those for one."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        seed_everything(self.seed, verbose=False)


def pretrain(
    method: Method, *, lr: float, seed: int, steps: int, precision: Any = "32-true", width: int = 128
) -> list[float]:
    """The training loss of every step, with ZenFlow, an emulation or plain AdamW; the same data for all."""
    seed_everything(seed, verbose=False)
    losses = Losses()
    strategy, callbacks = trained_by(method)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        use_distributed_sampler=False,  # it would draw other batches
        strategy=strategy,
        precision=precision,
        max_steps=steps,
        gradient_clip_val=1.0,
        callbacks=[losses, SameBatches(seed), *callbacks],
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(CharGPT(width=width, lr=lr), StandardLibraryText())
    return torch.stack(losses.values).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", choices=["adamw", "zenflow"], default="zenflow")
    parser.add_argument("--lr", type=float, default=4e-3, help="highest learning rate")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--update-interval", type=int, default=4)
    parser.add_argument("--topk-ratio", type=float, default=0.1)
    parser.add_argument(
        "--interim-step",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="let the device move deferred weights itself",
    )
    given = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    zenflow = {
        "topk_ratio": given.topk_ratio,
        "select_strategy": "step",
        "select_interval": 64,
        "update_interval": given.update_interval,
        "interim_step": given.interim_step,
    }
    settings = zenflow if given.method == "zenflow" else None
    losses = pretrain(settings, lr=given.lr, seed=given.seed, steps=given.steps)
    last = losses[-LAST_STEPS:]
    mean = sum(last) / len(last)
    print(f"Training loss: {losses[0]:.3f} at first, {mean:.3f} over the last {len(last)} of {len(losses)} steps.")


if __name__ == "__main__":
    main()
