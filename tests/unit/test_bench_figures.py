"""`bench`: figures, tables, notes, JSON and picture of runs whose numbers are known."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from lightning_zenflow.cli.bench import arguments, figures, picture, view
from lightning_zenflow.cli.bench.figures import Figures, Measured, figures_of
from lightning_zenflow.cli.bench.job import Job, Run
from lightning_zenflow.cli.bench.result import Result, hardware_of


def run(step_ms: list[float], **fields: Any) -> Run:
    return Run(**{"numel": 1000, "step_ms": step_ms, "passes_ms": [9.0] * len(step_ms), **fields})


def resident(base: float, per_param: float) -> list[Run]:
    """Two runs of models of 1,000 and 3,000 parameters."""
    return [run([1.0], numel=numel, resident_bytes=int(base + per_param * numel)) for numel in (1000, 3000)]


def a_result(*modes: str, stage: str = "2", device: str = "cpu", memory: bool = True) -> Result:
    """Steps of compute, ZeRO-Offload and ZenFlow; ZenFlow selects anew in its third counted step."""
    runs = {
        "compute": Measured([run([10.0, 10.0, 10.0, 14.0]), run([12.0] * 4)], resident(5000, 2)),
        "zero_offload": Measured(
            [run([40.0, 40.0, 40.0, 48.0], stall_ms=[30.0, 30.0, 30.0, 38.0]), run([44.0] * 4, stall_ms=[34.0] * 4)],
            resident(900, 20),
        ),
        "ds_zenflow": Measured(reason="there is no ninja here"),
        "zenflow": Measured(
            [
                run(
                    [20.0, 20.0, 35.0, 21.0],
                    stall_ms=[0.0, 1.0, 15.0, 0.0],
                    selected_at=[2],
                    to_host_bytes=2100.0,
                    to_device_bytes=600.0,
                    intervals=[4, 16],
                )
            ],
            resident(7000, 24.4),
        ),
    }
    kept = {mode: runs.get(mode, runs["zenflow"]) for mode in (modes or runs)}
    if not memory:
        kept = {mode: Measured(found.runs, [], found.reason) for mode, found in kept.items()}
    plan = arguments.plan_of(["--stage", stage, "--depth", "1", "--repeats", "2"])
    hardware = {"processor": "Some Processor", "cores": 2, "device": device}
    return Result(plan, hardware, {"Python": "3.11.0"}, {"OMP_NUM_THREADS": "1"}, kept)


def text_of(result: Result, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    view.show(result)
    return capsys.readouterr().out


def test_times_are_medians_over_the_repeats_and_ratios_those_of_mean_steps() -> None:
    found = a_result().figures
    compute, zenflow, offload = found["compute"], found["zenflow"], found["zero_offload"]
    assert compute.mean_ms == 11.5 and (compute.least_ms, compute.most_ms) == (11.0, 12.0)
    assert compute.median_ms == 11.0  # of 10 and 12
    assert compute.max_to_median_ratio == 1.2  # of 1.4 and 1
    assert offload.mean_ms == 43.0 and zenflow.mean_ms == 24.0
    assert offload.to_compute_ratio == pytest.approx(43 / 11.5) and offload.to_zenflow_ratio == pytest.approx(43 / 24)
    assert zenflow.to_zenflow_ratio == 1.0
    assert (offload.stall_ms, zenflow.stall_ms) == (33.0, 4.0) and compute.stall_ms is None
    assert zenflow.stall_ratio == pytest.approx(4 / 24)


def test_a_reselection_costs_what_its_step_took_beyond_the_median() -> None:
    found = a_result().figures
    assert found["zenflow"].reselection_ms == 35 - 20.5
    assert found["zero_offload"].reselection_ms is None


def test_memory_is_the_slope_over_parameters_without_that_of_compute() -> None:
    found = a_result().figures
    assert found["zenflow"].memory_bytes == pytest.approx(22.4)
    assert found["zero_offload"].memory_bytes == pytest.approx(18)
    assert found["compute"].memory_bytes is None
    assert a_result(memory=False).figures["zenflow"].memory_bytes is None
    assert a_result("zenflow").figures["zenflow"].memory_bytes is None  # nothing to take off


def test_bytes_are_counted_for_us_and_computed_for_others() -> None:
    found = a_result().figures
    ours, offload, compute = found["zenflow"], found["zero_offload"], found["compute"]
    assert (ours.to_host_bytes, ours.to_device_bytes, ours.is_counted) == (2.1, 0.6, True)
    assert (offload.to_host_bytes, offload.to_device_bytes, offload.is_counted) == (4, 2, False)
    assert (compute.to_host_bytes, compute.to_device_bytes) == (0, 0)


def test_one_reselection_falls_within_the_counted_steps_whatever_their_number() -> None:
    for steps in range(10, 200):
        interval = Job(mode="zenflow", steps=steps).select_interval
        selections = range(1, steps + 1, interval)  # steps count from 1, and the first one selects
        assert len([step for step in selections if step > 8]) == 1, steps


@pytest.mark.parametrize("columns", [80, 120])
def test_every_line_fits_and_every_mode_has_a_row_in_both_tables(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = text_of(a_result(), capsys, monkeypatch, columns)
    lines = shown.splitlines()
    assert max(map(len, lines)) <= columns
    for mode in ("compute", "zero_offload", "ds_zenflow", "zenflow"):
        assert sum(line.split()[:1] == [mode] for line in lines) == 2, mode
    times = next(line.split() for line in lines if line.startswith("zenflow "))
    expected = ["zenflow", "24.0", "20.5", "24.0-24.0", "2.09x", "1.00x", "1.71", "4.0", "16.7%", "14.5"]
    assert times == expected
    bytes_row = [line.split() for line in lines if line.startswith("zenflow ")][1]
    assert bytes_row == ["zenflow", "22.40", "2.10", "0.60", "counted", "0.00"]
    assert "Not run: ds_zenflow. There is no ninja here." in " ".join(shown.split())


def test_notes_say_which_bytes_are_the_devices() -> None:
    # A tenth of 1024 columns is 102, of 4096 it is 410; all vectors are selected.
    selected = 102 * 4096 + 410 * 1024 + 4096 + 1024
    numel = 2 * 1024 * 4096 + 4096 + 1024
    assert view.device_state_bytes(a_result()) == pytest.approx(14 * selected / numel)
    on_cpu = " ".join(view.footnotes(a_result()))
    assert "from depth 1 to 2" in on_cpu and "1.4 of zenflow's bytes" in on_cpu
    assert "share one memory" not in " ".join(view.footnotes(a_result(device="cuda")))
    assert "resident memory" not in " ".join(view.footnotes(a_result(memory=False)))


def test_json_holds_every_run_and_gives_the_same_figures_again() -> None:
    result = a_result()
    stored = json.loads(json.dumps(result.as_dict(["a note"]), allow_nan=False))
    assert stored["footnotes"] == ["a note"] and stored["hardware"]["cores"] == 2
    assert stored["arguments"]["update_interval"] == 4 and stored["environment"] == {"OMP_NUM_THREADS": "1"}
    again = {
        mode: Measured(
            runs=[Run.from_dict(one) for one in found["runs"]],
            memory=[Run.from_dict(one) for one in found["memory_runs"]],
            reason=found["reason"],
        )
        for mode, found in stored["modes"].items()
    }
    assert again == result.measured
    assert figures_of(again, Job(mode="compute")) == result.figures
    assert Figures(**stored["modes"]["zenflow"]["figures"]) == result.figures["zenflow"]
    assert stored["modes"]["ds_zenflow"]["figures"] is None


def test_the_picture_shows_parts_that_add_up_to_the_mean_step() -> None:
    result = a_result()
    for row in result.figures.values():
        assert sum(picture.parts_of(row).values()) == pytest.approx(row.mean_ms)
    assert list(picture.parts_of(result.figures["zenflow"]).values()) == pytest.approx([9, 0, 11, 4])
    drawn = imread(io.BytesIO(picture.bench_png(result)))
    assert drawn.shape[1] == 1000
    bare = imread(io.BytesIO(picture.bench_png(a_result("compute"))))
    assert bare.shape[0] < drawn.shape[0]


def test_a_comparison_of_which_nothing_could_run_is_drawn_and_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = a_result("ds_zenflow")
    assert picture.bench_png(nothing).startswith(b"\x89PNG")
    assert "not run" in text_of(nothing, capsys, monkeypatch, 80)


def test_the_overhead_under_zero_3_is_weighed_against_zero_2_and_zero_3_itself() -> None:
    def table(zenflow: float) -> dict[str, Figures]:
        means = {"compute": 100.0, "zero_2": 900.0, "zero": 950.0, "zenflow_2": 150.0, "zenflow": zenflow}
        passes = {"zero_2": 110.0, "zero": 130.0}
        measured = {mode: Measured([run([mean], passes_ms=[passes.get(mode, mean)])]) for mode, mean in means.items()}
        return figures_of(measured, Job(mode="compute", stage=3))

    within = figures.overhead_of_stage_3(table(180.0))
    assert within is not None and "takes 80 ms under ZeRO-3: no more than the 80 ms of its 50 ms" in within
    assert "the 30 ms that DeepSpeed's ZeRO-3 adds to forward and backward (of which 20 ms more" in within
    beyond = figures.overhead_of_stage_3(table(181.0))
    assert beyond is not None and "takes 81 ms under ZeRO-3: MORE THAN the 80 ms" in beyond
    assert figures.overhead_of_stage_3({"compute": table(1.0)["compute"]}) is None


def test_the_processor_is_named_as_the_system_names_it(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Quick 9000 @ 3 GHz\n")
    assert hardware_of("cpu", cpuinfo)["processor"] == "Quick 9000 @ 3 GHz"
    assert hardware_of("cpu", tmp_path / "none")["processor"]
