"""Where everything lies in the shared memory. Pure arithmetic: allocates nothing."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from functools import cached_property

import torch

WIRE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""What gradients and device weights may travel in."""


@dataclass(frozen=True)
class Region:
    """`numel` elements of `dtype` that begin `offset_bytes` after the start of the mapping."""

    offset_bytes: int
    numel: int
    dtype: torch.dtype


@dataclass(frozen=True)
class ArenaLayout:
    """The regions of one shard; their offsets are Python integers of any size.

    Attributes:
        numel: Elements of the shard.
        wire_dtype: dtype of gradients and device weights.
        blocks: `U`, the number of blocks.

    Raises:
        TypeError: `wire_dtype` is no floating dtype that travels.
        ValueError: `numel` or `blocks` is below 1.
    """

    numel: int
    wire_dtype: torch.dtype
    blocks: int

    def __post_init__(self) -> None:
        for name in ("numel", "blocks"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"`{name}` must be a whole number of at least 1, got {value!r}. A shard is never empty."
                )
        if self.wire_dtype not in WIRE_DTYPES:
            raise TypeError(
                f"`wire_dtype` must be torch.bfloat16, torch.float16 or torch.float32, got {self.wire_dtype}. "
                "Use a precision whose weights have one of these dtypes."
            )

    @property
    def outbox_numel(self) -> int:
        """Elements of one outbox half: the largest block."""
        return -(-self.numel // self.blocks)

    @cached_property
    def regions(self) -> dict[str, Region]:
        """All regions by name, in order of their place."""
        wire, full = self.wire_dtype, torch.float32
        sizes = {
            "slot0": (self.numel, wire),
            "slot1": (self.numel, wire),
            "outbox0": (self.outbox_numel, wire),
            "outbox1": (self.outbox_numel, wire),
            "master": (self.numel, full),
            "exp_avg": (self.numel, full),
            "exp_avg_sq": (self.numel, full),
            "accumulator": (self.numel, full),
        }
        regions, offset = {}, 0
        for name, (numel, dtype) in sizes.items():
            regions[name] = Region(offset, numel, dtype)
            offset += _whole_pages(numel * dtype.itemsize)
        return regions

    @property
    def exchange_nbytes(self) -> int:
        """Bytes from the start to the end of the exchange region (slots and outbox halves), in whole pages."""
        return self.regions["master"].offset_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the whole mapping, in whole pages."""
        last = self.regions["accumulator"]
        return last.offset_bytes + _whole_pages(last.numel * last.dtype.itemsize)


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
