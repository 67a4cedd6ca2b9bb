"""Which ranks of a machine share cores: `srun`, `mpirun` and `numactl` give every rank cores of its own, others do not."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NamedTuple

import torch.distributed


class Share(NamedTuple):
    """This rank is number `number`, from 0, of the `ranks` that divide the same cores."""

    number: int
    ranks: int


class Bound(NamedTuple):
    """The cores that a rank may run on."""

    node_rank: int
    local_rank: int
    cores: tuple[int, ...]


def share_of_cores(node_rank: int, local_rank: int, local_ranks: int) -> Share:
    """This rank's place among those of its machine that may use exactly its cores. Every rank must call it.

    Args:
        node_rank: Number of this machine.
        local_rank: Number of this rank on this machine.
        local_ranks: Ranks on this machine; they are asked if there are several, once the process group is there.
    """
    if local_ranks == 1 or not torch.distributed.is_initialized():
        return Share(local_rank, local_ranks)
    mine = Bound(node_rank, local_rank, tuple(sorted(os.sched_getaffinity(0))))
    everyone: list[Bound | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, mine)  # a rank that failed before it shows here
    return place_of(mine, [other for other in everyone if other is not None])


def place_of(mine: Bound, everyone: Iterable[Bound]) -> Share:
    """The place of `mine` among those of its machine with the same cores, in the order of their local ranks."""
    sharing = sorted(
        other.local_rank for other in everyone if (other.node_rank, other.cores) == (mine.node_rank, mine.cores)
    )
    return Share(sharing.index(mine.local_rank), len(sharing))
