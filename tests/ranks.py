"""What the ranks of multi-process tests run; called by path through the `run_ranks` fixture."""

from __future__ import annotations

import os
import random
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_zenflow.config import ZenFlowConfig
from tests.cases import Case, Zoo, batch, gathered, param_groups, relative, run_case, stage3_settings
from tests.delays import everything_late
from tests.engine import init_distributed, zenflow_engine


def _join() -> tuple[int, int]:
    torch.set_num_threads(1)
    init_distributed()
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def compare(cases: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Runs cases of the comparison with `reference.py` one after the other."""
    rank, world_size = _join()
    return [run_case(Case(**case), rank, world_size) for case in cases]


def train_all(runs: list[dict[str, Any]]) -> list[dict[str, torch.Tensor]]:
    """Several calls of `train` in the same interpreter, whose start costs more than a run."""
    rank, world_size = _join()
    return [train(rank, world_size, **run) for run in runs]


def train(
    rank: int,
    world_size: int,
    config: dict[str, Any],
    steps: int = 12,
    precision: str = "fp32",
    delays_secs: float = 0.0,
    seed: int = 0,
    batch_scale: float = 1.0,
    accumulate: int = 1,
    stage: int = 2,
    offload_params: bool = False,
    clip_norm: float = 1.0,
) -> dict[str, torch.Tensor]:
    """Trains the zoo with the engine and returns its weights; with delays, everything that can be late is late."""
    torch.manual_seed(0)
    model = Zoo()
    settings = ZenFlowConfig(**{"select_strategy": "step", "select_interval": 5, "update_interval": 4, **config})
    randomly = random.Random(seed)
    engine_of_run = zenflow_engine(
        model,
        param_groups(model),
        settings,
        stage=stage,
        select_interval=settings.select_interval,  # type: ignore[arg-type]
        clip_norm=clip_norm,
        precision=precision,
        local_ranks=world_size,
        **stage3_settings(stage, offload_params),
    )
    with everything_late(seed, delays_secs), engine_of_run as (engine, zero):
        for step in range(1, steps + 1):
            ids, targets = batch(step, 0, rank)
            parts = zip(ids.chunk(accumulate), targets.chunk(accumulate), strict=True)
            for micro, (part_ids, part_targets) in enumerate(parts):
                engine.set_gradient_accumulation_boundary(micro == accumulate - 1)
                loss = F.cross_entropy(engine(part_ids, step % 3 != 2).float(), part_targets)
                time.sleep(randomly.random() * delays_secs)
                engine.backward(batch_scale * loss / accumulate)
                time.sleep(randomly.random() * delays_secs)
            engine.step()
        zero.settle()
        with gathered(model.parameters()):
            return {name: param.detach().clone() for name, param in model.named_parameters()}


def against_torch_all(runs: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Several calls of `against_torch` in the same interpreter."""
    rank, world_size = _join()
    return [against_torch(rank, world_size, **run) for run in runs]


def against_torch(
    rank: int,
    world_size: int,
    config: dict[str, Any],
    decoupled: bool = True,
    stage: int = 2,
    offload_params: bool = False,
    steps: int = 12,
) -> dict[str, float]:
    """Trains the zoo with the engine and with torch's own optimizer; returns the relative difference of each parameter."""
    torch.manual_seed(0)
    model, twin = Zoo(), Zoo()
    twin.load_state_dict(model.state_dict())
    groups, twin_groups = param_groups(model, decoupled), param_groups(twin, decoupled)
    for group in twin_groups:
        del group["decoupled_weight_decay"]
    optimizer = (torch.optim.AdamW if decoupled else torch.optim.Adam)(twin_groups)
    settings = ZenFlowConfig(**{"select_strategy": "step", "select_interval": 5, **config})
    with zenflow_engine(
        model,
        groups,
        settings,
        stage=stage,
        select_interval=5,
        clip_norm=0.5,
        local_ranks=world_size,
        **stage3_settings(stage, offload_params),
    ) as (engine, zero):
        for step in range(1, steps + 1):
            ids, targets = batch(step, 0, rank)
            engine.backward(F.cross_entropy(engine(ids, True), targets))
            engine.step()
            optimizer.zero_grad()
            for other in range(world_size):
                ids, targets = batch(step, 0, other)
                (F.cross_entropy(twin(ids, True), targets) / world_size).backward()
            nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
            optimizer.step()
        zero.settle()
        twins = dict(twin.named_parameters())
        with gathered(model.parameters()):
            return {name: relative(param.detach(), twins[name].detach()) for name, param in model.named_parameters()}


def tiny_steps(topk_ratio: float, steps: int = 200) -> dict[str, float]:
    """At lr 1e-6 a bf16 weight alone would never move: how far the masters are from AdamW's with fp32 masters.

    Returns the relative difference of the movement, once for a fully selected and once for a deferred run, and how many
    of the rounded weights changed at all.
    """
    _join()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
    start = [param.detach().bfloat16().float() for param in model.parameters()]
    towards = [torch.randn(p.shape).sign() for p in start]
    grads = [[g + 0.1 * torch.randn(g.shape) for g in towards] for _ in range(4)]
    params = [nn.Parameter(weight.clone()) for weight in start]
    optimizer = torch.optim.AdamW(params, lr=1e-6)
    settings = ZenFlowConfig(topk_ratio=topk_ratio, select_strategy="step", select_interval=50, update_interval=4)
    group = {"params": list(model.parameters()), "lr": 1e-6, "weight_decay": 0.01}
    with zenflow_engine(model, [group], settings, select_interval=50, precision="bf16") as (engine, zero):
        for step in range(steps):
            # A loss that is linear in the weights has exactly these gradients, whatever the weights are.
            fixed = [grad.bfloat16() for grad in grads[step % 4]]
            engine(torch.zeros(1, 16, dtype=torch.bfloat16))
            engine.backward(sum((p * g).float().sum() for p, g in zip(model.parameters(), fixed, strict=True)))
            engine.step()
            for param, grad in zip(params, fixed, strict=True):
                param.grad = grad.float()
            optimizer.step()
        zero.settle()
        zero.shard.complete_host_state()
        masters = {s.param: zero.shard.host.arena.master[s.start : s.stop].clone() for s in zero.shard._table.segments}
        moved = torch.cat([masters[i] - weight.flatten() for i, weight in enumerate(start)])
        expected = torch.cat([(p.detach() - weight).flatten() for p, weight in zip(params, start, strict=True)])
        rounded = all(
            torch.equal(param.detach().flatten(), masters[i].bfloat16()) for i, param in enumerate(model.parameters())
        )
        return {"moved": relative(moved, expected), "movement": expected.abs().mean().item(), "rounded": float(rounded)}


class Recorded(Dataset[Any]):
    """Batches that were made before."""

    def __init__(self, items: list[Any]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Any:
        return self._items[index]


def char_gpt(lr: float, interim_step: bool = True) -> float:
    """Trains the char-GPT through the Trainer with bf16 weights; returns the mean loss of the last 50 steps."""
    from lightning.pytorch import LightningModule, Trainer

    from lightning_zenflow import ZenFlowStrategy
    from tests.char_gpt import CharGPT, batches, learning_rate, load_text

    losses = []

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = CharGPT()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            ids, following = batch
            loss = F.cross_entropy(self.net(ids).float().flatten(0, 1), following.flatten())
            losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1.0)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: learning_rate(done + 1, lr))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    torch.set_num_threads(1)
    zenflow = ZenFlowConfig(
        topk_ratio=0.1, select_strategy="step", select_interval=16, update_interval=4, interim_step=interim_step
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=ZenFlowStrategy(zenflow),
        precision="bf16-true",
        max_epochs=1,
        use_distributed_sampler=False,  # it would shuffle the batches, which the figures are made with
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(Recorded(list(batches(load_text()))), batch_size=None))
    return sum(losses[-50:]) / 50
