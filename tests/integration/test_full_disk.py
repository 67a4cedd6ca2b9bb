"""A disk that is full in the middle of a file: what is said, and what is left."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_zenflow.checkpoint.errors import CheckpointError
from lightning_zenflow.checkpoint.space import full_disk, stored_nbytes
from tests.modules import EXPECTED_WARNINGS, OFTEN, Small, batches, fit, strategy_of, trainer, weights

pytestmark = [
    *EXPECTED_WARNINGS,
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before"),
    pytest.mark.usefixtures("own_process_group"),
]

WRITE = os.write
SAID = (
    r"was not saved: rank 0 could not write the {what}: the disk of '/.*' is full \(No space left on device: '.*{file}.*'\)\."
    r" This rank's files need \d+\.\d\d MiB, and \d+\.\d\d GiB are free once this attempt is deleted\. .*"
    r"What was saved before is untouched"
)


class FullDisk:
    """Refuses to write more than `room_nbytes` to files of some name, once it is full; a few bytes always fit."""

    def __init__(self, file: str, room_nbytes: int, few_nbytes: int) -> None:
        self.file, self.room_nbytes, self.few_nbytes = file, room_nbytes, few_nbytes
        self.refused = 0

    def write(self, descriptor: int, data: Any) -> int:
        if self.file not in os.readlink(f"/proc/self/fd/{descriptor}"):
            return WRITE(descriptor, data)
        if len(data) <= self.few_nbytes:
            return WRITE(descriptor, data)
        part = memoryview(data)[: self.room_nbytes]
        if not part:
            self.refused += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room_nbytes -= len(part)
        return WRITE(descriptor, part)


class SavesAt(Callback):
    def __init__(self, path: Path, batch: int, disk: FullDisk | None = None) -> None:
        self.path, self.batch, self.disk = path, batch, disk

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_idx != self.batch:
            return
        with pytest.MonkeyPatch.context() as patch:
            if self.disk is not None:
                patch.setattr(os, "write", self.disk.write)
            trainer.save_checkpoint(self.path)


def wide() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(6, 4000), torch.nn.Linear(4000, 5))


@pytest.mark.parametrize("few_nbytes", [0, 500], ids=["not a byte", "small records still fit"])
@pytest.mark.parametrize(
    ("file", "what"), [("optim_states", "state"), ("zenflow_rank", "state"), ("model_states", "weights")]
)
def test_a_disk_that_is_full_in_the_middle_of_a_file_is_named_with_need_and_room(
    file: str, what: str, few_nbytes: int, tmp_path: Path
) -> None:
    """FAULTS 23, 27: not in `torch.save`'s words, which are of positions in a file."""
    path, disk = tmp_path / "last.ckpt", FullDisk(file, 100_000, few_nbytes)
    fit(Small(wide), callbacks=[SavesAt(path, 4)])
    before = {name: name.read_bytes() for name in path.rglob("*") if name.is_file()}
    with pytest.raises(CheckpointError, match=SAID.format(what=what, file=file)) as caught:
        fit(Small(wide), callbacks=[SavesAt(path, 6, disk)])
    assert disk.refused > 0
    cause = caught.value.__cause__
    assert isinstance(cause, OSError) and cause.errno == errno.ENOSPC and file in str(cause.filename)
    assert {name: name.read_bytes() for name in path.rglob("*") if name.is_file()} == before
    assert [name.name for name in tmp_path.iterdir()] == ["last.ckpt"]
    module = Small(wide)
    trainer().fit(module, batches(10), ckpt_path=path)
    assert weights(module).isfinite().all()


def test_under_zero_3_it_is_said_as_well(tmp_path: Path) -> None:
    disk = FullDisk("optim_states", 100_000, 500)
    with pytest.raises(CheckpointError, match=SAID.format(what="state", file="optim_states")):
        fit(Small(wide), strategy=strategy_of(OFTEN, stage=3), callbacks=[SavesAt(tmp_path / "last.ckpt", 6, disk)])
    assert list(tmp_path.iterdir()) == []


def test_the_need_is_the_memory_of_all_tensors_each_counted_once() -> None:
    master = torch.zeros(1000)
    assert stored_nbytes({"a": master, "b": [master[:10], (torch.zeros(5, dtype=torch.bfloat16),)], "c": 3}) == 4010


def test_only_a_full_disk_is_one_wherever_in_the_chain_it_stands() -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    masking, wrapping = RuntimeError("unexpected pos 64 vs 0"), OSError(errno.ENOSPC, "cannot be written there")
    masking.__context__, wrapping.__cause__ = full, full
    assert full_disk(full) is full_disk(masking) is full_disk(wrapping) is full
    assert full_disk(OSError(errno.EIO, "Input/output error")) is None
    assert full_disk(OSError(errno.EDQUOT, "Disk quota exceeded")) is not None
