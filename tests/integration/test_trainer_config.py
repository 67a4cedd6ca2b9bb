"""Runs that are configured from outside the program: DeepSpeed's JSON, YAML and the command line."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from lightning_zenflow import ZenFlowConfig, ZenFlowStrategy
from tests.cases import relative
from tests.modules import (
    EXPECTED_WARNINGS,
    EXTREMES,
    OFTEN,
    QUIET,
    FollowsReference,
    Small,
    batches,
    fit,
    fit_plainly,
    schedule_of,
    trainer,
    weights,
)

pytestmark = [*EXPECTED_WARNINGS, pytest.mark.usefixtures("own_process_group")]


class SeesRates(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.seen.append(optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize("in_json", ["optimizer and scheduler", "scheduler"])
def test_a_json_with_optimizer_schedule_and_clipping_trains_as_a_plain_trainer_told_the_same(
    in_json: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAULTS 6, 8, 40."""
    settings: dict[str, Any] = {"lr": 0.2, "betas": [0.8, 0.9], "eps": 1.0, "weight_decay": 0.1}
    config = {
        "train_batch_size": 8,
        "gradient_clipping": 0.3,
        "zero_optimization": {"stage": 1, "zenflow": EXTREMES[0]},
        "optimizer": {"type": "AdamW", "params": settings},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0.1, "warmup_max_lr": 0.2, "warmup_num_steps": 10, "warmup_type": "linear"},
        },
    }

    def adamw(module: Small) -> torch.optim.AdamW:
        return torch.optim.AdamW(module.parameters(), **{**settings, "betas": (0.8, 0.9)})

    ours, rates = Small(configure=adamw), SeesRates()
    if in_json == "scheduler":
        del config["optimizer"]
        made = fit(ours, strategy=ZenFlowStrategy(config=config), callbacks=[rates], accumulate_grad_batches=2)
    else:
        path = tmp_path / "ds_config.json"
        path.write_text(json.dumps(config))
        monkeypatch.setenv("PL_DEEPSPEED_CONFIG_PATH", str(path))
        made = fit(ours, strategy="zenflow", callbacks=[rates], accumulate_grad_batches=2)
        # The optimizer of the module is not even asked for.
        assert not hasattr(ours, "own_optimizer")

    def with_warm_up(module: Small) -> Any:
        optimizer = adamw(module)
        schedule = LambdaLR(optimizer, lambda step: 0.5 + 0.05 * max(0, step - 1))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    plain, plain_rates = Small(configure=with_warm_up), SeesRates()
    fit_plainly(plain, callbacks=[plain_rates], accumulate_grad_batches=2, gradient_clip_val=0.3)
    assert made.strategy.step_stats.grad_norm_clipped == pytest.approx(0.3, rel=1e-4)  # type: ignore[attr-defined]
    assert rates.seen == pytest.approx(plain_rates.seen)
    assert relative(weights(ours), weights(plain)) < 1e-6


def test_auto_values_of_a_json_come_from_the_trainer() -> None:
    follows = FollowsReference()
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "zenflow": {**OFTEN, "full_warm_up_rounds": 2}},
    }
    before = copy.deepcopy(config)
    made = fit(
        Small(),
        strategy=ZenFlowStrategy(config=config),
        callbacks=[follows],
        accumulate_grad_batches=2,
        gradient_clip_val=0.4,
    )
    follows.assert_equal(steps=5)
    assert config == before
    assert schedule_of(made).warm_up_steps == 2
    assert isinstance(made.strategy.config, dict)  # type: ignore[attr-defined]
    assert made.strategy.config["train_micro_batch_size_per_gpu"] == 4  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        ({"gradient_clipping": 1.0}, {"gradient_clip_val": 0.5}, "`gradient_clip_val` must agree with the DeepSpeed"),
        ({"bf16": {"enabled": True}}, {}, r"Set Trainer\(precision='bf16-mixed'\) to use bf16"),
        ({"train_batch_size": 32}, {"accumulate_grad_batches": 2}, "`train_batch_size` must be 8 .* got 32"),
        ({"optimizer": {"type": "Lamb"}}, {}, '`optimizer.type` must be "Adam" or "AdamW" with ZenFlow'),
    ],
)
def test_a_json_that_contradicts_trainer_or_package_is_refused_before_anything_starts(
    config: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    """FAULTS 41."""
    with pytest.raises(ValueError, match=message):
        fit(Small(), strategy=ZenFlowStrategy(config={"zero_optimization": {"stage": 2}, **config}), **settings)


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
def test_what_cannot_be_trained_is_refused_by_the_trainer_as_well() -> None:
    """The refusals themselves are tested in tests/unit."""

    class Sparse(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Embedding(3, 2, sparse=True))

    with pytest.raises(NotImplementedError, match=r"`net.0.sparse` must be False with ZenFlow"):
        fit(Small(Sparse))
    with pytest.raises(ValueError, match=r"must be one of torch.optim.AdamW, .* got torch.optim.sgd.SGD"):
        fit(Small(configure=lambda module: torch.optim.SGD(module.parameters(), lr=0.1)))
    with pytest.raises(ValueError, match="`configure_optimizers` must return an optimizer with ZenFlow, got None"):
        fit(Unoptimized())


class Unoptimized(Small):
    def configure_optimizers(self) -> None:
        return None


def test_a_loader_whose_batch_sampler_knows_no_size_trains() -> None:
    class OwnSampler:
        def __iter__(self) -> Any:
            return iter([[0, 1], [2, 3, 4]])

        def __len__(self) -> int:
            return 2

    loader = torch.utils.data.DataLoader(batches(3).dataset, batch_sampler=OwnSampler())
    assert fit(Small(), loader).global_step == 2


def test_yaml_with_a_class_path_and_an_option_train_in_somebody_elses_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAULTS 40."""
    zenflow = {"topk_ratio": 0.5, "select_strategy": "step", "select_interval": 2}
    strategy = {"class_path": "lightning_zenflow.ZenFlowStrategy", "init_args": {"stage": 1, "zenflow": zenflow}}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"trainer": {**QUIET, "max_steps": 3, "strategy": strategy}}))

    class Loads(Small):
        def __init__(self, width: int = 6) -> None:
            super().__init__()

        def train_dataloader(self) -> Any:
            return batches(5)

    trainer()  # forgets the process group of an earlier test
    monkeypatch.setattr(sys, "argv", ["anybody"])
    option = "--trainer.strategy.zenflow.topk_ratio=0.05"
    arguments = ["fit", "--config", str(config), option]
    cli = LightningCLI(Loads, save_config_callback=None, seed_everything_default=False, args=arguments)
    made = cli.trainer.strategy
    assert isinstance(made, ZenFlowStrategy)
    assert made.zenflow == ZenFlowConfig(topk_ratio=0.05, select_strategy="step", select_interval=2)
    assert made.step_stats.step == cli.trainer.global_step == 3


def test_the_learning_rate_finder_which_makes_a_scheduler_of_its_own_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="`LearningRateFinder` must be left out"):
        fit(Small(), callbacks=[LearningRateFinder()])
