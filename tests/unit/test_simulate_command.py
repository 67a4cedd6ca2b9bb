"""`lightning-zenflow simulate`: its arguments, tables, numbers and picture, from made-up points."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import os
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.image import imread

from lightning_zenflow.cli import simulate as command
from lightning_zenflow.cli.simulate import experiment
from lightning_zenflow.cli.simulate.experiment import (
    METHODS,
    SYNCHRONOUS,
    TUNED,
    WHOLE_MODEL,
    ZENFLOW,
    Point,
    Simulation,
)
from lightning_zenflow.cli.simulate.picture import COLOURS, MARKERS, picture_png, spread
from lightning_zenflow.cli.simulate.view import NAMES, as_dict, notes, show
from lightning_zenflow.cli.simulate.workload import Workload
from lightning_zenflow.offload.errors import WorkerDied

HOST_SECS = 0.04


def simulation(*ratios: float) -> Simulation:
    """A host that is never hidden by the synchronous schedule, and half of it by the others."""
    points = []
    for ratio in ratios:
        compute = HOST_SECS / ratio
        for method in METHODS:
            wait = HOST_SECS if method == SYNCHRONOUS else HOST_SECS / 2
            points.append(Point(method, ratio, 4, compute, compute + wait, compute + wait, wait, 0.0, wait))
    return Simulation(Workload(1_000_000, (1,)), 2.5e10, 4, HOST_SECS, tuple(points))


@pytest.fixture
def _made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command measures nothing."""
    monkeypatch.setattr(command, "cores", lambda: ([min(os.sched_getaffinity(0))], [max(os.sched_getaffinity(0))]))
    monkeypatch.setattr(experiment, "simulate", lambda load, bandwidth, interval, ratios, *rest: simulation(*ratios))


@pytest.mark.usefixtures("_made_up")
def test_the_command_says_first_that_it_is_a_simulation_and_writes_both_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "not" / "there"
    assert command.main(["--output", str(folder), "--ratios", "2,0.5,13"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("This is a simulation of the device and of the link")
    rows = [line.split() for line in shown.splitlines() if line.startswith(("0.5 ", "2 ", "13* "))]
    assert rows[0] == ["0.5", "80.0", "ms", "120", "ms", "100", "ms", "100", "ms", "100", "ms", "4"]
    assert rows[4] == ["2", "20.0", "ms", "67%", "50%", "50%", "50%", "4"]
    assert rows[6][3:] == ["1.00x", "1.20x", "1.20x", "1.20x", "4"]
    assert rows[8][0] == "13*"
    assert max(map(len, shown.replace(str(folder), "").splitlines())) <= 100
    assert json.loads((folder / "simulate.json").read_text())["points"][0]["ratio"] == 0.5
    assert (folder / "simulate.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("_made_up")
def test_json_is_all_that_is_printed_and_the_same_as_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--json", "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed == (tmp_path / "simulate.json").read_text()
    found = json.loads(printed)
    assert "simulation" in found["what"]
    assert [point["method"] for point in found["points"][:4]] == list(METHODS)
    assert {point["ratio"] for point in found["points"]} == {0.1, 0.25, 0.5, 1, 2, 4, 10, 13, 20}


def test_the_plain_numbers_add_up() -> None:
    for point in as_dict(simulation(0.5, 4.0))["points"]:
        parts = ("compute_secs", "host_wait_secs", "link_wait_secs", "other_secs")
        assert sum(point[part] for part in parts) == pytest.approx(point["step_secs"])
        assert point["stall_ratio"] == pytest.approx(1 - point["compute_secs"] / point["step_secs"])
    synchronous, _, zenflow, _ = as_dict(simulation(1.0))["points"]
    assert (synchronous["speedup"], zenflow["speedup"]) == pytest.approx((1.0, 80 / 60))


def test_the_published_case_is_explained_only_where_it_is_a_point() -> None:
    assert any("Llama-2-7B" in note for note in notes(simulation(1.0, 13.0)))
    assert not any("Llama-2-7B" in note for note in notes(simulation(1.0, 12.0)))


def test_it_is_said_that_the_host_bounds_everything_only_where_it_does() -> None:
    assert any("At ratio 20 the host bounds every method" in note for note in notes(simulation(1.0, 20.0)))
    assert not any("bounds every method" in note for note in notes(simulation(0.1, 0.5)))


def test_a_larger_interval_than_training_bears_is_warned_of() -> None:
    points = [dataclasses.replace(point, update_interval=9) for point in simulation(1.0).points]
    warning = "Above U = 8, which auto may choose, accuracy has not been measured"
    assert any(warning in note for note in notes(dataclasses.replace(simulation(1.0), points=tuple(points))))
    assert not any(warning in note for note in notes(simulation(1.0)))


def test_a_host_whose_pace_has_changed_is_told_of() -> None:
    found = simulation(1.0, 2.0)
    assert found.drift == pytest.approx(1.0)
    assert not any("busy" in note for note in notes(found))
    slowed = dataclasses.replace(found.points[0], host_busy_secs=1.5 * HOST_SECS)
    found = dataclasses.replace(found, points=(slowed, *found.points[1:]))
    assert found.drift == pytest.approx(1.5)
    assert any("up to 1.5 times as long" in note for note in notes(found))


def test_show_names_the_files(capsys: pytest.CaptureFixture[str]) -> None:
    show(simulation(1.0), ["Numbers: a.json", "Picture: b.png"])
    assert capsys.readouterr().out.endswith("Numbers: a.json\nPicture: b.png\n")


@pytest.mark.parametrize("ratios", [(0.1, 1.0, 13.0, 20.0), (1.0,), (50.0, 60.0), tuple(1 + n / 10 for n in range(40))])
def test_the_picture_has_a_line_of_each_method_whatever_the_ratios(ratios: tuple[float, ...]) -> None:
    before = dict(matplotlib.rcParams)
    pixels = imread(io.BytesIO(picture_png(simulation(*ratios))))
    assert pixels.shape[:2] == (640, 1400)
    assert dict(matplotlib.rcParams) == before
    # ZenFlow's lines lie over each other here, and the last drawn is seen, as is the synchronous schedule's.
    for method in (SYNCHRONOUS, TUNED):
        colour = [int(COLOURS[method][place : place + 2], 16) / 255 for place in (1, 3, 5)]
        assert (np.abs(pixels[..., :3] - colour).max(axis=2) < 0.02).sum() > 50


def test_every_method_has_a_name_a_colour_and_a_marker_of_its_own() -> None:
    for known in (NAMES, COLOURS, MARKERS):
        assert set(known) == set(METHODS) and len(set(known.values())) == len(METHODS)
    assert {SYNCHRONOUS, WHOLE_MODEL, ZENFLOW, TUNED} == set(METHODS)


def test_labels_that_would_lie_over_each_other_move_apart_and_stay_in_order() -> None:
    assert spread([0.1, 0.5, 0.9], 0.05) == pytest.approx([0.1, 0.5, 0.9])
    assert spread([0.5, 0.5], 0.1) == pytest.approx([0.45, 0.55])
    moved = spread([0.97, 0.98, 0.99, 1.0], 0.05)
    assert moved == sorted(moved) and moved[-1] <= 1.03
    assert min(high - low for low, high in itertools.pairwise(moved)) > 0.049


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--numel", "10"], "`--numel` must be from 65536 to 8.58993e+09, got 10. Give for example 8388608."),
        (["--link-bandwidth", "25"], "`--link-bandwidth` must be from 1e+06 to 1e+15, got 25.0. It is in bytes/s"),
        (["--link-bandwidth", "nan"], "link_bandwidth"),
        (["--update-interval", "0"], "`--update-interval` must be from 1 to 16, got 0. 4 is usual."),
        (["--steps", "1001"], "`--steps` must be from 1 to 1000, got 1001. 8 is usual."),
        (
            ["--ratios", "1,fast"],
            "`--ratios` must be 1 to 40 numbers from 0.01 to 100 with commas between them, got '1,fast'.",
        ),
        (["--ratios", "1,nan"], "got '1,nan'. Write for example 0.5,1,2."),
        (["--ratios", "0.001"], "got '0.001'."),
        (["--ratios", ""], "got ''."),
        (["--output", ""], "`--output` must be a path, got an empty one. Write . for the current folder."),
        (["--output", "/dev/null/here"], "Not a directory"),
        (["--numel", "many"], "numel"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert message in said.err and said.out == ""


def test_ratios_are_sorted_and_counted_once() -> None:
    assert command.ratios_of("4, 1,0.5,1.0") == [0.5, 1.0, 4.0]
    assert 13.0 in command.ratios_of(command.RATIOS)


def test_a_single_core_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "split_cores", lambda: ([3], [3]))
    with pytest.raises(ValueError, match=r"`simulate` must have 2 cores or more, .* Give this process more"):
        command.cores()


def raises(error: BaseException) -> Any:
    def fail(*arguments: Any) -> Any:
        raise error

    return fail


@pytest.mark.usefixtures("_made_up")
@pytest.mark.parametrize("error", [MemoryError("too little memory"), WorkerDied("it was killed")])
def test_a_host_that_fails_ends_in_one_line(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(experiment, "simulate", raises(error))
    with pytest.raises(SystemExit) as ended:
        command.main(["--output", str(tmp_path)])
    assert ended.value.code == 2 and str(error) in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("_made_up")
def test_ctrl_c_ends_with_130_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(experiment, "simulate", raises(KeyboardInterrupt()))
    assert command.main(["--output", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "stopped: nothing was written\n"
    assert list(tmp_path.iterdir()) == []
