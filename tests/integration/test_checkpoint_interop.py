"""Checkpoints between this package and plain DeepSpeed under Lightning, both ways, and DeepSpeed's universal ones."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict
from torch import Tensor, nn

from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.zero.stored import StoresState
from tests.cases import relative
from tests.interop import (
    ALL_SELECTED,
    Steady,
    differing,
    plain,
    rounded,
    run,
    to_universal,
)
from tests.modules import (
    CLASSES,
    EXPECTED_WARNINGS,
    FEATURES,
    OFTEN,
    QUIET,
    Small,
    batches,
    strategy_of,
    three_groups,
    weights,
)

pytestmark = [
    *EXPECTED_WARNINGS,
    pytest.mark.usefixtures("own_process_group"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:You.re resuming from a checkpoint that ended before the epoch ended"),
]
UNIVERSAL: dict[str, Any] = {"checkpoint": {"load_universal": True}}


def ours(zenflow: dict[str, Any] = ALL_SELECTED, stage: int = 2, zero: Any = None, **config: Any) -> ZenFlowStrategy:
    """ZenFlow with a DeepSpeed config like that of `plain`."""
    return strategy_of(zenflow, config={"zero_optimization": {"stage": stage, **(zero or {})}, **config})


def scheduled(module: Small) -> dict[str, Any]:
    """Three groups whose rates fall at every step."""
    optimizer = three_groups(module)
    falling = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": falling, "interval": "step"}}


def distance(one: Small, other: Small) -> float:
    return (weights(one) - weights(other)).abs().max().item()


def of_precision(precision: str) -> dict[str, Any]:
    """DeepSpeed's config for it: a loss scale that neither overflows nor grows."""
    return {"fp16": {"enabled": True, "initial_scale_power": 8}} if precision == "16-mixed" else {}


CASES = [
    (1, False, "32-true"),
    pytest.param(2, True, "32-true", marks=pytest.mark.long),
    (2, True, "bf16-true"),
    pytest.param(1, False, "bf16-mixed", marks=pytest.mark.long),
    pytest.param(2, False, "16-mixed", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("stage", "offload", "precision"), CASES)
def test_a_plain_run_goes_on_with_all_it_held(stage: int, offload: bool, precision: Any, tmp_path: Path) -> None:
    """With everything selected ZenFlow is AdamW: it ends where the plain run ends that never stopped."""
    config = of_precision(precision)
    whole, resumed = Steady(configure=scheduled), Steady(configure=scheduled)
    saved = run(plain(stage, offload, **config), whole, save=tmp_path / "plain.ckpt", precision=precision).at_save
    loaded = run(ours(stage=stage, **config), resumed, tmp_path / "plain.ckpt", precision=precision).at_start
    assert saved["step"] == 6 and saved["groups"][1]["lr"] == pytest.approx(3e-3 * 0.9**6)
    assert not differing(saved, loaded)
    assert loaded["global_step"] == 6 and loaded["counters"] == saved["counters"]
    assert rounded(saved["fp32"], resumed.first_weights)
    assert distance(whole, resumed) < (1e-6 if precision == "32-true" else 1e-3)


@pytest.mark.parametrize(("stage", "offload", "precision"), CASES)
def test_a_plain_run_takes_over_with_all_that_was_held(
    stage: int, offload: bool, precision: Any, tmp_path: Path
) -> None:
    """The first batch goes through the rounded masters, not through the extrapolated weights that the device showed."""
    config = of_precision(precision)
    whole, extrapolated = Steady(configure=scheduled), Steady(configure=scheduled)
    saved = [
        run(ours(zenflow, stage, **config), module, save=tmp_path / f"{name}.ckpt", precision=precision).at_save
        for name, zenflow, module in (("all", ALL_SELECTED, whole), ("few", OFTEN, extrapolated))
    ]
    assert not rounded(saved[1]["fp32"], saved[1]["weights"])
    for name, held in zip(("all", "few"), saved, strict=True):
        resumed = Steady(configure=scheduled)
        loaded = run(plain(stage, offload, **config), resumed, tmp_path / f"{name}.ckpt", precision=precision).at_start
        assert held["step"] == 6 and not differing(held, loaded)
        assert loaded["global_step"] == 6 and loaded["counters"] == held["counters"]
        assert rounded(held["fp32"], resumed.first_weights)
        if name == "all":
            assert distance(whole, resumed) < (1e-6 if precision == "32-true" else 1e-3)


def test_a_plain_run_takes_over_moments_that_were_kept_in_bf16(tmp_path: Path) -> None:
    path = tmp_path / "narrow.ckpt"
    saved = run(ours({**OFTEN, "moments_dtype": "bf16"}), Steady(), save=path).at_save
    loaded = run(plain(), Steady(), path).at_start
    assert saved["step"] == 6 and not differing(saved, loaded)


# -- no jump -----------------------------------------------------------------------------------------------------------


class Noisy(Steady):
    """A fifth of its labels is chance: after a while moments are far smaller than gradients, and dropping them shows."""

    batch_size = 32

    def __init__(self) -> None:
        super().__init__(
            lambda: nn.Sequential(
                nn.Linear(FEATURES, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, CLASSES)
            ),
            lambda module: torch.optim.AdamW(module.parameters(), lr=5e-3),
        )

    def batch(self, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        inputs = torch.randn(self.batch_size, FEATURES, generator=generator)
        targets = (inputs[:, :3].sum(1) > 0).long() + 2 * (inputs[:, 0] * inputs[:, 1] > 0).long()
        by_chance = torch.rand(self.batch_size, generator=generator) < 0.2
        return inputs, torch.where(by_chance, torch.randint(CLASSES, (self.batch_size,), generator=generator), targets)


def test_the_loss_does_not_jump_where_zenflow_takes_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With default settings it stays far within the spread of the plain run's losses; without the moments it does not."""
    settings: dict[str, Any] = {"save_after": 150, "batches": 175}
    whole = Noisy()
    run(plain(), whole, save=tmp_path / "plain.ckpt", **settings)
    expected = torch.tensor(whole.losses[150:])

    def largest_excess() -> float:
        module = Noisy()
        run(strategy_of({}), module, tmp_path / "plain.ckpt", **settings)
        return float((torch.tensor(module.losses) - expected).max())

    assert largest_excess() < 0.5 * expected.std()
    loads = StoresState.load_masters

    def without_moments(self: StoresState, source: Any) -> None:
        loads(self, source)
        self.shard.host.arena.exp_avg.zero_()
        self.shard.host.arena.exp_avg_sq.zero_()

    monkeypatch.setattr(StoresState, "load_masters", without_moments)
    assert largest_excess() > 2 * expected.std()


# -- optimizers --------------------------------------------------------------------------------------------------------


def adamw(module: Small) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)


def adam(module: Small) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), lr=1e-2, weight_decay=0.1)


def both_ways(
    tmp_path: Path, plainly: dict[str, Any], zenflow: dict[str, Any], configure: Any = adamw, **settings: Any
) -> list[float]:
    """How far runs that change between plain DeepSpeed and ZenFlow end from those that do not; all hold the same then."""
    found = []
    for first, second in (
        (lambda: plain(**plainly), lambda: ours(**zenflow)),
        (lambda: ours(**zenflow), lambda: plain(**plainly)),
    ):
        whole, resumed = Steady(configure=configure), Steady(configure=configure)
        saved = run(first(), whole, save=tmp_path / "one.ckpt", **settings).at_save
        loaded = run(second(), resumed, tmp_path / "one.ckpt", **settings).at_start
        assert saved["step"] == 6 and not differing(saved, loaded)
        found.append(distance(whole, resumed))
        shutil.rmtree(tmp_path / "one.ckpt")
    return found


@pytest.mark.long
def test_adam_with_coupled_weight_decay_goes_both_ways(tmp_path: Path) -> None:
    assert max(both_ways(tmp_path, {}, {}, adam)) < 1e-6


@pytest.mark.long
def test_an_optimizer_of_the_deepspeed_config_goes_both_ways(tmp_path: Path) -> None:
    block = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}}
    assert max(both_ways(tmp_path, {"optimizer": block}, {"optimizer": block})) < 1e-6


def test_a_checkpoint_of_adam_makes_no_adam_of_an_adamw(tmp_path: Path) -> None:
    """As in PyTorch, where an AdamW decays the weights themselves whatever it has loaded."""
    path = tmp_path / "adam.ckpt"
    run(plain(), Steady(configure=adam), save=path)
    expected, module = Steady(configure=adamw), Steady(configure=adamw)
    run(plain(), expected, path)
    run(ours(), module, path)
    assert distance(module, expected) < 1e-6
    assert module.own_optimizer.param_groups[0]["decoupled_weight_decay"] is True


def test_the_groups_hold_what_the_optimizers_of_deepspeed_read(tmp_path: Path) -> None:
    """Whether or not they can be built here: their `step` is read, and so are the files."""
    wanted: set[str] = set()
    for kind in (DeepSpeedCPUAdam, FusedAdam):
        source = re.sub(r" *#.*", "", inspect.getsource(kind.step))
        wanted |= set(re.findall(r"group\['(\w+)'\]", source)) - {"params", "step"}
        assert set(re.findall(r"state\['(\w+)'\]", source)) == {"step", "exp_avg", "exp_avg_sq"}
    assert wanted == {"lr", "bias_correction", "betas", "eps", "weight_decay"}
    block = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
    for name, strategy in (("torch", ours()), ("config", ours(optimizer=block))):
        run(strategy, Steady(configure=adamw), save=tmp_path / f"{name}.ckpt")
        file = tmp_path / f"{name}.ckpt" / "checkpoint" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
        stored = torch.load(file, weights_only=False)["optimizer_state_dict"]["base_optimizer_state"]
        (group,) = stored["param_groups"]
        expected = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "bias_correction": True}
        assert {key: group[key] for key in wanted} == expected and "step" not in group
        # Theirs count in integers, PyTorch's in a tensor, which not every way of loading makes of an integer.
        step = stored["state"][0]["step"]
        assert step == 6 and isinstance(step, torch.Tensor if name == "torch" else int)


@pytest.fixture(scope="module")
def _can_compile() -> None:
    """DeepSpeed builds its optimizers when they are first used, and keeps them for later runs."""
    from deepspeed.ops.op_builder import CPUAdamBuilder, FusedAdamBuilder

    if not (shutil.which("c++") and shutil.which("ninja")):
        pytest.skip("DeepSpeedCPUAdam and FusedAdam need a compiler and ninja, which are not here.")
    for builder in (CPUAdamBuilder, FusedAdamBuilder):
        with warnings.catch_warnings(), mock.patch.dict(os.environ):
            warnings.simplefilter("ignore")
            try:
                builder().load(verbose=False)
            except Exception as error:  # of many kinds, from whatever the compiler lacks
                pytest.skip(f"DeepSpeed's optimizers cannot be built here: {str(error)[:200]}")


@pytest.mark.soak  # the first build takes minutes
@pytest.mark.usefixtures("_can_compile")
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("by_config", [False, True])
def test_the_optimizers_of_deepspeed_go_both_ways(offload: bool, by_config: bool, tmp_path: Path) -> None:
    """DeepSpeedCPUAdam with offload, FusedAdam without; the module returns it, or DeepSpeed's config asks for it."""

    def configure(module: Small) -> torch.optim.Optimizer:
        return (DeepSpeedCPUAdam if offload else FusedAdam)(module.parameters(), lr=1e-2, weight_decay=0.1)

    block = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
    config = {"optimizer": block} if by_config else {}
    assert max(both_ways(tmp_path, {"offload": offload, **config}, config, configure)) < 1e-6


@pytest.mark.soak  # the first build takes minutes
@pytest.mark.usefixtures("_can_compile")
def test_a_run_of_torchs_optimizer_goes_on_with_deepspeeds(tmp_path: Path) -> None:
    """Plain DeepSpeed cannot go on so from its own checkpoints, whose groups lack `bias_correction`."""

    def configure(module: Small) -> torch.optim.Optimizer:
        return DeepSpeedCPUAdam(module.parameters(), lr=1e-2, weight_decay=0.1)

    whole, resumed = Steady(configure=adamw), Steady(configure=configure)
    run(ours(), whole, save=tmp_path / "torch.ckpt")
    run(plain(offload=True), resumed, tmp_path / "torch.ckpt")
    assert distance(whole, resumed) < 1e-6


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "limit"), [({}, 0.1), pytest.param({"gradient_clipping": 0.1}, None, marks=pytest.mark.long)]
)
def test_a_run_that_takes_over_clips_as_before(config: dict[str, Any], limit: float | None, tmp_path: Path) -> None:
    """Plain DeepSpeed takes the limit from the checkpoint, whatever the Trainer says."""
    assert max(both_ways(tmp_path, config, config, gradient_clip_val=limit)) < 1e-6
    free, clipped = Steady(configure=adamw), Steady(configure=adamw)
    run(plain(), free)
    run(plain(**config), clipped, gradient_clip_val=limit)
    assert distance(free, clipped) > 1e-3


@pytest.mark.long
@pytest.mark.parametrize("option", ["elastic_checkpoint", "round_robin_gradients", "parameter_alignment"])
def test_layouts_of_deepspeed_go_both_ways(option: str, tmp_path: Path) -> None:
    zero = {"zero": {option: True}}
    assert max(both_ways(tmp_path, zero, zero)) < 1e-6


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.long), 2])
def test_moments_of_accumulated_gradients_get_the_scale_of_zenflows(stage: int, tmp_path: Path) -> None:
    """With DeepSpeedStrategy, Lightning and DeepSpeed both divide by the number of micro-batches."""
    settings: dict[str, Any] = {"batches": 24, "save_after": 12, "accumulate_grad_batches": 4}
    whole, resumed, expected = (Steady(configure=adamw) for _ in range(3))
    saved = run(plain(stage), whole, save=tmp_path / "plain.ckpt", **settings).at_save
    loaded = run(ours(stage=stage), resumed, tmp_path / "plain.ckpt", **settings).at_start
    own = run(ours(stage=stage), expected, save=tmp_path / "ours.ckpt", **settings).at_save
    assert saved["step"] == loaded["step"] == 3
    for name in saved["fp32"]:
        assert torch.equal(loaded["fp32"][name], saved["fp32"][name])
        assert torch.equal(loaded["exp_avg"][name], 4 * saved["exp_avg"][name])
        assert torch.equal(loaded["exp_avg_sq"][name], 16 * saved["exp_avg_sq"][name])
        assert relative(loaded["exp_avg"][name], own["exp_avg"][name]) < 1e-4
    assert distance(whole, resumed) < 1e-5 and distance(expected, resumed) < 1e-5
    # Those of ZenFlow itself, in a universal checkpoint too, are of that scale already.
    path = to_universal(tmp_path / "ours.ckpt", tmp_path / "universal", inject_missing_state=False)
    assert not differing(own, run(ours(stage=stage), Steady(configure=adamw), path, **settings).at_start)


@pytest.mark.long
def test_the_scale_of_fp16_goes_on(tmp_path: Path) -> None:
    """Weights are compared elsewhere: where the scale grows, DeepSpeed divides that step's gradient by the new one."""
    config: dict[str, Any] = {"fp16": {"enabled": True, "initial_scale_power": 10, "loss_scale_window": 4}}
    for first, second in ((plain(**config), ours(**config)), (ours(**config), plain(**config))):
        path = tmp_path / f"{type(first).__name__}.ckpt"
        saved = run(first, Steady(), save=path, precision="16-mixed").at_save
        loaded = run(second, Steady(), path, precision="16-mixed", batches=9).at_start
        assert saved["scale"] == 2048.0 and not differing(saved, loaded)
        assert second.deepspeed_engine.optimizer.loss_scale == 4096.0  # in the ninth step, not four after the sixth


class Odd(nn.Module):
    """Tied and frozen weights, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.Linear(FEATURES, FEATURES, bias=False) for _ in range(2))
        self.last.weight = self.first.weight
        self.normed = nn.BatchNorm1d(FEATURES)
        self.frozen = nn.Linear(FEATURES, FEATURES).requires_grad_(False)
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.frozen(self.last(torch.tanh(self.normed(self.first(inputs))))))


def test_tied_and_frozen_weights_and_buffers_go_both_ways(tmp_path: Path) -> None:
    for name, first, second in (("plain", plain(), ours()), ("ours", ours(), plain())):
        path = tmp_path / f"{name}.ckpt"
        whole, resumed = Steady(Odd), Steady(Odd)
        nn.init.zeros_(resumed.net.frozen.weight)  # type: ignore[union-attr,arg-type]
        saved = run(first, whole, save=path).at_save
        loaded = run(second, resumed, path).at_start
        assert not differing(saved, loaded) and "net.last.weight" not in loaded["fp32"]
        assert saved["buffers"].keys() == loaded["buffers"].keys()
        assert all(torch.equal(saved["buffers"][key], loaded["buffers"][key]) for key in saved["buffers"])
        assert saved["buffers"]["net.normed.num_batches_tracked"] == 6
        assert torch.equal(loaded["weights"]["net.frozen.weight"], whole.net.frozen.weight)  # type: ignore[union-attr,arg-type]
        assert distance(whole, resumed) < 1e-6


# -- evaluation and export ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "evaluate", ["test", *(pytest.param(name, marks=pytest.mark.long) for name in ("validate", "predict"))]
)
def test_each_evaluates_the_masters_of_the_other(evaluate: str, tmp_path: Path) -> None:
    for name, first, second in (("plain", plain(), ours(OFTEN)), ("ours", ours(OFTEN), plain())):
        path = tmp_path / f"{name}.ckpt"
        saved = run(first, Steady(), save=path, precision="bf16-true").at_save
        module = Steady()
        made = Trainer(**{**QUIET, "strategy": second, "precision": "bf16-true"})
        getattr(made, evaluate)(module, batches(2), ckpt_path=path)
        assert rounded(saved["fp32"], dict(module.named_parameters()))


def test_what_deepspeed_makes_of_a_checkpoint_holds_the_masters(tmp_path: Path) -> None:
    """Lightning's conversion, the script inside, and universal checkpoints; it is saved between two updates."""
    path = tmp_path / "ours.ckpt"
    saved = run(ours(OFTEN), Steady(Odd), save=path).at_save
    converted = convert_zero_checkpoint_to_fp32_state_dict(path, tmp_path / "one.pt")["state_dict"]
    # Called as its main part does, which cuts large files into shards and wants huggingface_hub for it.
    program = "import zero_to_fp32 as z; z.convert_zero_checkpoint_to_fp32_state_dict('.', 'out', max_shard_size=None)"
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, cwd=path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    scripted = torch.load(path / "out" / "pytorch_model.bin", weights_only=True)
    for found in (converted, scripted):
        assert found.keys() == Steady(Odd).state_dict().keys()
        for name, master in saved["fp32"].items():
            assert torch.equal(found[name], master)
        for name in ("net.frozen.weight", "net.normed.running_mean"):
            assert torch.equal(found[name], {**saved["weights"], **saved["buffers"]}[name])
    universal = to_universal(path, tmp_path / "universal", inject_missing_state=False)
    assert not differing(saved, run(plain(**UNIVERSAL), Steady(Odd), universal).at_start)
    loaded = run(ours(OFTEN), Steady(Odd), universal).at_start
    assert not differing(saved, loaded)
    # Plain DeepSpeed restores no buffers from a universal checkpoint.
    assert all(torch.equal(saved["buffers"][key], loaded["buffers"][key]) for key in saved["buffers"])


# -- universal checkpoints ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["32-true", pytest.param("bf16-true", marks=pytest.mark.long)])
def test_universal_checkpoints_go_both_ways(precision: Any, tmp_path: Path) -> None:
    """Plain DeepSpeed loads its own in the same way (tried with 0.19.8), and neither needs the other's stage or offload."""
    for name, first, seconds in (
        ("plain", plain(), (ours(stage=1, **UNIVERSAL),)),
        ("ours", ours(), (plain(**UNIVERSAL), plain(1, offload=True, **UNIVERSAL), ours(stage=1))),
    ):
        whole = Steady(configure=scheduled)
        saved = run(first, whole, save=tmp_path / f"{name}.ckpt", precision=precision).at_save
        path = to_universal(tmp_path / f"{name}.ckpt", tmp_path / f"{name}.universal", name == "plain")
        for second in seconds:
            resumed = Steady(configure=scheduled)
            loaded = run(second, resumed, path, precision=precision).at_start
            assert loaded["step"] == 6 and not differing(saved, loaded)
            assert loaded["global_step"] == 6 and loaded["counters"] == saved["counters"]
            assert rounded(saved["fp32"], resumed.first_weights)
            assert distance(whole, resumed) < (1e-6 if precision == "32-true" else 1e-3)


# -- ranks -------------------------------------------------------------------------------------------------------------


def on_two_ranks(folder: str) -> dict[str, Any]:
    """What each of two ranks does, with what one rank has left in `folder`."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    two: dict[str, Any] = {"devices": 2}
    path, results = Path(folder), {}

    def note(name: str, strategy: Any, **arguments: Any) -> None:
        module = Steady(configure=scheduled)
        keeps = run(strategy, module, **arguments, **two)
        results[name] = {"at": keeps.at_save or keeps.at_start, "first": module.first_weights, "end": weights(module)}

    for stage, offload, precision in TWO_RANKS:
        settings: dict[str, Any] = {"precision": precision}
        name = f"{stage} {precision}"
        note(f"plain {name}", plain(stage, offload), save=path / f"plain two {name}", **settings)
        note(f"plain to ours {name}", ours(stage=stage), ckpt_path=path / f"plain two {name}", **settings)
        note(f"ours {name}", ours(stage=stage), save=path / f"ours two {name}", **settings)
        note(f"ours to plain {name}", plain(stage, offload), ckpt_path=path / f"ours two {name}", **settings)
    note("few", ours(OFTEN), save=path / "ours two few")
    note("few to plain", plain(), ckpt_path=path / "ours two few")
    note("one", ours(), ckpt_path=path / "plain one")
    note("one universal", ours(), ckpt_path=path / "plain one universal")
    note("one universal of ours", ours(), ckpt_path=path / "ours one universal")
    note("one universal of ours to plain", plain(**UNIVERSAL), ckpt_path=path / "ours one universal")
    return results


TWO_RANKS: list[tuple[int, bool, Any]] = [(1, False, "32-true"), (2, True, "bf16-true")]


@pytest.mark.long
@pytest.mark.timeout(300)  # twenty runs, on a machine that may be busy
def test_ranks_may_be_others_on_the_other_side(run_ranks: Any, tmp_path: Path) -> None:
    """Two ranks to two, one to two, two to one; the batches of all ranks together are the same."""
    from_one = {}
    for name, strategy in (("plain", plain()), ("ours", ours())):
        module = Steady(configure=scheduled)
        saved = run(strategy, module, save=tmp_path / f"{name} one").at_save
        from_one[name] = (saved, weights(module))
        to_universal(tmp_path / f"{name} one", tmp_path / f"{name} one universal", name == "plain")
    results = run_ranks(on_two_ranks, folder=str(tmp_path), timeout=200)
    for found in results:
        for stage, _, precision in TWO_RANKS:
            name, tolerance = f"{stage} {precision}", 1e-6 if precision == "32-true" else 1e-3
            for one, other in (("plain", "plain to ours"), ("ours", "ours to plain")):
                saved, loaded = found[f"{one} {name}"], found[f"{other} {name}"]
                assert saved["at"]["step"] == 6 and not differing(saved["at"], loaded["at"])
                assert rounded(saved["at"]["fp32"], loaded["first"])
                assert (saved["end"] - loaded["end"]).abs().max() < tolerance
        assert not rounded(found["few"]["at"]["fp32"], found["few"]["at"]["weights"])
        assert not differing(found["few"]["at"], found["few to plain"]["at"])
        assert rounded(found["few"]["at"]["fp32"], found["few to plain"]["first"])
        for name, origin in (
            ("one", "plain"),
            ("one universal", "plain"),
            ("one universal of ours", "ours"),
            ("one universal of ours to plain", "ours"),
        ):
            saved, end = from_one[origin]
            assert not differing(saved, found[name]["at"])
            assert (found[name]["end"] - end).abs().max() < 1e-6

    for precision, path, before in (
        ("32-true", tmp_path / "plain two 1 32-true", results[0]["plain 1 32-true"]),
        ("bf16-true", tmp_path / "plain two 2 bf16-true", results[0]["plain 2 bf16-true"]),
    ):
        universal = to_universal(path, tmp_path / f"{path.name} universal", inject_missing_state=True)
        for checkpoint in (path, universal):
            resumed = Steady(configure=scheduled)
            loaded = run(ours(), resumed, checkpoint, precision=precision).at_start
            assert not differing(before["at"], loaded)
            # In bf16 the halves of a batch are rounded apart.
            assert (weights(resumed) - before["end"]).abs().max() < (1e-6 if precision == "32-true" else 2e-2)
    universal = to_universal(tmp_path / "ours two few", tmp_path / "ours two universal", inject_missing_state=False)
    for strategy in (plain(**UNIVERSAL), ours(OFTEN)):
        loaded = run(strategy, Steady(configure=scheduled), universal).at_start
        assert not differing(results[0]["few"]["at"], loaded)
