"""`examples/accuracy.py` and what it trains: short runs of its own commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.test_finetune_sentiment import needs_minilm

REPO = Path(__file__).resolve().parents[2]


def run(*words: str, timeout: float = 240) -> str:
    ended = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=REPO,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.long
@pytest.mark.timeout(300)
def test_both_methods_pretrain_the_small_model_and_are_compared(tmp_path: Path) -> None:
    words = ["--seeds", "1", "--rates", "4e-3", "--steps", "60", "--output", str(tmp_path)]
    methods = ["AdamW", "U = 4", "U = 4, interim"]
    run("examples.accuracy", "pretrain", *words, "--methods", *methods)
    results = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert [one["run"]["method"] for one in results] == methods
    for one in results:
        assert len(one["curve"]) == 20 and one["curve"][-1] < 0.8 * one["curve"][0]
    # Same seed: the same first batches, before methods differ.
    first = [one["curve"][0] for one in results]
    assert max(first) - min(first) < 0.3
    run("examples.accuracy", "report", "--output", str(tmp_path))
    assert "| U = 4, interim | 0.004 |" in (tmp_path / "accuracy.md").read_text()


@pytest.mark.long
@pytest.mark.timeout(200)
def test_the_script_for_one_run_says_what_came_out() -> None:
    said = run("examples.pretrain_char_gpt", "--steps", "20", "--update-interval", "2", timeout=150)
    assert "over the last 20 of 20 steps" in said


@needs_minilm
@pytest.mark.long
@pytest.mark.timeout(400)
def test_both_methods_fine_tune_and_are_compared(tmp_path: Path) -> None:
    texts = [(text, 2.5 if number % 2 else -2.5) for number, text in enumerate(["awful", "lovely"] * 40)]
    lines = ["rating\tsplit\ttext"]
    lines += [
        f"{rating}\t{'test' if number % 5 == 0 else 'train'}\t{text} film"
        for number, (text, rating) in enumerate(texts)
    ]
    for name in ("movieReviewSnippets.tsv", "tweets.tsv"):
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    words = ["--data", str(tmp_path), "--seeds", "1", "--tasks", "movie", "tweets", "--output", str(tmp_path)]
    run("examples.accuracy", "finetune", *words)
    results = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert [set(one["figures"]) for one in results] == [{"accuracy", "f1", "loss"}] * 2 + [
        {"pearson", "spearman", "loss"}
    ] * 2
