"""One case of the comparison with `reference.py`: a small model with every kind of parameter, and the real engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.reference import ZenFlowReference
from lightning_zenflow.schedule import Schedule
from tests.engine import zenflow_engine

VOCAB, WIDTH = 11, 6


class Zoo(nn.Module):
    """Vectors, matrices, a 4-D weight, a matrix with one column, tied, frozen and sometimes unused parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.conv = nn.Conv2d(1, 3, (2, 3))
        self.up = nn.Linear(3 * 3 * (WIDTH - 2), 13)
        self.norm = nn.LayerNorm(13)
        self.gate = nn.Linear(1, 13)
        self.sometimes = nn.Linear(13, 13, bias=False)
        self.down = nn.Linear(13, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, use_sometimes: bool) -> Tensor:
        x = self.frozen(self.tokens(ids)).unsqueeze(1)  # [B, 1, T, WIDTH]
        x = F.gelu(self.conv(x)).flatten(1)
        x = self.norm(self.up(x)) * torch.sigmoid(self.gate(x.mean(1, keepdim=True)))
        if use_sometimes:
            x = x + torch.tanh(self.sometimes(x))
        return self.head(self.down(x))


@dataclass(frozen=True)
class Case:
    """Settings of one comparison; every field has the plainest value as default."""

    stage: int = 2
    offload_params: bool = False
    """Under stage 3, whether weights live in host memory."""
    topk_ratio: float = 0.5
    update_interval: int = 4
    overlap: bool = True
    look_ahead: bool = True
    interim: bool = True
    warm_up: int = 0
    accumulate: int = 1
    clip_norm: float = 0.0
    select_interval: int = 5
    lr_scale: str = "linear"
    lr_changes: bool = True
    skips_parameter: bool = True
    decoupled: bool = True
    moments_dtype: str = "fp32"
    nan_step: int | None = None
    spike_step: int | None = None
    """Step with a loss of a hundred times its usual size."""
    small_pieces: bool = False
    settle_before_step: int | None = None
    changes: tuple[tuple[int, int, int], ...] | None = None
    """Step after which the intervals change, update interval, selection interval."""
    steps: int = 14


def param_groups(model: Zoo, decoupled: bool = True) -> list[dict[str, Any]]:
    """Three groups with their own rate, decay and betas."""
    flag = {"decoupled_weight_decay": decoupled}
    first = [model.tokens.weight, model.conv.weight, model.conv.bias]
    second = [model.up.weight, model.up.bias, model.norm.weight, model.norm.bias, model.gate.weight, model.gate.bias]
    third = [model.sometimes.weight, model.down.weight, model.down.bias]
    return [
        {"params": first, "lr": 3e-3, "weight_decay": 0.1, **flag},
        {"params": second, "lr": 1e-2, "weight_decay": 0.0, "betas": (0.8, 0.95), **flag},
        {"params": third, "lr": 2e-3, "weight_decay": 0.02, "eps": 1e-6, **flag},
    ]


def batch(step: int, micro: int, rank: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    ids = torch.randint(0, VOCAB, (8, 4), generator=generator)
    return ids.to(device), torch.randint(0, VOCAB, (8,), generator=generator).to(device)


def zenflow_config(case: Case) -> ZenFlowConfig:
    return ZenFlowConfig(
        topk_ratio=case.topk_ratio,
        select_strategy="step",
        select_interval=case.select_interval,
        update_interval=case.update_interval,
        overlap_step=case.overlap,
        look_ahead=case.look_ahead,
        interim_step=case.interim,
        full_warm_up_rounds=case.warm_up,
        deferred_lr_scale=case.lr_scale,  # type: ignore[arg-type]
        moments_dtype=case.moments_dtype,  # type: ignore[arg-type]
    )


def run_case(case: Case, rank: int = 0, world_size: int = 1, device: str = "cpu") -> dict[str, float]:
    """Trains engine and reference side by side; returns the largest relative differences seen.

    The reference gets the engine's own gradients, which are compared with autograd's on a copy of the model, so that an
    error in either shows up as itself. Weights are compared after every step, and once more after settling.
    """
    torch.manual_seed(0)
    model, twin = Zoo().to(device), Zoo().to(device)
    twin.load_state_dict(model.state_dict())
    groups = param_groups(model, case.decoupled)
    names = {id(param): name for name, param in model.named_parameters()}
    initial = [
        (names[id(param)], param.detach().cpu().clone(), index)
        for index, group in enumerate(groups)
        for param in group["params"]
    ]
    settings = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    schedule = Schedule(
        case.update_interval,
        case.select_interval if case.topk_ratio > 0 else None,
        case.warm_up,
        case.overlap,
        case.look_ahead,
        interim=case.interim and case.topk_ratio < 1 and not (case.stage == 3 and case.offload_params),
    )
    worst = {"gradient": 0.0, "weights": 0.0, "norm": 0.0}
    with (
        pieces_of(7 if case.small_pieces else None),
        zenflow_engine(
            model,
            groups,
            zenflow_config(case),
            stage=case.stage,
            select_interval=case.select_interval,
            clip_norm=case.clip_norm,
            local_ranks=world_size,
            **stage3_settings(case.stage, case.offload_params),
        ) as (engine, zero),
    ):
        reference = ZenFlowReference(
            initial,
            [{"betas": (0.9, 0.999), "eps": 1e-8, **group} for group in settings],
            schedule,
            topk_ratio=case.topk_ratio,
            deferred_lr_scale=case.lr_scale,
            clip_norm=case.clip_norm,
            ranks=world_size,
            stage3=case.stage == 3,
            moments_dtype=case.moments_dtype,
        )
        params = {name: param for name, param in model.named_parameters() if param.requires_grad}
        for step in range(1, case.steps + 1):
            copy_weights(model, twin)
            twin.zero_grad()
            for micro in range(case.accumulate):
                use_sometimes = not (case.skips_parameter and step % 3 == 2)
                engine.set_gradient_accumulation_boundary(micro == case.accumulate - 1)
                ids, targets = batch(step, micro, rank, device)
                loss = F.cross_entropy(engine(ids, use_sometimes), targets) / case.accumulate
                spike = 100.0 if step == case.spike_step else 1.0
                loss = spike * loss
                if step == case.nan_step:
                    loss = loss * float("nan")
                engine.backward(loss)
                for other in range(world_size):
                    ids, targets = batch(step, micro, other, device)
                    share = case.accumulate * world_size
                    (spike * F.cross_entropy(twin(ids, use_sometimes), targets) / share).backward()
            if reference.schedule.plan(reference.clock + 1).reselect:  # the barrier's updates began with backward
                assert not any(zero.shard.host.ledger.held)
            grads = {name: zero.gradient(param).clone() for name, param in params.items()}
            if step != case.nan_step:
                for name, param in twin.named_parameters():
                    if param.requires_grad:
                        expected = torch.zeros_like(param) if param.grad is None else param.grad
                        worst["gradient"] = max(worst["gradient"], relative(grads[name], expected))
            if step == case.settle_before_step:
                zero.settle()
                reference.settle()
            engine.step()
            reference.step({name: grad.cpu() for name, grad in grads.items()})
            if step != case.nan_step:
                worst["norm"] = max(worst["norm"], abs(zero.shard.stats.grad_norm / reference.grad_norm - 1))
            assert zero.shard.clock == reference.clock, (zero.shard.clock, reference.clock)
            worst["weights"] = max(worst["weights"], furthest(params, reference.weights))
            for after, update_interval, select_interval in case.changes or ():
                if after == step:
                    changed = (update_interval, select_interval if case.topk_ratio > 0 else None)
                    zero.change_intervals(*changed)
                    reference.change_intervals(*changed)
                    assert zero.shard.intervals == changed
                    worst["weights"] = max(worst["weights"], furthest(params, reference.weights))
            if case.lr_changes:
                for group, own in zip(zero.param_groups, reference.groups, strict=True):
                    group["lr"] = own["lr"] = own["lr"] * (1.3 if step % 2 else 0.6)
                    group["betas"] = own["betas"] = ((0.85, 0.9, 0.8)[step % 3], own["betas"][1])  # as OneCycleLR does
        zero.settle()
        reference.settle()
        worst["weights"] = max(worst["weights"], furthest(params, reference.masters))
        assert model.head.weight is model.tokens.weight
    return worst


def stage3_settings(stage: int, offload_params: bool) -> dict[str, Any]:
    """Sub-groups of a few parameters, some parameters gathered at all times and some not."""
    if stage != 3:
        return {}
    settings: dict[str, Any] = {"sub_group_size": 60, "stage3_param_persistence_threshold": 20}
    return {**settings, "offload_param": {"device": "cpu"}} if offload_params else settings


def gathered(params: Iterable[Any]) -> AbstractContextManager[Any]:
    """Within this context parameters are whole, whatever the ZeRO stage. Every rank must enter it."""
    cut = [param for param in params if hasattr(param, "ds_id")]
    return deepspeed.zero.GatheredParameters(cut) if cut else nullcontext()


def copy_weights(model: nn.Module, twin: nn.Module) -> None:
    with gathered(model.parameters()), torch.no_grad():
        for param, copy in zip(model.parameters(), twin.parameters(), strict=True):
            copy.copy_(param)


def furthest(params: Mapping[str, Any], expected: Callable[[str], Tensor]) -> float:
    """The largest relative difference between the weights and what is expected by name."""
    with gathered(params.values()):
        return max(relative(param.detach().cpu(), expected(name)) for name, param in params.items())


@contextmanager
def pieces_of(numel: int | None) -> Iterator[None]:
    """Makes everything that is cut to fit caches so small that even this model is cut, if `numel` is given."""
    from lightning_zenflow import gradients, selected, selection

    places = [(gradients, "_CPU_BAND_NUMEL"), (selected, "_CHUNK_NUMEL"), (selection, "_CHUNK_NUMEL")]
    before = [getattr(module, name) for module, name in places]
    for (module, name), value in zip(places, before, strict=True):
        setattr(module, name, numel or value)
    try:
        yield
    finally:
        for (module, name), value in zip(places, before, strict=True):
            setattr(module, name, value)


def relative(got: Tensor, expected: Tensor) -> float:
    """How far apart they are; infinite where numbers are missing, which `max` would pass over."""
    distance, scale = (got - expected).norm().item(), expected.norm().item()
    if not math.isfinite(distance):
        return math.inf
    return distance / scale if scale else distance
