"""The shared memory: where things lie, what the system may refuse, pinning, and giving it back."""

from __future__ import annotations

import itertools
import logging
import mmap
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_zenflow.offload.arena import Arena
from lightning_zenflow.offload.layout import ArenaLayout
from tests.process.helpers import run_trainer, shared_resident_bytes

MIB = 2**20


@pytest.mark.parametrize("numel", [1, 4095, 3_000_000_019])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("blocks", [1, 4, 7])
def test_regions_are_page_aligned_do_not_overlap_and_fit(numel: int, dtype: torch.dtype, blocks: int) -> None:
    layout = ArenaLayout(numel, dtype, blocks)
    regions = list(layout.regions.values())
    ends = [region.offset_bytes + region.numel * region.dtype.itemsize for region in regions]
    for region, end, following in itertools.zip_longest(regions, ends, regions[1:]):
        assert region.offset_bytes % mmap.PAGESIZE == 0
        assert end <= (following.offset_bytes if following else layout.nbytes)
    size = -(-numel // blocks)
    assert [region.numel for region in regions] == [numel, size, size] + [numel] * 3 + [(blocks - 1) * size]


def test_the_exchange_region_is_slot_and_outboxes_only() -> None:
    layout = ArenaLayout(4 * mmap.PAGESIZE, torch.bfloat16, 4)
    assert layout.exchange_nbytes == (8 + 2 + 2) * mmap.PAGESIZE


@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 9, 64])
@pytest.mark.parametrize(("moments", "each_nbytes"), [(torch.float32, 18), (torch.bfloat16, 14)])
def test_what_is_touched_is_18_bytes_an_element_in_16_bit_or_14_for_any_number_of_blocks(
    blocks: int, moments: torch.dtype, each_nbytes: int
) -> None:
    numel = 1_000_003
    layout = ArenaLayout(numel, torch.bfloat16, blocks, moments)
    own_nbytes = sum(region.numel * region.dtype.itemsize for region in layout.regions.values())
    slack = 8 * mmap.PAGESIZE + 8 * blocks
    assert (
        own_nbytes <= layout.touched_nbytes <= each_nbytes * numel + slack and own_nbytes >= each_nbytes * numel - slack
    )


@pytest.mark.parametrize("numel", [1, 5, 1000, 1_000_003])
def test_any_number_of_blocks_has_the_state_at_one_place_and_fits(numel: int) -> None:
    first = ArenaLayout(numel, torch.float16, 4)
    for blocks in (1, 2, 3, 5, 7, 16, 63, 999, 1000):
        other = ArenaLayout(numel, torch.float16, blocks)
        assert other.nbytes == first.nbytes
        for name in ("slot", "master", "exp_avg", "exp_avg_sq"):
            assert other.regions[name] == first.regions[name]
        last = other.regions["accumulator"]
        assert last.offset_bytes == first.regions["accumulator"].offset_bytes
        assert last.offset_bytes + 4 * last.numel <= other.nbytes


def test_a_rebuilt_arena_keeps_its_state_has_regions_of_the_new_size_and_gives_memory_back() -> None:
    layout = ArenaLayout(8 * MIB, torch.bfloat16, 4)
    arena = Arena.create(layout)
    twin = Arena.open(os.dup(arena.fd), layout)
    for number, tensor in enumerate((arena.slot, arena.master), start=1):
        tensor.fill_(number)

    def allocated() -> int:
        return 512 * os.stat(arena.fd).st_blocks

    for side in (arena, twin):
        side.rebuild(1)
    assert arena.accumulator.numel() == twin.accumulator.numel() == 0
    before = allocated()
    for half in (0, 1):
        arena.outboxes[half].fill_(5 + half)
        assert arena.outboxes[half].numel() == 8 * MIB and torch.equal(arena.outboxes[half], twin.outboxes[half])
    assert allocated() - before == 2 * 16 * MIB
    for side in (arena, twin):
        side.rebuild(16)
    assert allocated() - before == 2 * 16 * MIB, "only the trainer gives memory back"
    arena.trim()
    assert arena.outboxes[0].numel() == MIB // 2 and arena.accumulator.numel() == 15 * MIB // 2
    assert allocated() - before == 2 * MIB
    arena.accumulator.fill_(7)
    assert twin.accumulator.eq(7).all() and allocated() - before == 2 * MIB + 30 * MIB
    for number, tensor in enumerate((arena.slot, arena.master), start=1):
        assert (tensor == number).all()
    with pytest.raises(ValueError, match="`blocks` must be a whole number of at least 1, got 0"):
        arena.rebuild(0)
    twin.close()
    arena.close()


@pytest.mark.parametrize(("field", "value"), [("numel", 0), ("numel", 1.5), ("blocks", 0)])
def test_a_layout_refuses_what_is_no_count(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"`{field}` must be a whole number of at least 1, got {value}"):
        ArenaLayout(**{"numel": 8, "wire_dtype": torch.float32, "blocks": 1, field: value})


def test_a_layout_refuses_more_blocks_than_an_interval_may_have_steps() -> None:
    with pytest.raises(ValueError, match=r"`blocks` must be at most 1000, got 1001\. Use a smaller `update_interval`"):
        ArenaLayout(8, torch.float32, 1001)


def test_a_layout_refuses_moments_in_fp16() -> None:
    with pytest.raises(
        TypeError, match=r"`moments_dtype` must be torch\.float32 or torch\.bfloat16, got torch\.float16"
    ):
        ArenaLayout(8, torch.float16, 1, torch.float16)


@pytest.mark.parametrize("blocks", [1, 4])
def test_an_arena_with_moments_in_16_bit_takes_what_its_layout_says(blocks: int) -> None:
    layout = ArenaLayout(MIB, torch.bfloat16, blocks, torch.bfloat16)
    arena = Arena.create(layout)
    for tensor in (arena.slot, *arena.outboxes, arena.master, arena.exp_avg, arena.exp_avg_sq, arena.accumulator):
        tensor.fill_(1)
    assert 512 * os.stat(arena.fd).st_blocks == layout.touched_nbytes == 14 * MIB
    arena.close()


def test_a_layout_refuses_a_dtype_that_does_not_travel() -> None:
    with pytest.raises(TypeError, match=r"`wire_dtype` must be torch\.bfloat16, .* got torch\.int8"):
        ArenaLayout(8, torch.int8, 1)


def test_what_one_side_writes_the_other_reads_and_new_memory_is_zero() -> None:
    layout = ArenaLayout(1000, torch.float16, 4)
    ours = Arena.create(layout)
    theirs = Arena.open(os.dup(ours.fd), layout)
    assert not ours.exp_avg.any() and not ours.accumulator.any()
    names = ["slot", "outboxes", "master", "exp_avg", "exp_avg_sq", "accumulator"]
    tensors = [view for name in names for view in _list(getattr(ours, name))]
    for number, view in enumerate(tensors, start=1):
        view.fill_(number)
    seen = [view for name in names for view in _list(getattr(theirs, name))]
    for number, view in enumerate(seen, start=1):
        assert view.eq(number).all()
    theirs.close()
    ours.close()


def _list(views: Any) -> list[torch.Tensor]:
    return list(views) if isinstance(views, tuple) else [views]


def test_close_returns_the_memory_and_the_descriptors_and_may_be_repeated() -> None:
    before, descriptors = shared_resident_bytes(), len(os.listdir("/proc/self/fd"))
    arena = Arena.create(ArenaLayout(8 * MIB, torch.bfloat16, 4))
    arena.master.fill_(1)
    assert shared_resident_bytes() - before >= 32 * MIB
    arena.close()
    arena.close()
    assert shared_resident_bytes() - before < MIB
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert arena.master.numel() == 0


def test_a_view_that_somebody_kept_stays_valid_after_close() -> None:
    before = shared_resident_bytes()
    arena = Arena.create(ArenaLayout(8 * MIB, torch.bfloat16, 4))
    kept = arena.master[MIB:].fill_(1)
    arena.close()
    assert kept.eq(1).all()
    del kept
    assert shared_resident_bytes() - before < MIB


class FakeCudart:
    """Records the calls, and whether the memory was still mapped; refuses with `status`."""

    def __init__(self, status: Any = 0) -> None:
        self.status = status
        self.calls: list[tuple[Any, ...]] = []

    def cudaHostRegister(self, pointer: int, nbytes: int, flags: int) -> int:  # noqa: N802
        self.calls.append(("register", pointer, nbytes, flags, _is_mapped(pointer)))
        if isinstance(self.status, Exception):
            raise self.status
        return int(self.status)

    def cudaHostUnregister(self, pointer: int) -> int:  # noqa: N802
        self.calls.append(("unregister", pointer, _is_mapped(pointer)))
        return 0


def _is_mapped(pointer: int) -> bool:
    return any(line.startswith(f"{pointer:x}-") for line in Path("/proc/self/maps").read_text().splitlines())


def test_the_exchange_region_is_registered_once_at_its_exact_size_and_unregistered_before_it_is_unmapped() -> None:
    cudart = FakeCudart()
    arena = Arena.create(ArenaLayout(100_000, torch.bfloat16, 4))
    pointer, nbytes = arena.slot.data_ptr(), arena.layout.exchange_nbytes
    assert arena.pin(cudart) and arena.pin(cudart)
    arena.close()
    arena.unpin()
    assert cudart.calls == [("register", pointer, nbytes, 0, True), ("unregister", pointer, True)]
    assert not _is_mapped(pointer)


def test_a_pinned_arena_is_pinned_anew_when_it_is_rebuilt() -> None:
    cudart = FakeCudart()
    arena = Arena.create(ArenaLayout(100_000, torch.bfloat16, 4))
    pointer, before = arena.slot.data_ptr(), arena.layout.exchange_nbytes
    arena.pin(cudart)
    arena.rebuild(2)
    after = arena.layout.exchange_nbytes
    arena.close()
    assert after > before
    assert cudart.calls == [
        ("register", pointer, before, 0, True),
        ("unregister", pointer, True),
        ("register", pointer, after, 0, True),
        ("unregister", pointer, True),
    ]


@pytest.mark.parametrize(
    ("refusal", "reason"), [(2, "cudaHostRegister returned 2"), (RuntimeError("no driver"), "no driver")]
)
def test_refused_pinning_warns_once_with_size_and_reason_and_goes_on(
    refusal: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    cudart = FakeCudart(refusal)
    arena = Arena.create(ArenaLayout(64 * MIB, torch.bfloat16, 4))
    with caplog.at_level(logging.WARNING):
        assert not arena.pin(cudart)
    assert [record.getMessage() for record in caplog.records] == [
        f"Could not page-lock 0.19 GiB of host memory ({reason}). Training goes on with slower copies."
    ]
    arena.slot[:8].fill_(1)
    arena.close()
    assert [call[0] for call in cudart.calls] == ["register"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="pins for real")
def test_pinning_without_cuda_is_a_refusal(caplog: pytest.LogCaptureFixture) -> None:
    arena = Arena.create(ArenaLayout(1000, torch.bfloat16, 4))
    assert not arena.pin()
    assert "Could not page-lock" in caplog.text
    arena.close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("limit", "value", "call", "shown", "remedy"),
    [
        ("RLIMIT_FSIZE", 2**28, "ftruncate", "0.25 GiB", "ulimit -f"),
        ("RLIMIT_AS", 2**34, "mmap", "16.00 GiB", "ulimit -v"),
        ("RLIMIT_NOFILE", 8, "memfd_create", "8", "ulimit -n"),
    ],
)
def test_a_refusal_of_the_system_names_need_limit_and_remedy(
    limit: str, value: int, call: str, shown: str, remedy: str, tmp_path: Path
) -> None:
    code = f"""
import resource
from lightning_zenflow.offload.arena import Arena
files = [open(os.devnull) for _ in range(16)]
resource.setrlimit(resource.{limit}, ({value}, {value}))
try:
    Arena.create(ArenaLayout(2**30, torch.bfloat16, 4))
except MemoryError as error:
    print(error)
"""
    message = " ".join(run_trainer(tmp_path, code))
    assert message.startswith("The host state needs 22.00 GiB of address space for 1,073,741,824 parameters, but ")
    assert f"{call} was refused" in message and f"({limit}: {shown})" in message and f"`{remedy}`" in message


def test_memory_is_made_by_a_python_without_memfd_create_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    arena = Arena.create(ArenaLayout(1000, torch.bfloat16, 4))
    assert not os.get_inheritable(arena.fd)
    arena.master.fill_(1)
    arena.close()
