"""The strategy's part in the DeepSpeed config: what is merged into it, and what of it the Trainer does instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.trainer.states import TrainerFn

from lightning_zenflow import ds_config
from lightning_zenflow.checkpointing import CheckpointingStrategy
from lightning_zenflow.ds_file import read_config


class ConfiguredStrategy(CheckpointingStrategy):
    """Reads the DeepSpeed config and brings it into agreement with strategy and Trainer; the attributes are the strategy's."""

    _zenflow_block: Mapping[str, Any] | None

    def _load_config(self, config: Any) -> dict[str, Any] | None:
        """The DeepSpeed config as a copy of its own, without the `"zenflow"` block, which is kept aside."""
        given = read_config(config, self.DEEPSPEED_ENV_VAR)
        if given is None:
            return None
        loaded, self._zenflow_block = ds_config.take_zenflow_block(given)
        ds_config.drop_auto(loaded)
        return loaded

    def _merge_stage(self, stage: int | None) -> None:
        zero = self.config.get("zero_optimization") if isinstance(self.config, dict) else None
        if stage is not None and isinstance(zero, dict) and zero.setdefault("stage", stage) != stage:
            raise ValueError(
                f"`stage` must agree with the DeepSpeed config, got stage={stage} and `zero_optimization.stage`="
                f"{zero['stage']}. Give one of them."
            )

    def _format_config(self) -> None:
        assert isinstance(self.config, dict) and self.lightning_module is not None
        trainer = self.lightning_module.trainer
        ds_config.check_against_trainer(self.config, self.precision_plugin.precision, trainer.gradient_clip_val)
        ds_config.settle_precision(self.config, self.precision_plugin.precision)
        # The Trainer's own limit comes with each step, through `ZenFlowPrecision`.
        self.config.setdefault("gradient_clipping", 0.0)
        batch_size = self.config.pop("train_batch_size", None)
        accumulation_steps = self.config.pop("gradient_accumulation_steps", None)
        super()._format_config()
        if trainer.state.fn == TrainerFn.FITTING:
            ds_config.check_batch_size(
                self.config,
                trainer.accumulate_grad_batches,
                self.world_size,
                train_batch_size=batch_size,
                accumulation_steps=accumulation_steps,
            )
        if trainer.accumulate_grad_batches > 1 and self.config["zero_optimization"]["stage"] == 1:
            # ZeRO-1 lets autograd sum micro-batches, in the model's dtype if not told otherwise.
            self.config.setdefault("data_types", {}).setdefault("grad_accum_dtype", "fp32")
        # Lightning scales the loss and says when to step; DeepSpeed would do both a second time.
        self.config["gradient_accumulation_steps"] = 1

    def _auto_select_batch_size(self) -> int:
        """Of the training data, which only logs show, and which a data module may not have when nothing is trained."""
        assert self.lightning_module is not None
        if self.lightning_module.trainer.state.fn != TrainerFn.FITTING:
            return 1
        try:
            return super()._auto_select_batch_size()
        except AttributeError:  # a batch sampler does not have to know its batch size, which only logs show
            return 1
