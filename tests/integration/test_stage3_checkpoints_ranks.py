"""Checkpoints under ZeRO-3 on two ranks, and on another number of ranks than the one that saved."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict

from lightning_zenflow.checkpoint.reader import StoredCheckpoint
from lightning_zenflow.cli import main
from tests.interop import ALL_SELECTED, Steady, differing, run, shown, to_universal
from tests.modules import EXPECTED_WARNINGS, batches, fit_plainly, three_groups, trainer
from tests.resuming import (
    BATCHES,
    Case,
    Numbered,
    check_resumes,
    differences,
    on,
    resume_both,
    save_both,
    stage_arguments,
    state_differences,
)
from tests.resuming import run as run_case
from tests.stage3_checkpoints import (
    Begins,
    Fails,
    KeepsState,
    OddModule,
    SavesAnywhere,
    both_ways,
    check_evaluates,
    counting_reads,
    evaluated,
    full,
    ours,
    plain_of,
    saved_by,
)

pytestmark = [
    *EXPECTED_WARNINGS,
    pytest.mark.filterwarnings("ignore:.*resuming from a checkpoint that ended before the epoch ended"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.usefixtures("own_process_group"),
    pytest.mark.timeout(300),
]

CUT, OFFLOADED = stage_arguments(3), stage_arguments("3 offload")
TWO: dict[str, Any] = {"devices": 2}


def _quietly() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)


# -- two ranks ---------------------------------------------------------------------------------------------------------

RESUMED = {
    "in threes, bf16, intervals change": Case(
        arguments=CUT,
        changes={6: (2, 3), 10: (3, 5)},
        settings={**TWO, "accumulate_grad_batches": 3, "precision": "bf16-mixed"},
    ),
    "fp16 with skipped steps, offloaded": Case(
        arguments={**OFFLOADED, "initial_scale_power": 8, "loss_scale_window": 2},
        zenflow={"full_warm_up_rounds": 2},
        settings={**TWO, "precision": "16-mixed"},
        module=partial(Numbered, infinite=(4, 5, 11)),
    ),
}


def resumes(folder: str) -> list[str]:
    """What each of the ranks does; returns what differed."""
    _quietly()
    path, found = Path(folder), []
    for name, case in RESUMED.items():
        found += [f"{name}: {text}" for text in check_resumes(case, path / name, range(1, 2 * BATCHES), [1, 5, 8, 13])]
    case = on(Case(arguments=CUT, validates=True), 2)
    saves = SavesAnywhere(path / "anywhere")
    whole = run_case(case)
    found += [f"saved anywhere: {text}" for text in differences(run_case(case, callbacks=[saves]), whole)]
    for name in sorted(saves.saved):
        done = run_case(case, resume=path / "anywhere" / f"{name}.ckpt", max_epochs=3).trainer.global_step
        found += [] if done in (3 * BATCHES, 3 * BATCHES - 1) else [f"saved in {name}: {done} steps"]

    once = run_case(case, max_epochs=1)
    once.trainer.save_checkpoint(path / "after.ckpt")
    resumed = run_case(case, resume=path / "after.ckpt")
    settled = run_case(case.but(settles=[BATCHES]))
    found += [f"saved after fit: {text}" for text in differences(resumed, settled, BATCHES)]

    keeps = KeepsState(7)
    failed = ModelCheckpoint(path / "failed", "one", save_on_exception=True, save_top_k=0)
    try:
        run_case(case.but(module=Fails), callbacks=[failed, keeps], enable_checkpointing=True)
    except RuntimeError as error:
        found += [] if "on purpose" in str(error) else [str(error)]
    resumed = run_case(case, resume=path / "failed" / "one.ckpt")
    found += [f"saved on an exception: {text}" for text in state_differences(resumed.trace.began, keeps.state)]
    return found


@pytest.mark.long
def test_two_ranks_resume_from_whatever_they_save(run_ranks: Any, tmp_path: Path) -> None:
    """At every point of a step, in the middle of passes, after `fit`, and where all ranks fail."""
    assert run_ranks(resumes, folder=str(tmp_path), timeout=240) == [[], []]


def interoperates(folder: str) -> list[str]:
    """With plain DeepSpeed on the same ranks."""
    _quietly()
    found = []
    cases: list[tuple[int | str, str]] = [(3, "32-true"), ("3 offload", "bf16-mixed")]
    for number, (stage, precision) in enumerate(cases):
        found += both_ways(Path(folder) / str(number), stage, precision, devices=2)
    return found


@pytest.mark.long
def test_two_ranks_and_plain_deepspeed_take_over_from_each_other(run_ranks: Any, tmp_path: Path) -> None:
    assert run_ranks(interoperates, folder=str(tmp_path), timeout=240) == [[], []]


# -- evaluation, files -------------------------------------------------------------------------------------------------


def of_first_rank(saved: dict[str, Any]) -> dict[str, Any]:
    """What the first rank holds: its buffers are those of the checkpoint, as in stages 1 and 2."""
    box = [saved]
    torch.distributed.broadcast_object_list(box)
    return box[0]


def evaluates(folder: str) -> dict[str, Any]:
    """Saves on two ranks, evaluates that and what one rank has saved, saves weights from there, begins with a single file."""
    _quietly()
    path = Path(folder)
    # At every point of a step in the tests that are long; here in the middle of one.
    found = check_resumes(next(iter(RESUMED.values())), path / "resumes", [4, 8], [8])
    saved = of_first_rank(saved_by(ours(), path / "two.ckpt", **TWO))
    one = torch.load(path / "one.pt", weights_only=False)
    for name, expected in (("two", saved), ("one", one)):
        for stage in (3, 2, "3 offload"):
            module = OddModule()
            made = evaluated(ours(stage=stage), "validate", path / f"{name}.ckpt", module, **TWO)
            found += [f"{name}, stage {stage}: {text}" for text in check_evaluates(expected, module)]
    made.save_checkpoint(path / "weights.ckpt")

    content = torch.load(path / "single.ckpt", weights_only=True)["state_dict"]
    keeps = Begins()
    numel = sum(param.numel() for param in OddModule().parameters())
    with counting_reads() as read:
        trainer(strategy=full(), max_epochs=2, callbacks=[keeps], **TWO).fit(
            OddModule(), batches(10), ckpt_path=path / "single.ckpt"
        )
    if not read[0] <= numel / 2 + 6:  # each of six is cut in two, the larger part first
        found.append(f"{read[0]} elements of {numel} read")
    for key, values in keeps.state.items():
        kind, name, start = key.split()
        expected_part = content[name].flatten()[int(start) : int(start) + values.numel()]
        if not torch.equal(values, expected_part if kind == "master" else torch.zeros_like(values)):
            found.append(f"single file: {key}")
    for name, weight in keeps.shown.items():
        if not torch.equal(weight, content[name]):
            found.append(f"single file: shown {name}")
    return {"found": found, "saved": saved}


def test_two_ranks_resume_evaluate_and_write_whole_files(run_ranks: Any, tmp_path: Path, capsys: Any) -> None:
    torch.save(saved_by(ours(), tmp_path / "one.ckpt"), tmp_path / "one.pt")
    fit_plainly(OddModule(), batches(10)).save_checkpoint(tmp_path / "single.ckpt")
    results = run_ranks(evaluates, folder=str(tmp_path))
    assert [result["found"] for result in results] == [[], []]
    two, one = results[0]["saved"], torch.load(tmp_path / "one.pt", weights_only=False)
    # What DeepSpeed's script, `export` and this package make of two ranks' parts.
    converted = convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "two.ckpt", tmp_path / "converted.pt")[
        "state_dict"
    ]
    assert main(["export", str(tmp_path / "two.ckpt"), str(tmp_path / "exported.ckpt")]) == 0
    assert "ZeRO stage 3, 2 ranks, by lightning-zenflow" in " ".join(capsys.readouterr().out.split())
    exported = OddModule.load_from_checkpoint(tmp_path / "exported.ckpt").state_dict()
    written = dict(StoredCheckpoint.open(tmp_path / "weights.ckpt").state_dict())
    for found, saved in ((converted, two), (exported, two), (written, one)):
        for name, master in saved["fp32"].items():
            assert torch.equal(found[name], master), name
        for name in ("net.frozen.weight", "net.frozen.bias"):
            assert torch.equal(found[name], saved["weights"][name]), name
    module = OddModule()
    evaluated(ours(), "test", tmp_path / "two.ckpt", module)
    assert check_evaluates(two, module) == []


# -- another number of ranks -------------------------------------------------------------------------------------------


def grouped() -> Numbered:
    return Numbered(configure=three_groups)


CHANGING = Case(
    changes={3: (3, 3)},
    arguments=CUT,
    settings={"precision": "bf16-mixed", "gradient_clip_val": 0.3},
    module=grouped,
)


def two_of_one(folder: str) -> list[str]:
    """Saves for one rank, and resumes what one rank has saved, in the same stage and in another."""
    _quietly()
    path = Path(folder)
    save_both(CHANGING, path / "of 2", 2)
    found = resume_both(CHANGING, path / "of 1", 2)
    second = CHANGING.but(arguments=stage_arguments(2))
    found += [f"under stage 2: {text}" for text in resume_both(second, path / "of 1", 2)]
    module = Steady()
    saved = run(plain_of(3), module, save=path / "plain two.ckpt", **TWO).at_save
    loaded = run(ours(ALL_SELECTED), Steady(), path / "plain one.ckpt", **TWO).at_start
    torch.save({"saved": saved, "end": shown(module)}, path / f"plain two {module.global_rank}.pt")
    held = torch.load(path / "plain one.pt", weights_only=False)
    return found + [f"plain one: {text}" for text in differing(held, loaded)]


@pytest.mark.long
def test_another_number_of_ranks_goes_on_from_settled_weights(run_ranks: Any, tmp_path: Path) -> None:
    """Both ways: bit for bit what a run that settles before it is saved goes on with, and within rounding the reference."""
    for name in ("of 1", "of 2"):
        (tmp_path / name).mkdir()
    save_both(CHANGING, tmp_path / "of 1", 1)
    held = run(plain_of(3), Steady(), save=tmp_path / "plain one.ckpt").at_save
    torch.save(held, tmp_path / "plain one.pt")
    assert run_ranks(two_of_one, folder=str(tmp_path)) == [[], []]
    for stage in (3, "3 offload", 1):
        case = CHANGING.but(arguments=stage_arguments(stage))
        assert resume_both(case, tmp_path / "of 2", 1) == [], stage
    plainly = torch.load(tmp_path / "plain two 0.pt", weights_only=False)
    universal = to_universal(tmp_path / "plain two.ckpt", tmp_path / "universal", inject_missing_state=True)
    for path in (tmp_path / "plain two.ckpt", universal):
        module = Steady()
        assert not differing(plainly["saved"], run(ours(ALL_SELECTED), module, path).at_start)
        assert all((weight - plainly["end"][name]).abs().max() < 1e-6 for name, weight in shown(module).items())
    universal = to_universal(tmp_path / "of 2" / "settled" / "7.ckpt", tmp_path / "ours", inject_missing_state=False)
    stored = [StoredCheckpoint.open(path) for path in (universal, tmp_path / "of 2" / "settled" / "7.ckpt")]
    for name in stored[1].shapes:
        for kind in ("fp32", "exp_avg", "exp_avg_sq"):
            assert torch.equal(stored[0].read(name, kind), stored[1].read(name, kind))
