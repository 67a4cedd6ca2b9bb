"""`examples/accuracy.py` and what it trains: short runs of its own commands."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from examples import pretrain_char_gpt
from examples.accuracy_emulated import Emulation, trained_by
from examples.pretrain_char_gpt import pretrain
from tests.integration.test_finetune_sentiment import needs_minilm
from tests.modules import EXPECTED_WARNINGS, OFTEN, Small, fit_plainly, three_groups, weights

pytestmark = [*EXPECTED_WARNINGS, pytest.mark.usefixtures("own_process_group")]

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


def falling(module: Small) -> dict[str, Any]:
    """Three groups, and a rate that changes at every step."""
    optimizer = three_groups(module)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@pytest.mark.parametrize("settings", [{}, {"overlap_step": False, "full_warm_up_rounds": 2}], ids=["overlap", "none"])
def test_an_emulation_is_the_strategy_under_the_same_trainer(settings: dict[str, Any]) -> None:
    """Groups, rates, clipping and the last settle. Gradients are clipped at most steps."""
    zenflow = {**OFTEN, **settings}
    modules = []
    for method in (zenflow, Emulation(settings=zenflow)):
        strategy, callbacks = trained_by(method)
        modules.append(Small(configure=falling))
        fit_plainly(modules[-1], strategy=strategy, callbacks=callbacks, gradient_clip_val=0.3)
    real, emulated = modules
    assert real.losses == pytest.approx(emulated.losses, rel=1e-5) and len(set(real.losses)) == 10
    assert (weights(real) - weights(emulated)).abs().max() < 1e-5


def test_an_emulation_pretrains_as_the_strategy_does() -> None:
    """The same batches, and so the same losses."""
    run: dict[str, Any] = {"lr": 8e-3, "seed": 3, "steps": 8, "width": 16}
    real, emulated, plain = (pretrain(method, **run) for method in (OFTEN, Emulation(settings=OFTEN), None))
    assert real == pytest.approx(emulated, abs=1e-4)
    assert plain[0] == pytest.approx(real[0], abs=1e-6) and abs(plain[-1] - real[-1]) > 1e-3


@pytest.mark.long
@pytest.mark.timeout(300)
def test_both_methods_pretrain_the_small_model_and_are_compared(tmp_path: Path) -> None:
    words = ["--seeds", "1", "--rates", "4e-3", "--steps", "60", "--output", str(tmp_path)]
    methods = ["AdamW", "U = 4", "U = 4, no interim step"]
    run("examples.accuracy", "pretrain", *words, "--methods", *methods)
    results = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert [one["run"]["method"] for one in results] == methods
    for one in results:
        assert len(one["curve"]) == 20 and one["curve"][-1] < 0.8 * one["curve"][0]
    run("examples.accuracy", "report", "--output", str(tmp_path))
    assert "| U = 4, no interim step | 0.004 |" in (tmp_path / "accuracy.md").read_text()


@pytest.mark.timeout(100)
def test_the_same_seed_has_the_same_weights_and_batches_with_any_method() -> None:
    """A sampler for several devices would draw other batches."""
    settings: tuple[dict[str, Any] | None, ...] = (None, {"update_interval": 2})
    first, second = (pretrain_char_gpt.pretrain(method, lr=1e-9, seed=3, steps=3, width=32) for method in settings)
    assert first == pytest.approx(second, rel=1e-4)  # nothing moves at this rate
    assert abs(first[0] - first[1]) > 1e-3  # while batches differ by more than that


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
        f"{rating}\t{['test', 'validation', 'train'][min(2, number % 5)]}\t{text} film"
        for number, (text, rating) in enumerate(texts)
    ]
    for name in ("movieReviewSnippets.tsv", "tweets.tsv"):
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    words = ["--data", str(tmp_path), "--seeds", "1", "--tasks", "movie", "tweets", "--output", str(tmp_path)]
    run("examples.accuracy", "finetune", *words)
    results = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert [set(one["figures"]) for one in results] == [{"accuracy", "f1", "loss"}] * 3 + [
        {"pearson", "spearman", "loss"}
    ] * 3  # AdamW and two of ZenFlow


@pytest.mark.parametrize(("given", "moves"), [([], True), (["--interim-step"], True), (["--no-interim-step"], False)])
def test_the_pretraining_has_the_interim_step_of_a_user_who_sets_nothing(
    given: list[str], moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []

    def pretrain(settings: dict[str, Any], **others: Any) -> list[float]:
        seen.append(settings)
        return [1.0]

    monkeypatch.setattr(pretrain_char_gpt, "pretrain", pretrain)
    monkeypatch.setattr("sys.argv", ["pretrain_char_gpt", *given])
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    try:
        pretrain_char_gpt.main()
    finally:
        logger.setLevel(level)  # the tests behind this one look at what is logged
    assert [settings["interim_step"] for settings in seen] == [moves]
