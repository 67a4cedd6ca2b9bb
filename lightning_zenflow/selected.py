"""The device side: fp32 weights and moments of the selected columns and of all vectors.

Each rank keeps only the selected elements of its own shard, packed without gaps, group after group. Between selections
the host's copy of these elements is a shadow that nobody reads; columns that are no longer selected go home, and new ones
are fetched, so that a column's moments travel with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_zenflow.adamw import Hyper, adamw_
from lightning_zenflow.column_moves import ColumnMoves
from lightning_zenflow.selected_layout import SelectedLayout, View, piece_view
from lightning_zenflow.shards import ShardTable

# fp32 gradients exist only in chunks, which saves 4 bytes per selected element; on CPU a chunk stays in cache.
_CHUNK_NUMEL = 1 << 18
_DEVICE_CHUNK_NUMEL = 1 << 24


@dataclass(frozen=True)
class HostState:
    """The host's fp32 master and its moments, fp32 or bf16, of the whole shard, flat `[shard numel]` on CPU."""

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
        self._set_layout(layout)
        self.weight, self.exp_avg, self.exp_avg_sq = (
            torch.zeros(layout.numel, dtype=torch.float32, device=self._device) for _ in range(3)
        )

    def _set_layout(self, layout: SelectedLayout) -> None:
        self.layout = layout
        self._weights_layout = layout if self._weights_device == self._device else layout.to(self._weights_device)
        self.wire = torch.zeros(layout.numel, dtype=self._wire_dtype, device=self._device)

    def fetch(self, host: HostState, columns: Mapping[int, Tensor]) -> None:
        """Takes the columns' state from the host, which must be idle, exactly."""
        self._take(SelectedLayout(self._table, columns, self._device))
        host_layout = self.layout.to(torch.device("cpu"))
        for mine, theirs in zip((self.weight, *self.moments()), host.tensors(), strict=True):
            mine.copy_(host_layout.packed_from(theirs))

    def send_home(self, host: HostState, clock: int) -> None:
        """Writes the state of all selected elements to the host, which must be idle; it stays here as well.

        Moments that the host keeps in bf16 are rounded as it rounds its own at this clock.
        """
        host_layout = self.layout.to(torch.device("cpu"))
        host_layout.unpack(self.weight.cpu(), piece_view(host.master))
        for number, (mine, theirs) in enumerate(zip(self.moments(), (host.exp_avg, host.exp_avg_sq), strict=True)):
            packed = mine.cpu()
            if theirs.dtype != packed.dtype:
                packed = host_layout.rounded(packed, clock, number)
            host_layout.unpack(packed, piece_view(theirs))

    def give_back(self, *, keep_moments: bool) -> None:
        """After the last update: returns the device's memory. Both moments stay, on the CPU, if somebody will ask for them."""
        self.weight = self.wire = torch.empty(0)
        self.exp_avg, self.exp_avg_sq = (
            moment.cpu() if keep_moments else torch.empty(0) for moment in (self.exp_avg, self.exp_avg_sq)
        )

    def moments(self) -> tuple[Tensor, Tensor]:
        """Both moments, packed fp32 `[numel]`."""
        return self.exp_avg, self.exp_avg_sq

    def move(self, host: HostState, columns: Mapping[int, Tensor], clock: int) -> tuple[int, int]:
        """From the columns selected so far to others: only those that change travel. The host must be idle.

        Where the host keeps moments in bf16, those that leave are rounded as it rounds its own at this clock. `wire` is zero
        afterwards. Returns the bytes that went home and the bytes that came.
        """
        moves = self.move_masters(host, columns, clock)
        self.move_moments(moves, host, clock)
        return moves.home_bytes, moves.fetched_bytes

    def move_masters(self, host: HostState, columns: Mapping[int, Tensor], clock: int) -> ColumnMoves:
        """The first part of `move`, with the host idle. `move_moments` must follow; the host may read masters by then."""
        layout = SelectedLayout(self._table, columns, self._device)
        moves = ColumnMoves(self._table, self.layout, layout, self._device)
        self.weight = moves.run(self.weight, host.master, clock)
        self._set_layout(layout)
        return moves

    def move_moments(self, moves: ColumnMoves, host: HostState, clock: int) -> None:
        """The second part of `move`."""
        self.exp_avg = moves.run(self.exp_avg, host.exp_avg, clock, moment=0)  # the old one makes room for the next
        self.exp_avg_sq = moves.run(self.exp_avg_sq, host.exp_avg_sq, clock, moment=1)

    def update(self, groups: Sequence[Hyper], factor: float, clock: int) -> None:
        """One AdamW step on the gradients in `wire`, times `factor` (clipping and unscaling); then `wire` is rounded."""
        start, chunk = 0, _CHUNK_NUMEL if self._device.type == "cpu" else _DEVICE_CHUNK_NUMEL
        scratch = torch.empty(min(chunk, self.layout.numel), dtype=torch.float32, device=self._device)
        for hyper, end in zip(groups, self.layout.group_ends, strict=True):
            for at in range(start, end, chunk):
                part = slice(at, min(end, at + chunk))
                grad = scratch[: part.stop - at].copy_(self.wire[part])
                if factor != 1:
                    grad.mul_(factor)
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
