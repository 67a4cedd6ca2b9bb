"""Checkpoints under ZeRO-3: what the tests of one and of two ranks do alike. What is checked comes back in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightning_zenflow import ZenFlowStrategy
from tests.interop import ALL_SELECTED, PlainOnCpu, Steady, differing, plain, rounded, run, shown
from tests.modules import CLASSES, FEATURES, OFTEN, QUIET, Small, batches, strategy_of, three_groups
from tests.resuming import Numbered, batches_done, own_state, stage_arguments

STAGES = (1, 2, 3, "3 offload")


# -- a module with everything ------------------------------------------------------------------------------------------


class Counted(nn.Linear):
    """Stores something of its own that is no tensor."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += self.training
        return super().forward(inputs)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class Centred(nn.Module):
    """Takes off a running mean, in any dtype."""

    mean: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(FEATURES))
        self.register_buffer("mean", torch.zeros(FEATURES))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(inputs.detach().mean(0).to(self.mean.dtype), 0.1)
            self.count += 1
        return (inputs - self.mean.to(inputs.dtype)) * self.weight


class Odd(nn.Module):
    """Tied and frozen weights, buffers, and a state that is no tensor; sizes that do not divide by two."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.Linear(FEATURES, FEATURES, bias=False) for _ in range(2))
        self.last.weight = self.first.weight
        self.normed = Centred()
        self.frozen = nn.Linear(FEATURES, 7).requires_grad_(False)
        self.head = Counted(7, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.frozen(self.last(self.normed(torch.tanh(self.first(inputs))))))


class OddModule(Steady):
    """`Odd`, with the batches of `Steady`, each rank with its own statistics."""

    def __init__(self, make_net: Callable[[], nn.Module] = Odd, configure: Any = None) -> None:
        super().__init__(make_net, configure)


# -- strategies --------------------------------------------------------------------------------------------------------


def ours(zenflow: Mapping[str, Any] = OFTEN, stage: int | str = 3, **config: Any) -> ZenFlowStrategy:
    """ZenFlow; under ZeRO-3 with small sub-groups, and parameters that stay gathered beside others."""
    arguments = dict(stage_arguments(stage))
    if config:
        zero = {"stage": stage} if "stage" in arguments else arguments["config"]["zero_optimization"]
        arguments = {"config": {"zero_optimization": zero, **config}}
    return strategy_of(dict(zenflow), **arguments)


def plain_of(stage: int | str, **config: Any) -> PlainOnCpu:
    """Lightning's own strategy with the same settings."""
    if stage in (1, 2):
        return plain(int(stage), **config)
    zero = stage_arguments(stage)["config"]["zero_optimization"]
    return plain(3, offload=stage == "3 offload", zero=zero, **config)


def of_precision(precision: str) -> dict[str, Any]:
    """DeepSpeed's config for it: a loss scale that neither overflows nor grows."""
    return {"fp16": {"enabled": True, "initial_scale_power": 8}} if precision == "16-mixed" else {}


def scheduled(module: Small) -> dict[str, Any]:
    """Three groups whose rates fall at every step."""
    optimizer = three_groups(module)
    falling = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": falling, "interval": "step"}}


def distance(one: LightningModule, other: LightningModule) -> float:
    """Largest difference of two modules' weights. Every rank must call it."""
    ours, theirs = shown(one), shown(other)
    return max((ours[name] - theirs[name]).abs().max().item() for name in ours)


# -- with plain DeepSpeed ----------------------------------------------------------------------------------------------


def both_ways(folder: Path, stage: int | str, precision: Any, devices: int = 1) -> list[str]:
    """Plain DeepSpeed's checkpoint under ZenFlow, and the other way; returns what was not as it should be.

    With everything selected ZenFlow is AdamW, and each ends where the other ends that never stopped.
    """
    config, settings = of_precision(precision), {"precision": precision, "devices": devices}
    tolerance = 1e-6 if precision == "32-true" else 2e-3
    found = []
    for name, first, second in (
        ("plain to ours", plain_of(stage, **config), ours(ALL_SELECTED, stage, **config)),
        ("ours to plain", ours(ALL_SELECTED, stage, **config), plain_of(stage, **config)),
        ("few to plain", ours(OFTEN, stage, **config), plain_of(stage, **config)),
        ("plain to few", plain_of(stage, **config), ours(OFTEN, stage, **config)),
    ):
        whole, resumed = Steady(configure=scheduled), Steady(configure=scheduled)
        path = folder / f"{name}.ckpt"
        saved = run(first, whole, save=path, **settings).at_save
        loaded = run(second, resumed, path, **settings).at_start
        wrong = differing(saved, loaded)
        if saved["step"] != 6 or loaded["global_step"] != 6 or loaded["counters"] != saved["counters"]:
            wrong.append(f"step {saved['step']}, {loaded['global_step']}, {loaded['counters']}")
        if not rounded(saved["fp32"], resumed.first_weights):
            wrong.append("first weights")
        if name == "few to plain" and rounded(saved["fp32"], saved["weights"]):
            wrong.append("nothing was extrapolated")
        if "few" not in name and not distance(whole, resumed) < tolerance:
            wrong.append(f"ends {distance(whole, resumed)} apart")
        jump = abs(resumed.losses[0] - whole.losses[6])
        if name == "plain to few" and not jump < (1e-5 if precision == "32-true" else 1e-2):
            wrong.append(f"loss jumps by {jump}")
        found += [f"stage {stage}, {precision}, {name}: {text}" for text in wrong]
    return found


# -- evaluation --------------------------------------------------------------------------------------------------------


def evaluated(strategy: Any, how: str, path: Path, module: LightningModule, **settings: Any) -> Trainer:
    """Runs `validate`, `test` or `predict` with the weights at `path`."""
    made = Trainer(**{**QUIET, **settings, "strategy": strategy})
    getattr(made, how)(module, batches(2), ckpt_path=path)
    return made


def check_evaluates(saved: Mapping[str, Any], module: OddModule, dtype: torch.dtype = torch.float32) -> list[str]:
    """Whether the module has the masters of `saved`, its frozen weights, its buffers and what is no tensor."""
    now, found = shown(module), []
    for name, weight in saved["weights"].items():
        if not torch.equal(now[name], saved["fp32"].get(name, weight).to(dtype)):
            found.append(name)
    for name, buffer in module.named_buffers():
        if not torch.equal(buffer, saved["buffers"][name]):
            found.append(name)
    if module.net.head.calls != saved["calls"]:  # type: ignore[union-attr]
        found.append(f"{module.net.head.calls} calls, not {saved['calls']}")  # type: ignore[union-attr]
    return found


def saved_by(strategy: Any, path: Path, **settings: Any) -> dict[str, Any]:
    """Trains an `Odd` module, saves after six of ten batches, and returns what the run held then."""
    module = OddModule()
    held = run(strategy, module, save=path, **settings).at_save
    return {**held, "calls": 6}


# -- saves anywhere ----------------------------------------------------------------------------------------------------


HOOKS = (
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
)


class SavesAnywhere(Callback):
    """Saves in each of `HOOKS`, within forward and backward passes, and in validation."""

    def __init__(self, folder: Path, within: bool = True) -> None:
        self.folder, self.within = folder, within
        self.saved: set[str] = set()
        self._handles: list[Any] = []

    def save(self, trainer: Trainer, name: str) -> None:
        """Saves, which must not move what a forward or backward under way has gathered."""
        self.saved.add(name)
        params: list[Any] = list(trainer.lightning_module.parameters())
        before = [(param.ds_status, param.data_ptr()) for param in params]
        trainer.save_checkpoint(self.folder / f"{name}.ckpt")
        assert [(param.ds_status, param.data_ptr()) for param in params] == before

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.within:
            net: Any = pl_module.net
            last = net[3]
            self._handles = [
                last.register_forward_pre_hook(lambda *_: self.save(trainer, "forward")),
                last.register_full_backward_pre_hook(lambda *_: self.save(trainer, "backward")),
            ]

    def on_validation_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        self.save(trainer, "validation")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for handle in self._handles:
            handle.remove()


def _saves_in(name: str) -> Callable[..., None]:
    def hook(self: SavesAnywhere, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        self.save(trainer, name)

    return hook


for _name in HOOKS:
    setattr(SavesAnywhere, _name, _saves_in(_name))


# -- single files ------------------------------------------------------------------------------------------------------


def full(stage: int | str = 3, zenflow: Mapping[str, Any] = OFTEN) -> ZenFlowStrategy:
    """ZeRO-3 that may begin with a single file."""
    return strategy_of(dict(zenflow), **stage_arguments(stage), load_full_weights=True)


@contextmanager
def counting_reads() -> Iterator[list[int]]:
    """Elements that are read from a single file within this context."""
    from lightning_zenflow.checkpoint.whole_file import WholeWeights

    original: Any = WholeWeights.read
    counted = [0]

    def read(self: WholeWeights, name: str, kind: str, *where: Any) -> Tensor:
        tensor: Tensor = original(self, name, kind, *where)
        counted[0] += tensor.numel() * (kind == "fp32")
        return tensor

    WholeWeights.read = read  # type: ignore[method-assign,assignment]
    try:
        yield counted
    finally:
        WholeWeights.read = original  # type: ignore[method-assign]


# -- what a run begins with, and where it fails ------------------------------------------------------------------------


class Begins(Callback):
    """What a run begins with."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, OddModule)
        net: Any = pl_module.net
        self.state, self.shown = own_state(trainer), shown(pl_module)
        self.buffer, self.calls = net.normed.mean.clone(), net.head.calls
        self.rates = [group["lr"] for group in trainer.optimizers[0].param_groups]


class KeepsState(Callback):
    """Keeps masters and moments as they are after a batch, once `Trace` has settled and saved."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if batches_done(trainer) == self.batch:
            self.state = own_state(trainer)


class Fails(Numbered):
    """Fails in the eighth batch, within the forward pass or after it."""

    where = "forward"

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.current_epoch == 0 and batch_idx == 7 and self.where:
            if self.where == "before":
                raise RuntimeError("on purpose")
            if self.where == "forward":
                self.net[3].register_forward_pre_hook(_fail)  # type: ignore[index]
            super().training_step(batch, batch_idx)
            raise RuntimeError("on purpose")
        return super().training_step(batch, batch_idx)


def _fail(*args: Any) -> None:
    raise RuntimeError("on purpose")
