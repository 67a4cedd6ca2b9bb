"""Ranks that share cores divide them; ranks that their launcher has bound to cores of their own keep those."""

from __future__ import annotations

import pytest

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.core_shares import Bound, Share, place_of, share_of_cores
from lightning_zenflow.environment import cores_of_worker


def places(*ranks: tuple[int, range]) -> list[Share]:
    """Of ranks given as the number of their machine and their cores, in the order of their local ranks."""
    seen: dict[int, int] = {}
    bound = []
    for node, cores in ranks:
        bound.append(Bound(node, seen.setdefault(node, 0), tuple(cores)))
        seen[node] += 1
    return [place_of(one, bound) for one in bound]


def test_ranks_that_nobody_has_bound_divide_all_cores_of_their_machine() -> None:
    here, there = (0, range(8)), (1, range(8))
    assert places(here, here, there, there, there) == [(0, 2), (1, 2), (0, 3), (1, 3), (2, 3)]


def test_ranks_with_cores_of_their_own_share_them_with_nobody() -> None:
    assert places(*((0, range(8 * rank, 8 * rank + 8)) for rank in range(4))) == [(0, 1)] * 4


def test_ranks_that_are_bound_to_sockets_divide_those() -> None:
    first, second = (0, range(8)), (0, range(8, 16))
    assert places(first, second, first, second) == [(0, 2), (0, 2), (1, 2), (1, 2)]


def test_a_rank_alone_asks_nobody() -> None:
    assert share_of_cores(node_rank=3, local_rank=0, local_ranks=1) == (0, 1)


def test_the_background_process_gets_its_part_of_what_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8, 16)))
    assert cores_of_worker(ZenFlowConfig(), 1, 2) == [14, 15]
    assert cores_of_worker(ZenFlowConfig(), 1, 2, Share(0, 1)) == [12, 13, 14, 15]
    with pytest.raises(ValueError, match="`worker_cores` must be left out with 2 ranks"):
        cores_of_worker(ZenFlowConfig(worker_cores=[8]), 1, 2, Share(0, 1))
