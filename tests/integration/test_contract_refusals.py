"""Lightning's callbacks that cannot work under ZeRO say so before the first batch, and leave the module as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from tests.modules import EXPECTED_WARNINGS, OFTEN, Small, fit, strategy_of, weights
from tests.stage3 import cut_strategy

pytestmark = [*EXPECTED_WARNINGS, pytest.mark.usefixtures("own_process_group")]


class FreezesFirst(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, *_: Any) -> None: ...


REFUSED: list[tuple[Callable[[], Callback], type[Exception], str]] = [
    (
        lambda: StochasticWeightAveraging(1e-3),
        MisconfigurationException,
        "SWA does not currently support sharded models",
    ),
    (
        FreezesFirst,
        ValueError,
        "`FreezesFirst` must be left out with ZenFlow: ZeRO has no place for parameters that were frozen",
    ),
    (
        BatchSizeFinder,
        MisconfigurationException,
        "The Batch size finder is not supported with distributed strategies",
    ),
    (LearningRateFinder, ValueError, "`LearningRateFinder` must be left out with ZenFlow: it makes a scheduler"),
    (
        lambda: GradientAccumulationScheduler({0: 2, 1: 3}),
        RuntimeError,
        "`ZenFlowStrategy` does not support `accumulate_grad_batches` changing between epochs",
    ),
]


@pytest.mark.parametrize(
    "make_strategy", [lambda: strategy_of(OFTEN), lambda: cut_strategy(OFTEN, "host")], ids=["stage 2", "stage 3"]
)
@pytest.mark.parametrize(("make", "error", "message"), REFUSED, ids=[message[:24] for _, _, message in REFUSED])
def test_a_callback_that_cannot_work_says_so_before_the_first_batch_and_the_module_still_trains(
    make: Callable[[], Callback], error: type[Exception], message: str, make_strategy: Callable[[], Any]
) -> None:
    module, other = Small(), Small()
    with pytest.raises(error, match=message):
        fit(module, strategy=make_strategy(), callbacks=[make()], max_epochs=2)
    assert module.losses == []
    fit(module, strategy=make_strategy())
    fit(other, strategy=make_strategy())
    assert torch.equal(weights(module), weights(other))
