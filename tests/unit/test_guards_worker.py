"""What the background process does with every element, counted: a pass that somebody adds fails here, on any machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from lightning_zenflow.adamw import Hyper
from lightning_zenflow.offload.arena import Arena
from lightning_zenflow.offload.layout import ArenaLayout
from lightning_zenflow.offload.protocol import Accumulated, Gradient, Read, Start, Update, Updated
from lightning_zenflow.offload.worker import CHUNK_NUMEL, READS, HostAdamW
from lightning_zenflow.rates import accumulate_bytes, update_bytes
from tests.counted import Counting, Kernel, swept_bytes

HYPER = Hyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01)
NUMEL = 16 * CHUNK_NUMEL
SPARE_BYTES = 64
"""A step's number, which the kernel of AdamW takes as a tensor, for each piece."""


@dataclass(frozen=True)
class Counted:
    """One `Update` in the middle of a run; bytes are per element of the shard."""

    read: dict[str, float]
    written: dict[str, float]
    touched_bytes: float
    counting: Counting
    answers: list[Any]

    @property
    def passes(self) -> list[Kernel]:
        """All kernels but those of a single number, such as the step that AdamW's takes as a tensor."""
        kernels = self.counting.kernels
        return [kernel for kernel in kernels if any(one.numel > 1 for one in (*kernel.read, *kernel.written))]


@contextmanager
def updated(
    numel: int,
    blocks: int,
    scale: float = 0.5,
    groups: int = 1,
    fill: float = 1e-3,
    moments_dtype: torch.dtype = torch.float32,
) -> Iterator[Counted]:
    """Counts the step after two rounds through all blocks, so that every block holds what it holds all the time."""
    arena = Arena.create(ArenaLayout(numel, torch.bfloat16, blocks, moments_dtype))
    try:
        ends = tuple(numel * (group + 1) // groups for group in range(groups))
        host = HostAdamW(arena, Start(arena.layout, ends, None, "linear"), 1, lambda: None)
        arena.slot.fill_(fill)
        gradient = Gradient(scale, (HYPER.lr,) * groups)
        for step in range(1, 2 * blocks + 2):
            answers: list[Any] = []
            with Counting() as counting:
                command = Update(step % blocks, step % 2, step, 0.6, (HYPER,) * groups, gradient, others=blocks > 1)
                host.update(command, answers.append)
        regions = {name: getattr(arena, name) for name in ("slot", "master", "exp_avg", "exp_avg_sq", "accumulator")}
        regions |= {"outbox0": arena.outboxes[0], "outbox1": arena.outboxes[1]}
        read = swept_bytes(counting.kernels, regions, lambda kernel: kernel.read)
        written = swept_bytes(counting.kernels, regions, lambda kernel: kernel.written)
        del regions
        total = (sum(read.values()) + sum(written.values())) / numel
        yield Counted(_each(read, numel), _each(written, numel), total, counting, answers)
        del host
    finally:
        arena.close()


def _each(total: dict[str, int], numel: int) -> dict[str, float]:
    return {name: nbytes / numel for name, nbytes in total.items()}


@pytest.mark.parametrize("blocks", [2, 4, 16])
def test_a_step_touches_the_bytes_of_the_estimate_and_each_tensor_once(blocks: int) -> None:
    with updated(NUMEL, blocks) as found:
        share = 1 / blocks
        assert found.read["slot"] == 2
        assert found.read["accumulator"] <= 4
        assert found.written["accumulator"] <= 4 * (1 - share)
        for name in ("master", "exp_avg", "exp_avg_sq"):
            assert found.read[name] == found.written[name] == 4 * share, name
        # Read again by look-ahead, in the same piece: that is what chunks are for.
        assert found.written["outbox0"] + found.written["outbox1"] == 2 * share
        assert found.read["outbox0"] == found.read["outbox1"] == found.written["slot"] == 0
        expected_bytes = accumulate_bytes(2) * (1 - share) + update_bytes(2) * share
        assert expected_bytes - 8 * share <= found.touched_bytes <= expected_bytes


def test_moments_in_16_bit_are_read_and_written_once_and_rounded_without_new_memory() -> None:
    with updated(NUMEL, 4) as wide, updated(NUMEL, 4, moments_dtype=torch.bfloat16) as found:
        for name in ("exp_avg", "exp_avg_sq"):
            assert found.read[name] == found.written[name] == 2 / 4, name
        assert found.touched_bytes == wide.touched_bytes - 2 * (2 + 2) / 4
        assert max((operand.numel for kernel in found.counting.kernels for operand in kernel.made), default=0) <= 1
        # Each moment widened; noise added to both at once, shifted, and each copied.
        assert len(found.passes) == len(wide.passes) + NUMEL // CHUNK_NUMEL // 4 * (2 + 2 + 2)


def test_an_accumulator_that_holds_nothing_is_overwritten_and_never_zeroed() -> None:
    with updated(NUMEL, 4, scale=1.0) as found:
        assert not {"zero_", "fill_", "zeros", "zeros_like", "full"} & {kernel.name for kernel in found.passes}
        # One block of four is fresh at each step: written, and not read first. One is read to be updated.
        assert found.read["accumulator"] == 4 * (2 + 1) / 4
        assert found.written["accumulator"] == 4 * 3 / 4


def test_scratch_stays_in_cache_and_what_happens_there_is_counted_too() -> None:
    with updated(NUMEL, 4) as found:
        accumulated = 2 + 4 + (4 + 4 + 4)  # copied to fp32, added
        fresh = 2 + 4 + (4 + 4)  # copied, scaled
        before, mean, ahead = 4 + 4, (2 + 4) + (4 + 4 + 4) + (4 + 4), (8 + 4) + (8 + 4)
        update = before + mean + (16 + 12) + ahead + (4 + 2)
        assert (
            found.counting.nbytes <= NUMEL * (2 * accumulated + fresh + update) / 4 + SPARE_BYTES * NUMEL / CHUNK_NUMEL
        )
        made = [operand.numel for kernel in found.counting.kernels for operand in kernel.made]
        assert max(made, default=0) <= 1  # nothing is allocated in a pass
        sizes = {operand.numel for kernel in found.counting.kernels for operand in (*kernel.read, *kernel.written)}
        assert max(sizes) <= CHUNK_NUMEL <= 1 << 20  # seven tensors of 4 MiB at most


def test_the_number_of_kernels_of_a_piece_is_known() -> None:
    with updated(NUMEL, 4) as found:
        pieces = NUMEL // CHUNK_NUMEL
        # Widened and added; copied and scaled; the master kept, sum and mean of two passes each, AdamW, look-ahead, rounded.
        accumulated, fresh, update = 2, 2, 1 + 2 + 1 + 1 + 2 + 1
        assert len(found.passes) <= pieces * (2 * accumulated + fresh + update) / 4
        # With the step's number, and views: of accumulator, slot and scratch; of two; of ten tensors of an update.
        assert found.counting.dispatched <= pieces * (2 * (accumulated + 3) + (fresh + 2) + (update + 1 + 10)) / 4


@pytest.mark.parametrize(
    ("numel", "blocks", "groups"),
    [(NUMEL, 4, 1), (3 * NUMEL + 17, 4, 1), (1 << 16, 64, 1), (1 << 16, 4, 100), (NUMEL + 17, 7, 3)],
)
def test_a_step_is_answered_in_a_bounded_number_of_messages(numel: int, blocks: int, groups: int) -> None:
    with updated(numel, blocks, groups=groups) as found:
        kinds = [type(answer) for answer in found.answers]
        assert kinds.count(Updated) == kinds.count(Accumulated) == 1
        # The pass is cut in three where the updated block has its turn: each part may end in a smaller batch.
        assert 1 <= kinds.count(Read) <= READS + 2
        # The last of them says that everything has been read.
        assert min(answer.first for answer in found.answers if isinstance(answer, Read)) == 0


def test_a_block_alone_reads_no_accumulator() -> None:
    with updated(4 * CHUNK_NUMEL, 1) as found:
        assert found.read["accumulator"] == found.written["accumulator"] == 0
        assert found.touched_bytes == update_bytes(2, update_interval=1)
        assert [type(answer) for answer in found.answers] == [Updated]
