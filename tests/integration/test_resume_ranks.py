"""Resuming on two ranks, and on another number of ranks than the one that saved."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from torch import Tensor

from lightning_zenflow.checkpoint.reader import StoredCheckpoint
from tests.cases import relative
from tests.modules import EXPECTED_WARNINGS, three_groups
from tests.resuming import (
    BATCHES,
    SAVED_AT,
    Case,
    Numbered,
    case_of,
    check_resumes,
    check_schedule,
    on,
    resume_both,
    run,
    save_both,
    schedules,
)

pytestmark = [
    *EXPECTED_WARNINGS,
    pytest.mark.filterwarnings("ignore:.*resuming from a checkpoint that ended before the epoch ended"),
    pytest.mark.usefixtures("own_process_group"),
    pytest.mark.timeout(300),
]


# -- the same number of ranks ------------------------------------------------------------------------------------------


def drawn(count: int) -> list[dict[str, Any]]:
    """Random runs, the same each time: drawn here, since ranks that try and shrink by themselves would go apart."""
    cases: list[dict[str, Any]] = []

    @settings(max_examples=count, derandomize=True, database=None, deadline=None, phases=[Phase.generate])
    @given(schedules())
    def collect(case: dict[str, Any]) -> None:
        cases.append(case)

    collect()
    return cases


def stop_and_resume(folder: str, schedules: list[dict[str, Any]]) -> list[str]:
    """What each of the ranks does; returns what differed."""
    _quietly()
    found = []
    for stage, precision in ((1, "bf16-mixed"), (2, "32-true")):
        case = Case(
            arguments={"stage": stage}, settings={"devices": 2, "accumulate_grad_batches": 3, "precision": precision}
        )
        place = Path(folder) / f"stage {stage}"
        found += [f"{case}: {text}" for text in check_resumes(case, place, range(1, 10), [4, 8])]
    for number, schedule in enumerate(schedules):
        place = Path(folder) / str(number)
        found += [f"{schedule}: {text}" for text in check_schedule(schedule, place, 2)]
    return found


def _quietly() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)


def test_two_ranks_that_stop_and_resume_are_the_same(run_ranks: Any, tmp_path: Path) -> None:
    """At every point of a step; and random runs."""
    assert run_ranks(stop_and_resume, folder=str(tmp_path), schedules=drawn(2)) == [[], []]


@pytest.mark.long
def test_many_random_runs_of_two_ranks_that_stop_twice_are_the_same(run_ranks: Any, tmp_path: Path) -> None:
    found = run_ranks(stop_and_resume, folder=str(tmp_path), schedules=drawn(15), timeout=240)
    assert found == [[], []]


# -- another number of ranks -------------------------------------------------------------------------------------------


def changing(precision: str, stage: int) -> Case:
    """Whose clipping, groups, and intervals give the host something to hold, in a schedule that has changed."""
    return Case(
        changes={3: (3, 3)},
        arguments={"stage": stage},
        settings={"precision": precision, "gradient_clip_val": 0.3},
        module=_three_groups,
    )


def _three_groups() -> Numbered:
    return Numbered(configure=three_groups)


CASES = {
    "fp32": changing("32-true", 1),
    "bf16": changing("bf16-mixed", 2),
    "moments in bf16": Case(zenflow={"moments_dtype": "bf16"}, changes={3: (3, 3)}),
    "warm-up": Case(zenflow={"full_warm_up_rounds": 9}),
    "all deferred": Case(zenflow={"topk_ratio": 0}),
}


def two_ranks(folder: str, names: list[str]) -> list[str]:
    """Saves for one rank, and resumes what one rank has saved."""
    _quietly()
    found = []
    for name in names:
        case = CASES[name]
        save_both(case, Path(folder) / f"{name} of 2", 2)
        found += [f"{name}: {text}" for text in resume_both(case, Path(folder) / f"{name} of 1", 2)]
    run(on(PARTIAL, 2), Path(folder) / "partial", [SAVED_AT])
    return found


PARTIAL = Case(settings={"accumulate_grad_batches": 3})


@pytest.mark.parametrize(
    "names", [["bf16", "moments in bf16"], pytest.param(["fp32", "warm-up", "all deferred"], marks=pytest.mark.long)]
)
def test_another_number_of_ranks_goes_on_from_settled_weights(names: list[str], run_ranks: Any, tmp_path: Path) -> None:
    """Both ways: bit for bit what a run that settles before it is saved goes on with, and within rounding the reference."""
    cases = {name: CASES[name] for name in names}
    for name, case in cases.items():
        (tmp_path / f"{name} of 1").mkdir()
        (tmp_path / f"{name} of 2").mkdir()
        save_both(case, tmp_path / f"{name} of 1", 1)
    assert run_ranks(two_ranks, folder=str(tmp_path), names=names) == [[], []]
    for name, case in cases.items():
        folder = tmp_path / f"{name} of 2"
        assert resume_both(case, folder, 1) == [], name
        assert_holds_the_reference(folder, name)

    with pytest.warns(UserWarning, match="micro-batches of a step that was not complete are dropped"):
        resumed = run(PARTIAL, resume=tmp_path / "partial" / f"{SAVED_AT}.ckpt")
    assert list(resumed.trace.shown) == list(range(SAVED_AT + 1, 2 * BATCHES + 1))


def assert_holds_the_reference(folder: Path, name: str) -> None:
    """The settled checkpoint has the masters and moments of the reference, whoever reads it."""
    reference = torch.load(folder / "reference.pt", weights_only=False)
    reference.settle()
    stored = StoredCheckpoint.open(folder / "settled" / f"{SAVED_AT}.ckpt")
    assert stored.world_size == 2
    states: Mapping[str, Any] = reference.states
    for own, state in states.items():
        reference._round_moments(state, state.selected)  # as they go home, where moments are kept in 16 bit
        for kind, expected in (("fp32", state.master), ("exp_avg", state.exp_avg), ("exp_avg_sq", state.exp_avg_sq)):
            mine: Tensor = stored.read(f"net.{own}", kind)
            assert relative(mine, expected.flatten()) < 1e-5, (name, own, kind)


def test_what_is_drawn_is_the_same_each_time() -> None:
    assert drawn(3) == drawn(3) and case_of(drawn(3)[-1]).zenflow
