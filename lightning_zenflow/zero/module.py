"""The module's part of a checkpoint, of any ZeRO stage: weights, buffers, and what modules store of their own."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_zenflow.checkpoint.errors import CheckpointError
from lightning_zenflow.checkpoint.reader import StoredCheckpoint

_READ_NUMEL = 1 << 24
"""Weights are read in pieces of this size: 64 MiB in fp32 at a time."""


class Weights(Protocol):
    """A module's state whose weights are read in parts."""

    @property
    def module(self) -> Mapping[str, Any]: ...

    def __contains__(self, name: str) -> bool: ...

    def shape_of(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, kind: str, start: int = 0, numel: int | None = None) -> Tensor: ...


def load_module(engine: Any, stored: Weights, *, strict: bool, without: Container[str] = ()) -> None:
    """Loads a module's weights, those of the masters where there are any. Every rank must call it.

    Weights that are stored cut, or will be, are read one parameter at a time: no rank has the whole model in memory for it.

    Args:
        engine: DeepSpeed's.
        stored: The checkpoint, of any stage.
        strict: Whether the module must have the very parameters and buffers of the checkpoint.
        without: Names of weights that need not be loaded, since their masters will be.

    Raises:
        CheckpointError: A parameter has another shape.
    """
    is_cut = engine.zero_optimization_partition_weights()
    if not is_cut and isinstance(stored, StoredCheckpoint) and stored.stage < 3:
        engine.module.load_state_dict(stored.module, strict=strict)
        return
    if is_cut:
        getattr(engine.optimizer, "parameter_offload", engine.optimizer).partition_all_parameters()
    params = dict(engine.module.named_parameters(remove_duplicate=False))
    held = {name: param for name, param in params.items() if name in stored}
    for name, param in held.items():
        check_shape(name, stored.shape_of(name), tuple(param.ds_shape if is_cut else param.shape))
    others = {name: value for name, value in stored.module.items() if name not in params}
    # Each from itself, or from a placeholder where it is one: so that missing and unexpected names are told by PyTorch.
    itself = {name: param.detach() for name, param in held.items()}
    engine.module.load_state_dict({**others, **itself}, strict=strict)
    for name, param in held.items():
        if name not in without:
            _load(param, name, stored)


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


@torch.no_grad()
def _load(param: Any, name: str, stored: Weights) -> None:
    """Fills a parameter, or this rank's part of it."""
    start, flat = 0, param.detach().view(-1) if param.is_contiguous() else None
    if hasattr(param, "ds_tensor"):
        flat = param.ds_tensor.view(-1)
        param.ds_secondary_tensor = None  # the copy that a machine's ranks keep (hpZ), of other weights
        start = param.ds_zero_partition_rank * flat.numel()
        flat = flat[: max(0, param.ds_numel - start)]
    if flat is None:  # as `channels_last` weights
        param.detach().copy_(stored.read(name, "fp32").view(param.shape))
    else:
        for offset in range(0, flat.numel(), _READ_NUMEL):
            piece = flat[offset : offset + _READ_NUMEL]
            piece.copy_(stored.read(name, "fp32", start + offset, piece.numel()))
