"""Plain DeepSpeed under Lightning on CPU, and what a run's optimizer holds, whoever runs it."""

from __future__ import annotations

import argparse
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.strategies.strategy import TBroadcast  # noqa: F401  (resolves the base class's annotations)
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.any_accelerator import _AnyAcceleratorStrategy
from tests.cases import gathered
from tests.modules import FEATURES, QUIET, Small

ALL_SELECTED: dict[str, Any] = {"topk_ratio": 1}
"""With these settings ZenFlow is plain AdamW."""

KINDS = ("fp32", "exp_avg", "exp_avg_sq")


class PlainOnCpu(_AnyAcceleratorStrategy):
    """Lightning's DeepSpeed strategy on CPU, where the ranks were started from outside."""

    def _configure_launcher(self) -> None:
        self._launcher = None


def plain(stage: int = 2, offload: bool = False, zero: dict[str, Any] | None = None, **config: Any) -> PlainOnCpu:
    """Plain DeepSpeed; `config` goes into DeepSpeed's config, `zero` into its `"zero_optimization"`."""
    sizes = {"reduce_bucket_size": 4000, "allgather_bucket_size": 4000}
    on_host = {"offload_optimizer": {"device": "cpu", "pin_memory": False}} if offload else {}
    return PlainOnCpu(
        config={
            "zero_optimization": {"stage": stage, **sizes, **on_host, **(zero or {})},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            **config,
        }
    )


class Keeps(Callback):
    """Keeps what the optimizer holds when training starts and, if asked, after a batch, where it saves as well.

    Attributes:
        at_start: Before the first step: after a checkpoint was loaded, what came out of it.
        at_save: When the checkpoint was saved.
    """

    def __init__(self, path: Path | None = None, batch: int = 5) -> None:
        self.path, self.batch = path, batch
        self.at_start: dict[str, Any] = {}
        self.at_save: dict[str, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.at_start = state_of(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.path is not None and batch_idx == self.batch:
            trainer.save_checkpoint(self.path)
            self.at_save = state_of(trainer, pl_module)


def state_of(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    """Masters, moments, step, groups and weights of a run under plain DeepSpeed or ZenFlow. Every rank must call it."""
    strategy = trainer.strategy
    assert isinstance(strategy, DeepSpeedStrategy)
    engine: Any = strategy.deepspeed_engine
    read = _ours if isinstance(strategy, ZenFlowStrategy) else _plain
    tensors, step = read(engine.optimizer, module)
    return {
        **tensors,
        "weights": shown(module),
        "buffers": {name: buffer.clone() for name, buffer in module.named_buffers()},
        "step": step,
        "groups": [
            {name: group[name] for name in ("lr", "betas", "eps", "weight_decay", "initial_lr") if name in group}
            for group in engine.optimizer.param_groups
        ],
        "counters": {name: getattr(engine, name) for name in ("global_steps", "global_samples", "skipped_steps")},
        "global_step": trainer.global_step,
        "scale": float(engine.optimizer.loss_scale),
    }


def shown(module: LightningModule) -> dict[str, Tensor]:
    """Copies of all weights, whole. Every rank must call it."""
    with gathered(module.parameters()):
        return {name: param.detach().clone() for name, param in module.named_parameters()}


def _plain(zero: Any, module: LightningModule) -> tuple[dict[str, dict[str, Tensor]], int | None]:
    """As DeepSpeed's own functions tell it."""
    state = list(zero.optimizer.state.values())
    kinds = ["exp_avg", "exp_avg_sq"] if state and "exp_avg" in state[0] else []
    if kinds and hasattr(zero, "_lazy_init_hp_params_optimizer_state"):
        # DeepSpeed links the moments after the first group's first step, when the other groups have none yet.
        zero._hp_optimizer_states_linked = False
        zero._lazy_init_hp_params_optimizer_state()
    found: dict[str, dict[str, Tensor]] = {kind: {} for kind in KINDS}
    for name, param in module.named_parameters():
        if param.requires_grad:
            found["fp32"][name] = safe_get_full_fp32_param(param).clone()
            for kind in kinds:
                found[kind][name] = safe_get_full_optimizer_state(param, kind).clone()
    steps = {int(one["step"]) for one in state if "step" in one}
    assert len(steps) <= 1
    return found, steps.pop() if steps else None


def _ours(zero: Any, module: LightningModule) -> tuple[dict[str, dict[str, Tensor]], int | None]:
    zero.complete()
    arena, found = zero.shard.host.arena, {}
    for kind, region in zip(KINDS, (arena.master, arena.exp_avg, arena.exp_avg_sq), strict=True):
        found[kind] = {spec.name: torch.zeros(spec.numel) for spec in zero.layout.params}
        for segment in zero._tables[zero._rank].segments:
            part = found[kind][segment.spec.name].narrow(0, segment.param_start, segment.numel)
            part.copy_(region[segment.start : segment.stop])
        for spec in zero.layout.params:
            torch.distributed.all_reduce(found[kind][spec.name])
            found[kind][spec.name] = found[kind][spec.name].view(spec.shape)
    return found, zero.shard.clock


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """What two optimizers hold differently: masters and moments bit for bit, step and groups."""
    found = [name for name in ("step", "groups", "scale") if one[name] != other[name]]
    for kind in KINDS:
        found += [f"{kind} {name}" for name in one[kind].keys() ^ other[kind].keys()]
        for name in one[kind].keys() & other[kind].keys():
            if not torch.equal(one[kind][name], other[kind][name]):
                found.append(f"{kind} {name}")
    return found


def rounded(masters: dict[str, Tensor], weights: dict[str, Tensor]) -> bool:
    """Whether the weights are the masters in the model's dtype."""
    return all(torch.equal(master.to(weights[name].dtype), weights[name]) for name, master in masters.items())


class Steady(Small):
    """Makes its own batches, since Lightning does not go on within a data loader: the same ones on any number of ranks.

    Attributes:
        first_weights: The weights that the first batch after the start went through.
    """

    batch_size = 8
    """Of all ranks together."""

    first_weights: dict[str, Tensor]

    def batch(self, seed: int) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(self.batch_size, FEATURES, generator=torch.Generator().manual_seed(seed))
        return inputs, (inputs.sum(1) > 0).long() + 2 * (inputs[:, 0] > 0).long()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not hasattr(self, "first_weights"):
            self.first_weights = shown(self)
        inputs, targets = (
            part.chunk(self.trainer.world_size)[self.global_rank]
            for part in self.batch(self.current_epoch * 1000 + batch_idx)
        )
        return super().training_step([inputs.to(next(self.net.parameters()).dtype), targets], batch_idx)


def run(
    strategy: DeepSpeedStrategy,
    module: Small,
    ckpt_path: Path | None = None,
    save: Path | None = None,
    save_after: int = 6,
    batches: int = 10,
    **settings: Any,
) -> Keeps:
    """Trains `batches` batches, in all with those before the checkpoint `ckpt_path`.

    Args:
        strategy: Plain DeepSpeed or ZenFlow.
        module: Makes its own batches.
        ckpt_path: What to resume from.
        save: Where a checkpoint is written after `save_after` batches.
        save_after: See `save`.
        batches: See above.
        **settings: Of the Trainer.
    """
    keeps = Keeps(save, save_after - 1)
    made = Trainer(**{**QUIET, **settings, "strategy": strategy, "callbacks": [keeps]})
    made.fit(module, DataLoader(TensorDataset(torch.zeros(batches))), ckpt_path=ckpt_path)
    assert made.global_step == batches // made.accumulate_grad_batches
    return keeps


def to_universal(checkpoint: Path, path: Path, inject_missing_state: bool) -> Path:
    """DeepSpeed's universal checkpoint in the directory `path`, in a folder with the name that Lightning looks for.

    Args:
        checkpoint: The directory of an ordinary one.
        path: Where to put it.
        inject_missing_state: DeepSpeed asks for this with its own checkpoints, and not with ours.
    """
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        ds_to_universal.main(
            argparse.Namespace(
                input_folder=str(checkpoint / "checkpoint"),
                output_folder=str(path / "checkpoint"),
                num_extract_workers=1,
                num_merge_workers=1,
                keep_temp_folder=False,
                strict=True,
                inject_missing_state=inject_missing_state,
            )
        )
    return path
