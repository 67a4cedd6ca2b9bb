"""Where the gradients of one step arrive while backward still runs.

Each segment's reduced gradient is handed in once per step. It is measured (norm, and column scores when a selection is
due), its selected columns stay on the device, and all of it starts its way into a host slot. Nothing waits here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_zenflow.selected import SelectedState
from lightning_zenflow.selection import ScoreBoard
from lightning_zenflow.shards import Piece, Segment, ShardTable
from lightning_zenflow.transfer import Transfers, square_sum


class GradientInbox:
    """Collects the gradient of one step, in the dtype of the model's weights and still times the loss scale."""

    def __init__(self, table: ShardTable, selected: SelectedState, transfers: Transfers, device: torch.device) -> None:
        self._table, self._selected, self._transfers, self._device = table, selected, transfers, device
        self._squares: dict[int, Tensor] = {}
        self.board = ScoreBoard(table.params, device)

    def open(self, slot: Tensor, *, selecting: bool) -> None:
        """Begins a step.

        Args:
            slot: The host slot of this step, flat `[shard numel]` on CPU; nobody else uses it until the step is applied.
            selecting: Whether columns are selected anew at this step, so that scores are needed and the old columns are not.
        """
        self._slot, self._selecting = slot, selecting
        self._squares.clear()
        self.board.clear()

    @property
    def has_gradients(self) -> bool:
        """Whether a gradient of this step has arrived."""
        return bool(self._squares)

    def receive(self, segment: Segment, grad: Tensor) -> None:
        """Takes the reduced gradient of a segment, flat `[segment.numel]` on the device.

        Called within the stream on which `grad` was reduced. Handing in a segment again before the step adds to it.
        """
        if segment.param in self._squares:
            self._transfers.wait_to_host()  # the first gradient is read back and must have arrived
            grad = grad + self.read(segment).to(grad.device)
        squares = torch.zeros((), dtype=torch.float32, device=grad.device)
        slots = {} if self._selecting else {slot.piece: slot for slot in self._selected.layout.slots(segment)}
        for piece in segment.pieces:  # everything that reads a piece does so while it is in cache
            part = grad[piece.start - segment.start : piece.stop - segment.start]
            squares += square_sum(part)
            if piece in slots:
                slots[piece].pack(part, self._selected.wire)
            # Last: the event recorded with the copy then stands for the measurements as well.
            self._transfers.to_host(self._slot[piece.start : piece.stop], part)
        self._squares[segment.param] = squares
        if self._selecting:
            self.board.record(segment, grad)

    def finish(self) -> Tensor:
        """Waits for all gradients of this step and returns this rank's sum of squares, fp32 `[1]` on the device.

        A segment that got no gradient counts as zero, as ZeRO has it.
        """
        self._transfers.wait_to_host()  # the slot is complete and the measurements are done
        for segment in self._table.segments:
            if segment.param not in self._squares:
                self._slot[segment.start : segment.stop].zero_()
                if not self._selecting:
                    for slot in self._selected.layout.slots(segment):
                        self._selected.wire[slot.start : slot.stop].zero_()
        total = torch.zeros(1, dtype=torch.float32, device=self._device)
        if self._squares:
            total += torch.stack(list(self._squares.values())).sum()
        return total

    def gather_selected(self) -> None:
        """Fetches the gradient of newly selected columns, which has left the device already, from the host slot."""
        packed = torch.empty_like(self._selected.wire, device="cpu")
        self._selected.layout.to(torch.device("cpu")).pack(self._slot_view, packed)
        self._selected.wire.copy_(packed)  # blocking: `packed` is dropped

    def _slot_view(self, piece: Piece) -> Tensor:
        return self._slot[piece.start : piece.stop]

    def read(self, segment: Segment) -> Tensor:
        """The gradient of a segment as it lies in the slot, flat on CPU; valid after `finish`."""
        return self._slot[segment.start : segment.stop]
