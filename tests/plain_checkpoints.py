"""Checkpoints that plain DeepSpeed writes, and what was in its memory when it wrote them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import Tensor, nn

from tests.engine import init_distributed

VOCAB, WIDTH = 11, 6
GROUPS = [["tokens.weight", "up.weight", "up.bias"], ["norm.weight", "norm.bias", "down.weight"]]
RATES, BETAS = (3e-2, 1e-2), ((0.9, 0.999), (0.8, 0.95))
CLIENT_STATE = {"epoch": 3, "global_step": 4, "callbacks": {"best": torch.tensor(0.25)}, "lr_schedulers": [{"last": 4}]}
CASES: dict[str, dict[str, Any]] = {
    **{
        f"{stage} {precision}": {"stage": stage, precision: True}
        for stage in (1, 2, 3)
        for precision in ("fp32", "bf16")
    },
    **{
        f"{stage} fp16": {"stage": stage, "fp16": {"initial_scale_power": 8, "loss_scale_window": 2}}
        for stage in (1, 2, 3)
    },
    "2 static scale": {"stage": 2, "fp16": {"loss_scale": 64.0}},
    "2 offload": {
        "stage": 2,
        "bf16": True,
        "zero": {"offload_optimizer": {"device": "cpu", "pin_memory": False}},
        "zero_force_ds_cpu_optimizer": False,
    },
    "1 fp32 gradients": {"stage": 1, "bf16": True, "data_types": {"grad_accum_dtype": "fp32"}},
    "2 aligned": {"stage": 2, "bf16": True, "zero": {"parameter_alignment": True}},
    "2 elastic": {"stage": 2, "bf16": True, "zero": {"elastic_checkpoint": True}},
    "2 round robin": {"stage": 2, "zero": {"round_robin_gradients": True}},
    "3 many sub-groups": {"stage": 3, "zero": {"sub_group_size": 40}},
    "2 before the first step": {"stage": 2, "steps": 0},
    "2 without frozen": {"stage": 2, "exclude_frozen": True},
    "0": {"stage": 0},
}
"""Settings by name; the name begins with the stage."""


class Net(nn.Module):
    """Tied and frozen weights, buffers, and sizes that two ranks cut inside `up.weight` and `down.weight`."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.batches = nn.BatchNorm1d(WIDTH, affine=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 13)
        self.down = nn.Linear(13, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.frozen(self.tokens(ids))
        x = self.batches(x.to(self.batches.running_mean.dtype)).to(x.dtype)  # type: ignore[union-attr]
        return self.head(self.down(torch.tanh(self.up(self.norm(x)))))


def write(folder: str, names: list[str]) -> dict[str, dict[str, Any]]:
    """Trains and saves each case below `folder`; returns, by case, what was in memory. Every rank calls it."""
    torch.set_num_threads(1)
    init_distributed()
    return {name: _write(Path(folder) / name.replace(" ", "_"), **CASES[name]) for name in names}


def _write(
    path: Path,
    stage: int,
    steps: int = 4,
    exclude_frozen: bool = False,
    zero: dict[str, Any] | None = None,
    fp32: bool = True,
    **settings: Any,
) -> dict[str, Any]:
    torch.manual_seed(0)
    net = Net()
    params = dict(net.named_parameters())
    groups = [
        {"params": [params[name] for name in names], "lr": rate, "betas": betas}
        for names, rate, betas in zip(GROUPS, RATES, BETAS, strict=True)
    ]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 4000, **(zero or {})},
    }
    for key, value in settings.items():
        config[key] = (
            {"enabled": True, **(value if isinstance(value, dict) else {})} if key in ("bf16", "fp16") else value
        )
    engine = deepspeed.initialize(
        model=net, optimizer=torch.optim.AdamW(groups), config=config, dist_init_required=False
    )[0]
    generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
    for _ in range(steps):
        ids = torch.randint(0, VOCAB, (8,), generator=generator)
        engine.backward(F.cross_entropy(engine(ids).float(), (ids + 1) % VOCAB))
        engine.step()
    engine.save_checkpoint(
        str(path), tag="checkpoint", client_state=CLIENT_STATE, exclude_frozen_parameters=exclude_frozen
    )
    seen = _in_memory(engine, net, stage, trained=steps > 0) if stage else {}
    engine.destroy()
    return seen


def _in_memory(engine: Any, net: nn.Module, stage: int, trained: bool) -> dict[str, Any]:
    if trained and hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        # DeepSpeed links the moments after the first group's first step, when the other groups have none yet.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    seen: dict[str, Any] = {"fp32": {}, "exp_avg": {}, "exp_avg_sq": {}, "buffers": {}, "frozen": {}, "module": {}}
    for name, param in net.named_parameters():
        if not param.requires_grad:
            continue
        seen["fp32"][name] = safe_get_full_fp32_param(param).clone()
        for kind in ("exp_avg", "exp_avg_sq") if trained else ():
            seen[kind][name] = safe_get_full_optimizer_state(param, kind).clone()
    with deepspeed.zero.GatheredParameters(list(net.parameters()), enabled=stage == 3):
        seen["module"] = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    seen["counters"] = {key: getattr(engine, key) for key in ("global_steps", "global_samples", "skipped_steps")}
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    seen["scaler"] = {key: value for key, value in vars(scaler).items() if key != "dtype"} if scaler else None
    return seen
