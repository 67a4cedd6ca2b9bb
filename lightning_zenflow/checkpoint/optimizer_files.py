"""The optimizer's files of a checkpoint: all there, of one save, and laid out in one of DeepSpeed's ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_zenflow.checkpoint.errors import CheckpointError
from lightning_zenflow.checkpoint.facts import OptimizerFacts, masters_key, stage_of, world_size_of
from lightning_zenflow.checkpoint.files import CheckpointFiles
from lightning_zenflow.checkpoint.layouts import Layout, WeightsOnly, partitioned, universal
from lightning_zenflow.checkpoint.loading import load_dict
from lightning_zenflow.checkpoint.model_file import ModelFile


def optimizer_states(files: CheckpointFiles, weights_only: bool | None) -> list[dict[str, Any]]:
    """`optimizer_state_dict` of every rank's file; of a universal checkpoint its one; none without the optimizer.

    Raises:
        CheckpointError: A file is missing, unreadable, not of ZeRO or of another save than the rest.
    """
    if files.universal is not None:
        file = files.universal / "optimizer_state.pt"
        return [_of_zero(file, load_dict(file, weights_only))]
    if not files.optimizer:
        return []
    states = {}
    for rank, file in sorted(files.optimizer.items()):
        states[rank] = _of_zero(file, load_dict(file, weights_only).get("optimizer_state_dict"), masters=True)
    kinds = {(stage_of(stored), world_size_of(stored)) for stored in states.values()}
    world_size = max(world_size for _, world_size in kinds)
    missing = [rank for rank in range(world_size) if rank not in states]
    if missing:
        prefix = next(iter(files.optimizer.values())).name.split("zero_pp_rank_")[0]
        raise CheckpointError(
            f"'{files.folder}' must hold {world_size} optimizer files, one for each rank, got {len(states)}:"
            f" `{prefix}zero_pp_rank_{missing[0]}_mp_rank_00_optim_states.pt` is missing. Copy the files that the ranks"
            " wrote, from every machine, into one folder, or take another checkpoint."
        )
    if len(kinds) > 1 or len(states) > world_size:
        raise CheckpointError(
            f"'{files.folder}' must hold {world_size} optimizer files of one save, got {len(states)} with"
            f" {' and '.join(f'stage {stage} on {ranks} ranks' for stage, ranks in sorted(kinds))}. An older save was"
            " written over: delete its files or take another checkpoint."
        )
    return list(states.values())


def layout_of(
    files: CheckpointFiles, model: ModelFile, stored: list[dict[str, Any]], weights_only: bool | None
) -> tuple[Layout, OptimizerFacts]:
    """How the masters and moments lie in the files, and what else the files say.

    Args:
        files: The checkpoint's files.
        model: Its model's file.
        stored: What `optimizer_states` returned.
        weights_only: As for `loading.load`.

    Raises:
        CheckpointError: The parts do not belong together, or there are no weights.
    """
    if files.universal is not None:
        return universal(files.universal, weights_only, model.groups, stored[0])
    if stored:
        return partitioned(model.groups, stored)
    if any(name not in model.module for group in model.groups for name in group):
        raise CheckpointError(
            f"'{files.folder}' must hold the optimizer's files, got none of them. Under ZeRO-3 no other file has the"
            " weights: copy the files `*_optim_states.pt` that the ranks wrote."
        )
    names = [list(group) for group in model.groups]
    facts = OptimizerFacts(model.stage, model.world_size, None, names, [{} for _ in names], None)
    return WeightsOnly(model.module), facts


def _of_zero(file: Path, stored: Any, masters: bool = False) -> dict[str, Any]:
    if isinstance(stored, dict) and "partition_count" in stored and (not masters or masters_key(stored) in stored):
        return stored
    raise CheckpointError(
        f"`{file.name}` in '{file.parent}' must be the optimizer's file of ZeRO stage 1, 2 or 3, got another. Pass a"
        " checkpoint of ZeRO."
    )
