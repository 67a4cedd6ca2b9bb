"""Checkpoints under ZeRO-3, where parameters are cut over the ranks: one rank."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict
from torch import Tensor, nn

from lightning_zenflow.checkpoint.errors import CheckpointError
from lightning_zenflow.checkpoint.reader import StoredCheckpoint
from lightning_zenflow.cli import main
from tests.interop import ALL_SELECTED, Steady, differing, rounded, run, shown, to_universal
from tests.modules import CLASSES, EXPECTED_WARNINGS, FEATURES, Small, batches, fit, fit_plainly, trainer
from tests.resuming import (
    BATCHES,
    Case,
    Numbered,
    check_resumes,
    differences,
    stage_arguments,
    state_differences,
)
from tests.resuming import run as run_case
from tests.stage3_checkpoints import (
    HOOKS,
    Begins,
    Fails,
    KeepsState,
    OddModule,
    SavesAnywhere,
    both_ways,
    check_evaluates,
    evaluated,
    full,
    ours,
    plain_of,
    saved_by,
)

pytestmark = [
    *EXPECTED_WARNINGS,
    pytest.mark.filterwarnings("ignore:Step after .* skipped"),
    pytest.mark.filterwarnings("ignore:.*resuming from a checkpoint that ended before the epoch ended"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.usefixtures("own_process_group"),
    pytest.mark.timeout(240),
]

CUT, OFFLOADED = stage_arguments(3), stage_arguments("3 offload")
BY_THREE: dict[str, Any] = {"accumulate_grad_batches": 3}
FP16: dict[str, Any] = {"initial_scale_power": 8, "loss_scale_window": 2}


# -- resuming ----------------------------------------------------------------------------------------------------------

CASES = {
    "plain, offloaded": Case(arguments=OFFLOADED),
    "in threes, bf16": Case(arguments=CUT, settings={**BY_THREE, "precision": "bf16-mixed"}),
    "fp16 with skipped steps, offloaded": Case(
        arguments={**OFFLOADED, **FP16},
        settings={"precision": "16-mixed"},
        module=partial(Numbered, infinite=(4, 5, 11)),
    ),
    "warm-up, then intervals change": Case(
        arguments=CUT, zenflow={"full_warm_up_rounds": 3}, changes={5: (2, 3), 6: (6, 3), 12: (1, 5), 15: (3, 2)}
    ),
    "manual, in threes": Case(arguments=CUT, module=partial(Numbered, manual=3)),
    "moments in bf16, in threes": Case(arguments=CUT, zenflow={"moments_dtype": "bf16"}, settings=BY_THREE),
}


OFTEN_RUN = ("fp16 with skipped steps, offloaded", "in threes, bf16")


@pytest.mark.parametrize(
    "name", [name if name in OFTEN_RUN else pytest.param(name, marks=pytest.mark.long) for name in CASES]
)
def test_a_run_resumes_after_any_batch(name: str, tmp_path: Path) -> None:
    """It saves after every batch, and has the same weights as one that never saves."""
    resumes: Collection[int] = (1, 2, 4, 5, 7, 11, 13, 16)
    assert check_resumes(CASES[name], tmp_path, range(1, 2 * BATCHES), resumes) == []


# -- other stages ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"),
    [(2, 3), ("3 offload", 2), *(pytest.param(*pair, marks=pytest.mark.long) for pair in ((1, "3 offload"), (3, 1)))],
)
def test_another_stage_goes_on_from_settled_weights(before: int | str, after: int | str, tmp_path: Path) -> None:
    """As if the run had settled before it was saved, with the masters and moments that it had then."""
    first = Case(arguments=stage_arguments(before), settings={"precision": "bf16-mixed"}, module=three_grouped)
    second = first.but(arguments=stage_arguments(after))
    keeps = KeepsState(7)
    run_case(first, tmp_path / "held", [7])
    run_case(first.but(settles=[7]), tmp_path / "settled", [7], callbacks=[keeps])
    held, settled = (run_case(second, resume=tmp_path / name / "7.ckpt") for name in ("held", "settled"))
    assert state_differences(held.trace.began, keeps.state) == []
    assert state_differences(settled.trace.began, keeps.state) == []
    assert differences(held, settled, 7) == []


def three_grouped() -> Numbered:
    from tests.modules import three_groups

    return Numbered(configure=three_groups)


@pytest.mark.parametrize(("name", "before"), [("ours", 3), ("plain", 3), ("plain", 2), ("ours", 2)])
def test_universal_checkpoints_and_plain_ones_go_to_every_stage(name: str, before: int, tmp_path: Path) -> None:
    """With masters and moments.

    DeepSpeed 0.19.8 itself reads neither an ordinary nor a universal checkpoint of ZeRO-3 in another stage, nor one of them in
    ZeRO-3, and gives all groups the settings of the first: so one group, and its own stage.
    """
    first = ours(stage=before) if name == "ours" else plain_of(before)
    saved = run(first, Steady(configure=adamw), save=tmp_path / "one.ckpt").at_save
    path = to_universal(tmp_path / "one.ckpt", tmp_path / "universal", inject_missing_state=name == "plain")
    others: tuple[int | str, ...] = (1, 2, 3, "3 offload")
    for stage in others:
        for found in (path, tmp_path / "one.ckpt") if name == "plain" else (path,):
            assert not differing(saved, run(ours(stage=stage), Steady(configure=adamw), found).at_start), stage
    universal: dict[str, Any] = {"checkpoint": {"load_universal": True}}
    assert not differing(saved, run(plain_of(before, **universal), Steady(configure=adamw), path).at_start)


def adamw(module: Small) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)


@pytest.mark.parametrize(("before", "after"), [(3, "3 offload"), (2, 3), (3, 2)])
def test_what_is_not_trained_is_restored_as_well(before: int | str, after: int | str, tmp_path: Path) -> None:
    saved = saved_by(ours(stage=before), tmp_path / "one.ckpt", precision="bf16-true")
    module = OddModule()
    net: Any = module.net
    nn.init.zeros_(net.frozen.weight)
    loaded = run(ours(stage=after), module, tmp_path / "one.ckpt", precision="bf16-true").at_start
    assert torch.equal(loaded["weights"]["net.frozen.weight"], saved["weights"]["net.frozen.weight"])
    assert all(torch.equal(loaded["buffers"][name], value) for name, value in saved["buffers"].items())
    assert loaded["buffers"]["net.normed.count"] == 6 and net.head.calls == 10


# -- plain DeepSpeed ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "precision"),
    [
        (3, "32-true"),
        ("3 offload", "bf16-mixed"),
        pytest.param("3 offload", "16-mixed", marks=pytest.mark.long),
        pytest.param(3, "bf16-true", marks=pytest.mark.long),
    ],
)
def test_plain_runs_and_ours_take_over_from_each_other(stage: int | str, precision: str, tmp_path: Path) -> None:
    assert both_ways(tmp_path, stage, precision) == []


# -- one file ----------------------------------------------------------------------------------------------------------


def test_every_conversion_holds_the_masters(tmp_path: Path) -> None:
    """Lightning's, the script inside, and `lightning-zenflow export`: saved between two updates, with selected columns."""
    path = tmp_path / "ours.ckpt"
    saved = saved_by(ours(stage="3 offload"), path, precision="bf16-true")
    assert not rounded(saved["fp32"], saved["weights"])
    converted = convert_zero_checkpoint_to_fp32_state_dict(path, tmp_path / "one.pt")["state_dict"]
    # Called as its main part does, which cuts large files into shards and wants huggingface_hub for it.
    program = "import zero_to_fp32 as z; z.convert_zero_checkpoint_to_fp32_state_dict('.', 'out', max_shard_size=None)"
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, cwd=path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    scripted = torch.load(path / "out" / "pytorch_model.bin", weights_only=True)
    for found in (converted, scripted):
        assert_holds(found, saved)
    out = tmp_path / "exported.ckpt"
    assert main(["export", str(path), str(out)]) == 0
    loaded = OddModule.load_from_checkpoint(out)
    assert_holds(loaded.state_dict(), saved)
    net: Any = loaded.net
    assert net.last.weight is net.first.weight and net.head.calls == 6


def assert_holds(found: dict[str, Tensor], saved: dict[str, Any]) -> None:
    """The masters as they are, and frozen weights and buffers in their dtype."""
    assert found["net.last.weight"].equal(found["net.first.weight"])
    for name, master in saved["fp32"].items():
        assert torch.equal(found[name], master), name
    others = {**{n: w for n, w in saved["weights"].items() if n not in saved["fp32"]}, **saved["buffers"]}
    assert len(others) == 4
    for name, value in others.items():
        assert torch.equal(found[name].to(value.dtype), value), name


# -- evaluation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16-true", pytest.param("32-true", marks=pytest.mark.long)])
def test_evaluation_uses_the_masters_of_every_stage(precision: Any, tmp_path: Path) -> None:
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    paths = {}
    for before in (1, 2, 3):
        path = tmp_path / f"{before}.ckpt"
        paths[f"stage {before}"] = path, saved_by(ours(stage=before), path, precision=precision)
    universal = to_universal(tmp_path / "3.ckpt", tmp_path / "universal", inject_missing_state=False)
    paths["universal"] = universal, paths["stage 3"][1]
    plainly = tmp_path / "plain.ckpt"
    paths["plain"] = plainly, saved_by(plain_of("3 offload"), plainly, precision=precision)
    kinds = ("validate", "test", "predict")
    stages: tuple[int | str, ...] = (3, "3 offload", 2)
    for number, (name, (path, saved)) in enumerate(paths.items()):
        for stage, how in zip(stages, (*kinds[number % 3 :], *kinds), strict=False):
            module = OddModule()
            evaluated(ours(stage=stage), how, path, module, precision=precision)
            assert check_evaluates(saved, module, dtype) == [], (name, stage)


def test_a_model_of_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    run(ours(), Steady(), save=tmp_path / "one.ckpt")
    wider = partial(nn.Linear, FEATURES, CLASSES + 1)
    other = Steady(lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, CLASSES + 1)))
    message = r"`net\.3\.weight` must have the shape of the checkpoint, \[5, 8\], got \[6, 8\]"
    with pytest.raises(CheckpointError, match=message):
        evaluated(ours(), "test", tmp_path / "one.ckpt", other)
    with pytest.raises(CheckpointError, match=message):
        run(ours(), other, tmp_path / "one.ckpt")
    with pytest.raises(RuntimeError, match=r"Missing key.*net\.weight"):
        evaluated(ours(), "test", tmp_path / "one.ckpt", Steady(wider))


# -- saves at any time -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [3, "3 offload"])
def test_a_save_in_the_middle_of_a_pass_changes_nothing(stage: int | str, tmp_path: Path) -> None:
    """In hooks, and within forward and backward, where layers are gathered."""
    case = Case(arguments=stage_arguments(stage), validates=True)
    whole, saves = run_case(case), SavesAnywhere(tmp_path)
    assert differences(run_case(case, callbacks=[saves]), whole) == []
    assert saves.saved == {*HOOKS, "forward", "backward", "validation"}
    # The last save of each was in the last batch, but not of its step; in validation and before the batch all is done.
    for name in saves.saved:
        resumed = run_case(case, resume=tmp_path / f"{name}.ckpt", max_epochs=3)
        assert resumed.trainer.global_step in (3 * BATCHES, 3 * BATCHES - 1), name


def test_saves_within_the_batches_of_manual_optimization_change_nothing(tmp_path: Path) -> None:
    """Also where gradients of earlier batches wait for their step."""
    case = Case(arguments=stage_arguments(3), module=partial(Numbered, manual=3))
    whole, saves = run_case(case), SavesAnywhere(tmp_path, within=False)
    assert differences(run_case(case, callbacks=[saves]), whole) == []


@pytest.mark.parametrize("where", ["before", "forward", "after"])
def test_what_is_saved_on_an_exception_resumes(where: str, tmp_path: Path) -> None:
    case = Case(arguments=stage_arguments("3 offload"), zenflow=dict(ALL_SELECTED))
    saves = ModelCheckpoint(tmp_path, "failed", save_on_exception=True, save_top_k=0)

    def failing() -> Fails:
        module = Fails()
        module.where = where
        return module

    keeps = KeepsState(7)
    with pytest.raises(RuntimeError, match="on purpose"):
        run_case(case.but(module=failing), callbacks=[saves, keeps], enable_checkpointing=True)
    (path,) = tmp_path.iterdir()
    resumed = run_case(case, resume=path)
    assert state_differences(resumed.trace.began, keeps.state) == []


# -- after fit, and without it -----------------------------------------------------------------------------------------


def test_the_weights_of_an_engine_that_only_evaluates_are_written_whole(tmp_path: Path) -> None:
    saved = saved_by(ours(), tmp_path / "one.ckpt")
    module = OddModule()
    made = evaluated(ours(), "validate", tmp_path / "one.ckpt", module)
    with pytest.warns(UserWarning, match="holds the weights alone"):
        made.save_checkpoint(tmp_path / "weights.ckpt")
    files = sorted(path.name for path in (tmp_path / "weights.ckpt" / "checkpoint").iterdir())
    assert files == ["mp_rank_00_model_states.pt", "zenflow.json"]
    stored = StoredCheckpoint.open(tmp_path / "weights.ckpt")
    assert stored.shared == {"net.last.weight": "net.first.weight"}
    assert_holds(dict(stored.state_dict()), saved)
    for stage in (2, 3):
        again = OddModule()
        evaluated(ours(stage=stage), "test", tmp_path / "weights.ckpt", again)
        assert check_evaluates(saved, again) == []
    out = tmp_path / "exported.ckpt"
    assert main(["export", str(tmp_path / "weights.ckpt"), str(out)]) == 0
    assert_holds(OddModule.load_from_checkpoint(out).state_dict(), saved)
    # The module is as usable as before.
    made.test(module, batches(2), verbose=False)
    assert check_evaluates(saved, module) == []


def test_a_module_goes_through_fits_tests_and_saves(tmp_path: Path) -> None:
    """Its parameters stay cut; what is saved after `fit` resumes, also where the user has changed weights since."""
    case = Case(arguments=stage_arguments(3))
    whole = run_case(case.but(settles=[10]), max_epochs=2)
    first = run_case(case, max_epochs=1)
    first.trainer.save_checkpoint(tmp_path / "after.ckpt")
    resumed = run_case(case, resume=tmp_path / "after.ckpt")
    assert differences(resumed, whole, 10) == []
    first.trainer.test(first.module, batches(2), verbose=False)
    assert torch.equal(torch.cat([w.flatten() for w in shown(first.module).values()]), first.weights)

    again = trainer(strategy=ours())
    again.fit(first.module, batches(10))
    params: dict[str, Any] = dict(first.module.named_parameters())
    small, large = params["net.3.bias"], params["net.0.weight"]
    small.all_gather([small])  # as it is after most steps
    with torch.no_grad(), GatheredParameters([large], modifier_rank=0):
        small.add_(1)
        large.mul_(2)
    expected = small.detach().clone()
    again.save_checkpoint(tmp_path / "changed.ckpt")
    found = dict(StoredCheckpoint.open(tmp_path / "changed.ckpt").state_dict())
    assert torch.equal(found.pop("net.3.bias"), expected)
    now = shown(first.module)
    assert all(torch.equal(found[name], now[name]) for name in found)


def test_weights_alone_and_links_are_saved(tmp_path: Path) -> None:
    saves = ModelCheckpoint(tmp_path, save_last="link", every_n_train_steps=4, save_top_k=1, save_weights_only=True)
    module = OddModule()
    fit(module, strategy=ours(), callbacks=[saves], enable_checkpointing=True)
    link = tmp_path / "last.ckpt"
    assert link.is_symlink() and link.resolve() == Path(saves.best_model_path).resolve()
    stored = StoredCheckpoint.open(link)
    assert stored.stage == 3 and not stored.has_moments
    with pytest.raises(CheckpointError, match="weights alone"):
        trainer(strategy=ours(), max_epochs=2).fit(OddModule(), batches(10), ckpt_path=link)
    again = OddModule()
    evaluated(ours(), "test", link, again)
    now = shown(again)
    assert all(torch.equal(now[name], stored.read(name, "fp32").view(now[name].shape)) for name in stored.shapes)


# -- a single file -----------------------------------------------------------------------------------------------------


@pytest.fixture
def single(tmp_path: Path) -> Path:
    """A checkpoint of a run without DeepSpeed, after one epoch."""
    made = fit_plainly(OddModule(configure=scheduled_odd), batches(10))
    made.save_checkpoint(tmp_path / "single.ckpt")
    return tmp_path / "single.ckpt"


def scheduled_odd(module: Small) -> Any:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)}


@pytest.mark.filterwarnings("ignore:`ckpt_path` is a single file")
@pytest.mark.parametrize(
    ("stage", "precision"),
    [
        (3, "bf16-true"),
        ("3 offload", "16-mixed"),
        *(pytest.param(stage, "32-true", marks=pytest.mark.long) for stage in (3, "3 offload")),
        pytest.param("3 offload", "bf16-true", marks=pytest.mark.long),
        pytest.param(3, "16-mixed", marks=pytest.mark.long),
    ],
)
def test_a_run_begins_with_the_very_values_of_a_single_file(
    stage: int | str, precision: Any, single: Path, tmp_path: Path
) -> None:
    state = torch.load(single, weights_only=True)["state_dict"]
    module = OddModule(configure=scheduled_odd)
    keeps = Begins()
    made = trainer(strategy=full(stage), max_epochs=2, precision=precision, callbacks=[keeps])
    made.fit(module, batches(10), ckpt_path=single)
    assert made.global_step == 20 and made.current_epoch == 2
    assert keeps.rates == [pytest.approx(5e-3)]  # as the file has them, and not as the optimizer begins
    trained = ("net.first.weight", "net.normed.weight", "net.head.weight", "net.head.bias")
    kinds = ("master", "exp_avg", "exp_avg_sq")
    assert keeps.state.keys() == {f"{kind} {name} 0" for name in trained for kind in kinds}
    for key, values in keeps.state.items():
        kind, name, _ = key.split()
        assert torch.equal(values, state[name].flatten() if kind == "master" else torch.zeros_like(values)), key
    for name, weight in keeps.shown.items():
        assert torch.equal(weight, state[name].to(weight.dtype)), name
    assert torch.equal(keeps.buffer, state["net.normed.mean"].to(keeps.buffer.dtype))
    assert keeps.calls == 10


@pytest.mark.filterwarnings("ignore:`ckpt_path` is a single file")
def test_a_single_file_is_evaluated_and_goes_through_hooks(single: Path) -> None:
    state = torch.load(single, weights_only=True)["state_dict"]
    module = OddModule()
    made = evaluated(full(), "test", single, module)
    assert all(torch.equal(weight, state[name]) for name, weight in shown(module).items())

    class Renames(OddModule):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["state_dict"]["net.frozen.bias"] = torch.full((7,), 3.0)

    hooked, keeps = Renames(configure=scheduled_odd), Begins()
    made = trainer(strategy=full(), max_epochs=2, callbacks=[keeps])
    made.fit(hooked, batches(10), ckpt_path=single)
    assert torch.equal(keeps.shown["net.frozen.bias"], torch.full((7,), 3.0))


def test_training_begins_anew_with_an_exported_file(tmp_path: Path) -> None:
    """Of a run under ZeRO-2, whose masters go from there into ZeRO-3 without being rounded."""
    saved = saved_by(ours(stage=2), tmp_path / "two.ckpt", precision="bf16-true")
    assert main(["export", str(tmp_path / "two.ckpt"), str(tmp_path / "one.pt")]) == 0
    keeps = Begins()
    made = trainer(strategy=full(), precision="bf16-true", callbacks=[keeps])
    with pytest.warns(UserWarning, match="is a single file, so Adam's moments begin at zero"):
        made.fit(OddModule(), batches(10), ckpt_path=tmp_path / "one.pt")
    assert made.global_step == 10
    for name, master in saved["fp32"].items():
        assert torch.equal(keeps.state[f"master {name} 0"], master.flatten())


@pytest.mark.filterwarnings("ignore:`ckpt_path` is a single file")
def test_what_a_single_file_lacks_stays_where_that_is_allowed(single: Path, tmp_path: Path) -> None:
    content = torch.load(single, weights_only=True)
    del content["state_dict"]["net.head.weight"]
    content["state_dict"]["net.unknown"] = torch.zeros(3)
    torch.save(content, tmp_path / "part.ckpt")

    class Lenient(OddModule):
        strict_loading = False

    keeps, lenient = Begins(), Lenient(configure=scheduled_odd)
    initial = shown(lenient)["net.head.weight"]
    made = trainer(strategy=full(), max_epochs=2, callbacks=[keeps])
    made.fit(lenient, batches(10), ckpt_path=tmp_path / "part.ckpt")
    assert torch.equal(keeps.state["master net.head.weight 0"], initial.flatten())
    assert torch.equal(keeps.state["master net.head.bias 0"], content["state_dict"]["net.head.bias"])
    strict = trainer(strategy=full(), max_epochs=2)
    with pytest.raises(RuntimeError, match=r"(?s)Missing key.*net\.head\.weight.*Unexpected key.*net\.unknown"):
        strict.fit(OddModule(configure=scheduled_odd), batches(10), ckpt_path=tmp_path / "part.ckpt")


def test_files_that_cannot_be_begun_with_are_refused_in_words(single: Path, tmp_path: Path) -> None:
    for content, message in (
        ({"net.head.weight": torch.zeros(3)}, r"weights under 'state_dict', got .* with 'net.head.weight'"),
        ([1], "must be a whole file"),
    ):
        torch.save(content, tmp_path / "bad.ckpt")
        with pytest.raises(CheckpointError, match=message):
            trainer(strategy=full()).fit(OddModule(), batches(10), ckpt_path=tmp_path / "bad.ckpt")
    other = torch.load(single, weights_only=True)
    other["state_dict"]["net.head.weight"] = torch.zeros(CLASSES, 8)
    torch.save(other, tmp_path / "other.ckpt")
    with pytest.raises(
        CheckpointError, match=r"`net\.head\.weight` must have the shape of the checkpoint, \[5, 8\], got"
    ):
        trainer(strategy=full()).fit(OddModule(), batches(10), ckpt_path=tmp_path / "other.ckpt")
    with pytest.raises(CheckpointError, match="which is a file"):
        trainer(strategy=ours()).fit(OddModule(), batches(10), ckpt_path=single)


def test_a_directory_resumes_as_ever_where_single_files_may_be_given(tmp_path: Path) -> None:
    """Without a warning, which would be an error here."""
    case = Case(arguments=stage_arguments(3))
    whole = run_case(case, tmp_path, [7])
    resumed = run_case(
        case.but(arguments={**stage_arguments(3), "load_full_weights": True}), resume=tmp_path / "7.ckpt"
    )
    assert differences(resumed, whole, 7) == []
