"""What a `fit` keeps for whoever saves after it, and for how long: until the Trainer runs again, whatever it runs."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from tests.modules import EXPECTED_WARNINGS, FEATURES, OFTEN, Small, batches, strategy_of, trainer

pytestmark = [
    *EXPECTED_WARNINGS,
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before"),
    pytest.mark.usefixtures("own_process_group"),
]

HIDDEN = 40_000
NUMEL = HIDDEN * (FEATURES + 5) + HIDDEN + 5


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, 5))


OTHERS: dict[int, int] = {}
"""Host states that were there before a test."""


def host_states() -> dict[int, int]:
    """By inode, what is really allocated of each host state that this process holds."""
    sizes = {}
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if "lightning-zenflow" in os.readlink(link):
                sizes[link.stat().st_ino] = 512 * link.stat().st_blocks
    return sizes


def host_state_bytes() -> int:
    """The same of those that this test has made, together."""
    return sum(size for inode, size in host_states().items() if inode not in OTHERS)


def fp32_bytes() -> int:
    """All fp32 tensors of this process that are not in a host state, the module's weights included."""
    gc.collect()
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "lightning-zenflow" in line]
    shared = [range(*(int(end, 16) for end in line.split()[0].split("-"))) for line in lines]
    found = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, nn.Parameter)]
    sizes = {
        it.untyped_storage().data_ptr(): it.untyped_storage().nbytes() for it in found if it.dtype == torch.float32
    }
    return sum(size for start, size in sizes.items() if not any(start in mapping for mapping in shared))


@pytest.fixture(autouse=True)
def nothing_of_other_tests() -> None:
    """A Trainer that was dropped keeps its host state until Python looks for cycles; that of a failed test stays."""
    gc.collect()
    OTHERS.clear()
    OTHERS.update(host_states())


class Holds(Callback):
    """Host state that is there when evaluation begins."""

    def __init__(self) -> None:
        self.bytes: list[int] = []

    def _note(self, *args: Any) -> None:
        self.bytes.append(host_state_bytes())

    on_validation_start = on_test_start = on_predict_start = _note  # type: ignore[assignment]


def evaluate(made: Trainer, how: str, module: LightningModule) -> None:
    method: Callable[..., Any] = getattr(made, how)
    method(module, batches(2), **({} if how == "predict" else {"verbose": False}))


@pytest.mark.parametrize("how", ["validate", "test", "predict"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_evaluation_after_fit_does_without_masters_and_moments(how: str, stage: int) -> None:
    """FAULTS 33, 34: the README says until when they are kept."""
    holds, module = Holds(), Small(wide)
    made = trainer(strategy=strategy_of(OFTEN, stage=stage), callbacks=[holds])
    made.fit(module, batches(3))
    assert 12 * NUMEL <= host_state_bytes() <= 12 * NUMEL + 100_000  # kept, and no more than that
    evaluate(made, how, module)
    assert holds.bytes == [0] and host_state_bytes() == 0


def test_after_fit_the_device_has_nothing_left_but_the_weights() -> None:
    """FAULTS 33: state of the selected columns, gradients and scratch are of no use any more."""
    before, module = fp32_bytes(), Small(wide)
    made = trainer({**OFTEN, "topk_ratio": 1.0}, precision="32-true")
    made.fit(module, batches(3))
    module.initial.clear()
    weights_bytes = 4 * NUMEL
    assert host_state_bytes() > 0
    assert fp32_bytes() - before < 2 * weights_bytes
    evaluate(made, "validate", module)
    assert fp32_bytes() - before < 2 * weights_bytes


@pytest.mark.parametrize("how", ["validate", "test", "predict"])
@pytest.mark.parametrize("stage", [2, 3])
def test_evaluation_of_a_checkpoint_alone_holds_no_masters_and_moments(how: str, stage: int, tmp_path: Path) -> None:
    """FAULTS 34."""
    path = tmp_path / "saved.ckpt"
    made = trainer(strategy=strategy_of(OFTEN, stage=stage))
    made.fit(Small(wide), batches(3))
    made.save_checkpoint(path)
    del made
    before, holds, module = fp32_bytes(), Holds(), Small(wide)
    again = trainer(strategy=strategy_of(OFTEN, stage=stage), callbacks=[holds])
    getattr(again, how)(module, batches(2), ckpt_path=path, **({} if how == "predict" else {"verbose": False}))
    assert holds.bytes == [0]
    assert fp32_bytes() - before < 2 * 4 * NUMEL


@pytest.mark.parametrize("moments_dtype", ["fp32", "bf16"])
def test_what_is_saved_after_fit_is_whole_all_the_same(moments_dtype: str, tmp_path: Path) -> None:
    """FAULTS 21: it goes on as a run that was never left."""
    zenflow = {**OFTEN, "moments_dtype": moments_dtype}
    path, module = tmp_path / "after.ckpt", Small()
    made = trainer(zenflow, max_epochs=1)
    made.fit(module, batches(10))
    made.save_checkpoint(path)
    made.save_checkpoint(tmp_path / "twice.ckpt")
    runs = []
    for file in (path, tmp_path / "twice.ckpt"):
        again, resumed = trainer(zenflow, max_epochs=2), Small()
        again.fit(resumed, batches(10), ckpt_path=file)
        runs.append(torch.cat([param.detach().flatten() for param in resumed.parameters()]))
    assert torch.equal(*runs)
