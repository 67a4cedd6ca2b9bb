"""FAULTS Z1: which optimizers are accepted, what they keep, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.op_builder import CPUAdamBuilder, FusedAdamBuilder
from torch import nn

from lightning_zenflow import ZenFlowAdamW


def ignore(*args: Any) -> None: ...


@pytest.fixture(autouse=True)
def _deepspeeds_kernels_need_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = SimpleNamespace(create_adam=ignore, destroy_adam=ignore, multi_tensor_adam=ignore)
    for builder in (CPUAdamBuilder, FusedAdamBuilder):
        monkeypatch.setattr(builder, "load", lambda self, *args: kernels)
    monkeypatch.setattr("deepspeed.ops.adam.fused_adam.get_accelerator", lambda: SimpleNamespace(IntTensor=ignore))


def params(count: int = 3) -> list[nn.Parameter]:
    return [nn.Parameter(torch.full((2, 2), float(index))) for index in range(count)]


def three_groups(**flags: Any) -> list[dict[str, Any]]:
    first, second, third = params()
    return [
        {"params": [first], "lr": 1e-2, "betas": (0.8, 0.9)},
        {"params": [second], "eps": 1e-5, **flags},
        {"params": [third], "weight_decay": 0.3},
    ]


ACCEPTED: dict[str, tuple[Callable[..., Any], bool]] = {
    "AdamW": (torch.optim.AdamW, True),
    "Adam": (torch.optim.Adam, False),
    "AdamW by flag": (lambda groups, **kw: torch.optim.Adam(groups, decoupled_weight_decay=True, **kw), True),
    "DeepSpeedCPUAdam": (DeepSpeedCPUAdam, True),
    "DeepSpeedCPUAdam as Adam": (lambda groups, **kw: DeepSpeedCPUAdam(groups, adamw_mode=False, **kw), False),
    "FusedAdam": (FusedAdam, True),
    "FusedAdam as Adam": (lambda groups, **kw: FusedAdam(groups, adam_w_mode=False, **kw), False),
    "ZenFlowAdamW": (ZenFlowAdamW, True),
    "ZenFlowAdamW as Adam": (lambda groups, **kw: ZenFlowAdamW(groups, decoupled_weight_decay=False, **kw), False),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_each_group_keeps_its_settings_and_its_dict(name: str) -> None:
    make, decoupled = ACCEPTED[name]
    optimizer = make(three_groups(), lr=1e-3, weight_decay=0.1)
    converted = ZenFlowAdamW.from_optimizer(optimizer)
    assert type(converted) is ZenFlowAdamW
    hypers = converted.hypers()
    assert [hyper.lr for hyper in hypers] == [1e-2, 1e-3, 1e-3]
    assert [(hyper.beta1, hyper.beta2) for hyper in hypers] == [(0.8, 0.9), (0.9, 0.999), (0.9, 0.999)]
    assert [hyper.eps for hyper in hypers] == [1e-8, 1e-5, 1e-8]
    assert [hyper.weight_decay for hyper in hypers] == [0.1, 0.1, 0.3]
    assert [hyper.decoupled for hyper in hypers] == [decoupled] * 3
    shared = zip(converted.param_groups, optimizer.param_groups, strict=True)
    assert all(ours is theirs for ours, theirs in shared)
    for group in optimizer.param_groups:
        group["lr"] = 0.5  # as a scheduler does
    assert [hyper.lr for hyper in converted.hypers()] == [0.5] * 3


def test_the_list_of_groups_is_not_shared_since_zero_drops_from_it() -> None:
    optimizer = torch.optim.AdamW(three_groups())
    converted = ZenFlowAdamW.from_optimizer(optimizer)
    del converted.param_groups[1]
    assert len(optimizer.param_groups) == 3


def test_groups_without_trainable_parameters_are_left_out() -> None:
    groups = three_groups()
    groups[1]["params"][0].requires_grad_(False)
    optimizer = torch.optim.AdamW(groups)
    converted = ZenFlowAdamW.from_optimizer(optimizer)
    assert [id(group) for group in converted.param_groups] == [id(optimizer.param_groups[index]) for index in (0, 2)]
    groups[0]["params"][0].requires_grad_(False)
    groups[2]["params"][0].requires_grad_(False)
    with pytest.raises(ValueError, match="must hold at least one trainable parameter, got none"):
        ZenFlowAdamW.from_optimizer(torch.optim.AdamW(groups))


def test_flags_that_change_speed_alone_and_rates_in_tensors_are_fine() -> None:
    optimizer = torch.optim.AdamW(params(), lr=torch.tensor(0.25), foreach=False, capturable=True)
    assert ZenFlowAdamW.from_optimizer(optimizer).hypers()[0].lr == 0.25


def test_a_scheduler_of_the_users_optimizer_does_not_miss_its_steps() -> None:
    """Warnings are errors here."""
    optimizer = torch.optim.AdamW(params(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    converted = ZenFlowAdamW.from_optimizer(optimizer)
    scheduler.step()
    assert converted.hypers()[0].lr == 0.5


@pytest.mark.parametrize("flag", ["amsgrad", "maximize", "differentiable"])
def test_a_flag_that_changes_the_maths_is_refused_by_name(flag: str) -> None:
    message = f"`{flag}` must be False in every parameter group of `AdamW`, got True in group 0"
    with pytest.raises(ValueError, match=message):
        ZenFlowAdamW.from_optimizer(torch.optim.AdamW(params(), foreach=False, **{flag: True}))  # type: ignore[arg-type]
    message = f"`{flag}` must be False in every parameter group of `Adam`, got True in group 1"
    with pytest.raises(ValueError, match=message):
        ZenFlowAdamW.from_optimizer(torch.optim.Adam(three_groups(**{flag: True}), foreach=False))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FusedAdam(params(), bias_correction=False), "`bias_correction` must be True .* of `FusedAdam`"),
        (lambda: DeepSpeedCPUAdam(params(), bias_correction=False), "`bias_correction` must be True"),
        (
            lambda: DeepSpeedCPUAdam(params(), fp32_optimizer_states=False),
            "`fp32_optimizer_states` must be True in every parameter group of `DeepSpeedCPUAdam`, got False",
        ),
    ],
)
def test_flags_of_deepspeeds_optimizers_are_refused_by_name(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ZenFlowAdamW.from_optimizer(make())


class MyAdamW(torch.optim.AdamW):
    """Its own step would never be called."""


class MyZenFlowAdamW(ZenFlowAdamW):
    """Likewise."""


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.NAdam, torch.optim.Adamax, MyAdamW, MyZenFlowAdamW])
def test_any_other_optimizer_is_named_beside_those_that_are_accepted(kind: Any) -> None:
    accepted = "torch.optim.AdamW, torch.optim.Adam, DeepSpeedCPUAdam, FusedAdam and lightning_zenflow.ZenFlowAdamW"
    with pytest.raises(ValueError, match=f"must be one of {accepted}, got .*{kind.__name__}. Return one of these"):
        ZenFlowAdamW.from_optimizer(kind(params()))


def test_an_optimizer_that_has_stepped_is_refused() -> None:
    weights = params()
    optimizer = torch.optim.AdamW(weights)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    with pytest.raises(ValueError, match="`AdamW` must be fresh, got one with state for 3 parameters"):
        ZenFlowAdamW.from_optimizer(optimizer)


@pytest.mark.parametrize("register", ["register_step_pre_hook", "register_step_post_hook"])
def test_step_hooks_are_refused_since_they_would_never_run(register: str) -> None:
    optimizer = torch.optim.AdamW(params())
    getattr(optimizer, register)(ignore)
    with pytest.raises(ValueError, match="`AdamW` must have no step hooks"):
        ZenFlowAdamW.from_optimizer(optimizer)


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("lr", -1.0, "at least 0"),
        ("lr", float("nan"), "at least 0"),
        ("betas", (1.0, 0.9), "two numbers from 0 to below 1"),
        ("eps", -1e-8, "at least 0"),
        ("weight_decay", -0.1, "at least 0"),
    ],
)
def test_settings_of_our_own_optimizer_are_checked_per_group(name: str, value: Any, rule: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}` must be {rule}, got"):
        ZenFlowAdamW([{"params": params(1)}, {"params": params(1), name: value}])


def test_our_own_optimizer_does_not_step_by_itself() -> None:
    with pytest.raises(RuntimeError, match=r"`ZenFlowAdamW.step` runs inside `ZenFlowStrategy` only"):
        ZenFlowAdamW(params()).step()
