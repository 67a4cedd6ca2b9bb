"""Masters and moments as they are once every gradient that the host held back is applied.

For another number of ranks, where blocks are cut elsewhere: what a settle would have done before saving is done here,
by the same code on the stored tensors, with moments in the dtype that the run which saved them kept them in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from lightning_zenflow.adamw import Hyper
from lightning_zenflow.offload.layout import ArenaLayout
from lightning_zenflow.offload.protocol import Ledger, Restore, Start, Update
from lightning_zenflow.offload.worker import HostAdamW
from lightning_zenflow.selected import HostState
from lightning_zenflow.selected_layout import SelectedLayout, piece_view
from lightning_zenflow.shard_state import ShardState
from lightning_zenflow.shards import Segment, ShardTable

KINDS = {"fp32": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


class Source(Protocol):
    """fp32 masters and moments by parameter name."""

    def read(self, name: str, kind: str, start: int = 0, numel: int | None = None) -> Tensor: ...


def fill(state: HostState, table: ShardTable, source: Source) -> None:
    """Reads a shard's masters and moments; padding stays as it is."""
    for kind, region in zip(KINDS, state.tensors(), strict=True):
        for segment in table.segments:
            region[segment.start : segment.stop] = source.read(
                segment.spec.name, kind, segment.param_start, segment.numel
            )


@dataclass
class _Memory:
    """A shard's host state in ordinary memory, flat `[numel]`."""

    layout: ArenaLayout
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    accumulator: Tensor
    outboxes: tuple[Tensor, Tensor]
    slot: Tensor = field(default_factory=lambda: torch.empty(0))

    @classmethod
    def of(cls, table: ShardTable, source: Source, state: ShardState) -> _Memory:
        layout = ArenaLayout(table.numel, state.layout.wire_dtype, len(state.held), state.moments_dtype)
        master = torch.zeros(table.numel)
        exp_avg, exp_avg_sq = (torch.zeros(table.numel, dtype=layout.moments_dtype) for _ in range(2))
        fill(HostState(master, exp_avg, exp_avg_sq), table, source)
        accumulator = torch.zeros(sum(held > 0 for held in state.held) * layout.block_numel)
        lanes = Ledger(len(state.held), len(table.group_ends))
        lanes.restore(_restore(state))
        for start, gradients in state.accumulated:
            at = lanes.lanes[start // layout.block_numel] * layout.block_numel
            accumulator[at : at + gradients.numel()] = gradients
        outbox = torch.empty(layout.block_numel, dtype=layout.wire_dtype)
        return cls(layout, master, exp_avg, exp_avg_sq, accumulator, (outbox, outbox))

    def rebuild(self, blocks: int) -> None:
        raise NotImplementedError


def fill_settled(
    state: HostState, table: ShardTable, source: Source, states: Sequence[ShardState], groups: Sequence[Hyper]
) -> None:
    """As `fill`, from a checkpoint as if it had been settled before it was saved. One stored shard is in memory at a time.

    Args:
        state: What to fill.
        table: Of the shard to fill.
        source: The checkpoint as it is stored.
        states: The state of every rank that saved it, in order.
        groups: Settings of each parameter group.
    """
    wanted = {segment.spec.name: segment for segment in table.segments}
    for stored in states:
        stored_table = stored.layout.table(stored.layout.rank)
        parts = [(part, wanted[part.spec.name]) for part in stored_table.segments if part.spec.name in wanted]
        overlaps = [overlap for part, segment in parts if (overlap := _overlap(part, segment)) is not None]
        if not overlaps:
            continue
        memory = _settle(stored, stored_table, source, tuple(groups))
        for kind, region in zip(KINDS.values(), state.tensors(), strict=True):
            for there, here in overlaps:
                region[here] = getattr(memory, kind)[there]


def _overlap(stored: Segment, wanted: Segment) -> tuple[slice, slice] | None:
    """Where the elements that both segments of a parameter have lie in the shard of the first, and of the second."""
    first = max(stored.param_start, wanted.param_start)
    numel = min(stored.param_start + stored.numel, wanted.param_start + wanted.numel) - first
    if numel <= 0:
        return None
    starts = [segment.start + first - segment.param_start for segment in (stored, wanted)]
    return slice(starts[0], starts[0] + numel), slice(starts[1], starts[1] + numel)


def _settle(state: ShardState, table: ShardTable, source: Source, groups: tuple[Hyper, ...]) -> _Memory:
    memory = _Memory.of(table, source, state)
    # Blocks hold a shadow of the selected elements, whose own state is stored: it is put back afterwards.
    selected = SelectedLayout(table, table.by_index(state.columns), torch.device("cpu"))
    regions = (memory.master, memory.exp_avg, memory.exp_avg_sq)
    kept = [selected.packed_from(region) for region in regions]
    start = Start(memory.layout, table.group_ends, None, state.lr_scale)
    host = HostAdamW(memory, start, 1, lambda: None)
    host.ledger.restore(_restore(state))
    for block in range(len(state.held)):
        host.update(Update(block, 0, state.clock, 0.0, groups), lambda answer: None)
    for region, packed in zip(regions, kept, strict=True):
        selected.unpack(packed, piece_view(region))
    return memory


def _restore(state: ShardState) -> Restore:
    return Restore(tuple(state.held), tuple(tuple(sums) for sums in state.lr_sums))
