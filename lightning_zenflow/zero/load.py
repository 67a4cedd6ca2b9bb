"""Resuming: from our own checkpoint bit for bit, from one of other ranks settled, from plain DeepSpeed's with its moments.

And weights alone: for evaluation, or to begin with those of a single file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_zenflow.adamw import Hyper
from lightning_zenflow.checkpoint import directory
from lightning_zenflow.checkpoint.errors import CheckpointError
from lightning_zenflow.checkpoint.reader import StoredCheckpoint
from lightning_zenflow.checkpoint.settled import Source, fill, fill_settled
from lightning_zenflow.checkpoint.whole_file import WholeWeights
from lightning_zenflow.shard_state import ShardState
from lightning_zenflow.zero import files
from lightning_zenflow.zero.module import check_shape, load_module
from lightning_zenflow.zero.stored import StoresState


def resume(engine: Any, path: Path, *, strict: bool, weights_only: bool | None) -> Mapping[str, Any]:
    """Restores weights, optimizer and counters; returns what Lightning has stored. Every rank must call it.

    Args:
        engine: DeepSpeed's, before its first step, with our ZeRO optimizer.
        path: The checkpoint directory, verified.
        strict: Whether the module must have the very parameters and buffers of the checkpoint.
        weights_only: Whether files must hold nothing but tensors and plain types; `None` if Lightning's part need not.

    Raises:
        CheckpointError: It is damaged, holds no optimizer, or belongs to another model.
    """
    zero: StoresState = engine.optimizer
    stored = StoredCheckpoint.open(path, weights_only=weights_only)
    if not stored.has_moments:
        raise CheckpointError(
            f"`ckpt_path` must hold the optimizer to resume training, got {str(path)!r} with weights alone. Save without"
            " `save_weights_only`, or begin anew with its weights: `lightning-zenflow export` makes a file for"
            " `load_from_checkpoint`."
        )
    _check_parameters(zero, stored, path)
    load_module(engine, stored, strict=strict, without=_trained(engine))
    zero.load_groups(stored.param_groups)
    zero.load_loss_scaler(stored.loss_scaler)
    _restore(zero, stored, path)
    zero.gather_weights()
    for name, value in stored.counters.items():
        setattr(engine, name, value)
    return stored.client_state


def evaluate(engine: Any, path: Path, *, strict: bool, weights_only: bool | None) -> Mapping[str, Any]:
    """Loads the masters' weights, rounded to the model's dtype; returns what Lightning has stored. Every rank must call it.

    Args:
        engine: DeepSpeed's, without an optimizer.
        path: As for `resume`.
        strict: As for `resume`.
        weights_only: As for `resume`.

    Raises:
        CheckpointError: It is damaged, or belongs to another model.
    """
    stored = StoredCheckpoint.open(path, weights_only=weights_only)
    load_module(engine, stored, strict=strict)
    return stored.client_state


def begin_with(engine: Any, checkpoint: Mapping[str, Any], *, strict: bool) -> None:
    """Loads the weights of a checkpoint in a single file under ZeRO-3. Every rank must call it, and reads its own part.

    Where there is an optimizer, its masters are the file's values as they are, not rounded to the model's dtype, its moments
    begin at zero, and it goes on with the learning rates that the file has for as many groups.

    Args:
        engine: DeepSpeed's, before its first step.
        checkpoint: Lightning's, with the whole `state_dict`.
        strict: As for `resume`. If not, masters without a value in the file stay as they are.

    Raises:
        CheckpointError: It is of another model.
    """
    weights = WholeWeights.of(checkpoint["state_dict"], engine.module)
    if not isinstance(engine.optimizer, StoresState):
        load_module(engine, weights, strict=strict)
        return
    zero: StoresState = engine.optimizer
    for spec in zero.layout.params:
        if spec.name in weights.names:
            check_shape(spec.name, weights.shape_of(spec.name), tuple(spec.shape))
    load_module(engine, weights, strict=strict, without=_trained(engine))
    for state in checkpoint.get("optimizer_states") or ():
        groups = state.get("param_groups", ())
        if len(groups) == len(zero.optimizer.param_groups):
            zero.load_groups(groups)
    kept = {name: part for name, part in zero.own_masters() if name not in weights.names}
    zero.load_masters(partial(fill, source=_Completed(weights, kept)))
    zero.shard.load_masters(0)
    zero.gather_weights()


def _trained(engine: Any) -> set[str]:
    """Names of the parameters whose weights follow from the masters, tied ones by each of their names."""
    params = engine.module.named_parameters(remove_duplicate=False)
    return {name for name, param in params if engine.optimizer.holds(param)}


@dataclass(frozen=True)
class _Completed:
    """Weights of a file, and this rank's part of those that it lacks."""

    weights: WholeWeights
    kept: Mapping[str, Tensor]

    def read(self, name: str, kind: str, start: int = 0, numel: int | None = None) -> Tensor:
        if name in self.weights.names:
            return self.weights.read(name, kind, start, numel)
        return self.kept[name] if kind == "fp32" else torch.zeros_like(self.kept[name])


def _check_parameters(zero: StoresState, stored: StoredCheckpoint, path: Path) -> None:
    expected = {spec.name: tuple(spec.shape) for spec in zero.layout.params}
    for name, shape in expected.items():
        if name not in stored.shapes:
            raise CheckpointError(
                f"`ckpt_path` must hold every trained parameter of the module, got {str(path)!r} without `{name}`. Is it of"
                " another model, or was the parameter frozen then?"
            )
        check_shape(name, tuple(stored.shapes[name]), shape)
    unknown = sorted(set(stored.shapes) - set(expected))
    if unknown:
        raise CheckpointError(
            f"The module must train every parameter that the checkpoint {str(path)!r} has state for, got one without"
            f" `{unknown[0]}` ({len(unknown)} in all). Is it of another model, or is the parameter frozen now?"
        )


def _restore(zero: StoresState, stored: StoredCheckpoint, path: Path) -> None:
    states = _states(path, stored.world_size)
    if states is None:
        zero.load_masters(partial(fill, source=_Multiplied(stored, _divisor(stored))))
        zero.shard.load_masters(stored.step or 0, int(stored.counters.get("skipped_steps", 0)))
        rank_zero_info(f"Resumed after step {stored.step} from a checkpoint of DeepSpeed, with its moments.")
        return
    layout = zero.layout
    mine = states[layout.rank] if layout.rank < len(states) else states[0]
    if mine.layout == layout:
        zero.load_masters(partial(fill, source=stored))
        zero.shard.load_state(mine)
        zero.load_partial_step(mine)
        _follow(zero, mine)
        return
    why = (
        f"{len(states)} ranks saved it and {layout.world_size} resume"
        if len(states) != layout.world_size
        else "the parameters are cut or rounded in another way"
    )
    rank_zero_info(f"Resumed after step {mine.clock}: {why}, so gradients that the host held are applied now.")
    if any(state.partial or state.received for state in states):
        rank_zero_warn(
            "The micro-batches of a step that was not complete are dropped: their sums belong to other ranks."
        )
    groups = [Hyper.of(dict(group)) for group in stored.param_groups]
    zero.load_masters(partial(fill_settled, source=stored, states=states, groups=groups))
    zero.shard.load_masters(
        mine.clock, mine.skipped_steps, mine.schedule, mine.columns, mine.mean_squares, mine.observed_steps
    )
    _follow(zero, mine)


def _divisor(stored: StoredCheckpoint) -> int:
    """What the gradients of a plain run were divided by once too often.

    Under `DeepSpeedStrategy` Lightning divides the loss by `accumulate_grad_batches`, tells DeepSpeed of it, and DeepSpeed
    divides again. Adam does not care, until it meets gradients of another scale than its moments.
    """
    by_lightning = "pytorch-lightning_version" in stored.client_state
    return int(stored.config.get("gradient_accumulation_steps") or 1) if by_lightning else 1


@dataclass(frozen=True)
class _Multiplied:
    """A checkpoint as if its gradients had been `factor` times as large."""

    source: Source
    factor: int

    def read(self, name: str, kind: str, start: int = 0, numel: int | None = None) -> Tensor:
        return self.source.read(name, kind, start, numel).mul_(self.factor ** {"fp32": 0, "exp_avg": 1}.get(kind, 2))


def _follow(zero: StoresState, state: ShardState) -> None:
    """Settings that were changed since then hold from now on; intervals that were changed while training stay as they were."""
    wanted, stored = zero.schedule(), state.schedule
    update_interval, select_interval = zero.settings.configured
    if update_interval in ("auto", state.configured[0]):
        wanted = replace(wanted, update_interval=stored.update_interval)
    selects = wanted.select_interval is not None and stored.select_interval is not None
    if selects and select_interval in ("auto", state.configured[1]):
        wanted = replace(wanted, select_interval=stored.select_interval)
    if zero.shard.follow(wanted):
        rank_zero_info(
            "The settings are others than in the checkpoint, so gradients that the host held are applied now."
        )


def _states(path: Path, world_size: int) -> list[ShardState] | None:
    """The own state of every rank that saved; `None` for a checkpoint that is not ours."""
    folder = path / directory.TAG
    paths = [folder / files.state_name(rank) for rank in range(world_size)]
    if not paths[0].exists():
        return None
    return [ShardState.of_plain(torch.load(file, map_location="cpu", mmap=True, weights_only=True)) for file in paths]
