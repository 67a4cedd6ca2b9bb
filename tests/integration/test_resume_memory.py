"""A resumed run keeps nothing of what it was loaded from: no history of autograd, which would grow with every step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_zenflow.checkpoint.reader import StoredCheckpoint
from tests.modules import EXPECTED_WARNINGS
from tests.resuming import Case, run, stage_arguments, zero_of

pytestmark = [
    *EXPECTED_WARNINGS,
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before"),
    pytest.mark.usefixtures("own_process_group"),
]

STAGES: list[int | str] = [1, 2, 3, "3 offload"]


def state_tensors(trainer: Trainer) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that a rank's state consists of, on device and host."""
    shard = zero_of(trainer).shard
    arena, selected = shard.host.arena, shard.selected
    for name in ("slot", "master", "exp_avg", "exp_avg_sq", "accumulator"):
        yield name, getattr(arena, name)
    yield from (("outbox", outbox) for outbox in arena.outboxes)
    yield from (("shown weights", weights) for _, weights in shard._weights.ranges(0, arena.layout.numel))
    for name in ("weight", "exp_avg", "exp_avg_sq", "wire"):
        yield f"selected {name}", getattr(selected, name)


class Histories(Callback):
    """Names of state tensors that autograd records, at the end of any batch."""

    def __init__(self) -> None:
        self.found: set[str] = set()
        self.batches = 0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.batches += 1
        self.found |= {name for name, tensor in state_tensors(trainer) if tensor.requires_grad}


@pytest.mark.parametrize("stage", STAGES)
def test_a_resumed_state_has_no_history_of_autograd(stage: int | str, tmp_path: Path) -> None:
    """FAULTS 33: it was 25 KB a step, for ever."""
    case = Case(arguments=stage_arguments(stage))
    run(case, tmp_path, [3])
    histories = Histories()
    run(case, resume=tmp_path / "3.ckpt", callbacks=[histories])
    assert histories.batches == 17 and histories.found == set()


@pytest.mark.parametrize("resumed", [2, 3])
def test_neither_has_one_that_is_resumed_under_another_stage(resumed: int, tmp_path: Path) -> None:
    """Gradients that the host held are applied while loading then, in ordinary memory."""
    run(Case(arguments=stage_arguments(5 - resumed)), tmp_path, [3])
    histories = Histories()
    run(Case(arguments=stage_arguments(resumed)), resume=tmp_path / "3.ckpt", callbacks=[histories])
    assert histories.batches == 17 and histories.found == set()


def test_what_is_read_from_a_checkpoint_asks_for_no_gradient(tmp_path: Path) -> None:
    """Also for those who export, or load weights by themselves."""
    run(Case(), tmp_path, [3])
    stored = StoredCheckpoint.open(tmp_path / "3.ckpt")
    (name, *_) = stored.shapes
    assert not any(stored.read(name, kind).requires_grad for kind in ("fp32", "exp_avg", "exp_avg_sq"))
    assert not any(tensor.requires_grad for _, tensor in stored.state_dict(torch.bfloat16))
