"""The strategy's part in checkpoints: Lightning's calls, answered by `zero.save`, `zero.load` and `checkpoint`."""

from __future__ import annotations

import os
import warnings
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim.optimizer import Optimizer

from lightning_zenflow import rendezvous
from lightning_zenflow.endings import EndingStrategy
from lightning_zenflow.refusals import is_pruned
from lightning_zenflow.signals import postponed
from lightning_zenflow.stats import StepStats

if TYPE_CHECKING:
    from lightning_zenflow.zero.adapter import ZenFlowZero


_AVERAGED = "averaged_state_dict"
"""Where the weights of a `WeightAveraging` callback are stored, beside those that training goes on with."""


class CheckpointingStrategy(EndingStrategy):
    """Saves and loads what a strategy with ZenFlow's optimizer trains; the attributes are the strategy's."""

    _is_complete: bool
    _batch_is_open: bool
    _loads_whole_file: bool
    _skipped_steps_logged: int

    @property
    @abstractmethod
    def _zero(self) -> ZenFlowZero | None: ...

    @property
    @abstractmethod
    def step_stats(self) -> StepStats: ...

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Nothing: DeepSpeed writes the optimizer state itself, and Lightning's copy would be thrown away."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Writes a checkpoint directory in DeepSpeed's layout. Training goes on as if nothing had been saved.

        Every rank must call it. The directory appears as a whole once all ranks have written, or not at all. After `fit` it
        holds everything as well, as `fit` left it, until the next run of the Trainer.

        Raises:
            CheckpointError: It could not be written; what was there before is untouched. In a callback's `on_exception` this
                is a warning instead, so that the error which ended the run is the one that is shown.
            TypeError: `storage_options` is given, which DeepSpeed's layout has no use for.
        """
        ends_with = self._exception_of_run()
        try:
            self._refuse_alone(filepath)
            self._save(checkpoint, filepath, storage_options)
        except Exception as error:
            if ends_with is None:
                raise
            warnings.warn(
                f"Nothing was saved after {type(ends_with).__name__}, which ends the run: {error}",
                category=RuntimeWarning,
                stacklevel=2,
            )

    def _save(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any) -> None:
        from lightning_zenflow.zero.save import Saving

        if storage_options is not None:
            raise TypeError(f"`storage_options` must be None with ZenFlow, got {storage_options!r}. Leave it out.")
        target = Path(self.broadcast(os.fspath(filepath)))
        self._refuse_save(target)
        if self._is_complete and self._zero is not None:
            self._zero.adopt_weights()
        if self._batch_is_open and self.lightning_module and self.lightning_module.trainer.accumulate_grad_batches > 1:
            rank_zero_warn(
                f"{str(target)!r} is saved between the backward pass of a micro-batch and the end of it, and does not hold"
                " gradients of earlier micro-batches of this step. Save in `on_train_batch_end` to resume exactly."
            )
        with postponed():  # a handler that saves as well must wait until this is done
            saving = Saving(target, self.global_rank, self.reduce_boolean_decision)
            saving.run(
                self.deepspeed_engine,
                _beside_the_weights(checkpoint),
                weights_only="optimizer_states" not in checkpoint,
                with_partial_step=not self._batch_is_open,
                exclude_frozen=self.exclude_frozen_parameters,
            )

    def _refuse_alone(self, filepath: Any) -> None:
        """Raises if not all ranks save."""
        from lightning_zenflow.checkpoint.errors import CheckpointError

        if self._is_forked:
            raise CheckpointError(
                f"{os.fspath(filepath)!r} was not saved: this is a forked child of the process that trains. Save there."
            )
        if self._is_alone:
            raise CheckpointError(
                f"{os.fspath(filepath)!r} was not saved: not all ranks came within {rendezvous.MEETING_SECS:g} seconds to save"
                " their parts, so one has failed or waits for this one. What was saved before is untouched."
            )

    def _refuse_save(self, target: Path) -> None:
        """Raises if nothing can be saved now; says so if it is not all."""
        from lightning_zenflow.checkpoint.errors import CheckpointError

        if not hasattr(self.model, "module_state_dict"):
            raise CheckpointError(
                f"{str(target)!r} was not saved: the strategy is not set up yet. Save from the hook `on_fit_start` on."
            )
        assert self.model is not None
        if self._zero is None:
            rank_zero_warn(
                f"{str(target)!r} holds the weights alone: to be able to resume, save after `fit` and before `validate`,"
                " `test` or `predict`."
            )
        elif is_pruned(self.model):
            raise CheckpointError(
                f"{str(target)!r} was not saved: weights are pruned now, under names by which nothing could be loaded. Save"
                " after `fit`."
            )
        elif self._zero.is_freed:
            raise CheckpointError(
                f"{str(target)!r} was not saved: `fit` ended with an exception, and its state with it. Save in time with"
                " ModelCheckpoint(save_on_exception=True)."
            )

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Resumes `fit` where the checkpoint was saved; loads the masters' weights for `validate`, `test` and `predict`.

        Args:
            checkpoint_path: A directory that `ZenFlowStrategy` or Lightning's `DeepSpeedStrategy` has written. Under ZeRO-3
                with `load_full_weights` also a single file with the whole `state_dict`: then the masters are its values,
                and the moments begin at zero.
            weights_only: Whether its files must hold nothing but tensors and plain types.

        Raises:
            CheckpointError: It is not there, damaged, or of another model; the message names it and what to do.
        """
        from lightning_zenflow.checkpoint import directory
        from lightning_zenflow.checkpoint.whole_file import load_whole_file
        from lightning_zenflow.zero.load import evaluate, resume

        assert self.lightning_module is not None
        path = Path(checkpoint_path)
        self._loads_whole_file = self.load_full_weights and self.zero_stage_3 and path.is_file()
        if self._loads_whole_file:
            return load_whole_file(path, weights_only)  # its weights are loaded once hooks have seen it
        directory.verify(path)
        load = resume if self.lightning_module.trainer.state.fn == TrainerFn.FITTING else evaluate
        strict = self.lightning_module.strict_loading
        client_state = load(self.deepspeed_engine, path, strict=strict, weights_only=weights_only)
        self._skipped_steps_logged = self.step_stats.skipped_steps
        loaded = dict(client_state)
        if _AVERAGED in loaded:
            loaded["state_dict"] = loaded.pop(_AVERAGED)
            loaded["current_model_state"] = self.lightning_module.state_dict()
        return loaded

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads the weights of a single file, or averaged ones to evaluate; others are there already. Every rank must call it.

        Raises:
            CheckpointError: They are of another model.
        """
        from lightning_zenflow.zero.load import begin_with

        assert self.lightning_module is not None
        evaluates = self.lightning_module.trainer.state.fn != TrainerFn.FITTING
        if self._loads_whole_file or (evaluates and "current_model_state" in checkpoint):
            begin_with(self.deepspeed_engine, checkpoint, strict=strict)

    @property
    def lightning_restore_optimizer(self) -> bool:
        """No: `load_checkpoint` has restored it. Says so where it could not, since the checkpoint is a single file."""
        if self._loads_whole_file:
            rank_zero_warn(
                "`ckpt_path` is a single file, so Adam's moments begin at zero. To resume with them, pass the directory that"
                " `Trainer.save_checkpoint` or `ModelCheckpoint` wrote."
            )
        return False

    def remove_checkpoint(self, filepath: Any) -> None:
        """Removes a checkpoint that is no longer wanted: as a whole, or not at all."""
        from lightning_zenflow.checkpoint import directory

        if self.is_global_zero:
            directory.remove(Path(filepath))


def _beside_the_weights(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """What Lightning stores and DeepSpeed does not, with the averaged weights that a `WeightAveraging` puts in first place."""
    kept = {name: value for name, value in checkpoint.items() if name not in ("state_dict", "optimizer_states")}
    if kept.pop("current_model_state", None) is not None:
        kept[_AVERAGED] = checkpoint["state_dict"]
    return kept
