"""`lightning-zenflow growth`: its arithmetic, tables, numbers and picture, and that nothing is left when it fails."""

from __future__ import annotations

import io
import json
from pathlib import Path

import psutil
import pytest
from matplotlib.image import imread
from rich.console import Console

from lightning_zenflow.cli import growth
from lightning_zenflow.cli.growth import picture, results, run, tables
from lightning_zenflow.cli.growth.results import CoresPoint, Growth, RanksPoint, StepPoint


def step_point(numel: int, tensors: int, overhead_secs: float, core_ratio: float = 0.99) -> StepPoint:
    return StepPoint(
        numel=numel,
        tensors=tensors,
        plain_secs=0.25,
        step_secs=0.25 + overhead_secs,
        stall_secs=0.001,
        host_secs=0.1,
        core_ratio=core_ratio,
    )


def found(core_ratio: float = 0.99) -> Growth:
    """3 ns a parameter; 20 ms and 50 us a tensor; a copy at 10 GB/s a core, and passes at 80 and 60 % of it on one core."""
    return Growth(
        available_cores=4,
        torch="2.13.0",
        sizes=tuple(step_point(numel, 8, 3e-9 * numel, core_ratio) for numel in (10**6, 4 * 10**6, 128 * 10**6)),
        tensors=tuple(step_point(10**7, tensors, 0.02 + 50e-6 * tensors) for tensors in (10, 100, 1000, 5000)),
        cores=(
            CoresPoint(wire_bytes=2, cores=1, accumulate_secs=10 / 8e9, update_secs=32 / 6e9, copy_bandwidth=10e9),
            CoresPoint(wire_bytes=2, cores=2, accumulate_secs=10 / 16e9, update_secs=32 / 9e9, copy_bandwidth=20e9),
            CoresPoint(wire_bytes=2, cores=4, accumulate_secs=10 / 20e9, update_secs=32 / 12e9, copy_bandwidth=25e9),
        ),
        ranks=tuple(
            RanksPoint(
                ranks=ranks,
                numel=8 * 10**6,
                plain_secs=0.01 * ranks,
                step_secs=0.05 * ranks,
                reduced_bytes=16_000_004 if ranks > 1 else 0,
                gathered_bytes=5_600_000 if ranks > 1 else 0,
                calls=3 if ranks > 1 else 0,
                weights_bytes=16_000_000,
            )
            for ranks in (1, 2, 4)
        ),
    )


def text_of(growth_found: Growth) -> str:
    out = io.StringIO()
    tables.show(growth_found, Console(file=out, width=100, color_system=None))
    return out.getvalue()


def test_what_follows_from_the_numbers_is_right() -> None:
    numbers = json.loads(json.dumps(found().as_dict(), allow_nan=False))
    assert [row["overhead_secs_per_parameter"] for row in numbers["sizes"]] == pytest.approx([3e-9] * 3)
    assert numbers["overhead_secs_per_tensor"] == pytest.approx(50e-6)
    assert [row["accumulate_speed_up_ratio"] for row in numbers["cores"]] == pytest.approx([1, 2, 2.5])
    assert [row["update_bytes_per_sec"] for row in numbers["cores"]] == pytest.approx([6e9, 9e9, 12e9])
    assert found().cores[2].update_share_ratio == pytest.approx(0.48)
    assert found().cores[0].accumulate_share_ratio == pytest.approx(0.8)


def test_a_slope_is_that_of_least_squares() -> None:
    assert results.slope([(0, 1), (1, 3), (2, 2), (3, 5)]) == pytest.approx(1.1)
    assert results.slope([(5, 7)]) == 0


def test_tables_fit_a_hundred_columns_and_hold_every_point() -> None:
    text = text_of(found())
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100
    assert sum(line.split()[:2] == ["128", "M"] for line in lines) == 1
    assert "50.0 µs a tensor" in text
    cores = next(line.split() for line in lines if line.startswith("2 "))
    assert cores == ["2", "20.0", "GB/s", "16.0", "GB/s", "80%", "2.00x", "9.0", "GB/s", "45%", "1.50x"]
    ranks = next(line.split() for line in lines if line.startswith("4 ") and "MB" in line)
    assert ranks[-6:] == ["16.0", "MB", "5.60", "MB", "16.0", "MB"]
    assert "busy" not in text


def test_a_busy_machine_is_told_of() -> None:
    assert "had only 52% of its core" in text_of(found(core_ratio=0.52))


def test_the_picture_has_its_size_and_draws_what_it_is_given() -> None:
    png = picture.picture_png(found())
    drawn = imread(io.BytesIO(png), format="png")
    assert drawn.shape == (820, 1400, 4)
    assert png != picture.picture_png(found(core_ratio=0.99).__class__(**{**vars(found()), "available_cores": 8}))


def test_sizes_grow_by_four_and_end_with_the_largest() -> None:
    million = 10**6
    assert run.Plan().sizes == [million, 4 * million, 16 * million, 64 * million, 128 * million]
    assert run.Plan(largest=64 * million).sizes == [million, 4 * million, 16 * million, 64 * million]
    assert run.Plan(largest=million).sizes == [million]


@pytest.mark.parametrize("size", ["600M", "10", "many", "-1"])
def test_sizes_out_of_range_are_refused(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        growth.main(["--largest", size] if size != "-1" else ["--largest=-1"])
    assert refused.value.code == 2
    assert "must be from 1M to 500M parameters" in capsys.readouterr().err


def test_a_process_that_fails_is_one_line_and_no_other_is_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "CHILD", "lightning_zenflow.no_such_module")
    assert growth.main(["--output", str(tmp_path)]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert "error: 1000000 parameters in 8 tensors on 1 ranks must run, got exit code 1: " in told.err
    assert told.err.count("\n") == 2
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "sleeps.py").write_text("import time; time.sleep(60)")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(run, "CHILD", "sleeps")
    monkeypatch.setattr(run, "LIMIT_SECS", 0.5)
    before = psutil.Process().children()
    with pytest.raises(run.GrowthError, match=r"must end within 0\.5 s"):
        run._run(2, 1000, 1, [], [])
    assert psutil.Process().children() == before


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_real_command_measures_small_models_and_writes_its_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    real = run.Plan
    small = real(
        smallest=20_000,
        largest=80_000,
        tensors_numel=20_000,
        tensors=(4, 16),
        host_numel=1 << 21,
        ranks=(1, 2),
        ranks_numel=80_000,
    )
    monkeypatch.setattr(run, "Plan", lambda largest: small)
    assert growth.main(["--output", str(tmp_path), "--json"]) == 0
    told = capsys.readouterr()
    numbers = json.loads(told.out)
    assert numbers == json.loads((tmp_path / growth.NUMBERS).read_text())
    assert imread(tmp_path / growth.PICTURE).shape[:2] == (820, 1400)
    assert [row["tensors"] for row in numbers["tensors"]] == [4, 16]
    assert all(row["step_secs"] > row["plain_secs"] > 0 and row["host_secs"] > 0 for row in numbers["sizes"])
    one, two = numbers["ranks"]
    assert (one["calls"], one["reduced_bytes"], one["gathered_bytes"]) == (0, 0, 0)
    width = 96  # of 8 matrices, near to 80,000 parameters
    numel = 8 * width * width
    # Gradients, and a sum of squares of each matrix; then all weights, which the device itself moves by default.
    assert (two["numel"], two["reduced_bytes"], two["calls"]) == (numel, 2 * numel + 4 * 8, 3)
    assert two["gathered_bytes"] == 2 * numel
    assert told.err.count("measuring") == 2 + 2 + len(numbers["cores"]) + 2
