"""What travels at a re-selection: columns that leave go home, columns that enter are fetched, the others stay on the device.

Where the host keeps moments in bf16, those that leave are rounded, those that enter are widened, and those that
stay keep their fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_zenflow.rounding import rounded_columns
from lightning_zenflow.selected_layout import SelectedLayout, Slot
from lightning_zenflow.shards import Piece, ShardTable


@dataclass(frozen=True)
class _Side:
    """Some columns of a piece that are, or will be, selected.

    Attributes:
        slot: Of the layout in which they are.
        columns: int64 within the piece, on CPU.
    """

    slot: Slot
    columns: Tensor

    @property
    def numel(self) -> int:
        """Elements of these columns."""
        return self.slot.piece.rows * self.columns.numel()


@dataclass(frozen=True)
class _Merge:
    """How the packed rows of a piece are put together: columns from the old ones, and behind them the fetched ones.

    Attributes:
        before: Where they are packed now; `None` if no column of the piece is selected yet.
        entering: What is fetched; `None` if nothing is.
        after: Where they will be packed.
        sources: int64, for each new column its place in the old and the fetched ones together, on the device; `None` if the
            columns stay as they are.
    """

    before: Slot | None
    entering: _Side | None
    after: Slot
    sources: Tensor | None


class ColumnMoves:
    """From one selection of a shard's columns to the next.

    Args:
        table: Of the shard.
        old: Where the state is packed now.
        new: Where it will be.
        device: Where the state lives.

    Attributes:
        home_bytes: What has gone from the device to the host.
        fetched_bytes: The reverse.
    """

    def __init__(self, table: ShardTable, old: SelectedLayout, new: SelectedLayout, device: torch.device) -> None:
        self._new, self._device = new, device
        self._leaving: list[_Side] = []
        self._leaving_places: list[Tensor] = []  # of each, int64 within an old packed row, on the device
        self._entering: list[_Side] = []
        self._merges: list[_Merge] = []
        for segment in table.segments:
            befores = {slot.piece: slot for slot in old.slots(segment)}
            afters = {slot.piece: slot for slot in new.slots(segment)}
            for piece in segment.pieces:
                self._compare(befores.get(piece), afters.get(piece))
        self._leaving_numel, self._entering_numel = (
            sum(side.numel for side in sides) for sides in (self._leaving, self._entering)
        )
        self.home_bytes = self.fetched_bytes = 0

    def _compare(self, before: Slot | None, after: Slot | None) -> None:
        ours, theirs = (_columns(slot) for slot in (before, after))
        stays = torch.isin(ours, theirs, assume_unique=True)
        stayed = torch.isin(theirs, ours, assume_unique=True)
        if before is not None and not stays.all():
            self._leaving.append(_Side(before, ours[~stays]))
            self._leaving_places.append((~stays).nonzero().squeeze(1).to(self._device))
        if after is None:
            return
        entering = sources = None
        if not stayed.all():
            entering = _Side(after, theirs[~stayed])
            self._entering.append(entering)
        if entering is not None or not stays.all():
            sources = torch.empty_like(theirs)
            sources[stayed] = stays.nonzero().squeeze(1)  # both ascend: the same columns in the same order
            sources[~stayed] = ours.numel() + torch.arange(int((~stayed).sum()))
            sources = sources.to(self._device)
        self._merges.append(_Merge(before, entering, after, sources))

    @torch.no_grad()  # DeepSpeed asks for gradients of the masters once it takes them over
    def run(self, packed: Tensor, home: Tensor, clock: int, moment: int = 0) -> Tensor:
        """Moves one tensor of the state. Both copies between host and device block, so that nothing needs to be waited for.

        Args:
            packed: fp32 `[old numel]` on the device, as the old layout has it.
            home: The host's tensor, fp32 or bf16, flat `[shard numel]`; its columns that leave are overwritten.
            clock: Step number at which bf16 is rounded; of no use for fp32.
            moment: Which moment it is, 0 or 1; of no use for fp32.

        Returns:
            fp32 `[new numel]` on the device, as the new layout has it.
        """
        self.home_bytes += self._leaving_numel * packed.itemsize  # it is the host that rounds
        self.fetched_bytes += self._entering_numel * home.itemsize
        leaving = torch.empty(self._leaving_numel, dtype=packed.dtype, device=self._device)
        for (side, part), places in zip(_parts(self._leaving, leaving), self._leaving_places, strict=True):
            torch.index_select(side.slot.rows_of(packed), 1, places, out=part)
        for side, part in _parts(self._leaving, leaving.cpu()):
            if home.dtype != part.dtype:
                part = rounded_columns(part, side.slot.piece, side.columns, clock, moment)
            _matrix(home, side.slot.piece).index_copy_(1, side.columns, part)
        fetched = torch.empty(self._entering_numel, dtype=home.dtype)
        for side, part in _parts(self._entering, fetched):
            torch.index_select(_matrix(home, side.slot.piece), 1, side.columns, out=part)
        arrived = iter(_parts(self._entering, fetched.to(self._device)))
        fresh = torch.empty(self._new.numel, dtype=packed.dtype, device=self._device)
        for merge in self._merges:
            rows = [] if merge.before is None else [merge.before.rows_of(packed)]
            if merge.entering is not None:
                rows.append(next(arrived)[1].to(packed.dtype))
            both, into = torch.cat(rows, 1) if len(rows) > 1 else rows[0], merge.after.rows_of(fresh)
            if merge.sources is None:
                into.copy_(both)
            else:
                torch.index_select(both, 1, merge.sources, out=into)
        return fresh


def _columns(slot: Slot | None) -> Tensor:
    """The selected columns of a piece, int64 on CPU, ascending."""
    return torch.empty(0, dtype=torch.int64) if slot is None else slot.columns_on_cpu


def _matrix(flat: Tensor, piece: Piece) -> Tensor:
    return flat[piece.start : piece.stop].view(piece.rows, piece.width)


def _parts(sides: Sequence[_Side], flat: Tensor) -> list[tuple[_Side, Tensor]]:
    """Each side with its part of `flat`, as a matrix."""
    parts = flat.split([side.numel for side in sides]) if sides else ()
    return [(side, part.view(side.slot.piece.rows, -1)) for side, part in zip(sides, parts, strict=True)]
