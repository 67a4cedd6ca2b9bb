"""A re-selection moves the columns that change, and no others."""

from __future__ import annotations

import pytest
import torch

from lightning_zenflow.rounding import noise_at, rounded
from lightning_zenflow.selected import HostState, SelectedState
from lightning_zenflow.selected_layout import SelectedLayout, piece_view
from lightning_zenflow.shards import ParamSpec, ShardTable

CPU = torch.device("cpu")
CLOCK = 17
SPECS = [ParamSpec("w", (6, 5), 0, 0), ParamSpec("v", (4,), 0, 30), ParamSpec("u", (3, 8), 1, 0)]
Columns = dict[int, torch.Tensor]


def table(rank: int, ranks: int) -> ShardTable:
    return ShardTable.build(SPECS, [-(-34 // (2 * ranks)) * 2, -(-24 // (2 * ranks)) * 2], rank)


def state_and_host(
    shard: ShardTable, columns: Columns, moments_dtype: torch.dtype = torch.float32
) -> tuple[SelectedState, HostState]:
    """State on the device that the host does not know yet, as in training."""
    torch.manual_seed(3)
    master, *moments = (torch.randn(shard.numel) for _ in range(3))
    there = HostState(master, *(moment.to(moments_dtype) for moment in moments))
    state = SelectedState(shard, torch.bfloat16, CPU)
    state.fetch(there, columns)
    for tensor in (state.weight, state.exp_avg, state.exp_avg_sq):
        tensor.normal_()
    return state, there


SELECTIONS: list[Columns] = [
    {},
    {0: torch.tensor([1, 4]), 2: torch.tensor([0, 3, 7])},
    {0: torch.tensor([0, 1]), 2: torch.tensor([3, 4, 7])},
    {0: torch.tensor([2, 3]), 2: torch.tensor([1, 2, 5])},
    {0: torch.arange(5), 2: torch.arange(8)},
]


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("before", SELECTIONS)
@pytest.mark.parametrize("after", SELECTIONS)
def test_a_move_leaves_what_sending_everything_home_and_fetching_it_leaves(
    ranks: int, before: Columns, after: Columns
) -> None:
    for rank in range(ranks):
        shard = table(rank, ranks)
        state, there = state_and_host(shard, before)
        other, other_there = state_and_host(shard, before)
        other.send_home(other_there, CLOCK)
        other.fetch(other_there, after)
        there.master.requires_grad_()  # as DeepSpeed leaves its partitions
        state.move(there, after, CLOCK)
        there.master.requires_grad_(False)
        for name in ("weight", "exp_avg", "exp_avg_sq"):
            assert torch.equal(getattr(state, name), getattr(other, name)), name
        assert state.wire.shape == other.wire.shape and not state.wire.any()
        state.send_home(there, CLOCK)  # also over the stale shadow of the columns that have stayed
        other.send_home(other_there, CLOCK)
        assert all(torch.equal(*pair) for pair in zip(there.tensors(), other_there.tensors(), strict=True))


def test_only_what_changes_travels() -> None:
    shard = table(0, 1)
    state, there = state_and_host(shard, SELECTIONS[1])
    home = [tensor.detach().clone() for tensor in there.tensors()]
    # One column of the 6 rows changes, and one of the 3 rows: 9 elements of three fp32 tensors each way.
    assert state.move(there, SELECTIONS[2], CLOCK) == (9 * 12, 9 * 12)
    assert [int((now != then).sum()) for now, then in zip(there.tensors(), home, strict=True)] == [9, 9, 9]
    assert state.move(there, SELECTIONS[2], CLOCK) == (0, 0)


def spread(layout: SelectedLayout, packed: torch.Tensor, numel: int) -> torch.Tensor:
    """Packed values at their places in the shard, NaN elsewhere."""
    whole = torch.full((numel,), torch.nan)
    layout.unpack(packed, piece_view(whole))
    return whole


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("before", SELECTIONS)
@pytest.mark.parametrize("after", SELECTIONS)
def test_of_moments_that_the_host_keeps_in_bf16_only_those_that_leave_are_rounded(
    ranks: int, before: Columns, after: Columns
) -> None:
    for rank in range(ranks):
        shard = table(rank, ranks)
        state, there = state_and_host(shard, before, torch.bfloat16)
        home = [moment.clone() for moment in (there.exp_avg, there.exp_avg_sq)]
        old = [spread(state.layout, moment, shard.numel) for moment in state.moments()]
        _, fetched_bytes = state.move(there, after, CLOCK)
        new = [spread(state.layout, moment, shard.numel) for moment in state.moments()]
        was, is_now = ~old[0].isnan(), ~new[0].isnan()
        left, stayed, came = was & ~is_now, was & is_now, ~was & is_now
        assert fetched_bytes == 8 * int(came.sum())
        for number, now in enumerate((there.exp_avg, there.exp_avg_sq)):
            expected = home[number].clone()
            expected[left] = rounded(old[number][left], noise_at(left.nonzero().flatten(), CLOCK, number))
            assert torch.equal(now, expected)
            assert torch.equal(new[number][stayed], old[number][stayed])
            assert torch.equal(new[number][came], home[number][came].float())
