"""What Lightning's DeepSpeed strategy and precision plugin promise of dtypes, and how a model is made and checkpointed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed.runtime.activation_checkpointing import checkpointing
from lightning.pytorch.plugins.precision import DeepSpeedPrecision, MixedPrecision
from torch import Tensor, nn

from lightning_zenflow.precision import ZenFlowPrecision
from tests.cases import relative
from tests.modules import (
    CLASSES,
    EXPECTED_WARNINGS,
    FEATURES,
    OFTEN,
    FollowsReference,
    Small,
    batches,
    fit,
    strategy_of,
    trainer,
    weights,
)

pytestmark = [*EXPECTED_WARNINGS, pytest.mark.usefixtures("own_process_group")]

PRECISIONS = [
    ("32-true", torch.float32),
    ("16-true", torch.float16),
    ("bf16-true", torch.bfloat16),
    ("16-mixed", torch.float16),
    ("bf16-mixed", torch.bfloat16),
]
"""A precision, and the dtype of weights and inputs."""


class SeesDtypes(Small):
    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, set[Any]] = {}

    def _see(self, where: str, batch: Any) -> None:
        dtypes = (self.net[0].weight.dtype, batch[0].dtype, batch[1].dtype)  # type: ignore[index]
        self.seen.setdefault(where, set()).add(dtypes)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self._see("fit", batch)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._see("validate", batch)
        super().validation_step(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._see("test", batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        self._see("predict", batch)
        return super().predict_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:Step after .* skipped")  # the first loss scale may be too large
@pytest.mark.parametrize(("precision", "dtype"), PRECISIONS)
def test_weights_and_inputs_have_the_dtype_of_the_precision_in_training_and_inference(
    precision: Any, dtype: torch.dtype
) -> None:
    module, alone = SeesDtypes(), SeesDtypes()
    made = fit(module, validation=batches(1), precision=precision)
    made.test(module, batches(1), verbose=False)
    other = trainer(precision=precision)
    other.validate(alone, batches(1), verbose=False)
    other.predict(alone, batches(1))
    expected = {(dtype, dtype, torch.int64)}
    assert module.seen == {"fit": expected, "validate": expected, "test": expected}
    assert alone.seen == {"validate": expected, "predict": expected}


def test_the_precision_plugin_is_lightnings_in_all_but_clipping() -> None:
    for precision, *_ in PRECISIONS:
        ours, own = ZenFlowPrecision(precision), DeepSpeedPrecision(precision)  # type: ignore[arg-type]
        inputs = {"float": torch.ones(2), "long": torch.ones(2, dtype=torch.long)}
        for name, value in ours.convert_input(inputs).items():
            assert value.dtype == own.convert_input(inputs)[name].dtype
        for context in ("tensor_init_context", "module_init_context", "forward_context"):
            with getattr(ours, context)():
                mine = nn.Linear(2, 2).weight.dtype
            with getattr(own, context)():
                assert nn.Linear(2, 2).weight.dtype == mine
    assert type(fit(Small(), precision="bf16-mixed", max_steps=1).strategy.precision_plugin) is ZenFlowPrecision


class ClipsNothing(DeepSpeedPrecision):
    """As Lightning's own, which leaves it to DeepSpeed."""


def test_a_precision_plugin_of_ones_own_is_kept_and_one_of_another_strategy_is_refused() -> None:
    class Own(ZenFlowPrecision): ...

    plugin = Own("bf16-mixed")
    assert fit(Small(), plugins=[plugin], max_steps=1).strategy.precision_plugin is plugin
    for other in (MixedPrecision("bf16-mixed", "cpu"), ClipsNothing("bf16-mixed")):
        with pytest.raises(TypeError, match=f"derived from ZenFlowPrecision, got {type(other).__name__}. Set Trainer"):
            fit(Small(), plugins=[other])
    with pytest.raises(ValueError, match=r"precision='64'\)` is not supported"):
        ZenFlowPrecision("64")  # type: ignore[arg-type]


def test_arguments_of_the_loss_scaler_reach_it() -> None:
    arguments = {"initial_scale_power": 10, "loss_scale_window": 11, "hysteresis": 12, "min_loss_scale": 13}
    strategy = strategy_of(OFTEN, **arguments)
    fit(Small(), strategy=strategy, precision="16-mixed", max_steps=2)
    assert isinstance(strategy.config, dict)
    fp16 = strategy.config["fp16"]
    assert fp16["enabled"] and {name: fp16[name] for name in arguments} == arguments
    scaler = strategy._zero.loss_scaler  # type: ignore[union-attr]
    got = (scaler.cur_scale, scaler.scale_window, scaler.delayed_shift, scaler.min_scale)
    assert got == (2**10, 11, 12, 13)
    fixed = strategy_of(OFTEN, loss_scale=0.5)
    fit(Small(), strategy=fixed, precision="16-mixed", max_steps=2)
    assert fixed._zero.loss_scale == 0.5  # type: ignore[union-attr]


# -- how a model is made -------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:`trainer.init_module` cannot fully support")  # said of every strategy that cuts
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_a_module_made_in_init_module_trains_as_one_made_outside(precision: Any, stage: int) -> None:
    within, outside = trainer(strategy=strategy_of(OFTEN, stage=stage), precision=precision), Small()
    with within.init_module():
        module = Small()
    is_cast = precision == "bf16-true" and stage < 3  # under ZeRO-3, Lightning leaves it to the engine
    assert module.net[0].weight.dtype == (torch.bfloat16 if is_cast else torch.float32)  # type: ignore[index]
    with torch.no_grad():
        for param, value in zip(module.net.parameters(), outside.net.parameters(), strict=True):
            value.copy_(value.bfloat16() if precision == "bf16-true" else value)
            param.copy_(value)
    within.fit(module, batches(10))
    fit(outside, strategy=strategy_of(OFTEN, stage=stage), precision=precision)
    assert torch.equal(weights(module), weights(outside))


# -- activation checkpointing ----------------------------------------------------------------------------------------------


class Recomputes(nn.Module):
    """By DeepSpeed's own function, if asked."""

    def __init__(self, *, recompute: bool) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(FEATURES, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.last = nn.Linear(8, CLASSES)
        self.recompute, self.calls = recompute, 0

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self._checkpointed(torch.tanh(self.first(x))))

    def _checkpointed(self, x: Tensor) -> Tensor:
        def middle(x: Tensor) -> Tensor:
            self.calls += 1
            return self.middle(x)

        return checkpointing.checkpoint(middle, x) if self.recompute else middle(x)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_activation_checkpointing_of_deepspeed_recomputes_and_changes_no_step(stage: int) -> None:
    def run(recompute: bool) -> Small:
        follows, module = FollowsReference(), Small(lambda: Recomputes(recompute=recompute))
        config = {"zero_optimization": {"stage": stage}, "activation_checkpointing": {"profile": recompute}}
        fit(module, strategy=strategy_of(OFTEN, config=config), callbacks=[follows])
        follows.assert_equal(steps=10)
        assert checkpointing.PROFILE_TIME is recompute  # the second run puts this global of DeepSpeed back
        return module

    with_it, without = run(True), run(False)
    assert with_it.net.calls == 2 * without.net.calls == 20  # type: ignore[operator]
    assert relative(weights(with_it), weights(without)) < 1e-6
