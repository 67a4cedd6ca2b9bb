"""The device side: fp32 weights and moments of the selected columns and of all vectors.

Each rank keeps only the selected elements of its own shard, packed without gaps, group after group. Between selections
the host's copy of these elements is a shadow that nobody reads; when columns change, everything goes home and the new
selection is fetched, so that a column's moments travel with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_zenflow.adamw import Hyper, adamw_
from lightning_zenflow.shards import Piece, Segment, ShardTable

# fp32 gradients exist only in chunks, which saves 4 bytes per selected element; on CPU a chunk stays in cache.
_CHUNK_NUMEL = 1 << 18
_DEVICE_CHUNK_NUMEL = 1 << 24

View = Callable[[Piece], Tensor]
"""Gives the flat elements of a piece in some tensor of the shard."""


@dataclass(frozen=True)
class _Slot:
    """Where the selected columns of one piece are packed: `[rows, width]` from `start` on."""

    piece: Piece
    columns: Tensor | None  # int64 within the piece; None stands for all of them
    start: int
    width: int

    @property
    def stop(self) -> int:
        return self.start + self.piece.rows * self.width

    def pack(self, flat: Tensor, packed: Tensor) -> None:
        """Copies the selected columns of `flat` (the whole piece) into their place in `packed`."""
        into = packed[self.start : self.stop].view(self.piece.rows, self.width)
        matrix = flat.view(self.piece.rows, self.piece.width)
        if self.columns is None:
            into.copy_(matrix)
        else:
            torch.gather(_bits(matrix), 1, self.columns.expand(into.shape), out=_bits(into))

    def unpack(self, packed: Tensor, flat: Tensor) -> None:
        """Writes the packed values back into the selected columns of `flat`."""
        values = packed[self.start : self.stop].view(self.piece.rows, self.width)
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
        self._slots: dict[int, list[_Slot]] = {}
        for segment in table.segments:
            slots = self._slots[segment.param] = []
            for piece in segment.pieces:
                chosen = _columns_of(segment, piece, columns.get(segment.param), device)
                width = piece.width if chosen is None else chosen.numel()
                if width:
                    slots.append(_Slot(piece, chosen, self.numel, width))
                    self.numel = slots[-1].stop
            self.group_ends[segment.spec.group :] = [self.numel] * (len(self.group_ends) - segment.spec.group)

    def slots(self, segment: Segment) -> Sequence[_Slot]:
        return self._slots[segment.param]

    def pack(self, view: View, packed: Tensor) -> None:
        """Collects the selected elements of the shard tensor behind `view` into `packed` `[numel]`."""
        for slots in self._slots.values():
            for slot in slots:
                slot.pack(view(slot.piece), packed)

    def unpack(self, packed: Tensor, view: View) -> None:
        """Writes `packed` `[numel]` to the selected elements of the shard tensor behind `view`."""
        for slots in self._slots.values():
            for slot in slots:
                slot.unpack(packed, view(slot.piece))

    def to(self, device: torch.device) -> SelectedLayout:
        """The same layout with its column indices on `device`, for tensors that live there."""
        twin = object.__new__(SelectedLayout)
        twin.numel, twin.group_ends = self.numel, self.group_ends
        twin._slots = {
            param: [
                _Slot(s.piece, None if s.columns is None else s.columns.to(device), s.start, s.width) for s in slots
            ]
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


@dataclass(frozen=True)
class HostState:
    """The host's fp32 master and moments of the whole shard, flat `[shard numel]` on CPU."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.master, self.exp_avg, self.exp_avg_sq


class SelectedState:
    """fp32 master and moments of the selected elements of this rank, packed `[numel]` on the device.

    `wire` has the dtype of the model's weights and serves twice: during backward it collects the gradients, after the
    update it holds the new weights until they are written and exchanged.

    Args:
        table: Of the shard.
        wire_dtype: dtype of the model's weights.
        device: Where the state lives.
        weights_device: Where the model's weights live: with parameter offload under ZeRO-3, on the host.
    """

    def __init__(
        self,
        table: ShardTable,
        wire_dtype: torch.dtype,
        device: torch.device,
        weights_device: torch.device | None = None,
    ) -> None:
        self._table, self._wire_dtype, self._device = table, wire_dtype, device
        self._weights_device = weights_device or device
        self._take(SelectedLayout(table, {}, device))

    def _take(self, layout: SelectedLayout) -> None:
        self.layout = layout
        self._weights_layout = layout if self._weights_device == self._device else layout.to(self._weights_device)
        self._allocate()

    def _allocate(self) -> None:
        numel = self.layout.numel
        self.weight, self.exp_avg, self.exp_avg_sq = (
            torch.zeros(numel, dtype=torch.float32, device=self._device) for _ in range(3)
        )
        self.wire = torch.zeros(numel, dtype=self._wire_dtype, device=self._device)

    def fetch(self, host: HostState, columns: Mapping[int, Tensor]) -> int:
        """Takes the columns' state from the host, which must be idle. Returns the bytes moved."""
        self._take(SelectedLayout(self._table, columns, self._device))
        host_layout = self.layout.to(torch.device("cpu"))
        packed = torch.empty(self.layout.numel, dtype=torch.float32)
        for mine, theirs in zip((self.weight, self.exp_avg, self.exp_avg_sq), host.tensors(), strict=True):
            host_layout.pack(piece_view(theirs), packed)
            mine.copy_(packed)  # blocking: `packed` is used again
        return 12 * self.layout.numel

    def send_home(self, host: HostState) -> int:
        """Writes the state of all selected elements to the host, which must be idle. Returns the bytes moved."""
        host_layout = self.layout.to(torch.device("cpu"))
        for mine, theirs in zip((self.weight, self.exp_avg, self.exp_avg_sq), host.tensors(), strict=True):
            host_layout.unpack(mine.cpu(), piece_view(theirs))
        return 12 * self.layout.numel

    def update(self, groups: Sequence[Hyper], factor: float, clock: int) -> None:
        """One AdamW step on the gradients in `wire`, times `factor` (clipping and unscaling); then `wire` is rounded."""
        start, chunk = 0, _CHUNK_NUMEL if self._device.type == "cpu" else _DEVICE_CHUNK_NUMEL
        for hyper, end in zip(groups, self.layout.group_ends, strict=True):
            for at in range(start, end, chunk):
                part = slice(at, min(end, at + chunk))
                grad = self.wire[part].to(torch.float32, copy=True).mul_(factor)
                adamw_(self.weight[part], grad, self.exp_avg[part], self.exp_avg_sq[part], hyper, clock=clock)
                self.wire[part].copy_(self.weight[part])
            start = end

    def write(self, weights: View) -> None:
        """Writes the rounded masters that `update` has left in `wire` into the model's weights."""
        self._write(self.wire, weights)

    def write_masters(self, weights: View) -> None:
        """Rounds and writes the masters at any time: `wire` may hold gradients of the step to come, and keeps them."""
        self._write(self.weight.to(self._wire_dtype, copy=True), weights)

    def _write(self, packed: Tensor, weights: View) -> None:
        # Blocking where the device changes: the weights are written by the CPU at once.
        self._weights_layout.unpack(packed.to(self._weights_device), weights)


def piece_view(flat: Tensor) -> View:
    """The elements of a piece in a tensor of the whole shard."""
    return lambda piece: flat[piece.start : piece.stop]
