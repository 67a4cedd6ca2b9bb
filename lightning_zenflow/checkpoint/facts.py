"""What the optimizer's files say besides tensors: stage, ranks, step, groups and loss scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_zenflow.checkpoint.errors import CheckpointError
from lightning_zenflow.checkpoint.pieces import Shapes


@dataclass(frozen=True)
class OptimizerFacts:
    """What is stored once for the whole optimizer.

    Attributes:
        stage: ZeRO stage.
        world_size: Ranks that wrote it.
        step: Steps that Adam has done, the largest of all groups; `None` without moments.
        groups: Names of the trained parameters of each group, in stored order.
        param_groups: Settings of each group; empty dicts where the file has none.
        loss_scaler: Numbers of the loss scaler; `None` for a scale that is always 1.
    """

    stage: int
    world_size: int
    step: int | None
    groups: list[list[str]]
    param_groups: list[dict[str, Any]]
    loss_scaler: dict[str, Any] | None


def facts_of(file: Mapping[str, Any], shapes: Sequence[Shapes], step: int | None) -> OptimizerFacts:
    """What one rank's `optimizer_state_dict`, or a universal checkpoint's `optimizer_state.pt`, tells of all ranks."""
    stage = stage_of(file)
    stored = _base(file, stage)
    param_groups = stored.get("param_groups") or file.get("param_groups") or [{} for _ in shapes]
    names = [list(named) for named in shapes]
    if stage == 3 and all("params" in group for group in param_groups):
        # Sub-groups are numbered on through the groups of the user.
        names = [[name for flat in group["params"] for name in names[flat]] for group in param_groups]
    plain = [{key: _plain(value) for key, value in group.items() if key != "params"} for group in param_groups]
    return OptimizerFacts(stage, world_size_of(file), step, names, plain, _loss_scaler(file.get("loss_scaler")))


def stage_of(file: Mapping[str, Any]) -> int:
    """ZeRO stage; DeepSpeed's optimizer for bf16 with fp32 gradients is stage 1 and does not say so."""
    return int(file.get("zero_stage", 1))


def masters_key(file: Mapping[str, Any]) -> str:
    """Under which key one rank's `optimizer_state_dict` has the fp32 masters."""
    return "fp32_flat_groups" if stage_of(file) == 3 else "single_partition_of_fp32_groups"


def world_size_of(file: Mapping[str, Any]) -> int:
    """Number of ranks over which the parameters are cut.

    Raises:
        CheckpointError: It differs between groups, as with mixtures of experts.
    """
    count = file["partition_count"]
    counts = set(count) if isinstance(count, list | tuple) else {count}
    if len(counts) != 1:
        raise CheckpointError(
            f"`partition_count` must be the same for all groups, got {count}. Mixtures of experts are not supported."
        )
    return int(counts.pop())


def step_of(states: Sequence[Mapping[str, Any]], file: Mapping[str, Any]) -> int | None:
    """Adam's step from wherever torch, CPUAdam, FusedAdam and elastic checkpoints keep it, the largest of all groups."""
    base = _base(file, stage_of(file))
    found = [state.get("step") for state in states]
    found += [group.get("step") for group in base.get("param_groups") or file.get("param_groups") or []]
    found.append(file.get("base_optimizer_state_step"))
    return max((int(step) for step in found if step is not None), default=None)


def _base(file: Mapping[str, Any], stage: int) -> Mapping[str, Any]:
    """The `state_dict` of the optimizer inside; empty for elastic and universal checkpoints, which have none."""
    base = file.get("optimizer_state_dict" if stage == 3 else "base_optimizer_state")
    return base if isinstance(base, Mapping) else {}


def states_of(file: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The optimizer's state of each flat tensor; empty dicts before the first step."""
    if isinstance(elastic := file.get("base_optimizer_state"), list | tuple):
        return list(elastic)
    base = _base(file, stage_of(file))
    states = base.get("state", {})
    return [states.get(param, {}) for group in base.get("param_groups", ()) for param in group["params"]]


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _loss_scaler(scaler: object) -> dict[str, Any] | None:
    if scaler is None:
        return None
    numbers = {key: value for key, value in vars(scaler).items() if isinstance(value, bool | int | float)}
    return numbers if numbers.get("dynamic") or numbers.get("cur_scale", 1) != 1 else None
