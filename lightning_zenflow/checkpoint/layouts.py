"""The ways in which DeepSpeed stores an optimizer, behind one question: copy this slice of this parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from lightning_zenflow.checkpoint.errors import CheckpointError
from lightning_zenflow.checkpoint.facts import OptimizerFacts, facts_of, masters_key, stage_of, states_of, step_of
from lightning_zenflow.checkpoint.loading import load, load_tensor
from lightning_zenflow.checkpoint.pieces import Piece, Shapes, zero3_pieces, zero12_pieces

MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = ("fp32", *MOMENTS)


class Layout(Protocol):
    """Copies a slice of a parameter's masters or moments to where it is wanted."""

    @property
    def has_moments(self) -> bool: ...

    def copy(self, name: str, kind: str, start: int, out: Tensor) -> None:
        """Fills `out` from element `start` of the flattened parameter `name`; the slice is within the parameter."""


@dataclass(frozen=True)
class Partitioned:
    """Flat tensors over the files of the ranks.

    Attributes:
        pieces: Where each parameter lies.
        flats: By kind, rank and index: the flat tensors, mapped from the files; `None` where there is none.
    """

    pieces: Mapping[str, Sequence[Piece]]
    flats: Mapping[str, Sequence[Sequence[Tensor | None]]]

    @property
    def has_moments(self) -> bool:
        return all(flat is not None for kind in MOMENTS for of_rank in self.flats[kind] for flat in of_rank)

    def copy(self, name: str, kind: str, start: int, out: Tensor) -> None:
        for piece in self.pieces[name]:
            first, last = max(start, piece.start), min(start + out.numel(), piece.start + piece.numel)
            if first >= last:
                continue
            flat = self.flats[kind][piece.rank][piece.flat]
            if flat is None:
                raise missing_kind(name, kind)
            source = flat.view(-1).narrow(0, piece.offset + first - piece.start, last - first)
            out.narrow(0, first - start, last - first).copy_(source)


@dataclass(frozen=True)
class Universal:
    """DeepSpeed's universal checkpoint: a folder for each parameter.

    Attributes:
        folder: The folder `zero`.
        weights_only: How its files are loaded.
        names: Every trained parameter.
        has_moments: Whether all of them have moments.
    """

    folder: Path
    weights_only: bool | None
    names: Sequence[str]
    has_moments: bool = field(init=False)

    def __post_init__(self) -> None:
        there = all((self.folder / name / f"{kind}.pt").is_file() for kind in MOMENTS for name in self.names)
        object.__setattr__(self, "has_moments", there)

    def copy(self, name: str, kind: str, start: int, out: Tensor) -> None:
        file = self.folder / name / f"{kind}.pt"
        if kind != "fp32" and not file.is_file():
            raise missing_kind(name, kind)
        out.copy_(load_tensor(file, self.weights_only).view(-1).narrow(0, start, out.numel()))


@dataclass(frozen=True)
class WeightsOnly:
    """No optimizer: the weights as the model uses them."""

    module: Mapping[str, Tensor]
    has_moments: bool = field(default=False, init=False)

    def copy(self, name: str, kind: str, start: int, out: Tensor) -> None:
        if kind != "fp32":
            raise missing_kind(name, kind)
        out.copy_(self.module[name].reshape(-1).narrow(0, start, out.numel()))


def missing_kind(name: str, kind: str) -> CheckpointError:
    """The error for moments that are not stored."""
    return CheckpointError(
        f"`kind` must be one that is stored, got '{kind}' of `{name}`. Either it is not trained, or the checkpoint was"
        " saved before the first step or without the optimizer: read 'fp32' alone."
    )


def partitioned(shapes: Sequence[Shapes], files: Sequence[Mapping[str, Any]]) -> tuple[Partitioned, OptimizerFacts]:
    """The layout of rank files, and what they say about the optimizer.

    Args:
        shapes: `param_shapes` of the model file: by group, by sub-group under ZeRO-3.
        files: `optimizer_state_dict` of each rank's file.

    Raises:
        CheckpointError: Files and shapes do not belong together.
    """
    stage = stage_of(files[0])
    masters = [file[masters_key(file)] for file in files]
    states = [states_of(file) for file in files]
    numels = [[flat.numel() for flat in of_rank] for of_rank in masters]
    found = {len(of_rank) for of_rank in (*numels, *states)}
    if found != {len(shapes)}:
        raise CheckpointError(
            f"The optimizer's files must hold {len(shapes)} groups, as `param_shapes` of the model's file does, got"
            f" {', '.join(map(str, sorted(found)))}. The files are of different saves: take another checkpoint."
        )
    if stage == 3:
        if any(of_rank != numels[0] for of_rank in numels):
            raise CheckpointError(
                f"The optimizer's files of ZeRO-3 must hold equal parts, got {numels[0]} elements and others. The files"
                " are of different saves: take another checkpoint."
            )
        pieces = zero3_pieces(shapes, len(files), numels[0])
    else:
        pieces = zero12_pieces(shapes, files[0].get("param_alignment_paddings"), numels)
    flats: dict[str, Sequence[Sequence[Tensor | None]]] = {"fp32": masters}
    for kind in MOMENTS:
        flats[kind] = [[_moment(state, kind) for state in of_rank] for of_rank in states]
    layout = Partitioned(pieces, flats)
    steps = {step_of(of_rank, file) for of_rank, file in zip(states, files, strict=True)}
    if len(steps) > 1:
        raise CheckpointError(
            f"The optimizer's files must all be of one step, got {sorted(map(str, steps))}. A save was cut off over an"
            " older one: take another checkpoint."
        )
    step = steps.pop() if layout.has_moments else None
    return layout, facts_of(files[0], shapes, step)


def _moment(state: Mapping[str, Any], kind: str) -> Tensor | None:
    moment = state.get(kind)
    return moment if isinstance(moment, Tensor) else None


def universal(
    folder: Path, weights_only: bool | None, shapes: Sequence[Shapes], file: Mapping[str, Any]
) -> tuple[Universal, OptimizerFacts]:
    """The layout of a universal checkpoint, and what its `optimizer_state.pt` says.

    Args:
        folder: The folder `zero`.
        weights_only: As for `loading.load`.
        shapes: `param_shapes` of the model's file.
        file: What `optimizer_state.pt` holds.

    Raises:
        CheckpointError: A parameter is missing, or of another size than in the model's file.
    """
    names = [name for named in shapes for name in named]
    missing = [name for name in names if not (folder / name / "fp32.pt").is_file()]
    if missing:
        raise CheckpointError(
            f"'{folder}' must hold `fp32.pt` of {len(names)} parameters, got {len(names) - len(missing)}:"
            f" `{missing[0]}` is missing. Run `ds_to_universal.py` again."
        )
    layout = Universal(folder, weights_only, names)
    stage = stage_of(file)
    # ZeRO-3 keeps the optimizer's state in the file, the others write the step beside each parameter.
    states = states_of(file) if stage == 3 else [_universal_state(folder / name, weights_only) for name in names[:1]]
    return layout, facts_of(file, shapes, step_of(states, file) if layout.has_moments else None)


def _universal_state(folder: Path, weights_only: bool | None) -> Mapping[str, Any]:
    step = folder / "step.pt"
    return {"step": load(step, weights_only)} if step.is_file() else {}
