"""`examples/accuracy.py`: which runs it makes, what it leaves out, and what its tables say of runs with known results."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from matplotlib.image import imread

from examples import accuracy
from examples.accuracy import METHODS, Result, Run, execute, main, means, read, runs_of
from examples.accuracy_emulated import Emulation
from examples.accuracy_report import best_rates, rows_of, tables
from lightning_zenflow import ZenFlowConfig


def result(method: str, seed: int, value: float, lr: float = 1e-3, figure: str = "loss", size: int = 10) -> Result:
    return Result(Run("pretrain", method, lr, seed, size), {figure: value}, [3.0, 2.0, value])


RESULTS = [
    *(result("AdamW", seed, 2.0 + seed) for seed in range(3)),
    *(result("U = 4", seed, 2.1 + seed + 0.1 * seed) for seed in range(3)),
    result("AdamW", 0, 1.5, lr=2e-3),
    result("U = 4", 0, 2.5, lr=2e-3),
]


def test_every_method_is_a_valid_setting() -> None:
    for name in METHODS:
        settings = Run("pretrain", name, 1e-3, 0, 10).settings
        assert (settings is None) == (name == "AdamW")
        settings = settings.settings if isinstance(settings, Emulation) else settings
        interval = "auto" if name == "defaults" else 64
        assert settings is None or ZenFlowConfig(**settings).select_interval == interval


def test_runs_come_seed_by_seed_and_in_pairs() -> None:
    runs = list(runs_of(["a", "b"], ["AdamW", "U = 4"], [1e-3], seeds=2, size=5))
    assert len(set(runs)) == len(runs) == 8
    assert [run.seed for run in runs] == [0] * 4 + [1] * 4
    assert [run.method for run in runs[:2]] == ["AdamW", "U = 4"] and runs[0].task == runs[1].task


def test_means_spreads_and_paired_differences() -> None:
    rows = {(row.method, row.lr): row for row in rows_of(RESULTS)}
    ours = rows["U = 4", 1e-3]
    assert (ours.seeds, ours.mean) == (3, pytest.approx(3.2))
    assert ours.spread == pytest.approx(1.1)  # 2.1, 3.2, 4.3
    assert ours.difference == pytest.approx(0.2)  # 0.1, 0.2, 0.3
    assert ours.error == pytest.approx(0.1 / math.sqrt(3))
    assert math.isnan(rows["U = 4", 2e-3].error) and rows["U = 4", 2e-3].difference == 1.0


def test_a_seed_without_its_pair_counts_for_the_mean_alone() -> None:
    rows = rows_of([result("AdamW", 0, 1.0), result("U = 4", 0, 2.0), result("U = 4", 1, 6.0)])
    assert (rows[1].mean, rows[1].difference) == (4.0, 1.0)


def test_the_best_rate_is_the_lowest_loss_and_the_highest_of_everything_else() -> None:
    assert {row.method: row.lr for row in best_rates(rows_of(RESULTS))} == {"AdamW": 2e-3, "U = 4": 2e-3}
    scores = [result("AdamW", 0, 0.5, figure="f1"), result("AdamW", 0, 0.7, lr=2e-3, figure="f1")]
    assert best_rates(rows_of(scores))[0].lr == 2e-3


@pytest.mark.parametrize("lost", [math.nan, math.inf])
def test_a_run_that_diverged_is_shown_and_is_no_ones_best(lost: float) -> None:
    results = [
        result("AdamW", 0, lost),
        result("AdamW", 1, 2.0),
        *(result("AdamW", seed, 3.0, 2e-3) for seed in (0, 1)),
    ]
    rows = rows_of([*results, result("U = 4", 0, 1.0), result("U = 4", 1, 2.5)])
    assert not math.isfinite(rows[0].mean) and math.isnan(rows[0].spread)
    assert math.isnan(rows[2].error) and rows[2].spread == pytest.approx(1.5 / math.sqrt(2))
    assert {row.method: row.lr for row in best_rates(rows)} == {"AdamW": 2e-3, "U = 4": 1e-3}


def test_runs_of_different_sizes_are_no_pairs() -> None:
    short = [result("AdamW", 0, 3.1, size=20), result("U = 4", 0, 3.0, size=20)]
    rows = rows_of([result("U = 4", 0, 0.9), *short, result("AdamW", 0, 1.0)])
    assert {(row.task, row.method): (row.mean, row.seeds) for row in rows} == {
        ("pretrain, size 10", "U = 4"): (0.9, 1),
        ("pretrain, size 20", "AdamW"): (3.1, 1),
        ("pretrain, size 20", "U = 4"): (3.0, 1),
        ("pretrain, size 10", "AdamW"): (1.0, 1),
    }
    assert [row.difference for row in rows if row.method == "U = 4"] == [pytest.approx(-0.1), pytest.approx(-0.1)]
    assert rows_of(short)[0].task == "pretrain"


def test_tables_show_all_rates_and_then_each_ones_best() -> None:
    text = tables(rows_of(RESULTS))
    assert "## pretrain: loss" in text and "| U = 4 | 0.001 | 3.2000 | 1.1000 | +0.2000 ± 0.0577 | 3 |" in text
    assert text.split("own best rate:")[1].count("| U = 4 | 0.002 | 2.5000 | nan | +1.0000 | 1 |") == 1


def test_means_over_pieces_of_a_run() -> None:
    assert means([1.0, 3.0, 5.0, 7.0], 2) == [2.0, 6.0]
    assert means([1.0], 2) == [1.0]
    assert sum(means([float(value) for value in range(103)], 20)) / 20 == pytest.approx(51, abs=0.5)


def test_a_command_goes_on_where_it_was(tmp_path: Path) -> None:
    path, runs = tmp_path / "out" / "runs.jsonl", list(runs_of(["a"], ["AdamW"], [1e-3], 3, 5))
    seen: list[Run] = []

    def train(run: Run) -> Result:
        if run.seed == 2 and len(seen) < 3:
            raise KeyboardInterrupt
        seen.append(run)
        return Result(run, {"loss": 1.0})

    with pytest.raises(KeyboardInterrupt):
        execute(runs, path, train)
    assert [one.run for one in read(path)] == runs[:2]
    seen.append(runs[2])
    execute(runs, path, train)
    assert [one.run for one in read(path)] == runs and seen[3:] == [runs[2]]


def test_a_line_that_is_no_result_is_named(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text('{"run": {"task": "a"}}\n')
    with pytest.raises(ValueError, match=r"must be results of this program, got .* in line 1\. Remove it"):
        read(path)


def test_a_report_has_tables_and_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"must be a folder with runs\.jsonl"):
        main(["report", "--output", str(tmp_path)])
    monkeypatch.setattr(accuracy, "read", lambda path: RESULTS)
    main(["report", "--output", str(tmp_path)])
    assert "own best rate" in (tmp_path / "accuracy.md").read_text()
    assert imread(tmp_path / "accuracy.png").shape[1] > 800
    with pytest.raises(
        ValueError, match=r"`curves` must name methods with runs, got \['U = 8'\].*runs of AdamW, U = 4\."
    ):
        main(["report", "--output", str(tmp_path), "--curves", "U = 8"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("pretrain --seeds 0", "argument --seeds: must be at least 1, got 0"),
        ("finetune --data here --epochs -1", "argument --epochs: must be at least 1, got -1"),
        ("pretrain --steps many", "argument --steps: invalid count value: 'many'"),
        ("finetune --data here --tasks nyt", "--data must be a folder with nytEditorialSnippets.tsv, got 'here'. Give"),
    ],
)
def test_a_command_that_could_not_run_is_refused_before_anything_runs(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def execute(*given: object) -> None:
        raise AssertionError("nothing can run")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(accuracy, "execute", execute)
    with pytest.raises(SystemExit):
        main(words.split())
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("part", ["pretrain", "finetune", "report"])
def test_the_help_has_a_word_on_every_option(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([part, "--help"])
    said = capsys.readouterr().out
    assert part == "report" or all(repr(name) in " ".join(said.split()) for name in METHODS)
    options = re.split(r"^  (?=-)", said.partition("options:")[2], flags=re.MULTILINE)[1:]
    assert len(options) >= 3
    for option in options:
        assert re.search(r"\S\s{2,}\S", option), option
