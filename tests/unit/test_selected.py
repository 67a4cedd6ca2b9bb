from typing import Any

import pytest
import torch

from lightning_zenflow.adamw import Hyper
from lightning_zenflow.rounding import noise_at, rounded
from lightning_zenflow.selected import HostState, SelectedState
from lightning_zenflow.selected_layout import SelectedLayout, piece_view
from lightning_zenflow.shards import ParamSpec, ShardTable

CPU = torch.device("cpu")
SPECS = [ParamSpec("w", (6, 5), 0, 0), ParamSpec("v", (4,), 0, 30), ParamSpec("u", (3, 8), 1, 0)]
COLUMNS = {0: torch.tensor([1, 4]), 2: torch.tensor([0, 3, 7])}


def table(rank: int, ranks: int = 2) -> ShardTable:
    return ShardTable.build(SPECS, [-(-34 // (2 * ranks)) * 2, -(-24 // (2 * ranks)) * 2], rank)


def host(numel: int, moments_dtype: torch.dtype = torch.float32) -> HostState:
    return HostState(torch.randn(numel), *(torch.randn(numel).to(moments_dtype) for _ in range(2)))


def selected_elements(shard: ShardTable) -> torch.Tensor:
    """Positions of the selected elements of a shard, worked out element by element."""
    positions = []
    for segment in shard.segments:
        for offset in range(segment.numel):
            column = (segment.param_start + offset) % segment.spec.cols
            if not segment.spec.is_matrix or column in COLUMNS[segment.param].tolist():
                positions.append(segment.start + offset)
    return torch.tensor(positions)


@pytest.mark.parametrize("rank", [0, 1])
def test_pack_and_unpack_touch_exactly_the_selected_elements(rank: int) -> None:
    shard = table(rank)
    layout = SelectedLayout(shard, COLUMNS, CPU)
    positions = selected_elements(shard)
    values = torch.randn(shard.numel)
    packed = torch.empty(layout.numel)
    layout.pack(lambda piece: values[piece.start : piece.stop], packed)
    assert layout.numel == len(positions) and torch.equal(packed.sort().values, values[positions].sort().values)
    other = torch.zeros(shard.numel)
    layout.unpack(packed, lambda piece: other[piece.start : piece.stop])
    assert torch.equal(other[positions], values[positions]) and other.count_nonzero() == len(positions)


def test_state_travels_home_and_back_without_a_bit_lost() -> None:
    shard = table(1)
    state, there = SelectedState(shard, torch.bfloat16, CPU), host(shard.numel)
    before = [tensor.clone() for tensor in there.tensors()]
    state.fetch(there, COLUMNS)
    mine = [state.weight.clone(), state.exp_avg.clone(), state.exp_avg_sq.clone()]
    for tensor in there.tensors():
        tensor[selected_elements(shard)] = float("nan")  # the host's shadow is nobody's business
    state.send_home(there, 3)
    assert all(torch.equal(now, then) for now, then in zip(there.tensors(), before, strict=True))
    state.fetch(there, COLUMNS)
    assert all(
        torch.equal(now, then) for now, then in zip((state.weight, state.exp_avg, state.exp_avg_sq), mine, strict=True)
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_moments_that_the_host_keeps_in_bf16_go_home_rounded_by_place_and_clock_and_come_back_exactly(
    rank: int,
) -> None:
    shard = table(rank)
    state, there = SelectedState(shard, torch.bfloat16, CPU), host(shard.numel, torch.bfloat16)
    state.fetch(there, COLUMNS)
    positions = selected_elements(shard)
    others = torch.tensor(sorted(set(range(shard.numel)) - set(positions.tolist())), dtype=torch.long)
    before = [tensor.clone() for tensor in there.tensors()]
    exact = []
    for moment in state.moments():
        moment.mul_(1 + torch.rand(moment.shape))
        whole = torch.empty(shard.numel)
        state.layout.unpack(moment, piece_view(whole))
        exact.append(whole[positions])
    state.send_home(there, 17)
    for number, (now, mine) in enumerate(zip((there.exp_avg, there.exp_avg_sq), exact, strict=True)):
        assert torch.equal(now[positions], rounded(mine, noise_at(positions, 17, number)))
        assert torch.equal(now[others], before[1 + number][others])
    state.fetch(there, COLUMNS)
    at_home = [tensor.clone() for tensor in there.tensors()]
    state.send_home(there, 18)
    assert all(torch.equal(now, then) for now, then in zip(there.tensors(), at_home, strict=True))


def test_the_update_equals_torch_adamw_with_each_groups_own_settings() -> None:
    shard = table(0, ranks=1)
    state, there = SelectedState(shard, torch.float32, CPU), host(shard.numel)
    there.exp_avg.zero_(), there.exp_avg_sq.zero_()
    state.fetch(there, COLUMNS)
    ends = state.layout.group_ends
    params = [torch.nn.Parameter(part.clone()) for part in state.weight.split([ends[0], ends[1] - ends[0]])]
    reference = torch.optim.AdamW(
        [
            {"params": [params[0]], "lr": 0.1, "weight_decay": 0.5},
            {"params": [params[1]], "lr": 0.01, "weight_decay": 0.0},
        ]
    )
    hypers = [Hyper(0.1, 0.9, 0.999, 1e-8, 0.5), Hyper(0.01, 0.9, 0.999, 1e-8, 0.0)]
    for clock in (1, 2, 3):
        grad = torch.randn(state.layout.numel)
        state.wire.copy_(grad)
        state.update(hypers, 0.25, clock)
        for param, part in zip(params, grad.split([len(p) for p in params]), strict=True):
            param.grad = 0.25 * part
        reference.step()
    torch.testing.assert_close(state.weight, torch.cat([p.detach() for p in params]), rtol=1e-6, atol=0)


def test_device_memory_is_fourteen_bytes_a_selected_element() -> None:
    shard = table(0)
    state = SelectedState(shard, torch.bfloat16, CPU)
    state.fetch(host(shard.numel), COLUMNS)
    tensors = (state.weight, state.exp_avg, state.exp_avg_sq, state.wire)
    assert sum(tensor.nbytes for tensor in tensors) == 14 * state.layout.numel


def test_weights_on_another_device_are_written_there_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameter offload: the device's state is read back first. `cpu:0` is not `cpu`, but one memory."""
    shard, used, unpack = table(0), [], SelectedLayout.unpack

    def watched(layout: SelectedLayout, *arguments: Any) -> None:
        used.append(layout)
        unpack(layout, *arguments)

    monkeypatch.setattr(SelectedLayout, "unpack", watched)
    elsewhere, here = (SelectedState(shard, torch.bfloat16, CPU, torch.device(name)) for name in ("cpu:0", "cpu"))
    there = host(shard.numel)
    written = []
    for state in (elsewhere, here):
        state.fetch(there, COLUMNS)
        weights = torch.zeros(shard.numel, dtype=torch.bfloat16)
        state.write_masters(lambda piece, weights=weights: weights[piece.start : piece.stop])  # type: ignore[misc]
        written.append(weights)
        # With its column indices where the weights are, which indices on the device could not address.
        assert (used[-1] is state.layout) == (state is here)
    positions = selected_elements(shard)
    expected = torch.zeros(shard.numel, dtype=torch.bfloat16)
    expected[positions] = there.master[positions].bfloat16()
    assert torch.equal(written[0], expected) and torch.equal(written[1], expected)
