"""What a step of training adds to forward and backward, counted: a pass that somebody adds fails here, on any machine.

All numbers are limits, not equalities: whoever takes a pass away is welcome. They stand for a CPU as the device, where every
copy is a pass of the trainer's core.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.conftest import destroy_process_group
from tests.counted import Kernel, Operand
from tests.counted_steps import SELECT_INTERVAL, UPDATE_INTERVAL, Counted, counted_step
from tests.engine import init_distributed

WIRE_BYTES = 2
BAND_NUMEL = 1 << 18
"""What the trainer takes of a gradient, or of the selected elements, at a time on a CPU; a matrix of the smallest model is one
band."""
SCORED_NUMEL = 1 << 17
"""What it scores at a time."""
TOLERANCE_RATIO = 0.005
"""For scalars and indices; the least pass there can be, reading a byte of each element, adds nine times that."""


@pytest.fixture(autouse=True)
def single_rank(monkeypatch: pytest.MonkeyPatch, free_port: int) -> None:
    settings = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port, "RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0}
    for name, value in {**settings, "LOCAL_SIZE": 1}.items():
        monkeypatch.setenv(name, str(value))


@functools.cache
def _counted(**settings: Any) -> Counted:
    init_distributed()
    try:
        return counted_step(**settings)
    finally:
        destroy_process_group()


def shared(kernel: Kernel, operands: tuple[Operand, ...], counted: Counted) -> int:
    """Bytes of the operands that lie in the memory shared with the worker."""
    begin, end = counted.arena
    return sum(operand.nbytes for operand in operands if begin <= operand.address < end)


@pytest.mark.parametrize("topk_ratio", [0.0, 0.125, 1.0])
def test_a_step_adds_the_bytes_that_are_listed_here_and_no_more(topk_ratio: float) -> None:
    counted = _counted(topk_ratio=topk_ratio)
    measured = WIRE_BYTES + 4 + 4  # a gradient read, widened, and its square summed, in bands that stay in cache
    left = 2 * WIRE_BYTES  # read and written into the slot
    arrived = 2 * WIRE_BYTES / UPDATE_INTERVAL  # a block, from the outbox into the weights
    packed = written = 2 * WIRE_BYTES
    adamw = (WIRE_BYTES + 4) + 8 + 28 + (4 + WIRE_BYTES)  # widened, clipped, updated, rounded
    listed = counted.numel * (measured + left + arrived) + counted.selected_numel * (packed + adamw + written)
    assert counted.extra_bytes <= (1 + TOLERANCE_RATIO) * listed


def test_a_parameter_and_a_band_of_it_take_the_kernels_that_are_listed_here_and_no_more() -> None:
    few, more, taller = _counted(), _counted(layers=4), _counted(rows=1024)
    band = 2 + 1 + 1  # widened and its squares summed; packed; sent to the slot
    param = band + 1  # a matrix of one band, or a vector; written when the step ends
    assert more.extra_kernels - few.extra_kernels <= 2 * (param + param)
    assert taller.extra_kernels - few.extra_kernels <= 2 * band
    # With views, each of which costs the trainer a microsecond or two.
    assert more.extra_dispatched - few.extra_dispatched <= 2 * 48
    assert taller.extra_dispatched - few.extra_dispatched <= 2 * 16
    # What a step takes whatever the model. Empty tensors: scratch of AdamW, and DeepSpeed's bucket, which nobody fills.
    norm, adamw, block, columns, empty, loss_scale = 3, 5, 1, 1, 2, 4
    assert few.extra_kernels <= 4 * param + norm + adamw + block + columns + empty + loss_scale


@pytest.mark.parametrize("rows", [512, 1024, 4096])
def test_a_gradient_is_measured_in_bands_of_whole_rows_that_stay_in_cache(rows: int) -> None:
    counted = _counted(rows=rows, layers=1, bias=False)
    bands = -(-rows // (BAND_NUMEL // 512))
    squared = counted.step.named("dot")
    assert [kernel.read[0].numel for kernel in squared] == [BAND_NUMEL] * bands
    # All of them in the same place, which is in cache by then.
    assert len({kernel.read[0].address for kernel in squared}) == 1
    # All that reads a band does so before the next one is read, and nothing adds the sums up before the last.
    names = [kernel.name for kernel in counted.step.kernels]
    start, end = names.index("dot") - 1, names.index("stack")
    assert names[start:end] == ["copy_", "dot", "gather", "copy_"] * bands
    assert names[end:].count("sum") == 1


def test_no_kernel_of_the_step_takes_the_whole_shard_but_the_copy_of_what_changed() -> None:
    counted = _counted(layers=4)
    largest: dict[str, int] = {}
    for kernel in counted.step.kernels:
        touched = max((operand.numel for operand in (*kernel.read, *kernel.written)), default=0)
        largest[kernel.name] = max(largest.get(kernel.name, 0), touched)
    block = -(-counted.numel // UPDATE_INTERVAL)
    assert {name for name, numel in largest.items() if numel > max(block, BAND_NUMEL)} == set()


def test_no_fp32_tensor_is_made_that_grows_with_the_shard() -> None:
    few, more = _counted(rows=1024, cols=1024), _counted(rows=1024, cols=1024, layers=4)
    for counted in (few, more):
        assert 0 < _largest_made_in_fp32(counted) <= BAND_NUMEL
    # The state of columns that change place is made anew, of one tensor at a time; scores and masters take no more.
    selecting = _counted(rows=1024, cols=1024, layers=4, steps=SELECT_INTERVAL + 1)
    assert BAND_NUMEL < _largest_made_in_fp32(selecting) == selecting.selected_numel < 1024 * 1024


def _largest_made_in_fp32(counted: Counted) -> int:
    made = [operand for kernel in counted.step.kernels for operand in kernel.made if operand.dtype == torch.float32]
    return max(operand.numel for operand in made)


@pytest.mark.parametrize("settings", [{}, {"layers": 4}, {"rows": 1024}])
def test_what_goes_to_the_host_and_back_is_the_formula(settings: dict[str, int]) -> None:
    counted = _counted(**settings)
    down_bytes, up_bytes = WIRE_BYTES * counted.numel, WIRE_BYTES * -(-counted.numel // UPDATE_INTERVAL)
    assert counted.stats.to_host_bytes == down_bytes
    assert counted.stats.to_device_bytes == up_bytes
    # The same, where it is copied.
    down = [shared(kernel, kernel.written, counted) for kernel in counted.step.kernels]
    up = [shared(kernel, kernel.read, counted) for kernel in counted.step.kernels]
    assert sum(down) == down_bytes
    assert sum(up) == up_bytes
    assert sum(map(bool, up)) == 1  # one parameter group, one copy


def test_a_re_selection_moves_the_columns_that_change_and_no_others() -> None:
    counted = _counted(steps=SELECT_INTERVAL + 1, fresh=True)
    stats, rows, selected_columns = counted.stats, 512, 2 * 512 // 8
    assert stats.selection_agreement is not None
    changed = round(selected_columns * (1 - stats.selection_agreement))
    assert 0 < changed < selected_columns
    moved_numel = changed * rows
    # The block under way and then, settled, all of them; master and both moments of what has changed.
    blocks_numel = counted.numel + -(-counted.numel // UPDATE_INTERVAL)
    assert stats.to_host_bytes == WIRE_BYTES * counted.numel + 12 * moved_numel
    assert stats.to_device_bytes == WIRE_BYTES * blocks_numel + 12 * moved_numel
    # The same, where it is copied.
    fetched, home = counted.step.named("index_select"), counted.step.named("index_copy_")
    from_host = [kernel for kernel in fetched if any(shared(kernel, (one,), counted) for one in kernel.read)]
    to_host = [kernel for kernel in home if shared(kernel, kernel.written, counted)]
    assert sum(one.numel for kernel in from_host for one in kernel.written) == 3 * moved_numel
    given = [one for kernel in to_host for one in kernel.read if one.dtype == torch.float32]
    assert sum(one.numel for one in given if not shared(to_host[0], (one,), counted)) == 3 * moved_numel


def test_scores_are_summed_in_chunks_that_stay_in_cache() -> None:
    counted = _counted(steps=SELECT_INTERVAL + 1)
    squared = counted.step.named("pow_")
    assert sum(kernel.written[0].numel for kernel in squared) == 2 * 512 * 512
    assert max(kernel.written[0].numel for kernel in squared) <= SCORED_NUMEL


def test_gradients_leave_in_one_copy_for_each_band() -> None:
    few, taller = _counted(), _counted(rows=1024)
    for counted, bands in ((few, 2 * 2), (taller, 2 * 2 + 2)):
        down = [kernel for kernel in counted.step.kernels if shared(kernel, kernel.written, counted)]
        assert len(down) <= bands
        assert {kernel.name for kernel in down} == {"copy_"}


def test_the_norm_is_read_back_once() -> None:
    assert len(_counted().step.named("_local_scalar_dense")) == 1


def test_columns_are_scored_only_at_a_selection() -> None:
    between, selecting = _counted(), _counted(steps=SELECT_INTERVAL + 1)
    scores = ("sum", "pow_", "square_", "square", "sort")

    def scored(counted: Counted) -> int:
        """Kernels that add up, or sort, columns; the model's own vectors have their gradients from such sums, too."""
        return len(counted.step.named(*scores)) - len(counted.plain.named(*scores))

    assert scored(between) <= 1  # of the norm
    assert scored(selecting) >= 4
    assert selecting.stats.selection_agreement is not None


def test_a_single_rank_calls_no_collective() -> None:
    assert _counted().step.collectives == []
    assert _counted(steps=SELECT_INTERVAL + 1).step.collectives == []


# -- what `interim_step` adds ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"layers": 4}, {"rows": 1024}])
def test_moving_deferred_weights_adds_a_pass_over_them_and_one_over_the_block(settings: dict[str, int]) -> None:
    without, counted = _counted(**settings), _counted(**settings, interim_step=True)
    block_numel = -(-counted.numel // UPDATE_INTERVAL)
    added = (counted.numel + block_numel) * 3 * WIRE_BYTES  # a gradient read, a weight read and written
    assert 0.8 * added < counted.extra_bytes - without.extra_bytes <= (1 + TOLERANCE_RATIO) * added


def test_moving_deferred_weights_takes_the_kernels_that_are_listed_here_and_no_more() -> None:
    without, counted = _counted(), _counted(interim_step=True)
    more, taller = _counted(layers=4, interim_step=True), _counted(rows=1024, interim_step=True)
    bound, matrix, again, scalars = 5, 1, 2, 8  # sums stacked, summed, root, factor and the smaller one; then the move
    assert counted.extra_kernels - without.extra_kernels <= 2 * (bound + matrix) + again + scalars
    plain = _counted(layers=4).extra_kernels - without.extra_kernels
    assert more.extra_kernels - counted.extra_kernels <= plain + 2 * (bound + matrix) + again
    plain = _counted(rows=1024).extra_kernels - without.extra_kernels
    assert taller.extra_kernels - counted.extra_kernels <= plain + again


def test_a_block_that_arrives_brings_its_gradient_along() -> None:
    counted = _counted(interim_step=True)
    assert counted.stats.to_host_bytes == WIRE_BYTES * counted.numel
    # The gradient comes only for what is moved: vectors are selected as a whole.
    block_bytes = WIRE_BYTES * -(-counted.numel // UPDATE_INTERVAL)
    assert 1.98 * block_bytes < counted.stats.to_device_bytes <= 2 * block_bytes
