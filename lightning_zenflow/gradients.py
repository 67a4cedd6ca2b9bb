"""Where the gradients of one step arrive while backward still runs.

Each segment's reduced gradient is handed in once per step. It is measured (norm, and column scores when a selection is
due), its selected columns stay on the device, and all of it starts its way into the host slot, as soon as the host has
read there what was in it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_zenflow.interim import InterimStep
from lightning_zenflow.selected import SelectedState
from lightning_zenflow.selection import ScoreBoard
from lightning_zenflow.shards import Piece, Segment, ShardTable
from lightning_zenflow.transfer import Transfers

_CPU_BAND_NUMEL = 1 << 18
"""On CPU a gradient is measured, packed and copied in bands of rows of this size, which stay in cache; kernels of a GPU want it
whole."""


class GradientInbox:
    """Collects the gradient of one step, in the dtype of the model's weights and still times the loss scale."""

    def __init__(
        self,
        table: ShardTable,
        selected: SelectedState,
        transfers: Transfers,
        device: torch.device,
        slot: Tensor,
        wait_slot: Callable[[int, int], None],
        interim: InterimStep | None = None,
    ) -> None:
        """Collects in `slot`, flat `[shard numel]` on CPU; `wait_slot` waits until a range of it may be written."""
        self._table, self._selected, self._transfers, self._device = table, selected, transfers, device
        self._interim = interim
        self._slot, self._wait_slot = slot, wait_slot
        self._selecting = False
        self._squares: dict[int, list[Tensor]] = {}
        self._band_numel = _CPU_BAND_NUMEL if device.type == "cpu" else 1 << 62
        self._scratch = torch.empty(min(_CPU_BAND_NUMEL, table.numel)) if device.type == "cpu" else None
        self.board = ScoreBoard(table.params, device)

    def open(self, *, selecting: bool) -> None:
        """Begins a step.

        Args:
            selecting: Whether columns are selected anew at this step, so that scores are needed and the old columns are not.
        """
        self._selecting = selecting
        self._squares.clear()
        self.board.clear()

    def received(self) -> list[Segment]:
        """Segments whose gradient of this step lies in the slot; waits until it does."""
        if self._squares:
            self._transfers.wait_to_host()
        return [segment for segment in self._table.segments if segment.param in self._squares]

    @property
    def has_gradients(self) -> bool:
        """Whether a gradient of this step has arrived."""
        return bool(self._squares)

    def receive(self, segment: Segment, grad: Tensor) -> None:
        """Takes the reduced gradient of a segment, flat `[segment.numel]` on the device.

        Called within the stream on which `grad` was reduced. Handing in a segment again before the step adds to it.
        """
        part = grad
        if is_second := segment.param in self._squares:
            self._transfers.wait_to_host()  # the first gradient is read back and must have arrived
            grad = part + self.read(segment).to(part.device)
        else:
            self._wait_slot(segment.start, segment.stop)
        squares = self._squares[segment.param] = []
        slots = {} if self._selecting else {slot.piece: slot for slot in self._selected.layout.slots(segment)}
        for piece in segment.pieces:
            slot, rows = slots.get(piece), max(1, self._band_numel // piece.width)
            for row in range(0, piece.rows, rows):  # everything that reads a band does so while it is in cache
                start, stop = piece.start + row * piece.width, min(piece.stop, piece.start + (row + rows) * piece.width)
                band = grad[start - segment.start : stop - segment.start]
                squares.append(self._square_sum(band))
                if slot is not None:
                    slot.pack(band, self._selected.wire, row)
                # Last: the event recorded with the copy then stands for the measurements as well.
                self._transfers.to_host(self._slot[start:stop], band)
        if self._interim is not None and self._interim.is_due:
            self._interim.measure(segment, squares)  # all of it, before the first move
            self._interim.move(segment, segment.start, segment.stop, part)
            self._transfers.mark()  # `finish` then waits for the move as well, which reads `part` and writes weights
        if is_second and self._interim is not None:
            self._interim.comes_in_parts(segment)
        if self._selecting:
            self.board.record(segment, grad)

    def _square_sum(self, grad: Tensor) -> Tensor:
        """Sum of squares of a flat tensor as an fp32 scalar on its device."""
        if self._scratch is None:
            return torch.linalg.vector_norm(grad, dtype=torch.float32).square()
        if grad.numel() > self._scratch.numel():  # a row that is longer than a band
            self._scratch = torch.empty(grad.numel())
        exact = self._scratch[: grad.numel()].copy_(grad)  # on CPU, faster than PyTorch's norm with an fp32 result
        return torch.dot(exact, exact)

    def finish(self, *, by_parameter: bool = False) -> Tensor:
        """Waits for all gradients of this step; this rank's sum of squares, fp32 on the device: `[1]`, or `[parameters]`.

        A segment that got no gradient counts as zero, as ZeRO has it.
        """
        self._transfers.wait_to_host()  # the slot is complete and the measurements are done
        for segment in self._table.segments:
            if segment.param not in self._squares:
                self._wait_slot(segment.start, segment.stop)
                self._slot[segment.start : segment.stop].zero_()
                if not self._selecting:
                    for slot in self._selected.layout.slots(segment):
                        self._selected.wire[slot.start : slot.stop].zero_()
        # In the order of parameters: that of arrival is another one after a resume within a step, and so would be the last bit.
        squares = [square for param in sorted(self._squares) for square in self._squares[param]]
        count = len(self._table.params) if by_parameter else 1
        if not squares:
            return torch.zeros(count, dtype=torch.float32, device=self._device)
        if not by_parameter:
            return torch.stack(squares).sum(0, keepdim=True)
        owners = [param for param in sorted(self._squares) for _ in self._squares[param]]
        sums = torch.zeros(count, dtype=torch.float32, device=self._device)
        return sums.index_add_(0, torch.tensor(owners).to(self._device), torch.stack(squares))

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
