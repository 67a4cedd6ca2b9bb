"""Where everything lies in the shared memory. Pure arithmetic: allocates nothing."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from lightning_zenflow.config import MAX_UPDATE_INTERVAL_STEPS

WIRE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""What gradients and device weights may travel in."""

MOMENTS_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""What the host may keep moments in, by the name that `ZenFlowConfig.moments_dtype` gives it."""


@dataclass(frozen=True)
class Region:
    """`numel` elements of `dtype` that begin `offset_bytes` after the start of the mapping."""

    offset_bytes: int
    numel: int
    dtype: torch.dtype


@dataclass(frozen=True)
class ArenaLayout:
    """The regions of one shard; their offsets are Python integers of any size.

    The outbox halves lie behind the slot, one right behind the other, so that what is exchanged is contiguous for any
    number of blocks. The accumulator has a lane for each block but one (see `Ledger`). Room is left for any other number of
    blocks: a page that nobody touches takes no memory. What is touched is 18 bytes per element with 16-bit weights, for any
    number of blocks, since the larger the outbox halves, the fewer the lanes; 14 with moments in 16 bit too.

    Attributes:
        numel: Elements of the shard.
        wire_dtype: dtype of gradients and device weights.
        blocks: `U`, the number of blocks.
        moments_dtype: dtype of both moments.

    Raises:
        TypeError: `wire_dtype` is no floating dtype that travels, or `moments_dtype` is neither fp32 nor bf16.
        ValueError: `numel` or `blocks` is below 1, or there are more blocks than an interval may have steps.
    """

    numel: int
    wire_dtype: torch.dtype
    blocks: int
    moments_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        for name in ("numel", "blocks"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"`{name}` must be a whole number of at least 1, got {value!r}. A shard is never empty."
                )
        if self.blocks > MAX_UPDATE_INTERVAL_STEPS:
            raise ValueError(
                f"`blocks` must be at most {MAX_UPDATE_INTERVAL_STEPS}, got {self.blocks}. Use a smaller `update_interval`."
            )
        if self.wire_dtype not in WIRE_DTYPES:
            raise TypeError(
                f"`wire_dtype` must be torch.bfloat16, torch.float16 or torch.float32, got {self.wire_dtype}. "
                "Use a precision whose weights have one of these dtypes."
            )
        if self.moments_dtype not in MOMENTS_DTYPES.values():
            raise TypeError(
                f"`moments_dtype` must be torch.float32 or torch.bfloat16, got {self.moments_dtype}. fp16 has too few"
                " exponents for a second moment."
            )

    @property
    def block_numel(self) -> int:
        """Elements of the largest block: of an outbox half, and of a lane of the accumulator."""
        return -(-self.numel // self.blocks)

    @property
    def lanes(self) -> int:
        """How many blocks can hold accumulated gradients at a time: all but the one that was updated last."""
        return self.blocks - 1

    @cached_property
    def regions(self) -> dict[str, Region]:
        """All regions by name, in order of their place."""
        regions: dict[str, Region] = {}
        wire = {"slot": self.numel, "outbox0": self.block_numel, "outbox1": self.block_numel}
        end = _append(regions, 0, wire, self.wire_dtype)
        end = _append(regions, end + self._spare_nbytes, {"master": self.numel}, torch.float32)
        end = _append(regions, end, dict.fromkeys(("exp_avg", "exp_avg_sq"), self.numel), self.moments_dtype)
        _append(regions, end, {"accumulator": self.lanes * self.block_numel}, torch.float32)
        return regions

    @property
    def _spare_nbytes(self) -> int:
        """Room behind the outbox halves that a single block would need."""
        return 2 * (self._outbox_nbytes(1) - self._outbox_nbytes(self.blocks))

    def _outbox_nbytes(self, blocks: int) -> int:
        return _whole_pages(-(-self.numel // blocks) * self.wire_dtype.itemsize)

    @property
    def exchange_nbytes(self) -> int:
        """Bytes from the start to the end of the exchange region (slot and outbox halves), in whole pages."""
        return self.regions["master"].offset_bytes - self._spare_nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of the whole mapping, in whole pages, with room for any number of blocks."""
        lanes_numel = self.numel + MAX_UPDATE_INTERVAL_STEPS  # the last of equal lanes has room that its block lacks
        return self.regions["accumulator"].offset_bytes + _whole_pages(4 * lanes_numel)

    @property
    def touched_nbytes(self) -> int:
        """Bytes that take memory in the course of training, at most, if the number of blocks may change."""
        dtypes = (torch.float32, self.moments_dtype, self.moments_dtype, self.wire_dtype)
        fixed_nbytes = sum(_whole_pages(self.numel * dtype.itemsize) for dtype in dtypes)
        return fixed_nbytes + max(self._varying_nbytes(1), self._varying_nbytes(self.blocks))

    def _varying_nbytes(self, blocks: int) -> int:
        layout = replace(self, blocks=blocks)
        return 2 * self._outbox_nbytes(blocks) + _whole_pages(4 * layout.lanes * layout.block_numel)


def _append(regions: dict[str, Region], offset: int, numels: dict[str, int], dtype: torch.dtype) -> int:
    """Puts regions one behind the other, each on pages of its own; returns the end of the last."""
    for name, numel in numels.items():
        regions[name] = Region(offset, numel, dtype)
        offset += _whole_pages(numel * dtype.itemsize)
    return offset


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
