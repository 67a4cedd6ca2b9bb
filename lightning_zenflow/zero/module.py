"""What a checkpoint holds for the module itself: weights, buffers, and what modules store of their own."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch

from lightning_zenflow.checkpoint.errors import CheckpointError
from lightning_zenflow.checkpoint.reader import StoredCheckpoint


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
        _load_parts(engine, stored, strict, without)
    else:
        engine.module.load_state_dict(_whole(engine, stored), strict=strict)


def _whole(engine: Any, stored: StoredCheckpoint) -> dict[str, Any]:
    if stored.stage < 3:
        return stored.module
    dtype = next((param.dtype for param in engine.module.parameters()), torch.float32)
    return {**stored.module, **dict(stored.state_dict(dtype))}


def _load_parts(engine: Any, stored: StoredCheckpoint, strict: bool, without: Container[str]) -> None:
    offload = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
    offload.partition_all_parameters()
    params = dict(engine.module.named_parameters(remove_duplicate=False))
    held = {name: param for name, param in params.items() if name in stored}
    others = {name: value for name, value in stored.module.items() if name not in params}
    # Placeholders, as parameters are between two uses: so that missing and unexpected names are told by PyTorch.
    engine.module.load_state_dict({**others, **{name: torch.empty(0) for name in held}}, strict=strict)
    for name, param in held.items():
        if name not in without:
            _load_part(param, name, stored)


def _load_part(param: Any, name: str, stored: StoredCheckpoint) -> None:
    shape = stored.shape_of(name)
    if shape != tuple(param.ds_shape):
        raise CheckpointError(
            f"`{name}` must have the shape of the checkpoint, {list(shape)}, got {list(param.ds_shape)}. Build the module"
            " with the arguments that it was saved with."
        )
    part = param.ds_tensor.view(-1)
    start = param.ds_zero_partition_rank * part.numel()
    numel = min(part.numel(), param.ds_numel - start)
    if numel > 0:
        part[:numel].copy_(stored.read(name, "fp32", start, numel))
