"""Small LightningModules, loaders and callbacks for the tests that train through Lightning's Trainer."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.reference import ZenFlowReference
from tests.cases import gathered, relative

with warnings.catch_warnings():
    # Imported by DeepSpeed when the first engine is built; torch's compiler warns of itself meanwhile.
    warnings.simplefilter("ignore")

EXPECTED_WARNINGS = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in (
        ".*isinstance.treespec, LeafSpec.* is deprecated",  # Lightning with this torch
        ".*does not have many workers",
        "You defined a `validation_step` but have no `val_dataloader`",
        "It is recommended to use `self.log.'val_loss', ..., sync_dist=True.`",  # of a plain Trainer in a process group
    )
]
"""What Lightning says in every fit; for `pytestmark`, since warnings are errors here."""

FEATURES, CLASSES = 6, 5
OFTEN: dict[str, Any] = {"topk_ratio": 0.3, "select_strategy": "step", "select_interval": 4, "update_interval": 4}
"""Settings with which short runs select several times, hold gradients back and have blocks in flight."""

EXTREMES: list[dict[str, Any]] = [{"topk_ratio": 1}, {"topk_ratio": 0, "update_interval": 1, "overlap_step": False}]
"""Settings with which training is plain AdamW."""


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, CLASSES))


class Small(LightningModule):
    """A classifier around any net.

    Attributes:
        losses: Loss of each training batch.
        own_optimizer: What `configure` returned.
        own_groups: Its groups that hold trainable parameters.
        initial: Name, initial weight and group of each trainable parameter, for the reference.
    """

    def __init__(
        self, make_net: Callable[[], nn.Module] = two_layers, configure: Callable[[Small], Any] | None = None
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.make_net = make_net
        self.net = make_net()
        self.configure = configure
        self.losses: list[float] = []

    def loss(self, net: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(net(batch[0]).float(), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(self.net, batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(self.net, batch), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        configured = self.configure(self) if self.configure else torch.optim.AdamW(self.parameters(), lr=1e-2)
        self.own_optimizer = configured["optimizer"] if isinstance(configured, dict) else configured
        names = {id(param): name for name, param in self.net.named_parameters()}
        trained = [
            (group, [param for param in group["params"] if param.requires_grad])
            for group in self.own_optimizer.param_groups
        ]
        self.own_groups = [group for group, params in trained if params]
        self.initial = [
            (names[id(param)], param.detach().clone(), index)
            for index, params in enumerate(params for _, params in trained if params)
            for param in params
            if param.numel()
        ]
        return configured


def three_groups(module: Small) -> torch.optim.AdamW:
    """An AdamW over `two_layers` whose groups differ in everything."""
    first, second, third = module.net[0], module.net[2], module.net[3]  # type: ignore[index]
    return torch.optim.AdamW(
        [
            {"params": first.parameters(), "weight_decay": 0.1},
            {"params": second.parameters(), "lr": 3e-3, "betas": (0.8, 0.95)},
            {"params": third.parameters(), "lr": 2e-2, "eps": 1e-5, "weight_decay": 0.0},
        ],
        lr=1e-2,
    )


def batches(count: int, size: int = 4, seed: int = 0) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count * size, FEATURES, generator=generator)
    targets = (inputs.sum(1) > 0).long() + 2 * (inputs[:, 0] > 0).long()
    return DataLoader(TensorDataset(inputs, targets), batch_size=size)


def weights(module: Small) -> Tensor:
    """All parameters in one flat fp32 tensor. Under ZeRO-3 every rank must call it."""
    with gathered(module.net.parameters()):
        return torch.cat([param.detach().float().flatten() for param in module.net.parameters()])


def numel_of(param: Any) -> int:
    """Elements of a parameter, which under ZeRO-3 shows none while it is cut."""
    numel: int = getattr(param, "ds_numel", param.numel())
    return numel


def masters(trainer: Trainer) -> dict[str, Tensor]:
    """The fp32 masters of all trained parameters of the module's net, by name; for one rank."""
    assert isinstance(trainer.strategy, ZenFlowStrategy) and trainer.strategy._zero is not None
    zero = trainer.strategy._zero
    zero.complete()
    found = {}
    for segment in zero._tables[0].segments:
        flat = zero.shard.host.arena.master[segment.start : segment.stop]
        found[segment.spec.name.removeprefix("net.")] = flat.clone().view(segment.spec.shape)
    return found


QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "use_distributed_sampler": False,  # it would shuffle the batches
}


def strategy_of(zenflow: Any, **arguments: Any) -> ZenFlowStrategy:
    """Settings as a person writes them: a mapping."""
    return ZenFlowStrategy(zenflow, **arguments)


def trainer(zenflow: Any = OFTEN, **settings: Any) -> Trainer:
    """A quiet Trainer on one CPU, with ZenFlow; `strategy=...` overrides that."""
    strategy = settings.pop("strategy", None) or strategy_of(zenflow)
    return Trainer(**{**QUIET, **settings, "strategy": strategy})


def fit(
    module: LightningModule, loader: Any = None, validation: Any = None, zenflow: Any = OFTEN, **settings: Any
) -> Trainer:
    """Trains with `trainer(...)`, on ten batches if no loader is given."""
    made = trainer(zenflow, **settings)
    made.fit(module, batches(10) if loader is None else loader, validation)
    return made


def fit_plainly(module: LightningModule, loader: Any = None, validation: Any = None, **settings: Any) -> Trainer:
    """The same without ZenFlow: one CPU, and the optimizer that the module returns."""
    made = Trainer(**{**QUIET, **settings})
    made.fit(module, batches(10) if loader is None else loader, validation)
    return made


class FollowsReference(Callback):
    """Compares each step of a fit with `reference.py`, and its gradient with autograd's on a copy of the net.

    The reference reads learning rates and the like from the optimizer that the user's `configure_optimizers` returned.

    Attributes:
        worst: Largest relative difference seen of gradients, norms and weights.
        steps: Steps compared.
        changes: How often the intervals changed.
    """

    def __init__(self) -> None:
        self.worst = {"gradient": 0.0, "norm": 0.0, "weights": 0.0}
        self.steps = self.changes = 0
        self._batches: list[Any] = []
        self._weights: dict[str, Tensor] = {}  # those of the step's forward: backward may move them already

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, Small) and isinstance(trainer.strategy, ZenFlowStrategy)
        assert trainer.strategy._zero is not None
        settings = trainer.strategy.zenflow
        self.params = {name: param for name, param in pl_module.net.named_parameters() if param.requires_grad}
        self.reference = ZenFlowReference(
            pl_module.initial,
            pl_module.own_groups,
            trainer.strategy._zero.shard._schedule,
            topk_ratio=settings.topk_ratio,
            deferred_lr_scale=settings.deferred_lr_scale,
            clip_norm=trainer.gradient_clip_val,
            ranks=trainer.world_size,
            stage3=trainer.strategy.zero_stage_3,
        )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        assert isinstance(pl_module, Small)
        if not self._batches:
            with gathered(pl_module.net.parameters()):
                self._weights = {name: value.clone() for name, value in pl_module.net.state_dict().items()}
        self._batches.append(batch)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        assert isinstance(pl_module, Small) and isinstance(trainer.strategy, ZenFlowStrategy)
        expected = self._autograd(trainer, pl_module)
        grads = {name: trainer.strategy.gradient(param) for name, param in self.params.items() if numel_of(param)}
        for name, grad in grads.items():
            assert grad.shape == expected[name].shape and grad.dtype == torch.float32
            assert self.params[name].grad is None
            self._see("gradient", relative(grad, expected[name]))
        norm = sum(grad.square().sum().item() for grad in expected.values()) ** 0.5
        self._see("norm", abs(trainer.strategy.grad_norm() / norm - 1))
        self.reference.step(grads)
        self.steps += 1
        self._batches.clear()

    def _autograd(self, trainer: Trainer, module: Small) -> dict[str, Tensor]:
        """The gradient of this step's batches, averaged over ranks, as plain PyTorch computes it in fp32."""
        twin = module.make_net()
        twin.load_state_dict(self._weights)
        for batch in self._batches:
            (module.loss(twin, [part.float() if part.is_floating_point() else part for part in batch])).backward()
        grads = {}
        for name, param in twin.named_parameters():
            grad = torch.zeros_like(param) if param.grad is None else param.grad / trainer.accumulate_grad_batches
            if trainer.world_size > 1:
                torch.distributed.all_reduce(grad)
                grad /= trainer.world_size
            if name in self.params:
                grads[name] = grad
        return grads

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        assert isinstance(trainer.strategy, ZenFlowStrategy)
        if trainer.strategy.intervals != (
            self.reference.schedule.update_interval,
            self.reference.schedule.select_interval,
        ):
            self.reference.change_intervals(*trainer.strategy.intervals)
            self.changes += 1
        if not self._batches:
            self._compare(self.reference.weights)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.reference.settle()
        self._compare(self.reference.masters)

    def _compare(self, expected: Callable[[str], Tensor]) -> None:
        with gathered(self.params.values()):
            for name, param in self.params.items():
                if numel_of(param):
                    self._see("weights", relative(param.detach().float(), expected(name)))

    def _see(self, what: str, difference: float) -> None:
        self.worst[what] = max(self.worst[what], difference)

    def assert_equal(self, steps: int, gradient: float = 1e-5, weights: float = 1e-6) -> None:
        assert self.steps == steps
        assert self.worst["gradient"] < gradient and self.worst["norm"] < gradient, self.worst
        assert self.worst["weights"] < weights, self.worst


class MemoryLogger(Logger):
    """Keeps what is logged: pairs of step and metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[int | None, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "memory"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None: ...

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.logged.append((step, metrics))

    def values(self, name: str) -> list[float]:
        return [metrics[name] for _, metrics in self.logged if name in metrics]


def schedule_of(made: Trainer) -> Any:
    """The schedule that a run went by."""
    strategy = made.strategy
    assert isinstance(strategy, ZenFlowStrategy) and strategy._zero is not None
    return strategy._zero.shard._schedule
