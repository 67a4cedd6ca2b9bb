"""Formulas of `rates`, `costs` and `footprint`, against numbers worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
from hypothesis import given
from hypothesis import strategies as st

from lightning_zenflow import costs, footprint, recommended, traffic
from lightning_zenflow.rates import (
    Rates,
    accumulate_bytes,
    device_adamw_bytes,
    offload_device_bytes,
    offload_step_bytes,
    update_bytes,
)
from lightning_zenflow.work import Work

# A billion parameters, a tenth of them selected, and rates that give round numbers.
WORK = Work(numel=10**9, selected_numel=10**8, tokens=1000, largest_numel=10**6, interim_step=False)
RATES = Rates(
    compute_flops=6e12,
    beside_flops=5e12,
    down_secs=0.1e-9,
    up_secs=0.2e-9,
    accumulate_secs=0.5e-9,
    update_secs=2.5e-9,
    device_adamw_secs=0.3e-9,
    write_secs=0.2e-9,
    interim_secs=0.01e-9,
    move_secs=10e-9,
    offload_down_secs=0.4e-9,
    offload_step_secs=3e-9,
    link_overlaps=True,
)


def test_forward_and_backward_take_six_operations_per_parameter_and_token() -> None:
    assert costs.compute_secs(WORK, RATES) == pytest.approx(6 * 1e9 * 1000 / 6e12)
    assert costs.compute_secs(WORK, RATES, beside_host=True) == pytest.approx(6 * 1e9 * 1000 / 5e12)


def test_computing_forward_again_takes_eight() -> None:
    assert costs.compute_secs(replace(WORK, checkpointing=True), RATES) == pytest.approx(8 / 6)


def test_few_tokens_take_as_long_as_reading_the_weights() -> None:
    slow = replace(
        RATES, device_bandwidth=1e9
    )  # forward and backward read 2 GB each, and a gradient of 2 GB is written
    assert costs.compute_secs(WORK, slow) == pytest.approx(6.0)
    assert costs.compute_secs(replace(WORK, micro_batches=4), slow) == pytest.approx(24.0)
    assert costs.compute_secs(replace(WORK, checkpointing=True), slow) == pytest.approx(8.0)


def test_backward_is_two_thirds_of_the_last_micro_batch() -> None:
    assert costs.backward_secs(WORK, RATES) == pytest.approx(2 / 3)
    assert costs.backward_secs(replace(WORK, micro_batches=2), RATES) == pytest.approx(1 / 3)
    assert costs.backward_secs(replace(WORK, checkpointing=True), RATES) == pytest.approx(3 / 4 * 8 / 6)


def test_a_zenflow_step_is_compute_block_and_selected_while_the_host_keeps_up() -> None:
    step = costs.zenflow(WORK, RATES, 4)
    assert step.compute_secs == pytest.approx(1.2)
    assert step.link_secs == pytest.approx(0.25 * 0.2)  # 0.1 s of gradients hide behind 0.67 s of backward
    assert step.optimizer_secs == pytest.approx(0.1 * 0.5)
    assert step.host_secs == pytest.approx(0.5 + 2 / 4)
    assert step.link_busy_secs == pytest.approx(0.1 + 0.05)
    assert step.stall_secs == 0
    assert step.step_secs == pytest.approx(1.3)
    assert step.limit == "compute"


def test_the_device_waits_for_what_the_host_needs_longer() -> None:
    step = costs.zenflow(WORK, RATES, 1)
    # Nothing is accumulated: 4 of the 10 bytes that adding a gradient takes 0.5 s for are not read.
    assert step.host_secs == pytest.approx(2.5 - 0.2)
    assert step.stall_secs == pytest.approx(2.3 - (1.2 + 0.2 + 0.05))
    assert step.step_secs == pytest.approx(2.3)
    assert step.limit == "host"


def test_what_backward_does_not_hide_of_the_link_is_waited_for() -> None:
    slow = replace(RATES, down_secs=1e-9)
    assert costs.zenflow(WORK, slow, 4).link_secs == pytest.approx(1 - 2 / 3 + 0.05)
    assert costs.zenflow(WORK, replace(slow, link_overlaps=False), 4).link_secs == pytest.approx(1.05)


def test_ranks_share_host_work_and_link() -> None:
    step = costs.zenflow(replace(WORK, ranks=4), RATES, 1)
    assert step.host_secs == pytest.approx(2.3 / 4)
    assert step.link_busy_secs == pytest.approx(0.3 / 4)
    assert step.optimizer_secs == pytest.approx(0.05 / 4)
    assert step.compute_secs == pytest.approx(1.2)  # tokens are per device
    assert step.exchange_secs == 0  # not counted without a bandwidth


def test_ranks_exchange_the_block_and_the_selected_values() -> None:
    linked = replace(RATES, interconnect_bandwidth=10e9)
    two = replace(WORK, ranks=2)
    # Half of it comes from the other rank, two bytes each; the reduction of 2 GB hides behind backward.
    assert costs.zenflow(two, linked, 4).exchange_secs == pytest.approx((0.25e9 + 0.1e9) / 10e9)
    assert costs.zero_offload(two, linked).exchange_secs == pytest.approx(1e9 / 10e9)
    assert costs.on_device(two, linked).exchange_secs == pytest.approx(1e9 / 10e9)
    slow = replace(RATES, interconnect_bandwidth=1e9)  # an all-reduce takes 2 s, of which 2/3 s are hidden
    assert costs.on_device(two, slow).exchange_secs == pytest.approx(2 - 2 / 3 + 1)


def test_zero_offload_waits_for_the_whole_host_step_and_for_the_weights() -> None:
    step = costs.zero_offload(WORK, RATES)
    assert step.stall_secs == step.host_secs == pytest.approx(3.0)
    assert step.link_secs == pytest.approx(0.2)
    assert step.step_secs == pytest.approx(1.0 + 3.0 + 0.2)
    assert step.limit == "host"


def test_without_offload_the_device_updates_everything() -> None:
    step = costs.on_device(WORK, RATES)
    assert step.step_secs == pytest.approx(1.0 + 0.3)
    assert step.limit == "compute"


def test_the_update_interval_is_the_smallest_with_which_the_host_keeps_up() -> None:
    # 0.5 + 2/U fits into 1.25 + 0.2/U from U = 2.4 on.
    assert recommended.smallest_update_interval(WORK, RATES) == 3
    assert recommended.smallest_update_interval(WORK, replace(RATES, update_secs=1e-9)) == 1


def test_an_interval_that_never_suffices_is_only_as_large_as_it_helps() -> None:
    slow = replace(RATES, accumulate_secs=2e-9, update_secs=3e-9)
    # The step is 2 + 1/U, at best 2.0625 for U = 16; 2 % more is reached from U = 9.64 on.
    assert recommended.smallest_update_interval(WORK, slow) == 10


def test_a_re_selection_waits_for_the_rest_of_the_updates_and_moves_the_selected_state_and_all_weights() -> None:
    # The step's own command takes the host 0.5 * 3/4 + 2.5 / 4 = 1.0 s, 3/4 of the shard are updated then, and forward and
    # backward end after 1.2 s. Reading masters and writing weights is 6 bytes where accumulating is 10.
    late = 1.0 + 2.5 * 3 / 4 - 1.2
    assert recommended.barrier_secs(WORK, RATES, 4) == pytest.approx(late + 0.3 + 0.2 / 4 + 0.1 * 10)
    far = replace(RATES, up_secs=5e-9)  # the link is slower than the host: what the first block takes there is added
    assert recommended.barrier_secs(WORK, far, 4) == pytest.approx(late + 5.0 + 0.3 / 4 + 0.1 * 10)
    # A fast host has all of it done while backward runs; one that is idle before does not begin earlier than backward.
    fast = replace(RATES, accumulate_secs=1e-10, update_secs=2e-10)
    assert recommended.barrier_secs(WORK, fast, 4) == pytest.approx(0.2 + 0.06 / 4 + 0.1 * 10)
    between = replace(RATES, accumulate_secs=1e-10, update_secs=1e-9)
    assert recommended.barrier_secs(WORK, between, 4) == pytest.approx(
        (1.2 - 2 / 3 + 0.75 - 1.2) + 0.2 + 0.06 / 4 + 0.1 * 10
    )


def test_an_interval_that_costs_copies_is_no_smaller_than_the_auto_tuner_allows() -> None:
    fast = replace(RATES, accumulate_secs=0.1e-9, update_secs=0.3e-9, link_overlaps=False)
    # Without copying a step takes 1.2 + 0.1 + 0.05 s. Of 0.2 / U s more, 2.5 % are reached from U = 5.8 on.
    assert recommended.smallest_update_interval(WORK, fast) == 6
    assert recommended.smallest_update_interval(WORK, replace(fast, link_overlaps=True)) == 1
    assert recommended.smallest_update_interval(WORK, replace(fast, up_secs=5e-9)) == 16  # never more
    # A host that does not keep up makes the trainer wait anyway: copies are then no reason.
    late = replace(fast, accumulate_secs=2e-9, update_secs=2.01e-9)
    assert recommended.smallest_update_interval(WORK, late) == 1


def test_re_selections_take_half_of_the_stall_budget() -> None:
    # 3.025 s may be 2.5 % of S steps of 1.3 s each.
    assert recommended.smallest_select_interval(WORK, RATES, 4) == math.ceil(3.025 / (0.025 * 1.3))
    assert recommended.smallest_select_interval(WORK, replace(RATES, move_secs=1.0), 4) == 4096  # never more


# -- ZeRO-3 ------------------------------------------------------------------------------------------------------------

CUT = replace(WORK, stage=3, ranks=2)
ON_HOST = replace(WORK, stage=3, offload_parameters=True)


def test_weights_are_gathered_in_both_passes_but_for_those_kept_at_the_turn() -> None:
    assert traffic.gathered_numel(CUT) == (10**9, 5 * 10**8)
    assert traffic.gathered_numel(replace(CUT, numel=4 * 10**8)) == (4 * 10**8, 0)
    assert traffic.gathered_numel(replace(CUT, ranks=1)) == (0, 0)  # they are on the device already
    assert traffic.gathered_numel(ON_HOST) == (10**9, 5 * 10**8)
    assert traffic.gathered_numel(replace(WORK, ranks=2)) == (0, 0)


def test_gathering_hides_behind_the_passes_and_nothing_is_exchanged_after_the_update() -> None:
    linked = replace(RATES, interconnect_bandwidth=10e9)
    # 0.1 s beside 1/3 s of forward; 0.05 s and 0.1 s of gradients beside 2/3 s of backward.
    assert costs.zenflow(CUT, linked, 4).exchange_secs == 0
    slow = replace(RATES, interconnect_bandwidth=1e9)
    expected = (1 - 1 / 3) + (1.5 - 2 / 3)
    for step in (costs.zenflow(CUT, slow, 4), costs.zero_offload(CUT, slow), costs.on_device(CUT, slow)):
        assert step.exchange_secs == pytest.approx(expected)
    twice = costs.on_device(replace(CUT, micro_batches=2), slow)
    assert twice.exchange_secs == pytest.approx(2 * ((1 - 1 / 6) + (1.5 - 1 / 3)))


def test_weights_in_host_memory_come_for_each_pass_and_blocks_stay_there() -> None:
    step = costs.zenflow(ON_HOST, RATES, 4)
    # A block is read and written at 20 bytes/ns: 0.25e9 x 4 bytes. 0.2 s and 0.1 s of fetching hide behind the passes.
    assert step.link_secs == pytest.approx(0.05)
    assert step.link_busy_secs == pytest.approx(0.1 + 0.2 + 0.1)
    # Selected values: AdamW 0.3, the way 0.1, a cache line and 2 bytes in host memory 3.3 ns each.
    assert step.optimizer_secs == pytest.approx(1e8 * 3.7e-9)
    slow = replace(RATES, up_secs=1e-9)
    assert costs.zenflow(ON_HOST, slow, 4).link_secs == pytest.approx((1 - 1 / 3) + 0.05)
    assert costs.zero_offload(ON_HOST, slow).link_secs == pytest.approx((1 - 1 / 3) + 0.2)
    accumulated = costs.zenflow(replace(ON_HOST, micro_batches=2), slow, 4)
    assert accumulated.link_secs == pytest.approx(2 * (1 - 1 / 6 + 0.5 - 1 / 3) + 0.05)
    shared = costs.zenflow(replace(ON_HOST, ranks=4), slow, 4)
    assert shared.link_busy_secs == pytest.approx((0.1 + 1.5) / 4)


def test_where_the_cpu_is_the_device_weights_in_host_memory_are_near() -> None:
    near = replace(RATES, link_overlaps=False)
    assert costs.zenflow(ON_HOST, near, 4) == costs.zenflow(WORK, near, 4)


def test_a_re_selection_under_zero_3_exchanges_scores_and_no_weights() -> None:
    linked = replace(RATES, interconnect_bandwidth=1e9)
    scored = replace(CUT, columns=10**8)
    assert traffic.score_bytes(scored) == 4 * 10**8  # each way of an all-reduce: half of it
    assert traffic.select_bytes(scored) == traffic.score_bytes(scored)
    assert traffic.select_bytes(replace(scored, stage=2)) == 4 * 10**8 + 10**9  # half of the weights, two bytes each
    alone = recommended.barrier_secs(CUT, RATES, 4)
    assert recommended.barrier_secs(scored, linked, 4) == pytest.approx(alone + 0.4)
    assert recommended.barrier_secs(replace(scored, stage=2), linked, 4) == pytest.approx(alone + 0.4 + 1.0)


def test_traffic_is_counted_in_bytes() -> None:
    two = replace(WORK, ranks=2)
    found = traffic.zenflow(two, 4)
    assert (found.to_host_bytes, found.to_device_bytes) == (10**9, 10**9 // 4)
    # An all-reduce of the gradients, then the block and what is selected.
    assert found.from_ranks_bytes == 2 * 10**9 + (25 + 10) * 10**7
    assert traffic.zenflow(CUT, 4).from_ranks_bytes == 10**9 + 10**9 + 5 * 10**8
    assert traffic.zero_offload(two).to_host_bytes == 2 * 10**9  # in fp32
    assert traffic.zero_offload(two).from_ranks_bytes == 2 * 10**9 + 10**9
    assert traffic.on_device(replace(CUT, micro_batches=3)).from_ranks_bytes == 3 * 25 * 10**8
    offloaded = traffic.zenflow(replace(ON_HOST, micro_batches=2), 4)
    assert offloaded.to_host_bytes == 2 * 10**9 + 2 * 10**8
    assert offloaded.to_device_bytes == 2 * 2 * (10**9 + 5 * 10**8)
    assert traffic.zero_offload(ON_HOST).to_device_bytes == 2 * (10**9 + 5 * 10**8)


def test_a_device_that_moves_deferred_weights_reads_each_block_and_its_gradient() -> None:
    moving = replace(WORK, interim_step=True)
    without, found = costs.zenflow(WORK, RATES, 4), costs.zenflow(moving, RATES, 4)
    assert found.optimizer_secs - without.optimizer_secs == pytest.approx(1.25 * 0.01)
    assert found.link_secs - without.link_secs == pytest.approx(0.25 * 0.2)
    near = replace(RATES, link_overlaps=False)  # where the CPU is the device the gradient is there
    assert costs.zenflow(moving, near, 4).link_secs == costs.zenflow(WORK, near, 4).link_secs
    two = traffic.zenflow(replace(moving, ranks=2), 4)
    assert (two.to_host_bytes, two.to_device_bytes) == (10**9, 10**9 // 2)
    assert two.from_ranks_bytes == 2 * 10**9 + 10**9  # all weights, as with plain ZeRO
    assert traffic.zenflow(replace(CUT, interim_step=True), 4).from_ranks_bytes == 25 * 10**8


@pytest.mark.parametrize("changed", [{"selected_numel": 10**9}, {"stage": 3, "offload_parameters": True}])
def test_nothing_is_moved_without_deferred_weights_on_the_device(changed: dict[str, Any]) -> None:
    moving = replace(WORK, interim_step=True, **changed)
    assert costs.zenflow(moving, RATES, 4) == costs.zenflow(replace(moving, interim_step=False), RATES, 4)
    assert traffic.zenflow(moving, 4) == traffic.zenflow(replace(moving, interim_step=False), 4)


def test_a_device_holds_its_part_and_what_is_gathered() -> None:
    gathered = 5 * 10**8 + 5 * 10**7
    assert footprint.zenflow_device(CUT, RATES).weights_bytes == 2 * (5 * 10**8 + gathered)
    assert footprint.zenflow_device(replace(CUT, ranks=1), RATES).weights_bytes == 2 * 10**9
    assert footprint.zenflow_device(ON_HOST, RATES).weights_bytes == 2 * gathered
    wide = replace(ON_HOST, largest_numel=7 * 10**8)
    assert footprint.zenflow_device(wide, RATES).weights_bytes == 2 * (7 * 10**8 + 5 * 10**7)
    assert footprint.host_weights_bytes(replace(ON_HOST, ranks=4)) == 10**9 // 2
    assert footprint.host_weights_bytes(CUT) == 0


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("offload_parameters", [False, True])
def test_memory_under_zero_3_is_what_deepspeed_estimates(ranks: int, offload_parameters: bool) -> None:
    # A model of one layer, which both keep whole while it is at work, together with its gradient.
    numel = 4 * 10**8
    work = replace(
        CUT, numel=numel, largest_numel=numel, selected_numel=0, ranks=ranks, offload_parameters=offload_parameters
    )
    host_bytes, device_bytes, _ = estimate_zero3_model_states_mem_needs(
        numel, numel, ranks, 1, cpu_offload=True, cpu_offload_params=offload_parameters, additional_buffer_factor=1
    )
    ours = footprint.zenflow_device(work, RATES)
    assert ours.weights_bytes + ours.gradients_bytes == device_bytes
    assert ranks * footprint.offload_host_bytes(work) == host_bytes


@given(
    numel=st.integers(1, 10**12),
    tokens=st.integers(1, 10**6),
    ranks=st.integers(1, 64),
    scale=st.floats(1e-3, 1e3),
    ratio=st.floats(0, 1),
)
def test_the_chosen_interval_stalls_least_and_all_parts_add_up(
    numel: int, tokens: int, ranks: int, scale: float, ratio: float
) -> None:
    work = Work(numel=numel, selected_numel=int(ratio * numel), tokens=tokens, ranks=ranks)
    rates = replace(RATES, accumulate_secs=scale * 1e-9, update_secs=4 * scale * 1e-9)
    chosen = recommended.smallest_update_interval(work, rates)
    step = costs.zenflow(work, rates, chosen)
    every = [costs.zenflow(work, rates, interval) for interval in range(1, 17)]
    assert step.stall_secs == 0 or step.step_secs <= 1.02 * min(other.step_secs for other in every)
    assert all(other.stall_secs > 0 for other in every[: chosen - 1])
    assert step.step_secs >= max(step.compute_secs, step.host_secs) * (1 - 1e-9)
    assert 1 <= recommended.smallest_select_interval(work, rates, chosen) <= 4096


def test_bytes_of_the_passes_are_those_of_the_tensors_they_touch() -> None:
    assert accumulate_bytes(2) == 2 + 4 + 4
    assert update_bytes(2) == update_bytes(2, 4) == 2 * (4 + 4 + 4) + 4 + 2 + 2
    assert update_bytes(2, 1) == 2 * (4 + 4 + 4) + 2 + 2  # no accumulator
    assert device_adamw_bytes(2) == (2 + 4) + (4 + 4) + (4 * 4 + 3 * 4) + (4 + 2)
    assert offload_device_bytes(2) == 3 * (2 + 2) + (2 + 8) + 8 + 2 * 2 + (2 + 4)
    assert offload_step_bytes(4) == (4 + 4) + (4 * 4 + 3 * 4) + (4 + 4)


def test_rates_from_bandwidths_are_bytes_over_bandwidth() -> None:
    rates = Rates.from_bandwidths(
        compute_flops=1e12, device_bandwidth=1e12, link_bandwidth=10e9, host_bandwidth=50e9, wire_bytes=2
    )
    assert rates.beside_flops == rates.compute_flops == 1e12
    assert rates.accumulate_secs == pytest.approx(10 / 50e9)
    assert rates.update_secs == pytest.approx(32 / 50e9)
    assert rates.up_secs == pytest.approx(2 / 10e9)
    assert rates.down_secs == pytest.approx(2 / 10e9 + 2 / 1e12)
    assert rates.offload_down_secs == pytest.approx(4 / 10e9 + 40 / 1e12)
    assert rates.offload_step_secs == pytest.approx(42 / 50e9)


def test_a_given_bandwidth_replaces_only_what_it_is_about() -> None:
    linked = RATES.with_link(20e9, wire_bytes=2)
    assert (linked.down_secs, linked.up_secs, linked.offload_down_secs) == (0.1e-9, 0.1e-9, 0.2e-9)
    assert replace(linked, down_secs=0.1e-9, up_secs=0.2e-9, offload_down_secs=0.4e-9) == RATES
    hosted = RATES.with_host(10e9, wire_bytes=4)
    assert (hosted.accumulate_secs, hosted.update_secs) == pytest.approx((1.2e-9, 3.6e-9))
    assert hosted.down_secs == RATES.down_secs


def test_selected_elements_take_fourteen_bytes_and_gradients_leave_at_once() -> None:
    found = footprint.zenflow_device(WORK, RATES)
    assert found.weights_bytes == 2 * 10**9
    assert found.state_bytes == 14 * 10**8
    assert found.gradients_bytes == 2 * 10**6  # the largest one; backward is slower than the link
    assert found.buffers_bytes == 0  # a single rank reduces nothing
    assert found.total_bytes == 2 * 10**9 + 14 * 10**8 + 2 * 10**6


def test_gradients_that_the_link_has_not_taken_wait_on_the_device() -> None:
    slow = replace(RATES, down_secs=1e-9)  # 1 s for all of them, of which backward has given it 2/3 s
    assert footprint.zenflow_device(WORK, slow).gradients_bytes == pytest.approx(2 * 10**9 / 3 + 2 * 10**6)
    waiting_for_none = replace(slow, link_overlaps=False)
    assert footprint.zenflow_device(WORK, waiting_for_none).gradients_bytes == 2 * 10**6


def test_micro_batches_are_summed_in_fp32_and_ranks_need_two_buckets() -> None:
    found = footprint.zenflow_device(replace(WORK, micro_batches=2, ranks=4), RATES)
    assert found.gradients_bytes == 4 * 10**9 // 4 + 2 * 10**6
    assert found.buffers_bytes == 2 * 2 * 200_000_000
    assert found.state_bytes == 14 * 10**8 // 4


def test_zero_offload_keeps_no_state_on_the_device_and_eighteen_bytes_on_the_host() -> None:
    found = footprint.offload_device(WORK, RATES)
    assert (found.state_bytes, found.weights_bytes) == (0, 2 * 10**9)
    assert found.buffers_bytes == 2 * 2 * 200_000_000 + 2 * 10**6
    assert footprint.offload_host_bytes(WORK) == 18 * 10**9
    assert footprint.offload_host_bytes(replace(WORK, wire_bytes=4, ranks=2)) == 10 * 10**9


def test_without_offload_a_parameter_takes_sixteen_bytes() -> None:
    assert footprint.on_device(WORK).total_bytes == 16 * 10**9
    assert footprint.on_device(replace(WORK, ranks=4)).total_bytes == 2 * 10**9 + 14 * 10**9 // 4 + 800_000_000


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("numel", 0, "at least 1, got 0"),
        ("tokens", 0, "at least 1, got 0"),
        ("ranks", 0, "at least 1, got 0"),
        ("micro_batches", 0, "at least 1, got 0"),
        ("selected_numel", 2 * 10**9, "from 0 to `numel` 1000000000, got 2000000000"),
        ("wire_bytes", 8, "2 or 4, got 8"),
        ("stage", 4, "2 or 3, got 4"),
        ("offload_parameters", True, "false under ZeRO stage 2, got True"),
    ],
)
def test_impossible_work_is_refused(field: str, value: int, rule: str) -> None:
    change: Any = {field: value}
    with pytest.raises(ValueError, match=f"`{field}` must be {rule}"):
        replace(WORK, **change)
