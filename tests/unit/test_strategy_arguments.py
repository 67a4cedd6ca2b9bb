"""How `ZenFlowStrategy` is made: by name, with settings, from DeepSpeed's JSON, and what it refuses."""

from __future__ import annotations

import copy
import inspect
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.pipe.module import PipelineModule
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import CUDAAccelerator, MPSAccelerator
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import nn

from lightning_zenflow import ZenFlowConfig, ZenFlowStrategy
from lightning_zenflow.environment import cores_of_worker
from lightning_zenflow.refusals import refuse_for_stage, refuse_unsupported


def strategy_of(zenflow: Any, **arguments: Any) -> ZenFlowStrategy:
    """Settings as a person writes them: a mapping."""
    return ZenFlowStrategy(zenflow, **arguments)


def stage_of(strategy: ZenFlowStrategy) -> int:
    assert isinstance(strategy.config, dict)
    stage: int = strategy.config["zero_optimization"]["stage"]
    return stage


def json_config(**zero: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 1, **zero}}


@pytest.mark.parametrize(
    ("name", "stage", "device"),
    [
        ("zenflow", 2, None),
        ("zenflow_stage_1", 1, None),
        ("zenflow_stage_2", 2, None),
        ("zenflow_stage_3", 3, None),
        ("zenflow_stage_3_offload", 3, "cpu"),
    ],
)
def test_a_registered_name_is_enough(name: str, stage: int, device: str | None) -> None:
    """FAULTS 42: on CPU too."""
    made = Trainer(strategy=name, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    assert type(made.strategy) is ZenFlowStrategy
    assert made.strategy.zenflow == ZenFlowConfig() and stage_of(made.strategy) == stage
    assert made.strategy.zero_stage_3 == (stage == 3)
    assert made.strategy.config["zero_optimization"].get("offload_param", {}).get("device") == device  # type: ignore


@pytest.mark.parametrize("settings", [ZenFlowConfig(topk_ratio=0.2), {"topk_ratio": 0.2}])
def test_settings_are_a_config_or_a_mapping(settings: Any) -> None:
    assert (
        ZenFlowStrategy(settings).zenflow == ZenFlowStrategy(zenflow=settings).zenflow == ZenFlowConfig(topk_ratio=0.2)
    )


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"topk": 0.1}, ValueError, "`zenflow` has no key `topk`"),
        ({"topk_ratio": 2}, ValueError, "`topk_ratio` must be a number from 0 to 1, got 2"),
        ({"offload": True}, NotImplementedError, "`offload` must be false"),
        ({"steps_per_epoch": 10}, ValueError, "`zenflow.steps_per_epoch` must be left out: it comes from the Trainer"),
        ({"select_interval": 5}, ValueError, '`select_interval` must be "auto" while `select_strategy` is "auto"'),
        ([0.1], TypeError, "`zenflow` must be a mapping of settings, got"),
    ],
)
def test_a_bad_setting_is_named(settings: Any, error: type[Exception], message: str) -> None:
    """FAULTS Z4: wherever it is written."""
    with pytest.raises(error, match=re.escape(message)):
        ZenFlowStrategy(settings)
    with pytest.raises(error, match=re.escape(message)):
        ZenFlowStrategy(config=json_config(zenflow=settings))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"stage": 0}, ValueError, "`stage` must be 1, 2 or 3, got 0"),
        ({"stage": 4}, ValueError, "`stage` must be 1, 2 or 3, got 4"),
        ({"stage": "2"}, ValueError, "`stage` must be 1, 2 or 3, got '2'"),
        ({"stage": True}, ValueError, "`stage` must be 1, 2 or 3, got True"),
        ({"zero_optimization": False}, ValueError, "`zero_optimization` must be True, got False"),
        (
            {"offload_parameters": True},
            ValueError,
            "`offload_parameters` must be left out with ZeRO stage 2, got True: it belongs to ZeRO-3",
        ),
        ({"offload_optimizer_device": "nvme"}, ValueError, "must be 'cpu', got 'nvme': NVMe is not supported"),
        ({"offload_params_device": "nvme"}, ValueError, "must be 'cpu', got 'nvme': NVMe is not supported"),
        (
            {"offload_params_device": "nvme", "stage": 3, "offload_parameters": True},
            ValueError,
            "`offload_params_device` must be 'cpu', got 'nvme': NVMe is not supported",
        ),
        ({"remote_device": "nvme", "stage": 3}, ValueError, "`remote_device` must be None or 'cpu', got 'nvme'"),
        ({"remote_device": "cpu"}, ValueError, "`remote_device` must be left out with ZeRO stage 2, got 'cpu'"),
        (
            {"remote_device": "cpu", "stage": 3},
            ValueError,
            "`remote_device` must be left out without offloaded parameters, got 'cpu'",
        ),
        ({"load_full_weights": True}, ValueError, "`load_full_weights` must be left out with ZeRO stage 2, got True"),
    ],
)
def test_an_argument_that_contradicts_is_named(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        ZenFlowStrategy(**arguments)


def test_an_argument_of_stage_3_is_refused_beside_a_config_of_another_stage() -> None:
    with pytest.raises(ValueError, match="`load_full_weights` must be left out with ZeRO stage 1, got True"):
        ZenFlowStrategy(config=json_config(), load_full_weights=True)
    with pytest.raises(ValueError, match="`offload_parameters` must be left out beside a DeepSpeed `config`"):
        ZenFlowStrategy(config=json_config(stage=3), offload_parameters=True)


def test_arguments_of_stage_3_work() -> None:
    arguments: dict[str, Any] = {"offload_parameters": True, "remote_device": "cpu", "load_full_weights": True}
    strategy = ZenFlowStrategy(stage=3, sub_group_size=77, **arguments)
    assert isinstance(strategy.config, dict) and strategy.remote_device == "cpu" and strategy.load_full_weights
    assert strategy.config["zero_optimization"]["offload_param"]["device"] == "cpu"
    assert strategy.config["zero_optimization"]["sub_group_size"] == 77
    zero = {"stage": 3, "offload_param": {"device": "cpu"}, "stage3_max_live_parameters": 5}
    strategy = ZenFlowStrategy(config=json_config(**zero), remote_device="cpu")
    assert strategy.zero_stage_3 and isinstance(strategy.config, dict)
    assert {name: strategy.config["zero_optimization"][name] for name in zero} == zero


def test_arguments_of_lightnings_strategy_still_work() -> None:
    strategy = ZenFlowStrategy(
        reduce_bucket_size=123, loss_scale=8.0, partition_activations=True, offload_optimizer=True
    )
    assert isinstance(strategy.config, dict)
    assert strategy.config["zero_optimization"]["reduce_bucket_size"] == 123
    assert strategy.config["activation_checkpointing"]["partition_activations"]
    assert strategy.loss_scale == 8.0
    with pytest.raises(TypeError, match="no_such_argument"):
        ZenFlowStrategy(no_such_argument=1)


@pytest.mark.parametrize("how", ["dict", "path", "environment"])
def test_deepspeeds_json_carries_over_and_is_not_changed(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAULTS 40."""
    block = {"topk_ratio": 0.05, "select_strategy": "step", "select_interval": 9, "update_interval": 2}
    config = json_config(zenflow=block, offload_optimizer={"device": "cpu", "pin_memory": True}, reduce_bucket_size=77)
    before = copy.deepcopy(config)
    path = tmp_path / "ds.json"
    path.write_text(text := json.dumps(config))
    if how == "environment":
        monkeypatch.setenv("PL_DEEPSPEED_CONFIG_PATH", str(path))
        strategy = ZenFlowStrategy()
    else:
        strategy = ZenFlowStrategy(config=config if how == "dict" else path)
    assert strategy.zenflow == ZenFlowConfig(**block)  # type: ignore[arg-type]
    assert stage_of(strategy) == 1
    assert isinstance(strategy.config, dict)
    assert "zenflow" not in strategy.config["zero_optimization"]  # DeepSpeed's own would start
    assert strategy.config["zero_optimization"]["reduce_bucket_size"] == 77
    assert config == before and path.read_text() == text


def test_a_config_without_a_block_takes_the_settings_given() -> None:
    strategy = strategy_of({"topk_ratio": 0.3}, stage=2, config={"zero_optimization": {}})
    assert strategy.zenflow == ZenFlowConfig(topk_ratio=0.3) and stage_of(strategy) == 2


def test_what_is_said_twice_must_be_the_same() -> None:
    """FAULTS 41."""
    config = json_config(zenflow={"topk_ratio": 0.3})
    assert strategy_of({"topk_ratio": 0.3}, stage=1, config=config).zenflow.topk_ratio == 0.3
    with pytest.raises(ValueError, match='`zenflow` must be left out beside a DeepSpeed config with a "zenflow" block'):
        strategy_of({"topk_ratio": 0.2}, config=config)
    with pytest.raises(ValueError, match=r"`stage` must agree with the DeepSpeed config, got stage=2 and .*=1"):
        ZenFlowStrategy(stage=2, config=config)


@pytest.mark.parametrize(
    "argument",
    [
        {"reduce_bucket_size": 5},
        {"overlap_comm": False},
        {"pin_memory": True},
        {"partition_activations": True},
        {"logging_batch_size_per_gpu": 3},
        {"sub_group_size": 7},
    ],
    ids=lambda argument: next(iter(argument)),
)
def test_an_argument_that_a_config_would_drop_is_named(
    argument: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAULTS 41."""
    (name,) = argument
    message = re.escape(
        f"`{name}` must be left out beside a DeepSpeed `config` (or PL_DEEPSPEED_CONFIG_PATH), got both"
    )
    with pytest.raises(ValueError, match=message):
        ZenFlowStrategy(config=json_config(), **argument)
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(json_config()))
    monkeypatch.setenv("PL_DEEPSPEED_CONFIG_PATH", str(path))
    with pytest.raises(ValueError, match=message):
        ZenFlowStrategy(**argument)


def test_a_loss_scale_is_used_beside_a_config_unless_the_config_has_its_own() -> None:
    """FAULTS 41."""
    assert ZenFlowStrategy(config=json_config(), loss_scale=4.0).loss_scale == 4.0
    with pytest.raises(ValueError, match="`loss_scale` must be left out beside a DeepSpeed `config`"):
        ZenFlowStrategy(config={**json_config(), "fp16": {"enabled": True}}, loss_scale=4.0)


def test_arguments_with_their_defaults_are_as_good_as_left_out() -> None:
    """FAULTS 40: a command line fills all of them in, also beside a config."""
    parameters = inspect.signature(DeepSpeedStrategy).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items() if name not in ("stage", "config")}
    assert stage_of(ZenFlowStrategy(**defaults)) == 2
    config = {**json_config(), "fp16": {"enabled": True}}
    assert stage_of(ZenFlowStrategy(config=config, **defaults)) == 1


def test_a_config_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"^`config` must be the path of .*, got 'no/such.json', which is not there\."):
        ZenFlowStrategy(config="no/such.json")


def test_mps_is_refused() -> None:
    strategy = ZenFlowStrategy()
    strategy.accelerator = MPSAccelerator.__new__(MPSAccelerator)
    with pytest.raises(RuntimeError, match=r"ZenFlow must run on CUDA or CPU, got MPS, .* Set accelerator='cpu'"):
        strategy.setup_environment()


def test_another_accelerator_than_deepspeeds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepspeed.accelerator.get_accelerator", lambda: SimpleNamespace(device_name=lambda: "cpu"))
    strategy = ZenFlowStrategy()
    strategy.accelerator = CUDAAccelerator.__new__(CUDAAccelerator)
    message = r"`accelerator` must be the one .*, got 'cuda' while DeepSpeed has chosen 'cpu'.*DS_ACCELERATOR=cuda"
    with pytest.raises(RuntimeError, match=message):
        strategy.setup_environment()


def test_cores_of_the_worker_are_for_one_rank_only() -> None:
    config = ZenFlowConfig(worker_cores=[0])
    with pytest.raises(ValueError, match="`worker_cores` must be left out with 2 ranks on a machine"):
        cores_of_worker(config, local_rank=0, local_ranks=2)
    assert cores_of_worker(config, local_rank=0, local_ranks=1) == [0]


# -- models ------------------------------------------------------------------------------------------------------------


def marked(**attributes: Any) -> nn.Module:
    model = nn.Linear(2, 2)
    for name, value in attributes.items():
        setattr(model.weight, name, value)
    return model


def a_pipeline() -> nn.Module:
    model = nn.Module()
    model.inner = PipelineModule.__new__(PipelineModule)
    nn.Module.__init__(model.inner)  # type: ignore[arg-type]
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (marked(allreduce=False), r"Expert parameter `weight` \(mixture of experts\) is not supported"),
        (marked(model_parallel=True), "Tensor parallel parameter `weight` is not supported"),
        (marked(tensor_model_parallel=True), "Tensor parallel parameter `weight` is not supported"),
        (a_pipeline(), "Pipeline parallel module `inner` is not supported"),
        (nn.Sequential(nn.Embedding(3, 2, sparse=True)), "`0.sparse` must be False with ZenFlow, got True"),
        (nn.ParameterList([torch.zeros(2, dtype=torch.complex64)]), "Complex parameter `0` is not supported"),
    ],
    ids=lambda value: "" if isinstance(value, nn.Module) else value,
)
def test_a_model_that_cannot_be_trained_correctly_is_refused_by_name(model: nn.Module, message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        refuse_unsupported(model)


def holding(tensor: torch.Tensor) -> LightningModule:
    module = LightningModule()
    module.own = nn.ParameterList([tensor])
    return module


def test_a_parameter_without_elements_is_named() -> None:
    with pytest.raises(
        NotImplementedError, match=r"`own.0` must have elements with ZeRO stage 3 .*, got shape \[0, 3\]"
    ):
        refuse_for_stage(holding(torch.empty(0, 3)), 2, is_stage_3=True)
    refuse_for_stage(holding(torch.empty(1, 3)), 2, is_stage_3=True)
    refuse_for_stage(holding(torch.empty(0, 3)), 1, is_stage_3=True)  # a single rank gathers nothing


def test_frozen_parts_are_not_refused() -> None:
    refuse_unsupported(marked(allreduce=False).requires_grad_(False))
    refuse_unsupported(nn.Linear(2, 2))


def test_lightnings_own_strategies_stay_as_they_were() -> None:
    from lightning.pytorch.strategies import StrategyRegistry

    assert StrategyRegistry["deepspeed_stage_2"]["strategy"] is DeepSpeedStrategy
