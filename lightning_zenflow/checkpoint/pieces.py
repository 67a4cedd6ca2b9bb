"""Where in the flat tensors of the ranks each parameter lies."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from lightning_zenflow.checkpoint.errors import CheckpointError

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Piece:
    """A part of a parameter that is contiguous in one flat tensor of one rank.

    Attributes:
        start: Its first element in the flattened parameter.
        numel: Elements of the part.
        rank: The rank whose file holds it.
        flat: Index of the flat tensor in that file.
        offset: Its first element in the flat tensor.
    """

    start: int
    numel: int
    rank: int
    flat: int
    offset: int


def zero12_pieces(
    shapes: Sequence[Shapes], paddings: Sequence[Sequence[int]] | None, numels: Sequence[Sequence[int]]
) -> dict[str, list[Piece]]:
    """The pieces under ZeRO-1 and 2: each group is flattened and cut anywhere.

    Args:
        shapes: Name and shape of the parameters of each group, in stored order.
        paddings: Elements of padding behind each parameter of each group, if the file tells.
        numels: Elements of each group's flat tensor, by rank. Padding at the end of a group may or may not be stored.

    Raises:
        CheckpointError: The flat tensors hold less than the parameters need.
    """
    pieces = {}
    for group, named in enumerate(shapes):
        ends = list(accumulate(of_rank[group] for of_rank in numels))
        padding = paddings[group] if paddings is not None else [0] * len(named)
        position = 0
        for (name, shape), pad in zip(named.items(), padding, strict=True):
            numel = math.prod(shape)
            pieces[name] = [
                Piece(start, count, rank, group, offset)
                for start, count, rank, offset in _cut(name, position, numel, ends)
            ]
            position += numel + pad
    return pieces


def zero3_pieces(shapes: Sequence[Shapes], world_size: int, numels: Sequence[int]) -> dict[str, list[Piece]]:
    """The pieces under ZeRO-3: each parameter is cut evenly, and each rank's parts are flattened.

    Args:
        shapes: Name and shape of the parameters of each sub-group, in stored order.
        world_size: Number of ranks.
        numels: Elements of each sub-group's flat tensor, the same on every rank.

    Raises:
        CheckpointError: The flat tensors hold less than the parameters need.
    """
    ends = list(accumulate(numels))
    pieces: dict[str, list[Piece]] = {}
    position = 0
    for name, shape in (item for named in shapes for item in named.items()):
        numel = math.prod(shape)
        part = -(-numel // world_size)
        pieces[name] = [
            Piece(rank * part + start, count, rank, flat, offset)
            for rank in range(world_size)
            for start, count, flat, offset in _cut(name, position, min(part, numel - rank * part), ends)
        ]
        position += part
    return pieces


def _cut(name: str, position: int, numel: int, ends: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """Cuts a range at `ends`: start in the range, elements, index of the interval, offset in the interval."""
    start = 0
    while start < numel:
        index = bisect_right(ends, position + start)
        if index == len(ends):
            raise CheckpointError(
                f"The optimizer's files must hold every parameter in `param_shapes`, got {ends[-1] if ends else 0}"
                f" elements in a group in which `{name}` ends at {position + numel}. The files are of different saves:"
                " take another checkpoint."
            )
        first = ends[index - 1] if index else 0
        count = min(numel - start, ends[index] - position - start)
        yield start, count, index, position + start - first
        start += count
