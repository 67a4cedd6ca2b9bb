"""What a rank owns under ZeRO: which piece of which parameter lies where in its shard.

A *shard* is the concatenation, over parameter groups, of the rank's partition of the group, padding included. Stages 1
and 2 flatten a group and cut that; stage 3 cuts each parameter and puts a rank's parts one behind the other. All
positions are elements in that one coordinate system. Every rank can work out the table of every other rank, so that
nothing about layouts is ever communicated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class ParamSpec:
    """One trainable parameter and its place in its flattened group.

    Attributes:
        name: Qualified name in the module.
        shape: Its shape.
        group: Index of its parameter group.
        offset: Its first element in the flattened group, which is cut into equal partitions over the ranks. Under ZeRO-3,
            where its part begins in every rank's partition of the group.
    """

    name: str
    shape: tuple[int, ...]
    group: int
    offset: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """Two or more dimensions: seen as `[shape[0], prod(shape[1:])]`. Everything else is a vector."""
        return len(self.shape) >= 2

    @property
    def cols(self) -> int:
        """Columns of the matrix; a vector counts as a single row."""
        return math.prod(self.shape[1:]) if self.is_matrix else self.numel


@dataclass(frozen=True)
class Piece:
    """A rectangle of a parameter that is contiguous in the shard.

    Attributes:
        start: Its first element in the shard.
        rows: Rows of the rectangle.
        width: Columns of the rectangle; more than one row only at full width.
        column: Column of the parameter at which the rectangle begins.
        group: Index of the parameter group.
    """

    start: int
    rows: int
    width: int
    column: int
    group: int

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.width


@dataclass(frozen=True)
class Segment:
    """The part of one parameter that lies in a rank's shard.

    Attributes:
        param: Index of the parameter in `ShardTable.params`.
        spec: The parameter.
        param_start: First element of the part, in the flattened parameter.
        start: First element of the part, in the shard.
        numel: Elements of the part.
    """

    param: int
    spec: ParamSpec
    param_start: int
    start: int
    numel: int

    @property
    def stop(self) -> int:
        return self.start + self.numel

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """The part as rectangles: a partition boundary may cut a row at either end, whole rows lie between."""
        cols, pieces = self.spec.cols, []
        at, end = self.param_start, self.param_start + self.numel
        while at < end:
            column = at % cols
            whole_rows = (end - at) // cols
            if column == 0 and whole_rows > 0:
                rows, width = whole_rows, cols
            else:
                rows, width = 1, min(cols - column, end - at)
            pieces.append(Piece(self.start + at - self.param_start, rows, width, column, self.spec.group))
            at += rows * width
        return tuple(pieces)


@dataclass(frozen=True)
class ShardTable:
    """Everything one rank owns.

    Attributes:
        params: All parameters of the model that are trained, in group order; the same on every rank.
        segments: This rank's parts of them, in shard order.
        group_ends: End of each group's partition in the shard, padding included.
    """

    params: tuple[ParamSpec, ...]
    segments: tuple[Segment, ...]
    group_ends: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements of the shard, padding included."""
        return self.group_ends[-1]

    def by_index(self, by_name: Mapping[str, T]) -> dict[int, T]:
        """What is known by parameter name, by index in `params`."""
        return {index: by_name[spec.name] for index, spec in enumerate(self.params) if spec.name in by_name}

    def group_start(self, group: int) -> int:
        return self.group_ends[group - 1] if group else 0

    @classmethod
    def build(cls, params: Sequence[ParamSpec], partition_numels: Sequence[int], rank: int) -> ShardTable:
        """The table of `rank` under ZeRO-1 and 2, which cut flattened groups.

        Args:
            params: All parameters, ordered by group and offset.
            partition_numels: Elements of one rank's partition of each group, padding included.
            rank: Whose table to build.
        """
        parts = []
        for spec in params:
            part_start = rank * partition_numels[spec.group]
            first = max(spec.offset, part_start)
            last = min(spec.offset + spec.numel, part_start + partition_numels[spec.group])
            parts.append((first - spec.offset, last - spec.offset, first - part_start))
        return cls._of_parts(params, partition_numels, parts)

    @classmethod
    def build_stage3(
        cls,
        params: Sequence[ParamSpec],
        partition_numels: Sequence[int],
        rank: int,
        world_size: int,
    ) -> ShardTable:
        """The table of `rank` under ZeRO-3, which cuts each parameter into `world_size` parts of `part_numel`.

        A parameter of less elements than ranks has no part on the last ones.
        """
        parts = []
        for spec in params:
            numel = part_numel(spec.numel, world_size)
            parts.append((rank * numel, min((rank + 1) * numel, spec.numel), spec.offset))
        return cls._of_parts(params, partition_numels, parts)

    @classmethod
    def _of_parts(
        cls,
        params: Sequence[ParamSpec],
        partition_numels: Sequence[int],
        parts: Sequence[tuple[int, int, int]],
    ) -> ShardTable:
        """From the first element, the end, and the place in the group's partition, of each parameter's part."""
        starts = [sum(partition_numels[:group]) for group in range(len(partition_numels))]
        segments = [
            Segment(index, spec, first, starts[spec.group] + offset, last - first)
            for index, (spec, (first, last, offset)) in enumerate(zip(params, parts, strict=True))
            if first < last
        ]
        ends = tuple(start + numel for start, numel in zip(starts, partition_numels, strict=True))
        return cls(tuple(params), tuple(segments), ends)


def part_numel(numel: int, world_size: int) -> int:
    """Elements of a parameter that each rank holds under ZeRO-3, padding included."""
    return -(-numel // world_size)
