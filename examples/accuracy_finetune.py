"""One run of fine-tuning for `accuracy.py`: the model and data of `finetune_sentiment.py`, without checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Trainer, seed_everything

from examples.accuracy_emulated import Method, trained_by
from examples.finetune_sentiment import SentimentData, SentimentModel
from examples.pretrain_char_gpt import Losses, SameBatches


def finetune(
    path: Path,
    kind: Literal["classification", "regression"],
    method: Method,
    *,
    lr: float,
    seed: int,
    epochs: int,
) -> tuple[dict[str, float], list[float]]:
    """Test metrics by name, and the training loss of every step."""
    seed_everything(seed, verbose=False)
    losses = Losses()
    strategy, callbacks = trained_by(method)
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(
        accelerator="cpu",
        precision="bf16-mixed",  # twice as fast on CPUs that can; with ZenFlow only masters stay in fp32, else weights do
        use_distributed_sampler=False,  # it would draw other batches
        devices=1,
        strategy=strategy,
        max_epochs=epochs,
        gradient_clip_val=1.0,
        limit_val_batches=0,
        callbacks=[losses, SameBatches(seed), *callbacks],
        enable_checkpointing=False,
        **quiet,
    )
    model = SentimentModel(task=kind, lr=lr)
    data = SentimentData(str(path), least_rating=0.5 if kind == "classification" else 0.0)
    trainer.fit(model, data)
    (metrics,) = trainer.test(model, data, verbose=False)
    figures = {name.removeprefix("test_"): float(value) for name, value in metrics.items()}
    return figures, torch.stack(losses.values).tolist()
