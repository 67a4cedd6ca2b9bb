"""The module's part of a checkpoint, of any ZeRO stage: weights, buffers, and what modules store of their own."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_zenflow.checkpoint.errors import CheckpointError
from lightning_zenflow.checkpoint.reader import StoredCheckpoint


class Weights(Protocol):
    """A module's state whose weights are read in parts."""

    @property
    def module(self) -> Mapping[str, Any]: ...

    def __contains__(self, name: str) -> bool: ...

    def shape_of(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, kind: str, start: int = 0, numel: int | None = None) -> Tensor: ...


def load_module(engine: Any, stored: StoredCheckpoint, *, strict: bool, without: Container[str] = ()) -> None:
    """Loads a module's weights, those of the masters where there are any. Every rank must call it.

    Under ZeRO-3 each rank reads its own part of each parameter, and no rank has the whole model in memory.

    Args:
        engine: DeepSpeed's.
        stored: The checkpoint, of any stage.
        strict: Whether the module must have the very parameters and buffers of the checkpoint.
        without: Names of weights that need not be loaded, since their masters will be.

    Raises:
        CheckpointError: A parameter has another shape.
    """
    if engine.zero_optimization_partition_weights():
        load_parts(engine, stored, strict=strict, without=without)
    else:
        engine.module.load_state_dict(_whole(engine, stored), strict=strict)


def _whole(engine: Any, stored: StoredCheckpoint) -> dict[str, Any]:
    if stored.stage < 3:
        return stored.module
    dtype = next((param.dtype for param in engine.module.parameters()), torch.float32)
    return {**stored.module, **dict(stored.state_dict(dtype))}


def load_parts(engine: Any, stored: Weights, *, strict: bool, without: Container[str] = ()) -> None:
    """The same for a module whose parameters are cut, from whatever holds its weights. Every rank must call it.

    Raises:
        CheckpointError: A parameter has another shape.
    """
    offload = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
    offload.partition_all_parameters()
    params = dict(engine.module.named_parameters(remove_duplicate=False))
    held = {name: param for name, param in params.items() if name in stored}
    for name, param in held.items():
        check_shape(name, stored.shape_of(name), tuple(param.ds_shape))
    others = {name: value for name, value in stored.module.items() if name not in params}
    # Placeholders, as parameters are between two uses: so that missing and unexpected names are told by PyTorch.
    engine.module.load_state_dict({**others, **{name: torch.empty(0) for name in held}}, strict=strict)
    for name, param in held.items():
        if name not in without:
            _load_part(param, name, stored)


def check_shape(name: str, stored: tuple[int, ...], own: tuple[int, ...]) -> None:
    """Raises where a checkpoint has a parameter of another shape.

    Raises:
        CheckpointError: It has.
    """
    if stored != own:
        raise CheckpointError(
            f"`{name}` must have the shape of the checkpoint, {list(stored)}, got {list(own)}. Build the module with the"
            " arguments that it was saved with."
        )


def _load_part(param: Any, name: str, stored: Weights) -> None:
    part = param.ds_tensor.view(-1)
    start = param.ds_zero_partition_rank * part.numel()
    numel = min(part.numel(), param.ds_numel - start)
    if numel > 0:
        part[:numel].copy_(stored.read(name, "fp32", start, numel))
