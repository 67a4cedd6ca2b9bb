"""Precision as in Lightning's DeepSpeed strategy, but with clipping that does what it is told."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.utilities import GradClipAlgorithmType

CLIP_BY_VALUE_MESSAGE = (
    "`gradient_clip_algorithm` must be 'norm' with ZenFlow, got 'value': gradients leave the device during backward, one by"
    " one. Clip by norm."
)


class ZenFlowPrecision(DeepSpeedPrecision):
    """Lightning's `DeepSpeedPrecision`, whose own `clip_gradients` does nothing."""

    def clip_gradients(
        self,
        optimizer: Any,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Sets the largest global gradient norm of the coming step.

        `Trainer(gradient_clip_val=...)`, a module's own `configure_gradient_clipping` and `clip_gradients` in manual
        optimization all end here.

        Raises:
            ValueError: Clipping by value is asked for.
        """
        if clip_val <= 0:
            return
        if gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
            raise ValueError(CLIP_BY_VALUE_MESSAGE)
        zero: Any = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        zero.clip_grad = float(clip_val)


def refuse_16_bits(precision: Any) -> None:
    """Raises where the accelerator has no numbers of this precision, as many CPUs have no fp16.

    Raises:
        ValueError: The message names the precision, and one that works.
    """
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    kinds = (("16-", "fp16", accelerator.is_fp16_supported), ("bf16-", "bf16", accelerator.is_bf16_supported))
    for prefix, name, is_supported in kinds:
        if str(precision).startswith(prefix) and not is_supported():
            others = {"16-": "'bf16-mixed' or '32-true'", "bf16-": "'16-mixed' or '32-true'"}[prefix]
            raise ValueError(
                f"`precision` must be one that the accelerator has, got {precision!r} on {accelerator.device_name()!r}, which"
                f" DeepSpeed says has no {name}. Set Trainer(precision=...) to {others}."
            )


def refuse_precision(plugin: Any) -> None:
    """Raises if a plugin of the user's would clip nothing, or go backward past ZeRO.

    Raises:
        TypeError: It is neither Lightning's own for DeepSpeed, which ours replaces, nor derived from ours.
    """
    if type(plugin) is not DeepSpeedPrecision and not isinstance(plugin, ZenFlowPrecision):
        raise TypeError(
            "`plugins` must hold no other precision plugin than one derived from ZenFlowPrecision, got"
            f" {type(plugin).__name__}. Set Trainer(precision=...) instead."
        )
