"""The masters of all ranks under ZeRO-1 and 2, brought to the first one for the model's file."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed import comm as dist
from torch import Tensor

from lightning_zenflow.shard_state import StoredLayout

_GATHER_NUMEL = 1 << 24
"""Masters of other ranks pass through the device in pieces of this size."""


def rounded_masters(layout: StoredLayout, master: Tensor, device: torch.device, process_group: Any) -> list[Tensor]:
    """The masters of all ranks in the model's dtype on the CPU, flat, one tensor per group; empty on other ranks than 0.

    Every rank must call it. The device needs memory for a small piece only.

    Args:
        layout: How groups are cut.
        master: This rank's, fp32 `[shard numel]` on the CPU.
        device: Where the ranks talk.
        process_group: Of the ranks.
    """
    gathered = []
    table = layout.table(layout.rank)
    for group, end in enumerate(table.group_ends):
        part = master[table.group_start(group) : end]
        if layout.world_size == 1:
            gathered.append(part.to(layout.wire_dtype))
            continue
        whole = torch.empty(layout.world_size, part.numel() if layout.rank == 0 else 0, dtype=layout.wire_dtype)
        for start in range(0, part.numel(), _GATHER_NUMEL):
            piece = part[start : start + _GATHER_NUMEL].to(device=device, dtype=layout.wire_dtype)
            everyone = torch.empty(layout.world_size * piece.numel(), dtype=layout.wire_dtype, device=device)
            # As bytes, since not every backend gathers 16-bit floats.
            dist.all_gather_into_tensor(everyone.view(torch.uint8), piece.view(torch.uint8), group=process_group)
            if layout.rank == 0:
                whole[:, start : start + piece.numel()] = everyone.view(layout.world_size, -1).cpu()
        gathered.append(whole.view(-1))
    return gathered if layout.rank == 0 else []
