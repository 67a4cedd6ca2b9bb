"""Everything that Lightning does in a run, under ZeRO-3 on one rank: with parameters on the device, and on the host."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zenflow import AutoTuner, ZenFlowStrategy
from tests.cases import gathered, relative
from tests.integration.test_trainer_life import Fails, children, split
from tests.integration.test_trainer_manual import DropsGradients, Manual
from tests.integration.test_trainer_parameters import (
    Everything,
    Reentrant,
    VectorsOnly,
    groups_of_which_one_is_frozen,
    one_column,
    one_matrix,
)
from tests.integration.test_trainer_steps import AsksInHook, OwnClipping, SometimesNaN
from tests.modules import (
    EXPECTED_WARNINGS,
    EXTREMES,
    OFTEN,
    FollowsReference,
    Small,
    batches,
    fit,
    fit_plainly,
    masters,
    strategy_of,
    three_groups,
    trainer,
    weights,
)
from tests.stage3 import (
    PLACES,
    ChangesIntervals,
    Checkpointed,
    Configured,
    Sequences,
    Shared,
    Single,
    Uneven,
    WithLeaf,
    cut_strategy,
    fit_cut,
    is_cut,
)

pytestmark = [*EXPECTED_WARNINGS, pytest.mark.usefixtures("own_process_group")]
places = pytest.mark.parametrize("place", PLACES)


# -- models ------------------------------------------------------------------------------------------------------------


@places
@pytest.mark.parametrize(
    "make_net",
    [Everything, Reentrant, VectorsOnly, one_matrix, one_column, Sequences, Shared, Checkpointed, WithLeaf, Single],
)
def test_a_model_of_any_parameters_follows_the_reference(make_net: Callable[[], nn.Module], place: str) -> None:
    """Also where they are made in `configure_model`, in which case they are cut before the optimizer sees them."""
    kind = Small if place == "device" else Configured
    follows, module = FollowsReference(), kind(make_net)
    settings: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "callbacks": [follows]}
    fit_cut(module, batches(20), place=place, **settings)
    follows.assert_equal(steps=10)
    assert is_cut(module)


def test_tied_weights_stay_tied_and_frozen_ones_stay_as_they_were() -> None:
    module = Small(Everything)
    net: Any = module.net
    frozen, conv = net.frozen.weight.clone(), net.conv.weight.clone()
    made = fit_cut(module)
    assert net.first.weight is net.tied.weight
    with gathered(net.parameters()):
        assert torch.equal(net.frozen.weight, frozen)
        assert net.conv.weight.shape == conv.shape and not torch.equal(net.conv.weight, conv)
        assert net.scale.shape == ()
    assert {"frozen.weight", "tied.weight"}.isdisjoint(masters(made))


@places
def test_groups_with_their_own_settings_and_schedules_follow_the_reference(place: str) -> None:
    follows, module = FollowsReference(), Small(configure=groups_of_which_one_is_frozen)
    frozen = module.net[0].weight.clone()  # type: ignore[index]
    fit_cut(module, place=place, callbacks=[follows])
    follows.assert_equal(steps=10)
    with gathered(module.net.parameters()):
        assert torch.equal(module.net[0].weight, frozen)  # type: ignore[index]
    rates = [group["lr"] for group in module.own_optimizer.param_groups]
    assert rates == pytest.approx([1.0, 1e-2 * 0.9**10, 1e-2 / 11])


@pytest.mark.parametrize("zenflow", EXTREMES, ids=["selected", "deferred"])
def test_buffers_are_those_of_a_plain_trainer(zenflow: dict[str, Any]) -> None:
    ours, plain = Configured(Sequences), Small(Sequences)
    fit_cut(ours, zenflow=zenflow)
    fit_plainly(plain)
    for name, buffer in plain.net.named_buffers():
        assert relative(ours.net.get_buffer(name).float(), buffer.float()) < 1e-5, name


# -- steps -------------------------------------------------------------------------------------------------------------


@places
@pytest.mark.parametrize("zenflow", EXTREMES, ids=["selected", "deferred"])
def test_a_run_at_an_extreme_equals_a_plain_trainer(zenflow: dict[str, Any], place: str) -> None:
    """With groups, clipping, and an epoch that ends in the middle of an accumulation."""
    settings: dict[str, Any] = {"max_epochs": 2, "accumulate_grad_batches": 3, "gradient_clip_val": 0.3}
    ours, plain = Configured(configure=_large_eps), Small(configure=_large_eps)
    made = fit_cut(ours, place=place, zenflow=zenflow, **settings)
    assert made.global_step == fit_plainly(plain, **settings).global_step == 8
    assert relative(weights(ours), weights(plain)) < 1e-6


def _large_eps(module: Small) -> torch.optim.Optimizer:
    """So that the size of gradients matters."""
    return torch.optim.AdamW(module.parameters(), lr=0.3, eps=1.0, weight_decay=0.05)


@places
@pytest.mark.parametrize("kind", [Manual, OwnClipping, lambda: DropsGradients(False), lambda: DropsGradients(True)])
def test_hooks_and_manual_optimization_do_what_they_do_in_a_plain_trainer(
    kind: Callable[[], Small], place: str
) -> None:
    ours, plain = kind(), kind()
    ours.configure = plain.configure = _large_eps
    made = fit_cut(ours, batches(12), place=place, zenflow=EXTREMES[0])
    assert made.global_step == fit_plainly(plain, batches(12)).global_step
    assert relative(weights(ours), weights(plain)) < 1e-6


@places
def test_gradients_and_their_norm_can_be_read_in_hooks(place: str) -> None:
    module = AsksInHook()
    fit_cut(module, place=place, gradient_clip_val=0.1, accumulate_grad_batches=2)
    assert len(module.norms) == 5 and min(module.norms) > 0.1


@places
def test_a_skipped_step_leaves_everything_as_it_was(place: str) -> None:
    ours, good = SometimesNaN(), Small()
    with pytest.warns(RuntimeWarning, match="skipped: the gradient norm is nan"):
        made = fit_cut(ours, place=place)
    finite = [batch for number, batch in enumerate(batches(10)) if number not in SometimesNaN.bad]
    fit_cut(good, DataLoader(finite, batch_size=None), place=place)  # type: ignore[arg-type]
    # On the device weights have moved by then, and a settling shows the masters: it applies early what the host holds.
    assert torch.isfinite(weights(ours)).all()
    assert place == "device" or torch.equal(weights(ours), weights(good))
    stats = made.strategy.step_stats  # type: ignore[attr-defined]
    assert (stats.step, stats.skipped_steps) == (7, 3)


@places
@pytest.mark.parametrize(("precision", "tolerance"), [("16-mixed", 2e-3), ("bf16-mixed", 2e-2), ("bf16-true", 2e-2)])
def test_a_precision_of_16_bits_trains_as_stage_2_does(precision: Any, tolerance: float, place: str) -> None:
    """What each of them selects differs, so that everything is selected here."""
    modules = [Configured(), Small()]
    for module, strategy in zip(
        modules,
        (
            cut_strategy(EXTREMES[0], place, loss_scale=512.0),
            ZenFlowStrategy(EXTREMES[0], loss_scale=512.0),  # type: ignore[arg-type]
        ),
        strict=True,
    ):
        fit(module, strategy=strategy, precision=precision, gradient_clip_val=0.5)
    assert relative(weights(modules[0]), weights(modules[1])) < tolerance
    assert modules[0].losses == pytest.approx(modules[1].losses, rel=4 * tolerance)


def test_an_overflow_is_skipped_until_the_scale_fits() -> None:
    strategy = cut_strategy(OFTEN, "host", initial_scale_power=24, hysteresis=1)
    module = Small()
    with pytest.warns(RuntimeWarning, match=r"the gradient norm is (inf|nan) \(\d skipped so far\)"):
        fit(module, batches(20), strategy=strategy, precision="16-mixed")
    skipped = strategy.step_stats.skipped_steps
    assert skipped > 2 and strategy._zero.loss_scale == 2 ** (24 - skipped)  # type: ignore[union-attr]
    assert torch.isfinite(weights(module)).all()


@places
def test_intervals_change_in_the_middle_of_a_run(place: str) -> None:
    follows = FollowsReference()
    fit_cut(Small(configure=three_groups), place=place, callbacks=[ChangesIntervals(), follows])
    follows.assert_equal(steps=10)
    assert follows.changes == 2


def test_automatic_intervals_are_tuned_and_agreed_upon() -> None:
    zenflow = {"topk_ratio": 0.3, "select_strategy": "step", "select_interval": "auto", "update_interval": "auto"}
    follows, tuner = FollowsReference(), AutoTuner()
    fit_cut(Small(), batches(40), zenflow=zenflow, callbacks=[tuner, follows])
    follows.assert_equal(steps=40)


class Settles(Callback):
    def __init__(self) -> None:
        self.equal: list[bool] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 4 == 3:
            trainer.strategy.settle()
            own = masters(trainer)
            with gathered(pl_module.net.parameters()):
                named = dict(pl_module.net.named_parameters())
                self.equal.append(all(torch.equal(named[name].float(), own[name].bfloat16().float()) for name in own))


@places
def test_after_a_settle_the_gathered_weights_are_the_rounded_masters(place: str) -> None:
    settles = Settles()
    fit_cut(Small(), place=place, precision="bf16-true", callbacks=[settles])
    assert settles.equal == [True, True]


# -- forwards of any kind ----------------------------------------------------------------------------------------------


@places
def test_another_number_of_forwards_in_each_step_follows_the_reference(place: str) -> None:
    """DeepSpeed expects the modules of the step before, and has to notice."""
    follows, module = FollowsReference(), Uneven()
    made = fit_cut(module, batches(10), batches(2), place=place, callbacks=[follows], val_check_interval=4)
    follows.assert_equal(steps=10)
    assert module.forwards == [1, 2, 3] * 3 + [1]
    predicted = made.predict(module, batches(5))
    net = Uneven().net
    with gathered(module.net.parameters()):
        net.load_state_dict(module.net.state_dict())
    for number, (got, (inputs, _)) in enumerate(zip(predicted or [], batches(5), strict=True)):
        expected = inputs
        for _ in range(number % 3 + 1):
            expected = net.last(torch.tanh(net.layer(net.first(expected))))  # type: ignore[operator]
            expected = torch.cat([expected, inputs[:, 5:]], 1)
        assert torch.allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("place", "zero"),
    [
        ("host", {"stage3_param_persistence_threshold": 20}),
        ("device", {"stage3_param_persistence_threshold": 10**6, "sub_group_size": 10**9}),
        ("host", {"stage3_param_persistence_threshold": 10**6, "stage3_model_persistence_threshold": 50}),
        (
            "device",
            {"stage3_max_live_parameters": 10, "stage3_max_reuse_distance": 10, "stage3_prefetch_bucket_size": 5},
        ),
        ("host", {"sub_group_size": 1, "reduce_bucket_size": 7}),
        ("device", {"overlap_comm": True, "contiguous_gradients": False, "stage3_prefetch_bucket_size": 10**9}),
        ("device", {"zero_hpz_partition_size": 2}),
    ],
)
def test_settings_of_deepspeed_change_no_result(place: str, zero: dict[str, Any]) -> None:
    follows = FollowsReference()
    made = fit_cut(Small(Shared), batches(8), place=place, zero=zero, callbacks=[follows])
    follows.assert_equal(steps=8)
    used = made.strategy.deepspeed_engine._config.zero_config.model_dump(by_alias=True)  # type: ignore[attr-defined]
    assert {name: used[name] for name in zero} == zero


@pytest.mark.filterwarnings(
    "ignore:Full backward hook is firing when gradients are computed with respect to module outputs"
)
def test_a_whole_net_that_deepspeed_takes_for_a_leaf_is_refused_in_words() -> None:
    with pytest.raises(
        RuntimeError, match=r"The gradient of `net.first.weight` must have 48 elements, got 1: .* Remove"
    ):
        fit_cut(Small(Shared), zero={"stage3_module_granularity_threshold": 100})


# -- a run from start to end -------------------------------------------------------------------------------------------


@places
def test_validation_in_the_middle_of_an_epoch_changes_nothing(place: str) -> None:
    alone, validated = Small(), Small()
    fit_cut(alone, place=place)
    fit_cut(validated, validation=batches(3), place=place, val_check_interval=3)
    assert torch.equal(weights(alone), weights(validated)) and alone.losses == validated.losses


@places
@pytest.mark.parametrize("kind", [Small, Configured])
def test_fit_evaluation_and_fit_again_take_turns(kind: type[Small], place: str) -> None:
    module = kind()
    made = trainer(strategy=cut_strategy(OFTEN, place))
    made.validate(module, batches(3), verbose=False)
    made.fit(module, batches(10), batches(2))
    first = weights(module).clone()
    loss = made.validate(module, batches(3), verbose=False)[0]["val_loss"]
    assert made.test(module, batches(3), verbose=False)[0]["val_loss"] == loss
    predicted = made.predict(module, batches(3))
    assert predicted is not None and [part.shape for part in predicted] == [(4, 5)] * 3  # type: ignore[union-attr]
    assert torch.equal(weights(module), first) and children() == []
    made.fit_loop.max_epochs = 2
    made.fit(module, batches(10), batches(2))
    other, another = Small(), Small()
    fit_cut(other, place=place)
    assert torch.equal(weights(other), first)
    another.net.load_state_dict(dict(zip(another.net.state_dict(), split(first, another), strict=True)))
    fit_cut(another, place=place)
    assert torch.equal(weights(another), weights(module))


def test_a_net_made_before_and_one_made_in_configure_model_are_trained_alike() -> None:
    for remote in ({}, {"remote_device": "cpu"}):
        before, within = Small(), Configured()
        for module in (before, within):
            fit(module, strategy=ZenFlowStrategy(OFTEN, stage=3, offload_parameters=True, **remote))  # type: ignore
        assert torch.equal(weights(before), weights(within))


# -- what is left ------------------------------------------------------------------------------------------------------


@places
@pytest.mark.parametrize("kind", [Small, Configured])
def test_after_fit_a_module_is_cut_and_nothing_else_is_left_of_the_run(kind: type[Small], place: str) -> None:
    module = kind()
    module.register_forward_hook(lambda *args: None)
    made = fit_cut(module, place=place, precision="bf16-true")
    assert is_cut(module)
    own = masters(made)
    with gathered(module.net.parameters()):
        for name, param in module.net.named_parameters():
            assert torch.equal(param, own[name].bfloat16())
    hooks = {part: (len(part._forward_hooks), len(part._forward_pre_hooks)) for part in module.modules()}
    assert hooks.pop(module) == (1, 0) and set(hooks.values()) == {(0, 0)}
    strategy: Any = made.strategy
    left = [
        weakref.ref(thing) for thing in (strategy.deepspeed_engine, strategy._zero, strategy._zero.shard.host.arena)
    ]
    del made, strategy
    module._trainer = None
    gc.collect()
    assert [thing() for thing in left] == [None] * 3
    left = [weakref.ref(thing) for thing in (module, next(module.parameters()))]
    del module, hooks, param
    gc.collect()
    assert [thing() for thing in left] == [None] * 2


@places
@pytest.mark.parametrize("where", ["training_step", "validation_step", "forward", "on_train_end"])
def test_an_exception_leaves_no_process_and_a_module_that_can_be_trained_again(where: str, place: str) -> None:
    module = FailsWithin(where)
    made = trainer(strategy=cut_strategy(OFTEN, place), num_sanity_val_steps=0)
    with pytest.raises(ZeroDivisionError, match=f"^in {where}$"):
        made.fit(module, batches(10), batches(2))
    assert children() == [] and is_cut(module)
    before = weights(module).clone()
    assert torch.isfinite(before).all() and not any(part._forward_hooks for part in module.modules())
    module.where = "nowhere"
    module.train()
    fit_cut(module, batches(4), place=place)
    other = Small()
    other.net.load_state_dict(dict(zip(other.net.state_dict(), split(before, other), strict=True)))
    fit_cut(other, batches(4), place=place)
    assert torch.equal(weights(module), weights(other))


def test_an_engine_that_cannot_be_built_leaves_no_process_and_a_module_that_can_be_trained() -> None:
    """DeepSpeed looks at the schedule last."""
    module, other = Small(), Small()
    strategy = ZenFlowStrategy(stage=3)
    # Later than here, since the strategy refuses it.
    strategy.config["scheduler"] = {"type": "NoSuchSchedule", "params": {}}  # type: ignore[index]
    with pytest.raises(AssertionError, match="NoSuchSchedule"):
        fit(module, strategy=strategy)
    assert children() == [] and is_cut(module)
    for trained in (module, other):
        fit_cut(trained)
    assert torch.equal(weights(module), weights(other))


def test_asking_for_the_gradient_of_a_frozen_parameter_is_an_error_that_tells_its_shape() -> None:
    class AsksForFrozen(Small):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.trainer.strategy.gradient(self.net[0].weight)  # type: ignore

    module = AsksForFrozen()
    module.net[0].requires_grad_(False)  # type: ignore[index]
    with pytest.raises(ValueError, match=r"`param` must be a trainable parameter .* of shape \[8, 6\]"):
        fit_cut(module)


class Trips(nn.Module):
    """Passes its input on, or not."""

    def forward(self, x: Tensor) -> Tensor:
        if getattr(self, "trips", False):
            raise ZeroDivisionError("in forward")
        return x


class FailsWithin(Fails):
    """Also in the middle of a forward, while parameters are gathered."""

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self.net.insert(2, Trips())  # type: ignore[operator]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.net[2].trips = self.where == "forward" and batch_idx == 3  # type: ignore[index]
        return super().training_step(batch, batch_idx)


def test_a_module_that_is_used_after_fit_says_what_is_missing() -> None:
    """As under plain DeepSpeed: gather what you need."""
    module = Small()
    fit_cut(module)
    (batch,) = batches(1)
    with pytest.raises(RuntimeError):
        module.net(batch[0])
    with gathered(module.net.parameters()):
        assert module.net(batch[0]).shape == (4, 5)
    assert {param.ds_status for param in module.parameters()} == {ZeroParamStatus.NOT_AVAILABLE}  # type: ignore


def copied_layers() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)


def test_a_layer_that_is_copied_after_it_was_cut_is_named() -> None:
    """`nn.TransformerEncoder` copies its layer, of which nothing is left then."""
    with pytest.raises(
        ValueError, match=r"`net\.layers\.0\..*` must be made in `configure_model` itself .* empty deep copy"
    ):
        fit_cut(Configured(copied_layers))
    assert not children()


def test_a_module_that_is_cut_is_refused_by_the_other_stages() -> None:
    module = Small()
    fit_cut(module)
    with pytest.raises(
        ValueError, match=r"`net\..*` must be whole for ZeRO stages 1 and 2, got one that an earlier run"
    ):
        fit(module)


class Initialised(Configured):
    """Gives its weights values once they are cut."""

    def configure_model(self) -> None:
        super().configure_model()
        if not hasattr(self, "scale"):
            self.scale = nn.Parameter(torch.tensor(3.0))
            torch.manual_seed(5)
            nn.init.xavier_uniform_(self.net[0].weight)  # type: ignore[index]
            nn.init.constant_(self.net[0].bias, 0.25)  # type: ignore[index]
            nn.init.zeros_(self.net[2].weight)  # type: ignore[index]


def test_values_given_by_torchs_init_in_configure_model_are_there() -> None:
    whole = Initialised()
    whole.configure_model()
    late = Initialised()
    trainer(strategy=cut_strategy(), max_epochs=1).predict(late, batches(1))
    with gathered(late.parameters()):
        for (name, param), expected in zip(late.named_parameters(), whole.parameters(), strict=True):
            assert hasattr(param, "ds_id") and torch.equal(param, expected), name


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_start_that_fails_leaves_a_module_that_trains_as_if_nothing_had_happened(stage: int) -> None:
    plain, module = Small(), Small()
    config = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 10}}
    fit(plain, strategy=strategy_of(OFTEN, config=config))
    with pytest.raises(RuntimeError, match="`worker_cores` must be"):
        fit(module, strategy=strategy_of({**OFTEN, "worker_cores": [4095]}, config=config))
    assert not children()
    fit(module, strategy=strategy_of(OFTEN, config=config))
    with gathered([*plain.parameters(), *module.parameters()]):
        for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours, theirs)


def test_a_compiled_submodule_is_refused_by_name() -> None:
    module = Small()
    module.net[0] = torch.compile(module.net[0])  # type: ignore[index, operator]
    with pytest.raises(NotImplementedError, match=r"`net\.0` must not be wrapped .* with `self\.net\.0\.compile\(\)`"):
        fit_cut(module)
