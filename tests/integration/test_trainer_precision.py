"""Every precision of Lightning's DeepSpeed strategy on CPU, and what 16 bits need: masters, unscaling, skipped overflows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from lightning.pytorch import Callback

from tests.cases import relative
from tests.modules import (
    EXPECTED_WARNINGS,
    EXTREMES,
    OFTEN,
    FollowsReference,
    Small,
    batches,
    fit,
    fit_plainly,
    strategy_of,
    weights,
)

pytestmark = [*EXPECTED_WARNINGS, pytest.mark.usefixtures("own_process_group")]


@pytest.mark.filterwarnings("ignore:Step after .* skipped")  # the first loss scale may be too large
@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ("16-mixed", torch.float16),
        ("bf16-mixed", torch.bfloat16),
        ("bf16-true", torch.bfloat16),
        ("16-true", torch.float16),
        ("32-true", torch.float32),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_precision_trains_with_falling_loss(precision: Any, dtype: torch.dtype) -> None:
    """FAULTS 14."""
    module = Small()
    made = fit(module, batches(20), precision=precision, max_epochs=3)
    assert module.net[0].weight.dtype == dtype  # type: ignore[index]
    first, last = sum(module.losses[:20]) / 20, sum(module.losses[-20:]) / 20
    assert last < 0.8 * first
    assert made.strategy.step_stats.step >= 58  # type: ignore[attr-defined]


def test_double_precision_is_refused() -> None:
    """FAULTS 14: Lightning's own message."""
    with pytest.raises(ValueError, match=r"'64-true'\)` is not supported. `precision` must be one of: \('32-true'"):
        fit(Small(), precision="64-true")


def sensitive(module: Small) -> torch.optim.Optimizer:
    """With a large `eps` a wrong scale of the gradient is not divided away."""
    return torch.optim.AdamW(module.parameters(), lr=0.5, eps=1.0)


@pytest.mark.parametrize("zenflow", EXTREMES, ids=["selected", "deferred"])
def test_fp16_gradients_are_unscaled_and_clipped_in_both_parts(zenflow: dict[str, Any]) -> None:
    """FAULTS Z9: the loss is multiplied with 1024; some of the five norms lie above the limit, some below."""
    strategy = strategy_of(zenflow, loss_scale=1024.0)
    ours, plain = Small(configure=sensitive), Small(configure=sensitive)
    before = weights(plain).clone()
    norms = ClippedNorms()
    settings: dict[str, Any] = {"gradient_clip_val": 1.3, "accumulate_grad_batches": 2}
    made = fit(ours, strategy=strategy, precision="16-mixed", callbacks=[norms], **settings)
    fit_plainly(plain, **settings)
    assert relative(weights(ours) - before, weights(plain) - before) < 5e-3
    assert made.strategy.step_stats.skipped_steps == 0  # type: ignore[attr-defined]
    assert 0 < sum(norm == pytest.approx(1.3, rel=1e-4) for norm in norms.seen[::2]) < 5
    assert max(norms.seen) < 1.3001
    unclipped = Small(configure=sensitive)
    fit_plainly(unclipped, accumulate_grad_batches=2)
    assert relative(weights(unclipped) - before, weights(plain) - before) > 0.05


class ClippedNorms(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.seen.append(trainer.strategy.step_stats.grad_norm_clipped)


class SumsInFp32(Callback):
    """Compares the gradient of a step with the fp32 sum of those of its batches, rounded once."""

    def __init__(self) -> None:
        self.batches: list[Any] = []
        self.equal: list[bool] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not self.batches:  # before the device moves deferred weights in backward
            self.state = {name: value.clone() for name, value in pl_module.net.state_dict().items()}
        self.batches.append(batch)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        twin = pl_module.make_net().to(torch.bfloat16)
        twin.load_state_dict(self.state)
        sums = [torch.zeros_like(param, dtype=torch.float32) for param in twin.parameters()]
        for batch in self.batches:
            twin.zero_grad()
            (pl_module.loss(twin, batch) / trainer.accumulate_grad_batches).backward()
            for total, param in zip(sums, twin.parameters(), strict=True):
                total += param.grad
        self.batches.clear()
        for total, param in zip(sums, pl_module.net.parameters(), strict=True):
            self.equal.append(torch.equal(trainer.strategy.gradient(param), total.to(torch.bfloat16).float()))


@pytest.mark.parametrize("precision", ["16-mixed", "16-true"])
def test_fp16_is_refused_before_training_where_the_device_has_no_instructions_for_it(
    precision: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAULTS 14."""
    monkeypatch.setattr(CPU_Accelerator, "is_fp16_supported", lambda self: False)
    with pytest.raises(ValueError, match=f"must be one that the accelerator has, got '{precision}' on 'cpu'"):
        fit(Small(), precision=precision)


@pytest.mark.parametrize("stage", [1, 2])
def test_batches_are_accumulated_in_fp32_whatever_the_precision(stage: int) -> None:
    """FAULTS 1."""
    sums = SumsInFp32()
    strategy = strategy_of(OFTEN, stage=stage)
    fit(Small(), batches(16), strategy=strategy, precision="bf16-true", accumulate_grad_batches=8, callbacks=[sums])
    assert sums.equal == [True] * 2 * 6


@pytest.mark.parametrize(("precision", "tolerance"), [("16-mixed", 2e-3), ("bf16-mixed", 2e-2)])
def test_gradients_in_hooks_are_unscaled_and_masters_follow_the_reference(precision: Any, tolerance: float) -> None:
    """FAULTS 19, Z9, Z11."""
    follows = FollowsReference()
    strategy = strategy_of(OFTEN, loss_scale=512.0)
    fit(Small(), strategy=strategy, callbacks=[follows], precision=precision, gradient_clip_val=0.5)
    follows.assert_equal(steps=10, gradient=4 * tolerance, weights=tolerance)


def test_an_overflow_is_skipped_until_the_scale_fits() -> None:
    """FAULTS 12, 13, Z9: a scale of 2^24 is too large for fp16; each skip halves it and moves no weight."""
    strategy = strategy_of(OFTEN, initial_scale_power=24, hysteresis=1)
    module = Small()
    with pytest.warns(RuntimeWarning, match=r"the gradient norm is (inf|nan) \(\d skipped so far\)") as warned:
        made = fit(module, batches(20), strategy=strategy, precision="16-mixed")
    stats = strategy.step_stats
    assert stats.skipped_steps == sum("skipped so far" in str(warning.message) for warning in warned) > 2
    assert stats.step + stats.skipped_steps == made.global_step == 20
    assert strategy._zero.loss_scale == 2 ** (24 - stats.skipped_steps)  # type: ignore[union-attr]
    assert torch.isfinite(weights(module)).all()
