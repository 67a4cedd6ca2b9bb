"""Where the selected elements of a shard are packed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_zenflow.rounding import rounded_columns
from lightning_zenflow.shards import Piece, Segment, ShardTable

View = Callable[[Piece], Tensor]
"""Gives the flat elements of a piece in some tensor of the shard."""


@dataclass(frozen=True)
class Slot:
    """Where the selected columns of one piece are packed: `[rows, width]` from `start` on."""

    piece: Piece
    columns: Tensor | None  # int64 within the piece; None stands for all of them
    start: int
    width: int

    @property
    def stop(self) -> int:
        return self.start + self.piece.rows * self.width

    @property
    def columns_on_cpu(self) -> Tensor:
        """The selected columns within the piece, int64 on CPU, ascending; listed also where that is all of them."""
        return torch.arange(self.piece.width) if self.columns is None else self.columns.cpu()

    def rows_of(self, packed: Tensor) -> Tensor:
        """The packed columns as a matrix, `[rows, width]`."""
        return packed[self.start : self.stop].view(self.piece.rows, self.width)

    def pack(self, flat: Tensor, packed: Tensor, first_row: int = 0) -> None:
        """Copies the selected columns of `flat`, which are rows of the piece, into their place in `packed`."""
        matrix = flat.view(-1, self.piece.width)
        into = self.rows_of(packed)[first_row : first_row + matrix.size(0)]
        if self.columns is None:
            into.copy_(matrix)
        else:
            torch.gather(_bits(matrix), 1, self.columns.expand(into.shape), out=_bits(into))

    def unpack(self, packed: Tensor, flat: Tensor) -> None:
        """Writes the packed values back into the selected columns of `flat`."""
        values = self.rows_of(packed)
        matrix = flat.view(self.piece.rows, self.piece.width)
        if self.columns is None:
            matrix.copy_(values)
        else:
            _bits(matrix).scatter_(1, self.columns.expand(values.shape), _bits(values))


def _bits(tensor: Tensor) -> Tensor:
    """The same memory as integers: moving columns is twice as fast on CPU than with 16-bit floats, bit for bit the same."""
    return tensor.view(torch.int16 if tensor.itemsize == 2 else torch.int32)


class SelectedLayout:
    """Where the selected elements of one rank's shard are packed."""

    def __init__(self, table: ShardTable, columns: Mapping[int, Tensor], device: torch.device) -> None:
        """Packs the selected columns (by parameter index, ascending, int64) and all vectors of `table`."""
        self.numel = 0
        self.group_ends = [0] * len(table.group_ends)
        self._slots: dict[int, list[Slot]] = {}
        for segment in table.segments:
            slots = self._slots[segment.param] = []
            for piece in segment.pieces:
                chosen = _columns_of(segment, piece, columns.get(segment.param), device)
                width = piece.width if chosen is None else chosen.numel()
                if width:
                    slots.append(Slot(piece, chosen, self.numel, width))
                    self.numel = slots[-1].stop
            self.group_ends[segment.spec.group :] = [self.numel] * (len(self.group_ends) - segment.spec.group)

    def slots(self, segment: Segment) -> Sequence[Slot]:
        return self._slots[segment.param]

    def pack(self, view: View, packed: Tensor) -> None:
        """Collects the selected elements of the shard tensor behind `view` into `packed` `[numel]`."""
        for slots in self._slots.values():
            for slot in slots:
                slot.pack(view(slot.piece), packed)

    def packed_from(self, flat: Tensor) -> Tensor:
        """The selected elements of `flat` `[shard numel]`, as new memory `[numel]` on CPU in its dtype."""
        packed = torch.empty(self.numel, dtype=flat.dtype)
        self.pack(piece_view(flat), packed)
        return packed

    def unpack(self, packed: Tensor, view: View) -> None:
        """Writes `packed` `[numel]` to the selected elements of the shard tensor behind `view`."""
        for slots in self._slots.values():
            for slot in slots:
                slot.unpack(packed, view(slot.piece))

    def rounded(self, packed: Tensor, clock: int, moment: int) -> Tensor:
        """A packed moment, fp32 `[numel]` on CPU, in bf16, as the host rounds its own at this clock."""
        into = torch.empty_like(packed, dtype=torch.bfloat16)
        for slots in self._slots.values():
            for slot in slots:
                values = rounded_columns(slot.rows_of(packed), slot.piece, slot.columns_on_cpu, clock, moment)
                slot.rows_of(into).copy_(values)
        return into

    def to(self, device: torch.device) -> SelectedLayout:
        """The same layout with its column indices on `device`, for tensors that live there."""
        twin = object.__new__(SelectedLayout)
        twin.numel, twin.group_ends = self.numel, self.group_ends
        twin._slots = {
            param: [Slot(s.piece, None if s.columns is None else s.columns.to(device), s.start, s.width) for s in slots]
            for param, slots in self._slots.items()
        }
        return twin


def _columns_of(segment: Segment, piece: Piece, columns: Tensor | None, device: torch.device) -> Tensor | None:
    """The selected columns that fall into `piece`, counted from its left edge; None if the whole piece is selected."""
    if not segment.spec.is_matrix:
        return None
    if columns is None:
        return torch.empty(0, dtype=torch.int64, device=device)
    inside = columns[(columns >= piece.column) & (columns < piece.column + piece.width)] - piece.column
    return None if inside.numel() == piece.width else inside.to(device)


def piece_view(flat: Tensor) -> View:
    """The elements of a piece in a tensor of the whole shard."""
    return lambda piece: flat[piece.start : piece.stop]
