"""ZenFlow side by side with AdamW, over seeds: the runs, one line of JSON each, and what they come to.

    python -m examples.accuracy pretrain --output accuracy
    python -m examples.accuracy finetune --data data/sentiment --output accuracy
    python -m examples.accuracy report --output accuracy

Runs that `accuracy/runs.jsonl` has already are left out, so a command that was interrupted goes on where it was. `report`
writes tables (`accuracy.md`) and curves (`accuracy.png`) into the same folder. AdamW is plain PyTorch with weights in fp32; a
pair of runs has the same seed, so the same first weights and the same batches.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rich.progress import track

from examples.accuracy_emulated import Emulation, Method
from examples.accuracy_report import write_report
from examples.accuracy_sliced import SlicedReference
from examples.accuracy_trials import OneBudget, PaperForm, ScoresByAdam, SmoothedScores

FIXED: dict[str, Any] = {"select_strategy": "step", "select_interval": 64, "update_interval": 4}
"""Unless a method says otherwise: intervals that follow measured times would be others in each run."""

AUTO: dict[str, Any] = {"select_strategy": "auto", "select_interval": "auto", "update_interval": "auto"}

PAPER: dict[str, Any] = {"update_interval": 4, "look_ahead": False, "interim_step": False}

METHODS: dict[str, Method] = {
    "AdamW": None,
    "defaults": AUTO,
    **{f"U = {steps}": {"update_interval": steps} for steps in (4, 1, 2, 8, 16)},
    **{f"U = {steps}, no interim step": {"update_interval": steps, "interim_step": False} for steps in (4, 1, 2, 8)},
    **{f"U = 4, k = {ratio}": {"topk_ratio": ratio} for ratio in (0.01, 0.05, 0.3)},
    **{f"U = 4, rate {scale}": {"deferred_lr_scale": scale} for scale in ("sqrt", "none")},
    "U = 4, no look-ahead": {"look_ahead": False},
    "U = 4, emulated": Emulation(SlicedReference, {"update_interval": 4}),
    "U = 4, smoothed scores": Emulation(SmoothedScores, {"update_interval": 4}),
    "U = 4, scores by Adam": Emulation(ScoresByAdam, {"update_interval": 4}),
    "U = 4, one budget": Emulation(OneBudget, {"update_interval": 4}),
    "paper's form, U = 4": Emulation(PaperForm, PAPER),
    "paper's form, U = 4, no overlap": Emulation(PaperForm, {**PAPER, "overlap_step": False}),
}
"""By the name that tables show: what differs from `FIXED` and the defaults of `ZenFlowConfig`; `None` is plain AdamW.

Emulations keep their weights in fp32: beside ZenFlow with 16-bit weights, "U = 4, emulated" is what to compare others with."""

TASKS: dict[str, tuple[str, Literal["classification", "regression"]]] = {
    "movie": ("movieReviewSnippets.tsv", "classification"),
    "amazon": ("amazonReviewSnippets.tsv", "regression"),
    "nyt": ("nytEditorialSnippets.tsv", "regression"),
    "tweets": ("tweets.tsv", "regression"),
}
"""Of fine-tuning: file and kind."""


@dataclass(frozen=True)
class Run:
    """What a run is, apart from what came out."""

    task: str
    method: str
    lr: float
    seed: int
    size: int
    """Steps, or epochs for fine-tuning."""

    @property
    def settings(self) -> Method:
        method = METHODS[self.method]
        if method is None:
            return None
        if isinstance(method, Emulation):
            return replace(method, settings={**FIXED, **method.settings})
        return {**FIXED, **method}


@dataclass(frozen=True)
class Result:
    """What came out: figures by name, and the course of the loss, each value a mean over a twentieth of the run."""

    run: Run
    figures: dict[str, float]
    curve: list[float] = field(default_factory=list)
    secs: float = 0.0


def pretraining(run: Run) -> Result:
    from examples.pretrain_char_gpt import LAST_STEPS, pretrain

    losses = pretrain(run.settings, lr=run.lr, seed=run.seed, steps=run.size)
    last = losses[-LAST_STEPS:]
    return Result(run, {"loss": sum(last) / len(last)}, means(losses, 20))


def finetuning(folder: Path) -> Callable[[Run], Result]:
    def finetune(run: Run) -> Result:
        from examples.accuracy_finetune import finetune as train

        name, kind = TASKS[run.task]
        figures, losses = train(folder / name, kind, run.settings, lr=run.lr, seed=run.seed, epochs=run.size)
        return Result(run, figures, means(losses, 20))

    return finetune


def means(values: list[float], parts: int) -> list[float]:
    """The means of `parts` equal pieces of a list, or the list if it is shorter."""
    if len(values) < parts:
        return values
    cuts = [round(number * len(values) / parts) for number in range(parts + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(cuts)]


def runs_of(
    tasks: Iterable[str], methods: Iterable[str], rates: Iterable[float], seeds: int, size: int
) -> Iterator[Run]:
    """All of one seed before the next: whoever stops early has whole pairs."""
    tasks, methods, rates = list(tasks), list(methods), list(rates)
    for seed in range(seeds):
        for task in tasks:
            for lr in rates:
                for method in methods:
                    yield Run(task, method, lr, seed, size)


def read(path: Path) -> list[Result]:
    """Results of earlier commands.

    Raises:
        ValueError: A line is none.
    """
    results = []
    for number, line in enumerate(path.read_text().splitlines() if path.exists() else [], start=1):
        try:
            fields = json.loads(line)
            results.append(Result(**{**fields, "run": Run(**fields["run"])}))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"Lines of {path} must be results of this program, got {line[:60]!r} in line {number}. Remove it."
            ) from error
    return results


def execute(wanted: Iterable[Run], path: Path, train: Callable[[Run], Result]) -> None:
    """Runs what `path` does not have yet, and adds a line for each when it has ended."""
    path.parent.mkdir(parents=True, exist_ok=True)
    done = {result.run for result in read(path)}
    missing = [run for run in wanted if run not in done]
    for run in track(missing, description=f"{len(missing)} runs", transient=True):
        begin = time.monotonic()
        result = asdict(train(run))
        result["secs"] = round(time.monotonic() - begin, 1)
        result["curve"] = [round(value, 4) for value in result["curve"]]
        with path.open("a") as lines:
            lines.write(json.dumps(result) + "\n")


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = parser.add_subparsers(dest="part", required=True)
    for name, size, unit, rates, what in (
        ("pretrain", 400, "steps", [2e-3, 4e-3, 8e-3], "trains the quickstart's model from scratch"),
        ("finetune", 1, "epochs", [5e-5], "fine-tunes a pretrained model on rated texts"),
    ):
        part = parts.add_parser(name, help=what)
        seeds = 3 if name == "pretrain" else 5
        part.add_argument(
            "--seeds", type=count, default=seeds, metavar="N", help="how many, from 0 (default: %(default)s)"
        )
        part.add_argument("--rates", type=float, nargs="+", default=rates, metavar="LR", help="default: %(default)s")
        part.add_argument(
            "--methods",
            nargs="+",
            choices=list(METHODS),
            default=["AdamW", "defaults", "U = 4"],
            metavar="METHOD",
            help=f"of {', '.join(map(repr, METHODS))} (default: %(default)s)",
        )
        part.add_argument(f"--{unit}", dest="size", type=count, default=size, metavar="N", help="default: %(default)s")
        part.add_argument(
            "--output", type=Path, default=Path("accuracy"), metavar="FOLDER", help="default: %(default)s"
        )
        if name == "finetune":
            part.add_argument("--data", type=Path, required=True, metavar="FOLDER", help="of the tasks' files")
            part.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), help="default: all")
    report = parts.add_parser("report", help="writes tables and curves of what has been run")
    report.add_argument("--output", type=Path, default=Path("accuracy"), metavar="FOLDER", help="default: %(default)s")
    report.add_argument("--curves", nargs="+", choices=list(METHODS), metavar="METHOD", help="draw these alone")
    return parser


def count(text: str) -> int:
    """A whole number from 1."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return number


def main(words: list[str] | None = None) -> None:
    parser = arguments()
    given = parser.parse_args(words)
    path = given.output / "runs.jsonl"
    if given.part == "report":
        write_report(read(path), given.output, given.curves)
        return
    for task in given.tasks if given.part == "finetune" else ():
        if not (given.data / TASKS[task][0]).is_file():
            parser.error(
                f"--data must be a folder with {TASKS[task][0]}, got {str(given.data)!r}. Give another folder, or --tasks"
                f" without {task}."
            )
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    tasks = ["pretrain"] if given.part == "pretrain" else given.tasks
    train = pretraining if given.part == "pretrain" else finetuning(given.data)
    execute(runs_of(tasks, given.methods, given.rates, given.seeds, given.size), path, train)


if __name__ == "__main__":
    main()
