"""fp32 tensors of a file whose values are in bf16: made while they are written, a piece at a time.

Whoever keeps moments in 16 bit has no memory for a second copy of them in 32 bit just because a checkpoint is saved.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

PIECE_NUMEL = 1 << 20


class Widening:
    """Stands in for fp32 copies in what `torch.save` gets. A stand-in has the shape and dtype of one, and no memory of its own.

    `torch.save` hands the memory of each tensor to the file that it writes, which asks here whether it is a stand-in's.
    """

    def __init__(self) -> None:
        # Stand-in and source, by the address of the first; written ones are forgotten.
        self._pending: dict[int, tuple[Tensor, Tensor]] = {}

    def stand_in(self, source: Tensor) -> Tensor:
        """What to store in place of `source.float()`; `source` is bf16 `[numel]` on CPU, unchanged until it is written."""
        if not source.numel():
            return source.float()
        # Private pages that nobody writes to are all the same one, of zeros.
        pages = mmap.mmap(-1, 4 * source.numel(), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        tensor = torch.frombuffer(pages, dtype=torch.float32)
        self._pending[tensor.data_ptr()] = (tensor, source)
        return tensor

    def parts(self, data: memoryview) -> Iterator[memoryview]:
        """What to write for `data`, bytes that `torch.save` has handed over: themselves, or fp32 values in pieces.

        A piece is valid until the next one is asked for.
        """
        address = np.frombuffer(data, np.uint8).ctypes.data if len(data) else 0
        tensor, source = self._pending.get(address, (None, None))
        if tensor is None or source is None or tensor.nbytes != len(data):
            yield data
            return
        wide = torch.empty(min(PIECE_NUMEL, source.numel()))  # one for all: freed ones would not all be used again
        for piece in source.split(PIECE_NUMEL):
            yield wide[: piece.numel()].copy_(piece).numpy().data.cast("B")
        del self._pending[address]

    def complete(self) -> bool:
        """Fills stand-ins that have not been written, as memory permits; returns whether there was none."""
        pending, self._pending = self._pending, {}
        for tensor, source in pending.values():
            tensor.copy_(source)
        return not pending

    def forget(self) -> None:
        """Whatever has not been written is not going to be."""
        self._pending.clear()
