"""Copies of a module while it trains: whole, and free of everything that DeepSpeed has put there."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import deepspeed
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from tests.modules import EXPECTED_WARNINGS, OFTEN, Small, batches, fit, strategy_of, trainer, weights

pytestmark = [*EXPECTED_WARNINGS, pytest.mark.usefixtures("own_process_group")]


def counts(module: nn.Module, *args: Any) -> None:
    vars(module)["calls"] = vars(module).get("calls", 0) + 1


def tied_layers() -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6), nn.Linear(6, 5))
    net[2].weight = net[0].weight
    vars(net[3].weight)["remark"] = "mine"
    return net


def by_pickle(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


def by_torch(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Callable[[Any], Any]] = {"pickle": by_pickle, "torch": by_torch, "deepcopy": copy.deepcopy}


class Copying(Callback):
    """Calls `look` in the middle of a step, between steps, in validation and while saving."""

    def __init__(self, look: Callable[[Trainer, Any], None]) -> None:
        self.look, self.looks = look, 0

    def _look(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.look(trainer, pl_module)
        self.looks += 1

    on_train_start = on_after_backward = on_train_end = _look
    on_before_optimizer_step = on_train_batch_end = _look  # type: ignore[assignment]
    on_validation_batch_end = on_test_batch_end = _look  # type: ignore[assignment]


def settings(accumulate: int = 1) -> dict[str, Any]:
    return {"accumulate_grad_batches": accumulate, "num_sanity_val_steps": 0}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("stage", "precision"), [(1, "bf16-true"), (2, "32-true"), (2, "bf16-mixed")])
def test_a_module_is_copied_whole_and_without_its_engine(way: str, stage: int, precision: Any) -> None:
    """FAULTS 26: in mid-fit, the module and what the Trainer calls its model."""

    def look(made: Trainer, module: Small) -> None:
        for thing in (module, made.model):
            twin: Any = WAYS[way](thing)
            net: Any = twin.net
            assert type(twin) is Small and torch.equal(weights(twin), weights(module))
            assert net[0].weight is net[2].weight
            if way != "deepcopy":  # which leaves attributes of parameters out, as everywhere
                assert vars(net[3].weight) == {"remark": "mine"}
            hooks = [*twin._forward_hooks.values(), *twin._forward_pre_hooks.values()]
            assert hooks == [counts] and "__reduce_ex__" not in vars(twin)
            if not torch.is_grad_enabled():
                continue
            before = weights(module).clone()
            net(torch.ones(2, 6, dtype=net[0].weight.dtype)).sum().backward()  # nothing of it reaches the engine
            with torch.no_grad():
                net[0].weight.fill_(7.0)
            assert torch.equal(weights(module), before)

    copying, module, other = Copying(look), Small(tied_layers), Small(tied_layers)
    for each in (module, other):
        each.register_forward_hook(counts)
    fit(
        module,
        batches(4),
        batches(1),
        strategy=strategy_of(OFTEN, stage=stage),
        precision=precision,
        callbacks=[copying],
        **settings(2),
    )
    assert copying.looks >= 10
    fit(other, batches(4), batches(1), strategy=strategy_of(OFTEN, stage=stage), precision=precision, **settings(2))
    assert torch.equal(weights(module), weights(other))
    left = [name for param in module.parameters() for name in vars(param) if name != "remark"]
    assert left == [] and "__reduce_ex__" not in vars(module)


def test_a_pickled_module_is_no_larger_than_its_weights() -> None:
    """Each parameter is a part of one buffer meanwhile, which would be written for each of them."""
    sizes = []

    def look(made: Trainer, module: Small) -> None:
        sizes.append(len(pickle.dumps(module.net)))

    def many_layers() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 200), *(nn.Linear(200, 200) for _ in range(5)), nn.Linear(200, 5))

    fit(Small(many_layers), batches(2), callbacks=[Copying(look)])
    numel = sum(param.numel() for param in many_layers().parameters())
    assert sizes and max(sizes) < 4 * numel + 20_000


class PicklesCheckpoint(Callback):
    def __init__(self) -> None:
        self.pickled = 0

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        assert pickle.loads(pickle.dumps(checkpoint)).keys() == checkpoint.keys()
        copy.deepcopy(checkpoint)
        self.pickled += 1


class Saves(Callback):
    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        trainer.save_checkpoint(f"{trainer.default_root_dir}/saved.ckpt")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_callbacks_see_of_a_checkpoint_can_be_pickled(stage: int, tmp_path: Any) -> None:
    """FAULTS 26."""
    pickles = PicklesCheckpoint()
    fit(
        Small(),
        batches(3),
        strategy=strategy_of(OFTEN, stage=stage),
        callbacks=[pickles, Saves()],
        default_root_dir=tmp_path,
    )
    assert pickles.pickled == 3


@pytest.mark.parametrize("way", WAYS)
def test_a_cut_module_is_refused_by_name_and_copied_where_it_is_gathered(way: str) -> None:
    """FAULTS 26: under ZeRO-3 its weights are elsewhere, and a copy of nothing would look like one."""
    cut = r"`.*` must .* to be copied or pickled, got .* that ZeRO-3 has cut over the ranks. Use `trainer.save_checkpoint`"

    def look(made: Trainer, module: Small) -> None:
        for thing in (module, module.net, module.net[0], module.net[0].weight, made.model):  # type: ignore[index]
            with pytest.raises(RuntimeError, match=cut):
                WAYS[way](thing)
        with deepspeed.zero.GatheredParameters([module.net[0].weight]):  # type: ignore[index]
            twin = WAYS[way](module.net[0].weight)  # type: ignore[index]
            assert torch.equal(twin, module.net[0].weight) and not vars(twin)  # type: ignore[index]

    config = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    copying = Copying(look)
    copying.on_after_backward = copying.on_before_optimizer_step = lambda *args: None  # type: ignore
    fit(Small(), batches(3), strategy=strategy_of(OFTEN, config=config), callbacks=[copying])
    assert copying.looks >= 4


@pytest.mark.parametrize("way", WAYS)
def test_a_module_that_is_evaluated_is_copied_as_well(way: str) -> None:
    """FAULTS 26: DeepSpeed's engine for inference has hooks of its own."""

    def look(made: Trainer, module: Small) -> None:
        twin = WAYS[way](made.model)
        assert torch.equal(weights(twin), weights(module)) and not twin._forward_pre_hooks

    copying, module = Copying(look), Small()
    trainer(callbacks=[copying]).test(module, batches(2), verbose=False)
    assert copying.looks == 2 and "__reduce_ex__" not in vars(module)
