"""What is trained: a shard of constant gradients, and where its background processes run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lightning_zenflow.offload.client import HostClient
from lightning_zenflow.offload.layout import ArenaLayout
from lightning_zenflow.schedule import block_range
from lightning_zenflow.shards import ParamSpec, ShardTable

from ..passes import HYPER

SEGMENTS = 8
"""Parameters that the shard is made of: so often in backward a gradient becomes ready."""

FORWARD_RATIO = 1 / 3
"""Share of the forward pass in the device's time; backward computes two products for each of its one."""

GRADIENT_VALUE = 1e-3
"""Of all elements: with zeros, moments would be special cases of the processor's arithmetic."""

WIRE_DTYPE = torch.bfloat16
GROUPS = (HYPER,)


@dataclass(frozen=True)
class Workload:
    """A shard of `numel` elements, all deferred, whose background process has `host_cores`.

    Attributes:
        numel: Elements of the shard.
        host_cores: Cores of each background process.
        timeout_secs: How long a background process may take to answer.
    """

    numel: int
    host_cores: tuple[int, ...]
    timeout_secs: float = 60.0

    @cached_property
    def table(self) -> ShardTable:
        """Parameters of one column each and about equal length: matrices, of which no column is selected."""
        specs = []
        for number in range(SEGMENTS):
            start, stop = block_range(self.numel, SEGMENTS, number)
            specs.append(ParamSpec(str(number), (stop - start, 1), 0, start))
        return ShardTable.build(specs, [self.numel], 0)

    def device_memory(self) -> Tensor:
        """Weights or gradients on the device, `[numel]`. Nobody writes them, so they take no memory."""
        return torch.empty(self.numel, dtype=WIRE_DTYPE)

    def launch(self, blocks: int, **changes: Any) -> HostClient:
        """Starts a background process with memory of its own; `changes` are other fields of this workload."""
        asked = dataclasses.replace(self, **changes)
        client = HostClient.start(
            ArenaLayout(asked.numel, WIRE_DTYPE, blocks),
            [asked.numel],
            cores=asked.host_cores,
            lr_scale="linear",
            timeout_secs=asked.timeout_secs,
        )
        client.arena.slot.fill_(GRADIENT_VALUE)
        return client
