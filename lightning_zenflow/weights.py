"""The model's weights as the device sees them, addressed in shard coordinates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lightning_zenflow.shards import Piece, ShardTable


class ShardWeights:
    """One rank's slices of the flattened weights, in the model's dtype, one flat tensor per parameter group.

    The tensors are views of the model's own storage: what is written here is what the next forward reads.
    """

    def __init__(self, table: ShardTable, partitions: Sequence[Tensor]) -> None:
        self._starts = [table.group_start(group) for group in range(len(table.group_ends))]
        self._ends = table.group_ends
        self._partitions = [partition.detach() for partition in partitions]

    @property
    def device(self) -> torch.device:
        """Where the weights live: with parameter offload under ZeRO-3, on the host."""
        return max(self._partitions, key=Tensor.numel).device

    def view(self, piece: Piece) -> Tensor:
        """The flat elements of a piece."""
        start = self._starts[piece.group]
        return self._partitions[piece.group][piece.start - start : piece.stop - start]

    def ranges(self, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """The elements `start` to `stop` of the shard, cut at group ends: pairs of offset from `start` and flat view."""
        for first, end, partition in zip(self._starts, self._ends, self._partitions, strict=True):
            lo, hi = max(first, start), min(end, stop)
            if lo < hi:
                yield lo - start, partition[lo - first : hi - first]
