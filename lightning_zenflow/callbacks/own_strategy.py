"""The strategy, for callbacks that need ours."""

from __future__ import annotations

from lightning.pytorch import Trainer

from lightning_zenflow.strategy import ZenFlowStrategy


def zenflow_strategy(trainer: Trainer, callback: str) -> ZenFlowStrategy:
    """The Trainer's strategy, for a callback that needs it.

    Raises:
        TypeError: It is another one. The message names the callback.
    """
    if not isinstance(trainer.strategy, ZenFlowStrategy):
        raise TypeError(
            f"`strategy` must be zenflow for {callback}, got {type(trainer.strategy).__name__}. Set strategy='zenflow' or"
            " remove the callback."
        )
    return trainer.strategy
