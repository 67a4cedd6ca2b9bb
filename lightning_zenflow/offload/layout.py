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

    The outbox halves lie behind the slots, one right behind the other, so that what is exchanged is contiguous for any
    number of blocks. Room is left for the fewest blocks: a page that nobody touches takes no memory.

    Attributes:
        numel: Elements of the shard.
        wire_dtype: dtype of gradients and device weights.
        blocks: `U`, the number of blocks.
        fewest_blocks: The smallest `blocks` that this mapping has room for; `None` for `blocks` itself.

    Raises:
        TypeError: `wire_dtype` is no floating dtype that travels.
        ValueError: `numel` or `blocks` is below 1, or `blocks` below `fewest_blocks`.
    """

    numel: int
    wire_dtype: torch.dtype
    blocks: int
    fewest_blocks: int | None = None

    def __post_init__(self) -> None:
        if self.fewest_blocks is None:
            object.__setattr__(self, "fewest_blocks", self.blocks)
        for name in ("numel", "blocks"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"`{name}` must be a whole number of at least 1, got {value!r}. A shard is never empty."
                )
        assert self.fewest_blocks is not None
        if not 1 <= self.fewest_blocks <= self.blocks:
            raise ValueError(
                f"`blocks` must be at least `fewest_blocks` {self.fewest_blocks}, got {self.blocks}. Make a new mapping."
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
        regions: dict[str, Region] = {}
        wire = {"slot0": self.numel, "slot1": self.numel, "outbox0": self.outbox_numel, "outbox1": self.outbox_numel}
        end = _append(regions, 0, wire, self.wire_dtype)
        state = dict.fromkeys(("master", "exp_avg", "exp_avg_sq", "accumulator"), self.numel)
        _append(regions, end + self._spare_nbytes, state, torch.float32)
        return regions

    @property
    def _spare_nbytes(self) -> int:
        """Room behind the outbox halves that fewer blocks would need."""
        assert self.fewest_blocks is not None
        return 2 * (self._outbox_nbytes(self.fewest_blocks) - self._outbox_nbytes(self.blocks))

    def _outbox_nbytes(self, blocks: int) -> int:
        return _whole_pages(-(-self.numel // blocks) * self.wire_dtype.itemsize)

    @property
    def exchange_nbytes(self) -> int:
        """Bytes from the start to the end of the exchange region (slots and outbox halves), in whole pages."""
        return self.regions["master"].offset_bytes - self._spare_nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of the whole mapping, in whole pages: what is needed with the fewest blocks."""
        last = self.regions["accumulator"]
        return last.offset_bytes + _whole_pages(last.numel * last.dtype.itemsize)


def _append(regions: dict[str, Region], offset: int, numels: dict[str, int], dtype: torch.dtype) -> int:
    """Puts regions one behind the other, each on pages of its own; returns the end of the last."""
    for name, numel in numels.items():
        regions[name] = Region(offset, numel, dtype)
        offset += _whole_pages(numel * dtype.itemsize)
    return offset


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
