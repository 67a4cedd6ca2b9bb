"""What the GPU tests run in processes of their own."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lightning_zenflow.config import ZenFlowConfig
from tests.cases import Case, run_case
from tests.engine import init_distributed, zenflow_engine
from tests.ranks import Recorded

DEVICE = "cuda:0"


def compare(cases: list[dict[str, Any]]) -> list[dict[str, float]]:
    init_distributed("nccl")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    return [run_case(Case(**case), device=DEVICE) for case in cases]


def _mlp(width: int = 2048, depth: int = 8) -> nn.Sequential:
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(depth)]
    )


def _steps(engine: Any, x: torch.Tensor, steps: int, update: bool) -> float:
    """Median seconds of a step, waiting for the device at its end."""
    times = []
    for _ in range(steps):
        torch.cuda.synchronize()  # times whole steps; training itself never waits like this
        start = time.perf_counter()
        loss = engine(x).float().pow(2).mean()
        if update:
            engine.backward(loss)
            engine.step()
        else:
            engine.zero_grad(set_to_none=True)
            loss.backward()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times[steps // 3 :])[len(times[steps // 3 :]) // 2]


def pinned_and_overlapping() -> dict[str, Any]:
    init_distributed("nccl")
    x = torch.randn(16384, 2048, device=DEVICE).bfloat16()
    alone = _steps(_mlp().to(DEVICE).bfloat16(), x, 12, update=False)
    model = _mlp().to(DEVICE)
    settings = ZenFlowConfig(select_strategy="step", select_interval=1000, update_interval=4)
    group = {"params": list(model.parameters()), "lr": 1e-5, "weight_decay": 0.01}
    with zenflow_engine(model, [group], settings, precision="bf16") as (engine, zero):
        ours = _steps(engine, x, 24, update=True)
        pinned = zero.shard.host.arena.slot.is_pinned()
        return {"pinned": pinned, "step_to_compute": ours / alone, "stats": str(zero.shard.stats)}


def train_twice() -> list[dict[str, torch.Tensor]]:
    init_distributed("nccl")
    torch.use_deterministic_algorithms(True, warn_only=True)
    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        model = _mlp(256, 2).to(DEVICE)
        settings = ZenFlowConfig(topk_ratio=0.3, select_strategy="step", select_interval=5, update_interval=4)
        group = {"params": list(model.parameters()), "lr": 1e-3, "weight_decay": 0.01}
        with zenflow_engine(model, [group], settings, select_interval=5, precision="bf16", clip_norm=1.0) as (
            engine,
            zero,
        ):
            for step in range(20):
                torch.manual_seed(step)
                engine.backward(
                    F.mse_loss(engine(torch.randn(64, 256, device=DEVICE).bfloat16()).float(), torch.zeros(()))
                )
                engine.step()
            zero.settle()
            runs.append({name: param.detach().cpu() for name, param in model.named_parameters()})
    return runs


def trainer_losses(precision: Any) -> tuple[float, float]:
    from lightning.pytorch import LightningModule, Trainer
    from torch.utils.data import DataLoader

    import lightning_zenflow  # noqa: F401

    losses: list[float] = []

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            loss = (self.net(batch).float() - batch.float()).pow(2).mean()
            losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=3e-3)

    torch.manual_seed(0)
    trainer = Trainer(
        accelerator="cuda",
        devices=1,
        strategy="zenflow",
        precision=precision,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(Recorded(list(torch.randn(512, 32))), batch_size=16))
    return losses[0], losses[-1]
