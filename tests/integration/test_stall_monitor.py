"""`StallMonitor`: the record of a run, and what the progress bar shows. What it logs is tested in test_trainer_steps.py."""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger

from lightning_zenflow import AutoTuner, StallMonitor, __version__
from lightning_zenflow.callbacks.record import read_changes
from tests.delays import host_that_takes
from tests.modules import EXPECTED_WARNINGS, Small, batches, fit, strategy_of

pytestmark = [*EXPECTED_WARNINGS, pytest.mark.timeout(120), pytest.mark.usefixtures("own_process_group")]

SETTINGS = {"topk_ratio": 0.3, "select_strategy": "step", "select_interval": 4}


def lines(path: Path, kind: str | None = None) -> list[dict[str, Any]]:
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    return [entry for entry in entries if kind in (None, entry["kind"])]


def test_every_step_is_recorded_with_its_parts_and_when_they_happened(tmp_path: Path) -> None:
    with host_that_takes(0.002, 0.2):
        made = fit(
            Small(),
            batches(24),
            zenflow=SETTINGS,
            callbacks=[StallMonitor(record=True)],
            default_root_dir=tmp_path,
            accumulate_grad_batches=2,
            gradient_clip_val=0.1,
        )
    (run,), steps = lines(tmp_path / "zenflow.jsonl", "run"), lines(tmp_path / "zenflow.jsonl", "step")
    assert (run["format"], run["rank"], run["world_size"], run["stage"], run["device"]) == (1, 0, 1, 2, "cpu:0")
    assert run["settings"]["topk_ratio"] == 0.3 and run["precision"] == "32-true" and run["shard_numel"] == 118
    assert (run["update_interval"], run["select_interval"], run["stall_budget"]) == (4, 4, 0.05)
    assert [step["step"] for step in steps] == list(range(1, 13))
    assert [step["step"] for step in steps if step["reselected"]] == [1, 5, 9]
    assert steps[0]["selection_agreement"] is None and 0 <= steps[4]["selection_agreement"] <= 1
    assert all(0 < step["deferred_mass_ratio"] < 1 for step in steps if step["reselected"])
    assert steps[-1]["grad_norm_clipped"] == pytest.approx(0.1, rel=1e-4)
    assert steps[-1]["grad_norm"] > 0.1
    told_ratios: list[float] = []
    for before, step in itertools.pairwise(steps):
        assert step["begin_secs"] >= before["begin_secs"] + before["step_secs"] - 1e-5, "a clock that only goes forward"
        device = [span for span in step["spans"] if span[0] == "device"]
        computing = min(start for _, name, start, _ in device if name == "forward and backward")
        assert computing == pytest.approx(step["begin_secs"], abs=2e-6)
        waited = sum(secs for _, name, _, secs in device if name == "wait for host")
        assert waited == pytest.approx(step["update_stall_secs"], abs=1e-5)
        inside = [span for span in device if span[1] not in ("wait for host", "settle")]  # which is between steps
        assert {"forward and backward", "gradient norm", "launch", "optimizer", "write weights"} <= {
            s[1] for s in inside
        }
        told_ratios.append((sum(secs for *_, secs in inside) + waited) / step["step_secs"])
        assert ("select" in {span[1] for span in device}) == step["reselected"]
    # The parts are the whole, but for moments in which a busy machine does something else.
    assert max(told_ratios) < 1.01 and statistics.median(told_ratios) > 0.8, told_ratios
    host = sorted((span for step in steps for span in step["spans"] if span[0] == "host"), key=lambda span: span[2])
    assert {name for _, name, *_ in host} == {"accumulate", "update"}
    assert all(after[2] >= span[2] + span[3] - 1e-5 for span, after in itertools.pairwise(host)), "one at a time"
    assert sum(step["update_stall_secs"] > 0.01 for step in steps) >= 6
    assert made.global_step == 12


def test_decisions_are_recorded_and_tell_where_the_intervals_changed(tmp_path: Path) -> None:
    seen = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            seen.append(trainer.strategy.intervals)

    with host_that_takes(0.001, 0.2):
        fit(Small(), batches(30), zenflow=SETTINGS, callbacks=[StallMonitor(record=tmp_path / "a.jsonl"), Watch()])
    decisions = lines(tmp_path / "a.jsonl", "decision")
    assert decisions[0]["step"] == 10 and decisions[0]["changed"]
    assert decisions[0]["previous"] == {"update_interval": 4, "select_interval": 4}
    assert "update_interval 4 -> " in decisions[0]["reason"] and decisions[0]["window"]["steps"] == 8
    changes = read_changes(tmp_path / "a.jsonl")
    assert changes[0] == (0, 4, 4)
    before = [(4, 4), *seen]
    assert changes[1:] == [(step, *now) for step, now in enumerate(seen, start=1) if now != before[step - 1]]


def test_a_second_run_is_appended_and_only_the_steps_asked_for_are_recorded(tmp_path: Path) -> None:
    for _ in range(2):
        monitor = StallMonitor(record="sub/runs.jsonl", record_every_n_steps=4)
        fit(Small(), zenflow=SETTINGS, callbacks=[monitor], default_root_dir=tmp_path)
    entries = lines(tmp_path / "sub" / "runs.jsonl")
    numbers = [(entry["kind"], entry.get("step")) for entry in entries if entry["kind"] != "decision"]
    assert numbers == 2 * [("run", None), ("step", 4), ("step", 8)]


def test_the_record_lies_beside_what_the_logger_writes(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, "logs", 7)
    fit(Small(), zenflow=SETTINGS, callbacks=[StallMonitor(record=True)], logger=logger, log_every_n_steps=5)
    assert len(lines(tmp_path / "logs" / "version_7" / "zenflow.jsonl", "step")) == 10


def test_a_package_that_is_not_installed_records_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As from an archive (`python app.pyz`) or from a checkout on PYTHONPATH."""
    from_name = metadata.Distribution.from_name

    def ours_missing(name: str) -> metadata.Distribution:
        if name == "lightning-zenflow":
            raise metadata.PackageNotFoundError(name)
        return from_name(name)

    monkeypatch.setattr(metadata.Distribution, "from_name", staticmethod(ours_missing))
    fit(Small(), zenflow=SETTINGS, callbacks=[StallMonitor(record=True)], default_root_dir=tmp_path)
    (first,) = lines(tmp_path / "zenflow.jsonl", "run")
    assert first["versions"]["lightning-zenflow"] == __version__
    assert first["versions"]["deepspeed"].startswith("0.")


class Failing(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 5:
            raise ValueError("enough")
        return loss * (math.nan if batch_idx == 2 else 1)


@pytest.mark.filterwarnings("ignore:Step after .* skipped")
def test_a_run_that_fails_leaves_a_whole_record_and_skipped_steps_are_in_the_next_ones_figures(tmp_path: Path) -> None:
    monitor = StallMonitor(record=True)
    with pytest.raises(ValueError, match="enough"):
        fit(Failing(), zenflow=SETTINGS, callbacks=[monitor], default_root_dir=tmp_path)
    steps = lines(tmp_path / "zenflow.jsonl", "step")
    assert [(step["step"], step["skipped_steps"]) for step in steps] == [(1, 0), (2, 0), (3, 1), (4, 1)]
    assert all(math.isfinite(step["grad_norm"]) for step in steps)


def test_a_torn_line_of_a_killed_run_spoils_neither_the_next_run_nor_its_replay(tmp_path: Path) -> None:
    path = tmp_path / "zenflow.jsonl"
    path.write_text('{"kind": "run", "format": 1, "update_interval": 9, "select_interval": 9}\n{"kind": "step", "st')
    fit(Small(), zenflow=SETTINGS, callbacks=[StallMonitor(record=path)])
    assert path.read_text().split("\n")[1] == '{"kind": "step", "st'
    assert read_changes(path)[0] == (0, 4, 4)
    path.write_text(path.read_text() + '{"kind": "deci')
    assert read_changes(path)[0] == (0, 4, 4)


def test_the_progress_bar_shows_the_stall_of_recent_steps() -> None:
    shown = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            shown.append(trainer.progress_bar_metrics["stall"])

    with host_that_takes(0.0, 0.2):
        fit(
            Small(),
            zenflow={**SETTINGS, "update_interval": 4},
            callbacks=[StallMonitor(progress_bar=True), Watch()],
            enable_progress_bar=True,
        )
    assert len(shown) == 10 and all(0 <= value <= 1 for value in shown) and shown[-1] > 0.5


def record_of_each_rank(folder: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    fit(
        Small(),
        batches(10, seed=rank),
        strategy=strategy_of(SETTINGS),
        callbacks=[StallMonitor(record="run.jsonl", progress_bar=True), AutoTuner()],
        default_root_dir=folder,
        devices=2,
    )


def test_every_rank_has_a_record_of_its_own(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(
        "tests.integration.test_stall_monitor:record_of_each_rank", world_size=2, timeout=100, folder=str(tmp_path)
    )
    for rank, name in enumerate(("run.jsonl", "run.rank1.jsonl")):
        (run,), steps = lines(tmp_path / name, "run"), lines(tmp_path / name, "step")
        assert (run["rank"], run["world_size"]) == (rank, 2) and len(steps) == 10
        assert any(name == "exchange" for step in steps for _, name, *_ in step["spans"])


def test_a_full_disk_ends_the_record_and_not_the_training() -> None:
    with pytest.warns(UserWarning, match="The record '/dev/full' ends here: .*No space left.* Training goes on"):
        made = fit(Small(), zenflow=SETTINGS, callbacks=[StallMonitor(record="/dev/full")])
    assert made.global_step == 10


def test_a_record_begins_with_what_the_tuner_had_learned_wherever_it_stands(tmp_path: Path) -> None:
    monitor, tuner = StallMonitor(record=tmp_path / "a.jsonl"), AutoTuner(max_update_interval=2)
    made = fit(Small(), batches(12), zenflow=SETTINGS, callbacks=[monitor, tuner])
    made.fit_loop.max_epochs = 2
    made.fit(Small(), batches(4))
    assert [run["update_interval"] for run in lines(tmp_path / "a.jsonl", "run")] == [4, 2]
    assert lines(tmp_path / "a.jsonl", "step")[-4]["update_interval"] == 2 == read_changes(tmp_path / "a.jsonl")[0][1]


def test_a_dry_run_leaves_no_record(tmp_path: Path) -> None:
    fit(Small(), zenflow=SETTINGS, callbacks=[StallMonitor(record=tmp_path / "a.jsonl")], fast_dev_run=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"record_every_n_steps": 0}, ValueError, "`record_every_n_steps` must be a whole number of at least 1, got 0"),
        ({"record_every_n_steps": 2.5}, TypeError, "`record_every_n_steps` must be a whole number .* got 2.5"),
        ({"record": 1}, TypeError, "`record` must be true, false or a path, got 1"),
    ],
)
def test_arguments_are_refused_when_they_are_given(arguments: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        StallMonitor(**arguments)


@pytest.mark.parametrize("path", ["/proc/nowhere/a.jsonl", "/dev", "a\0b"])
def test_a_record_that_cannot_be_written_is_refused_before_anything_starts(path: str) -> None:
    with pytest.raises(ValueError, match="`record` must be a file that can be written, got"):
        fit(Small(), zenflow=SETTINGS, callbacks=[StallMonitor(record=path)])
