"""The contract of Lightning's DeepSpeed strategy: what its own tests ask for, and which test asks it of ZenFlow.

| intent | test (in tests/integration, if not said otherwise) |
|---|---|
| strategy by name, from the environment, as an instance | unit/test_strategy_arguments.py; `test_a_name_...`, below |
| precision choice, bf16, fp32 | test_trainer_precision.py, test_contract_precision.py |
| invalid config path, config path in the environment | unit/test_strategy_arguments.py; `test_a_name_...` |
| defaults | `test_defaults_are_lightnings_with_the_optimizer_on_the_host` |
| warning of what is ignored | `test_a_backward_of_ones_own_is_warned_of_and_a_clipping_hook_is_not` |
| batch size inference, set-up of the train loader | `test_the_batch_size_...` |
| `configure_optimizers` with and without scheduler | test_trainer_schedulers.py, test_trainer_steps.py |
| optimizer and scheduler of the config, scheduler step count | test_trainer_config.py |
| arguments of the fp16 scaler, inference precision | test_contract_precision.py |
| activation checkpointing | test_contract_precision.py, unit/test_strategy_arguments.py, test_stage3_trainer.py |
| offload switched off is no option | unit/test_strategy_arguments.py, unit/test_ds_config.py |
| two processes | test_trainer_two_ranks.py, test_stage3_ranks.py |
| save warning of stage 3 | `test_a_save_under_stage_3_needs_no_warning` |
| single file | test_stage3_checkpoints.py |
| conversion of a directory into one file | test_checkpoint_interop.py, test_stage3_checkpoints.py, test_export.py |
| frozen parameters | test_trainer_parameters.py, test_contract_saving.py |
| manual optimization | test_trainer_manual.py, test_stage3_trainer.py |
| checkpointing, resume, resume of weights alone | test_checkpoints.py, test_resume.py, test_stage3_checkpoints.py |
| accumulation, with `global_step` equal to the engine's over several epochs | test_trainer_steps.py |
| accumulation that changes | test_trainer_steps.py, test_contract_refusals.py |
| partly cut parameters | test_stage3_trainer.py (`Configured`, `Shared`, `WithLeaf`) |
| test only, RNN | `test_a_recurrent_model_...` |
| environment variables | `test_the_environment_of_a_rank_...` |
| skipped backward | test_trainer_steps.py |
| clipping hooks, clipping by value | test_trainer_steps.py |
| `save_top_k`, the same path twice | test_contract_saving.py, test_checkpoints.py |
| device and `estimated_stepping_batches` inside `configure_optimizers` | test_trainer_schedulers.py |
| device indices, invalid accelerator | `test_devices_...`; unit/test_strategy_arguments.py |
| init contexts | test_contract_precision.py, test_stage3_trainer.py |
| checkpoint path errors | test_checkpoints.py |
| registry, command line | test_contract_cli.py, unit/test_cli.py |
| model summary, callbacks | test_contract_callbacks.py |
"""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from lightning_zenflow import ZenFlowConfig, ZenFlowStrategy
from tests.modules import EXPECTED_WARNINGS, OFTEN, Small, batches, fit, strategy_of, trainer, weights
from tests.stage3 import Sequences, cut_strategy

pytestmark = [*EXPECTED_WARNINGS, pytest.mark.usefixtures("own_process_group")]


# -- how a strategy is given -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_name_an_instance_and_a_config_in_the_environment_train_alike(
    stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": stage}}))
    made = [Small() for _ in range(4)]
    fit(made[0], strategy=f"zenflow_stage_{stage}")
    fit(made[1], strategy=ZenFlowStrategy(ZenFlowConfig(), stage=stage))
    fit(made[2], strategy=ZenFlowStrategy(config=str(path)))
    monkeypatch.setenv("PL_DEEPSPEED_CONFIG_PATH", str(path))
    fit(made[3], strategy="zenflow")
    for module in made[1:]:
        assert torch.equal(weights(module), weights(made[0]))


def test_defaults_are_lightnings_with_the_optimizer_on_the_host() -> None:
    ours, lightnings = ZenFlowStrategy().config, DeepSpeedStrategy().config
    assert isinstance(ours, dict) and isinstance(lightnings, dict)
    zero, own = ours.pop("zero_optimization"), lightnings.pop("zero_optimization")
    assert zero == {**own, "offload_optimizer": {"device": "cpu", "pin_memory": False}}
    # DeepSpeed must take an optimizer that it does not know, and not replace it.
    assert ours == {**lightnings, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}


def test_a_backward_of_ones_own_is_warned_of_and_a_clipping_hook_is_not() -> None:
    """The engine goes backward; unlike Lightning's strategy, ours clips as a hook says (test_trainer_steps.py)."""

    class Own(Small):
        def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            raise AssertionError("not called")

        def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None: ...

    with pytest.warns(UserWarning, match="You have overridden the `LightningModule.backward` hook") as warned:
        made = fit(Own())
    assert made.global_step == 10
    assert not [warning for warning in warned if "clip" in str(warning.message)]


# -- data ----------------------------------------------------------------------------------------------------------------


class MadeInSetup(LightningDataModule):
    """Has nothing before `setup`."""

    def setup(self, stage: str) -> None:
        self.data = batches(10, 3).dataset

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.data, batch_size=3)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.data, batch_size=5)


class OnlyTests(LightningDataModule):
    """Holds what its stage needs, and nothing for training when there is none."""

    def setup(self, stage: str) -> None:
        assert stage == "test"
        self.data = batches(2)

    def train_dataloader(self) -> Any:
        raise KeyError("no training data was prepared")

    def test_dataloader(self) -> Any:
        return self.data


def test_testing_asks_for_no_training_data() -> None:
    made = trainer()
    made.test(Small(), datamodule=OnlyTests(), verbose=False)


def test_the_batch_size_is_that_of_a_train_loader_which_is_made_in_setup() -> None:
    made = trainer()
    made.fit(Small(), datamodule=MadeInSetup())
    assert made.strategy.config["train_micro_batch_size_per_gpu"] == 3  # type: ignore[attr-defined]
    assert made.global_step == 10


@pytest.mark.parametrize("size", [2, 7])
def test_the_batch_size_is_that_of_a_batch_sampler_and_of_a_config_that_says_so(size: int) -> None:
    data: Any = batches(4, 7).dataset
    sampler = BatchSampler(SequentialSampler(data), size, drop_last=False)
    made = fit(Small(), DataLoader(data, batch_sampler=sampler))
    assert made.strategy.config["train_micro_batch_size_per_gpu"] == size  # type: ignore[attr-defined]
    config = {"train_micro_batch_size_per_gpu": 17, "zero_optimization": {"stage": 2}}
    made = fit(Small(), batches(2, size), strategy=ZenFlowStrategy(config=config))
    assert made.strategy.config["train_micro_batch_size_per_gpu"] == 17  # type: ignore[attr-defined]


# -- what runs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["stage 2", "device", "host"])
def test_a_recurrent_model_is_only_tested_with_the_numbers_of_a_plain_module(place: str) -> None:
    module, plain = Small(Sequences), Small(Sequences).eval()
    made = trainer(strategy=strategy_of(OFTEN) if place == "stage 2" else cut_strategy(OFTEN, place))
    (logged,) = made.test(module, batches(3), verbose=False)
    with torch.no_grad():
        losses = [plain.loss(plain.net, batch).item() for batch in batches(3)]
    assert logged["val_loss"] == pytest.approx(sum(losses) / 3, rel=1e-5)


def test_a_save_under_stage_3_needs_no_warning(tmp_path: Path) -> None:
    """Lightning's strategy warns of directories; ours says in the docs what a checkpoint is, at every stage."""
    made = fit(Small(), strategy=cut_strategy(OFTEN, "device"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made.save_checkpoint(tmp_path / "saved.ckpt")
    assert (tmp_path / "saved.ckpt" / "checkpoint").is_dir()


def test_the_environment_of_a_rank_is_there_while_it_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, str] = {}

    class SeesEnvironment(Small):
        def on_train_start(self) -> None:
            seen.update(os.environ)

    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    fit(SeesEnvironment())
    assert seen["MASTER_ADDR"] == "127.0.0.1" and int(seen["MASTER_PORT"]) > 0
    assert (seen["RANK"], seen["LOCAL_RANK"], seen["WORLD_SIZE"]) == ("0", "0", "1")


def test_devices_that_are_not_the_first_ones_are_refused_with_the_variable_to_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a GPU: Lightning looks at the indices before anything else."""
    devices = [torch.device("cuda", 1), torch.device("cuda", 3)]
    strategy = strategy_of(OFTEN, accelerator=CUDAAccelerator(), parallel_devices=devices)
    with pytest.raises(RuntimeError, match=r"indices \[1, 3\] don't match .* `CUDA_VISIBLE_DEVICES=1,3`"):
        strategy.setup_distributed()
