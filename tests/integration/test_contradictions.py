"""What two places say of the same thing: settings, Trainer, strategy's arguments and DeepSpeed's config, as one table.

Either one documented rule merges them, or the error names both. The rules are in the docstrings of `ZenFlowStrategy`,
`ZenFlowConfig` and `AutoTuner`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from torch.optim.lr_scheduler import StepLR

from lightning_zenflow import AutoTuner, ZenFlowConfig, ZenFlowStrategy
from tests.fuzz import COUNTS, check_words
from tests.modules import EXPECTED_WARNINGS, OFTEN, Small, batches, fit, trainer

pytestmark = [*EXPECTED_WARNINGS, pytest.mark.usefixtures("own_process_group")]


@dataclass(frozen=True)
class Said:
    """Two places that say something.

    Attributes:
        strategy: Arguments of `ZenFlowStrategy`.
        trainer: Arguments of the Trainer.
        config: DeepSpeed's, beside ZeRO-2; `None` for none.
        configure: The module's `configure_optimizers`.
    """

    strategy: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] | None = None
    configure: Callable[[Any], Any] | None = None

    def make(self) -> ZenFlowStrategy:
        arguments = dict(self.strategy)
        if self.config is not None:
            arguments["config"] = {"zero_optimization": {"stage": 2}, **self.config}
        return ZenFlowStrategy(**arguments)

    def fit(self) -> Any:
        module = Small(configure=self.configure)
        return fit(module, batches(4), strategy=self.make(), **{"max_steps": 2, **self.trainer})


def zero(**settings: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 2, **settings}}


def with_schedule(module: Any) -> Any:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    return {"optimizer": optimizer, "lr_scheduler": StepLR(optimizer, 5)}


WARM_UP = {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}
ADAMW = {"type": "AdamW", "params": {"lr": 0.5}}

# -- refused -----------------------------------------------------------------------------------------------------------

WHEN_MADE: dict[str, tuple[Said, tuple[str, str]]] = {
    "stage twice": (Said({"stage": 1}, config={}), ("stage=1", "`zero_optimization.stage`=2")),
    "stage 1 and offloaded parameters": (
        Said({"stage": 1, "offload_parameters": True}),
        ("offload_parameters", "stage 1"),
    ),
    "stage 2 and offloaded parameters in the config": (
        Said(config=zero(offload_param={"device": "cpu"})),
        ("zero_optimization.offload_param.device", "ZeRO-3"),
    ),
    "full weights and stage 2": (Said({"load_full_weights": True}), ("load_full_weights", "stage 2")),
    "remote device and weights that stay": (
        Said({"stage": 3, "remote_device": "cpu"}),
        ("remote_device", "offload_parameters"),
    ),
    "optimizer on NVMe": (
        Said(config=zero(offload_optimizer={"device": "nvme"})),
        ("zero_optimization.offload_optimizer.device", "host memory"),
    ),
    "DeepSpeed's CPU optimizer": (Said(config={"zero_force_ds_cpu_optimizer": True}), ("zero_force_ds_cpu", "its own")),
    "an argument and a config": (Said({"reduce_bucket_size": 5}, config={}), ("reduce_bucket_size", "config")),
    "a loss scale and the config's": (
        Said({"loss_scale": 4.0}, config={"fp16": {"enabled": True}}),
        ("loss_scale", "config"),
    ),
    "a loss scale and the config's, of which the Trainer decides": (
        Said({"loss_scale": 4.0}, config={"fp16": {"enabled": "auto", "loss_scale": 8}}),
        ("loss_scale", "config"),
    ),
    "settings and a block": (
        Said({"zenflow": {"topk_ratio": 0.2}}, config=zero(zenflow={"topk_ratio": 0.3})),
        ("`zenflow`", '"zenflow" block'),
    ),
    "a block in two places": (Said(config={"zenflow": {}}), ("`zenflow`", "zero_optimization")),
    "bf16 and its older name": (Said(config={"bf16": {}, "bfloat16": {}}), ("`bfloat16`", "`bf16`")),
    "an interval without its unit": (
        Said({"zenflow": {"select_interval": 5}}),
        ("`select_interval`", "`select_strategy`"),
    ),
    "a key and its older name": (
        Said(config=zero(stage=3, offload_param={"device": "cpu"}, cpu_offload_param=True)),
        ("zero_optimization.cpu_offload_param", "offload_param"),
    ),
    "an optimizer of another kind": (Said(config={"optimizer": {"type": "Lamb"}}), ("`optimizer.type`", "ZenFlow")),
}

WHEN_FITTED: dict[str, tuple[Said, tuple[str, str]]] = {
    "clipping twice": (
        Said(config={"gradient_clipping": 1.0}, trainer={"gradient_clip_val": 0.5}),
        ("`gradient_clip_val`", "`gradient_clipping`=1.0"),
    ),
    "clipping that is switched off": (
        Said(config={"gradient_clipping": 1.0}, trainer={"gradient_clip_val": 0}),
        ("`gradient_clip_val`", "`gradient_clipping`=1.0"),
    ),
    "accumulation twice": (
        Said(config={"gradient_accumulation_steps": 4}, trainer={"accumulate_grad_batches": 2}),
        ("`accumulate_grad_batches`", "`gradient_accumulation_steps`=4"),
    ),
    "the whole batch": (
        Said(config={"train_batch_size": 32}, trainer={"accumulate_grad_batches": 2}),
        ("`train_batch_size`", "accumulated 2 times"),
    ),
    "fp16 and precision": (
        Said(config={"fp16": {"enabled": True}}, trainer={"precision": "32-true"}),
        ("`precision`", "`fp16.enabled`=True"),
    ),
    "bf16 under its older name and precision": (
        Said(config={"bfloat16": {"enabled": True}}, trainer={"precision": "32-true"}),
        ("`precision`", "`bf16.enabled`=True"),
    ),
    "no bf16 and precision": (
        Said(config={"bf16": {"enabled": False}}, trainer={"precision": "bf16-mixed"}),
        ("`precision`", "`bf16.enabled`=False"),
    ),
    "a schedule twice": (Said(config={"scheduler": WARM_UP}, configure=with_schedule), ("'WarmupLR'", "StepLR")),
    "an upper bound and a fixed interval": (
        Said({"zenflow": {"update_interval": 4}}, trainer={"callbacks": [AutoTuner(max_update_interval=8)]}),
        ("`max_update_interval`", "`update_interval`=4"),
    ),
    "a lower bound and a fixed interval": (
        Said(
            {"zenflow": {"select_strategy": "step", "select_interval": 9}},
            trainer={"callbacks": [AutoTuner(min_select_interval=2)]},
        ),
        ("`min_select_interval`", "`select_interval`=9"),
    ),
    "a tuner and fixed intervals": (
        Said({"zenflow": OFTEN}, trainer={"callbacks": [AutoTuner()]}),
        ("`update_interval` or `select_interval`", "AutoTuner"),
    ),
}


def check_refused(call: Callable[[], Any], both: tuple[str, str]) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    check_words(caught.value)
    COUNTS["refused in words"] += 1
    assert all(part in str(caught.value) for part in both), caught.value


@pytest.mark.parametrize("name", WHEN_MADE)
def test_what_contradicts_is_refused_by_both_names_when_the_strategy_is_made(name: str) -> None:
    said, both = WHEN_MADE[name]
    check_refused(said.make, both)


@pytest.mark.parametrize("name", WHEN_FITTED)
def test_what_contradicts_the_trainer_is_refused_by_both_names_before_the_first_step(name: str) -> None:
    said, both = WHEN_FITTED[name]
    check_refused(said.fit, both)


def test_a_replay_and_bounds_are_refused_by_both_names() -> None:
    check_refused(lambda: AutoTuner(replay=[(0, 4, 8)], max_update_interval=8), ("`max_update_interval`", "`replay`"))
    AutoTuner(replay=[(0, 4, 8)])


# -- merged ------------------------------------------------------------------------------------------------------------


def config_of(made: Any) -> dict[str, Any]:
    assert isinstance(made.strategy.config, dict)
    config: dict[str, Any] = made.strategy.config
    return config


MERGED: dict[str, tuple[Said, Callable[[Any], bool]]] = {
    "stage twice, the same": (
        Said({"stage": 2}, config={}),
        lambda made: config_of(made)["zero_optimization"]["stage"] == 2,
    ),
    "accumulation twice, the same": (
        Said(config={"gradient_accumulation_steps": 2}, trainer={"accumulate_grad_batches": 2}),
        # Lightning accumulates, DeepSpeed must not do it again.
        lambda made: config_of(made)["gradient_accumulation_steps"] == 1 and made.global_step == 2,
    ),
    "clipping in the config alone": (
        Said(config={"gradient_clipping": 0.01}),
        lambda made: made.strategy.step_stats.grad_norm_clipped <= 0.0101,
    ),
    "clipping twice, the same": (
        Said(config={"gradient_clipping": 0.01}, trainer={"gradient_clip_val": 0.01}),
        lambda made: made.strategy.step_stats.grad_norm_clipped <= 0.0101,
    ),
    "an optimizer and the module's": (
        Said(config={"optimizer": ADAMW}),
        lambda made: (
            made.optimizers[0].param_groups[0]["lr"] == 0.5 and not hasattr(made.lightning_module, "own_optimizer")
        ),
    ),
    "a schedule and the module's optimizer": (
        Said(config={"scheduler": WARM_UP}),
        lambda made: type(made.lr_scheduler_configs[0].scheduler).__name__ == "WarmupLR",
    ),
    "fp16 of which the Trainer decides": (
        Said(config={"fp16": {"enabled": "auto", "initial_scale_power": 4}}, trainer={"precision": "16-mixed"}),
        lambda made: made.strategy._zero.loss_scale == 2**4,
    ),
    "fp16 that does not say whether": (
        Said(config={"fp16": {"initial_scale_power": 5}}, trainer={"precision": "16-mixed"}),
        lambda made: made.strategy._zero.loss_scale == 2**5,
    ),
    "fp16 of which the Trainer decides otherwise": (
        Said(config={"fp16": {"enabled": "auto", "initial_scale_power": 4}}, trainer={"precision": "32-true"}),
        lambda made: made.strategy._zero.dtype == torch.float32,
    ),
    "the same settings twice": (
        Said({"zenflow": OFTEN}, config=zero(zenflow=OFTEN)),
        lambda made: made.strategy.zenflow == ZenFlowConfig(**OFTEN),
    ),
    "a block of null and settings": (
        Said({"zenflow": OFTEN}, config=zero(zenflow=None)),
        lambda made: made.strategy.zenflow == ZenFlowConfig(**OFTEN),
    ),
    "offloading that says more than there is to say": (
        Said(config=zero(offload_optimizer={"device": "none", "pin_memory": True, "buffer_count": 9})),
        lambda made: config_of(made)["zero_optimization"]["offload_optimizer"]["device"] == "cpu",
    ),
    "a batch size for logs": (
        Said(config={"train_micro_batch_size_per_gpu": 17}),
        lambda made: made.global_step == 2,
    ),
    "nothing selected and how often": (
        Said({"zenflow": {"topk_ratio": 0, "select_strategy": "step", "select_interval": 2}}),
        lambda made: made.strategy._zero.shard.intervals[1] is None,
    ),
    "a warm-up longer than the run": (
        Said({"zenflow": {**OFTEN, "full_warm_up_rounds": 100}}),
        lambda made: made.strategy._zero.shard.columns is None or not any(map(len, made.strategy._zero.shard.columns)),
    ),
    "bounds of one interval, the other fixed": (
        Said(
            {"zenflow": {"update_interval": 4}},
            trainer={"callbacks": [AutoTuner(max_select_interval=8)]},
        ),
        lambda made: made.global_step == 2,
    ),
    "a bound below where an interval begins": (
        Said({}, trainer={"callbacks": [AutoTuner(max_update_interval=2)]}),
        lambda made: made.global_step == 2,
    ),
}


@pytest.mark.parametrize("name", MERGED)
def test_what_agrees_or_has_a_rule_is_merged(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Fast fp16 is a matter of the CPU, and of no concern here.
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
    said, holds = MERGED[name]
    made = said.fit()
    COUNTS["accepted"] += 1
    assert made.global_step == 2 and holds(made)


def test_the_argument_goes_before_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(zero(stage=1)))
    monkeypatch.setenv("PL_DEEPSPEED_CONFIG_PATH", str(path))
    assert Said(config={}).make().config["zero_optimization"]["stage"] == 2  # type: ignore[index]
    assert ZenFlowStrategy().config["zero_optimization"]["stage"] == 1  # type: ignore[index]


def test_cores_of_the_worker_go_before_a_share_of_cores() -> None:
    from lightning_zenflow.environment import cores_of_worker

    assert cores_of_worker(ZenFlowConfig(worker_cores=[0], pt_reserved_cores_perc=1), 0, 1) == [0]


def test_accumulation_of_the_config_says_nothing_of_an_evaluation() -> None:
    made = trainer(strategy=Said(config={"gradient_accumulation_steps": 4, "train_batch_size": 999}).make())
    (results,) = made.validate(Small(), batches(2), verbose=False)
    assert results["val_loss"] > 0


@pytest.mark.parametrize(("precision", "name"), [("16-mixed", "fp16"), ("16-true", "fp16"), ("bf16-mixed", "bf16")])
def test_a_precision_that_the_accelerator_lacks_is_refused_with_one_that_it_has(
    precision: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAULTS 14."""
    monkeypatch.setattr(get_accelerator(), f"is_{name}_supported", lambda: False)
    check_refused(Said(trainer={"precision": precision}).fit, (f"got '{precision}' on 'cpu'", f"no {name}"))
