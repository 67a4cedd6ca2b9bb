"""What the model's file of a checkpoint holds: weights, buffers, shapes, and what Lightning and the user put there."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_zenflow.checkpoint.errors import CheckpointError
from lightning_zenflow.checkpoint.files import CheckpointFiles
from lightning_zenflow.checkpoint.loading import load_dict
from lightning_zenflow.checkpoint.pieces import Shapes

# Everything that DeepSpeed's engine writes beside the client state.
_DEEPSPEED_KEYS = frozenset(
    (
        *("module", "buffer_names", "param_shapes", "shared_params", "frozen_param_shapes", "frozen_param_fragments"),
        *("optimizer", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names"),
        *("global_steps", "global_samples", "skipped_steps", "dp_world_size", "mp_world_size"),
        *("checkpoint_parallel_dimensions", "ds_config", "ds_version", "universal_checkpoint_info"),
        *("ds_autoep_layers", "autoep_layers"),
    )
)
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


class FrozenParts(Mapping[str, Tensor]):
    """Frozen parameters under ZeRO-3, put together from the parts of the ranks when they are asked for."""

    def __init__(self, shapes: Shapes, parts: Sequence[Mapping[str, Tensor]]) -> None:
        self._shapes = shapes
        self._parts = parts

    def __getitem__(self, name: str) -> Tensor:
        shape = self._shapes[name]
        parts = [of_rank[name].view(-1) for of_rank in self._parts]
        whole = torch.cat(parts) if len(parts) > 1 else parts[0]
        return whole[: math.prod(shape)].view(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


@dataclass(frozen=True)
class ModelFile:
    """The parts of the model's file.

    Attributes:
        stage: ZeRO stage, as far as this file tells.
        world_size: Number of ranks.
        groups: Name and shape of the trained parameters, by group; by sub-group under ZeRO-3.
        shared: Tied names, and the name under which their parameter is stored.
        frozen: Parameters that are not trained.
        buffers: Persistent buffers.
        module: The module's `state_dict`; under ZeRO-3 without the placeholders of trained and frozen parameters.
        order: Names in the order of the module's `state_dict`.
        client_state: Everything that is not DeepSpeed's.
        counters: DeepSpeed's counts of steps and samples.
        written_by: Version of DeepSpeed.
        config: DeepSpeed's config of the run; empty if it is not stored.
    """

    stage: int
    world_size: int
    groups: list[dict[str, tuple[int, ...]]]
    shared: dict[str, str]
    frozen: Mapping[str, Tensor]
    buffers: dict[str, Tensor]
    module: dict[str, Any]
    order: list[str]
    client_state: dict[str, Any]
    counters: dict[str, int]
    written_by: str | None
    config: dict[str, Any]

    @classmethod
    def load(cls, files: CheckpointFiles, stage: int | None, weights_only: bool | None) -> ModelFile:
        """Loads the file of rank 0, and those of the others where they hold parts of frozen parameters.

        Args:
            files: The checkpoint's files.
            stage: The stage that the optimizer's files tell; `None` without them.
            weights_only: As for `loading.load`; this is the file that may hold objects of the user.

        Raises:
            CheckpointError: A file is missing or unreadable, or is not of ZeRO.
        """
        zero3 = stage == 3 or (stage is None and files.model is None)
        path = files.zero3_models.get(0) if zero3 else files.model
        if path is None:
            expected = "zero_pp_rank_0_mp_rank_00_model_states.pt" if zero3 else "mp_rank_00_model_states.pt"
            raise CheckpointError(
                f"'{files.folder}' must hold `{expected}`, which it does not. Copy all files that the ranks wrote, from"
                " every machine, into one folder."
            )
        stored = load_dict(path, weights_only, holds_user_objects=True)
        weights, trained = stored.get("module"), stored.get("param_shapes")
        if not isinstance(weights, Mapping) or "buffer_names" not in stored:
            raise CheckpointError(
                f"`{path.name}` in '{files.folder}' must be the model's file of a DeepSpeed engine, got the keys"
                f" {', '.join(map(str, list(stored)[:8]))}. Pass a checkpoint of ZeRO stage 1, 2 or 3."
            )
        if trained is None and (stage is not None or stored.get("optimizer") is not None):
            raise CheckpointError(
                f"The checkpoint must be of ZeRO stage 1, 2 or 3, got one without ZeRO in '{files.folder}'. Its weights"
                f" are under 'module' in `{path.name}`: load them with `torch.load` and `load_state_dict`."
            )
        # What modules store by `get_extra_state` may be a tensor, but is neither parameter nor buffer.
        tensors = {
            name: value
            for name, value in weights.items()
            if isinstance(value, Tensor) and name.rpartition(".")[2] != "_extra_state"
        }
        buffers = {name: tensors[name] for name in stored["buffer_names"] if name in tensors}
        if trained is None:  # saved by an engine that only evaluated
            shared = _of_one_storage(tensors)
            others = {*buffers, *shared}
            trained = [{name: tensor.shape for name, tensor in tensors.items() if name not in others}]
        else:
            shared = _truly_shared(stored.get("shared_params") or {}, tensors)
        groups = [{name: tuple(shape) for name, shape in group.items()} for group in trained]
        known = {*buffers, *shared, *(name for group in groups for name in group)}
        rest = {name: tensor for name, tensor in tensors.items() if name not in known}
        frozen = _frozen_parts(files, stored, weights_only) if zero3 else rest
        placeholders = (tensors.keys() - buffers.keys()) if zero3 else set()
        return cls(
            stage=stage or _configured_stage(stored, zero3),
            world_size=int(stored.get("dp_world_size") or 1),
            groups=groups,
            shared=shared,
            frozen=frozen,
            buffers=buffers,
            module={name: value for name, value in weights.items() if name not in placeholders},
            order=list(weights),
            client_state={key: value for key, value in stored.items() if key not in _DEEPSPEED_KEYS},
            counters={key: int(stored.get(key) or 0) for key in _COUNTERS},
            written_by=stored.get("ds_version"),
            config=dict(stored.get("ds_config") or {}),
        )


def _truly_shared(shared: Mapping[str, str], tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Without the empty parameters, which DeepSpeed takes for one because none of them has an address."""
    return {
        tied: name
        for tied, name in shared.items()
        if tied not in tensors or name not in tensors or tensors[tied].shape == tensors[name].shape
    }


def _of_one_storage(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Tied names where DeepSpeed names none: `torch.save` stores them once."""
    first: dict[Any, str] = {}
    names = (
        (name, (tensor.data_ptr(), tensor.shape, tensor.stride())) for name, tensor in tensors.items() if tensor.numel()
    )
    return {name: first[place] for name, place in names if first.setdefault(place, name) != name}


def _frozen_parts(files: CheckpointFiles, first: Mapping[str, Any], weights_only: bool | None) -> FrozenParts:
    shapes = {name: tuple(shape) for name, shape in (first.get("frozen_param_shapes") or {}).items()}
    if not shapes:
        return FrozenParts({}, [])
    world_size = int(first.get("dp_world_size") or 1)
    missing = [rank for rank in range(world_size) if rank not in files.zero3_models]
    if missing:
        raise CheckpointError(
            f"'{files.folder}' must hold {world_size} model files, one for each rank, got {len(files.zero3_models)}:"
            f" `zero_pp_rank_{missing[0]}_mp_rank_00_model_states.pt` is missing. Copy all files that the ranks wrote,"
            " from every machine, into one folder."
        )
    others = [
        load_dict(files.zero3_models[rank], weights_only, holds_user_objects=True) for rank in range(1, world_size)
    ]
    return FrozenParts(shapes, [stored["frozen_param_fragments"] for stored in (first, *others)])


def _configured_stage(stored: Mapping[str, Any], zero3: bool) -> int:
    config = stored.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
    stage = zero.get("stage") if isinstance(zero, Mapping) else None
    if stage in (1, 2, 3):
        return int(stage)
    return 3 if zero3 else 1 if stored.get("frozen_param_shapes") is None else 2
