"""`ZenFlowStrategy`: Lightning's DeepSpeed strategy with ZenFlow's optimizer in place of ZeRO-Offload's step."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.strategies import _StrategyRegistry
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.strategies.strategy import TBroadcast  # noqa: F401  (resolves the base class's annotations)
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from lightning_zenflow import arguments, ds_config, internals
from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.core_shares import share_of_cores
from lightning_zenflow.ds_blocks import optimizer_settings
from lightning_zenflow.ds_values import refuse_values
from lightning_zenflow.environment import TorchThreads, cores_of_worker
from lightning_zenflow.intervals import IntervalsStrategy
from lightning_zenflow.module_guard import ModuleGuard
from lightning_zenflow.precision import CLIP_BY_VALUE_MESSAGE, ZenFlowPrecision, refuse_16_bits, refuse_precision
from lightning_zenflow.refusals import refuse_callbacks, refuse_for_stage, refuse_unsupported
from lightning_zenflow.signals import ASKING, Hold
from lightning_zenflow.stats import RunFacts, StepStats
from lightning_zenflow.stop_signals import StopSignals

if TYPE_CHECKING:
    from lightning_zenflow.callbacks import AutoTuner
    from lightning_zenflow.zero.adapter import ZenFlowZero


class ZenFlowStrategy(IntervalsStrategy):
    """Trains with ZeRO stage 1, 2 or 3 and the optimizer state in host memory, without waiting for the host.

    Use it as `Trainer(strategy="zenflow")` after `import lightning_zenflow`, or make one with settings. The module's own
    `configure_optimizers` stays as it is: torch `AdamW` or `Adam`, `DeepSpeedCPUAdam`, `FusedAdam` or `ZenFlowAdamW`.
    Works on CUDA and on CPU.

    Under ZeRO-3 each rank holds a part of every parameter, on the device or, with `offload_parameters`, on the host; what is
    made in `configure_model` is cut at once. As with Lightning's strategy a parameter shows no elements between two uses,
    also after `fit`: `deepspeed.zero.GatheredParameters` shows the whole of it, which then is the rounded fp32 master.

    Accumulation follows Lightning: the last batch of an epoch steps with what has been accumulated, as it does with
    strategies other than DeepSpeed's. A step whose gradient is not finite is skipped, counted and logged once.

    Args:
        zenflow: Settings of the algorithm; a mapping with the same keys is fine too.
        stage: ZeRO stage, 1, 2 or 3. `None` is 2, or the stage of `config`.
        **kwargs: Arguments of Lightning's `DeepSpeedStrategy`. `config` (a dict or a path; without it, the path in the
            environment variable `PL_DEEPSPEED_CONFIG_PATH`) may hold DeepSpeed's `"zenflow"` block inside
            `"zero_optimization"`. What it says must agree with the Trainer; `"auto"` leaves it to the Trainer. Only logs show
            its `"train_micro_batch_size_per_gpu"`. Its
            `"optimizer"` block stands for the module's `configure_optimizers`, which is not asked then. Offloading the
            optimizer is a matter of course: of `"offload_optimizer"` nothing but `"device": "cpu"` has a use. Keys that
            begin with `_` are comments.

    Raises:
        TypeError: A setting has the wrong type; the message names it.
        ValueError: A setting is out of range, unknown, or two contradict each other; the message names them.
        NotImplementedError: A setting is known but not supported yet.
        ImportError: DeepSpeed, Lightning or PyTorch has a version that is not supported.
    """

    strategy_name = "zenflow"

    def __init__(
        self,
        zenflow: ZenFlowConfig = ZenFlowConfig(),  # noqa: B008  (frozen)
        stage: int | None = None,
        **kwargs: Any,
    ) -> None:
        internals.check()
        given = zenflow if isinstance(zenflow, ZenFlowConfig) else ZenFlowConfig.from_mapping(zenflow)
        changed = arguments.without_defaults(kwargs)
        arguments.refuse(stage, changed)
        self._zenflow_block: Mapping[str, Any] | None = None
        self._has_own_config = kwargs.get("config") is not None or self.DEEPSPEED_ENV_VAR in os.environ
        super().__init__(stage=stage or 2, **kwargs)
        assert isinstance(self.config, dict)
        if self._has_own_config:
            arguments.refuse_beside_config(changed, self.config)
        self._merge_stage(stage)
        self.zenflow = arguments.merge_zenflow(given, self._zenflow_block)
        arguments.refuse_without_stage_3(changed, self.config)
        ds_config.refuse(self.config)
        if "optimizer" in self.config:
            optimizer_settings(self.config["optimizer"])
        refuse_values(self.config)
        ds_config.complete(self.config)
        self._settle_first = _SettleFirst()
        self._auto_tuner: AutoTuner | None = None
        self._threads = TorchThreads()
        self._begin_run()

    def _begin_run(self) -> None:
        self._skipped_steps_logged = 0
        self._step_is_open = self._batch_is_open = False
        self._held: Hold = Hold()
        self._has_ended = self._is_complete = self._loads_whole_file = False
        self._guard: ModuleGuard | None = None

    # -- the run ----------------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        trainer: Any = self.lightning_module._trainer if self.lightning_module is not None else None
        if trainer is not None:
            refuse_precision(self.precision_plugin)
            refuse_16_bits(self.precision_plugin.precision)
            if trainer.state.fn == TrainerFn.FITTING:  # before the `setup` of callbacks, which may make whole models
                refuse_callbacks(trainer, is_stage_3=self.zero_stage_3)
        self._threads.make_do()
        super().setup_environment()

    def connect(self, model: LightningModule) -> None:
        """Called first in each run of the Trainer: the state of the last `fit` ends here, while it can still be reached."""
        self._free_last_run()
        super().connect(model)

    def setup(self, trainer: Trainer) -> None:
        if self.world_size > 1:
            StopSignals.install(trainer)
        self._begin_run()
        if isinstance(trainer._signal_connector, StopSignals):
            self._held = trainer._signal_connector.begin_run()
        if type(self.precision_plugin) is DeepSpeedPrecision:
            self.precision_plugin = ZenFlowPrecision(self.precision_plugin.precision)  # type: ignore[arg-type]
        if trainer.state.fn == TrainerFn.FITTING:
            self._share = share_of_cores(self.node_rank, self.local_rank, self.num_processes)
            if isinstance(self.accelerator, CPUAccelerator):
                self._threads.limit(len(self._cores_of_worker()), self._share.ranks)
            self._add_auto_tuner(trainer)
        super().setup(trainer)
        if self._zero is not None:
            trainer.callbacks.insert(0, self._settle_first)  # type: ignore[attr-defined]
            assert isinstance(self.config, dict)
            self._zero.stored_clip_norm = float(trainer.gradient_clip_val or self.config["gradient_clipping"])

    def _free_last_run(self) -> None:
        """Lets go of what the last `fit` kept for whoever saves after it."""
        if self._zero is not None:
            self._zero.free()

    def init_deepspeed(self) -> None:
        assert self.lightning_module is not None and isinstance(self.model, LightningModule)
        trainer = self.lightning_module.trainer
        if trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
            raise ValueError(CLIP_BY_VALUE_MESSAGE)
        refuse_for_stage(self.model, self.world_size, is_stage_3=self.zero_stage_3)
        # Not the base class's method, which warns that a `configure_gradient_clipping` of one's own is ignored.
        if trainer.training:
            self._initialize_deepspeed_train(self.model)
        else:
            self._initialize_deepspeed_inference(self.model)

    def _initialize_deepspeed_inference(self, model: nn.Module) -> None:
        self._guard = ModuleGuard(model)
        with self._cuts_any_module():
            super()._initialize_deepspeed_inference(model)
        self._guard.let_copy(self.model)

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Under ZeRO-3, parameters made in `configure_model` are cut over the ranks as soon as their module is made."""
        from lightning_zenflow.zero.initial import gathering_inits

        with self._cuts_any_module(), gathering_inits(), super().model_sharded_context():
            yield

    @contextmanager
    def _cuts_any_module(self) -> Iterator[None]:
        """Within this context DeepSpeed takes modules of any parameters, however often a process builds its engine."""
        from lightning_zenflow.zero.broadcast import any_layout
        from lightning_zenflow.zero.secondary import group_of_copies

        assert isinstance(self.config, dict)
        with any_layout(), group_of_copies(self.config["zero_optimization"].get("zero_hpz_partition_size", 1)):
            yield

    def _init_optimizers(self) -> tuple[Optimizer, Any]:
        optimizer, scheduler = super()._init_optimizers()
        assert isinstance(self.config, dict)
        if scheduler is not None and "scheduler" in self.config:
            raise ValueError(
                f"`scheduler` must be left out of the DeepSpeed config beside one of `configure_optimizers`, got"
                f" {self.config['scheduler'].get('type')!r} and {type(scheduler.scheduler).__name__}. Remove one of them."
            )
        if isinstance(optimizer, _MockOptimizer):
            raise ValueError(
                "`configure_optimizers` must return an optimizer with ZenFlow, got None. Return a torch.optim.AdamW."
            )
        return optimizer, scheduler

    @property
    def handles_gradient_accumulation(self) -> bool:
        """No: Lightning does, so that the last batch of an epoch steps and `global_step` counts the engine's steps."""
        return False

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Marks micro-batches that do not end a step, so that their gradients are summed on the device."""
        self.deepspeed_engine.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            self.deepspeed_engine.set_gradient_accumulation_boundary(True)
        self._batch_is_open = False

    def _setup_model_and_optimizer(
        self, model: nn.Module, optimizer: Optimizer | None, lr_scheduler: Any = None
    ) -> tuple[Any, Any]:
        from lightning_zenflow.optimizer import ZenFlowAdamW
        from lightning_zenflow.zero.install import installed

        assert isinstance(self.config, dict)
        refuse_unsupported(model)
        if optimizer is None:
            settings = optimizer_settings(self.config["optimizer"])
            optimizer = ZenFlowAdamW([param for param in model.parameters() if param.requires_grad], **settings)
        converted = ZenFlowAdamW.from_optimizer(optimizer)
        self._guard = ModuleGuard(model)
        self.barrier()  # a rank that failed before this point shows here, and not as a hang within DeepSpeed
        try:
            with installed(self._run_settings()), self._cuts_any_module():
                engine, deepspeed_optimizer = super()._setup_model_and_optimizer(model, converted, lr_scheduler)
            self._guard.let_copy(engine)
            return engine, deepspeed_optimizer
        except BaseException:
            self._guard.abandon()
            raise

    def _run_settings(self) -> Any:
        from lightning_zenflow.zero.settings import RunSettings

        return RunSettings(
            config=self.zenflow,
            select_interval=self.zenflow.select_interval_steps(self._steps_per_epoch()),
            worker_cores=self._cores_of_worker(),
            local_ranks=self.num_processes,
        )

    def _cores_of_worker(self) -> list[int]:
        return cores_of_worker(self.zenflow, self.local_rank, self.num_processes, self._share)

    @property
    def _zero(self) -> ZenFlowZero | None:
        """Our ZeRO optimizer while `fit` runs, else None."""
        from lightning_zenflow.zero.adapter import ZenFlowZero

        optimizer = getattr(self.model, "optimizer", None)
        return optimizer if isinstance(optimizer, ZenFlowZero) else None

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if not self._step_is_open and self._zero is not None:
            assert self._guard is not None
            self._guard.refuse_unfrozen()
            self._zero.shard.begin_step()
            self._step_is_open = True
        if self._zero is not None:
            self._zero.begin_batch()
        output = super().training_step(*args, **kwargs)
        assert self.lightning_module is not None
        if not self.lightning_module.automatic_optimization:
            self._batch_is_open = False  # backward is done, whether a step followed or not
        elif output is None:
            raise ValueError(
                "`training_step` must return a loss with ZenFlow, got None: other ranks would wait for its gradients. Leave"
                " unwanted batches out in the data loader."
            )
        return output

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        # From here to `on_train_batch_end` the data loader has moved on and Lightning has not: whoever resumed from a
        # checkpoint that a signal handler saves there would skip the batch, or train it twice.
        if self._zero is not None and self.lightning_module is not None and self.lightning_module.trainer.training:
            self._held.hold(ASKING)
        return super().batch_to_device(batch, device, dataloader_idx)

    def pre_backward(self, closure_loss: Tensor) -> None:
        self._held.hold()  # Ctrl-C as well, after which callbacks may save
        super().pre_backward(closure_loss)
        self._batch_is_open = True  # from here on, gradients of this micro-batch mix with those of earlier ones

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._zero is not None:
            self._zero.shard.host.check()  # a long validation must not hide a dead background process
        return super().validation_step(*args, **kwargs)

    def optimizer_step(self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._step_is_open = self._batch_is_open = False
        if self._zero is not None and isinstance(self.config, dict):
            self._zero.clip_grad = self.config["gradient_clipping"]  # until the next step asks for another limit
        self._log_skipped_step()
        return result

    def _log_skipped_step(self) -> None:
        stats = self.step_stats
        if stats.skipped_steps > self._skipped_steps_logged:
            self._skipped_steps_logged = stats.skipped_steps
            rank_zero_warn(
                f"Step after {stats.step} skipped: the gradient norm is {stats.grad_norm} ({stats.skipped_steps} skipped so"
                " far). No weight changes by it.",
                category=RuntimeWarning,
            )

    def _end_batch(self, *, with_error: bool = False) -> None:
        """Lets signals that came during the batch be heard; Ctrl-C not, if there is an error to show."""
        if with_error:
            self._held.forget(signal.SIGINT)
            self._held.release()
        self._held.end_batch()

    def settle(self) -> None:
        """Brings the weights up to date: no gradient is pending, and they are the rounded fp32 masters.

        In the middle of a run it changes the course of training a little, since all blocks are updated early.

        `fit` ends with it, before `on_train_end` of callbacks and module. Every rank must call it.
        """
        self._training("settle").settle()

    def _end_training(self) -> None:
        self.settle()
        self._is_complete = True

    @property
    def _is_running(self) -> bool:
        """Whether the Trainer is at work, without an exception until now."""
        trainer = self.lightning_module._trainer if self.lightning_module is not None else None
        return trainer is not None and trainer.state.status == TrainerStatus.RUNNING

    @property
    def _is_fitted(self) -> bool:
        """Whether `fit` has come to its end without an exception."""
        return self._zero is not None and self._is_running

    def teardown(self) -> None:
        """Ends the background process and makes the module an ordinary one again, also after an exception."""
        if self._is_forked:
            return  # all of it belongs to the parent
        self._end_batch(with_error=True)
        engine: Any = self.model
        if self._is_fitted and not self._is_complete:
            self._end_training()  # a finished run was resumed: nothing was left to train, and no hook was called
        self._has_ended = True
        try:
            if self._zero is not None and self._is_complete:
                self._zero.retire()
            super().teardown()
        finally:
            if self._guard is not None and engine is not self.lightning_module and hasattr(engine, "destroy"):
                self._guard.release(engine, wait=self._is_running)
            self._threads.restore()
            trainer: Any = self.lightning_module._trainer if self.lightning_module is not None else None
            for callback in (self._settle_first, self._auto_tuner):
                if trainer is not None and callback in trainer.callbacks:
                    trainer.callbacks.remove(callback)

    # -- what a run tells -------------------------------------------------------------------------------------------

    @property
    def step_stats(self) -> StepStats:
        """Figures of the last optimizer step of this rank; zeros before the first one."""
        return self._zero.shard.stats if self._zero is not None else StepStats()

    @property
    def run_facts(self) -> RunFacts:
        """What this rank works on in this `fit`.

        Raises:
            RuntimeError: No training is under way.
        """
        zero = self._training("run_facts")
        betas = [hyper.beta2 for hyper in zero.optimizer.hypers()]
        assert isinstance(self.config, dict)
        in_epochs = self.zenflow.select_strategy == "epoch"
        return RunFacts(
            stage=self.config["zero_optimization"]["stage"],
            shard_numel=zero.shard.host.arena.layout.numel,
            memory_steps=1 / (1 - min(betas)),
            select_unit_steps=(self._steps_per_epoch() or 1) if in_epochs else 1,
        )

    def grad_norm(self) -> float:
        """Global norm of the averaged, unscaled gradient before clipping.

        For `on_before_optimizer_step`, where parameters have no `.grad` under ZeRO. Every rank must call it.

        Raises:
            RuntimeError: No training is under way, or the gradient of a step is not complete.
        """
        return self._with_gradient("grad_norm").grad_norm()

    def gradient(self, param: nn.Parameter) -> Tensor:
        """The averaged, unscaled gradient of a parameter, fp32 on the device, in its shape.

        For `on_before_optimizer_step`. Every rank must call it with the same parameter.

        Raises:
            RuntimeError: No training is under way, or the gradient of a step is not complete.
            ValueError: The optimizer does not hold the parameter.
        """
        zero = self._with_gradient("gradient")
        if not zero.holds(param):
            shape = list(getattr(param, "ds_shape", param.shape))
            raise ValueError(
                f"`param` must be a trainable parameter of the optimizer, got one of shape {shape} that it does"
                " not hold. Add it to a group in `configure_optimizers`."
            )
        return zero.gradient(param)

    def _with_gradient(self, name: str) -> ZenFlowZero:
        """As `_training`, while there is a gradient to tell of: zeros would look like an answer."""
        zero = self._training(name)
        if not zero.shard.has_whole_gradient:
            raise RuntimeError(
                f"`{name}` must be called between the backward pass of a step's last micro-batch and its optimizer step, got"
                " a call when no gradient was complete. Use the hook `on_before_optimizer_step`."
            )
        return zero

    def _training(self, name: str) -> ZenFlowZero:
        if self._zero is None or self._has_ended:
            raise RuntimeError(
                f"`{name}` must be called while `trainer.fit` runs. Use the hook `on_before_optimizer_step`."
            )
        return self._zero

    @classmethod
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Registers `zenflow`, `zenflow_stage_1`, `_2` and `_3`, and `zenflow_stage_3_offload`."""
        strategy_registry.register("zenflow", cls, "ZenFlow on ZeRO stage 2", override=True)
        for stage in (1, 2, 3):
            description = f"ZenFlow on ZeRO stage {stage}"
            strategy_registry.register(f"zenflow_stage_{stage}", cls, description, override=True, stage=stage)
        strategy_registry.register(
            "zenflow_stage_3_offload",
            cls,
            "ZenFlow on ZeRO stage 3 with the parameters in host memory",
            override=True,
            stage=3,
            offload_parameters=True,
        )


class _SettleFirst(Callback):
    """Stands before all other callbacks, so that whoever reads or replaces weights in `on_train_end` finds the final ones.

    Whoever saves at the end of a batch, or after an exception, does so once signals are heard again.
    """

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        assert isinstance(trainer.strategy, ZenFlowStrategy)
        trainer.strategy._end_batch()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.on_train_batch_end(trainer, pl_module)  # the last batch was skipped by `on_train_batch_start`

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        assert isinstance(trainer.strategy, ZenFlowStrategy)
        trainer.strategy._end_batch(with_error=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(trainer.strategy, ZenFlowStrategy)
        trainer.strategy._end_training()
        if isinstance(trainer._signal_connector, StopSignals):
            trainer._signal_connector.agree()  # what came during the last step
        trainer.strategy._held.release()
