"""Automatic intervals against the best fixed ones, on two cores: one plays the device, the other the host.

    python -m tests.two_core_auto FACTOR

Makes the host `FACTOR` times slower (it sleeps after each piece of work), sweeps over fixed pairs of intervals, lets the
auto-tuner choose, and then takes turns between its choice and the best pair of the sweep. Prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_zenflow import ZenFlowConfig, ZenFlowStrategy
from lightning_zenflow.offload import process

UPDATE_INTERVALS = (1, 2, 3, 4, 6, 8, 12, 16)
SLOW_FACTOR = 8.0
"""From here on the sweep begins at `SLOW_UPDATE_INTERVALS`: with less, a step waits for the host most of the time."""
SLOW_UPDATE_INTERVALS = (4, 6, 8, 12, 16)
SELECT_INTERVALS = (16, 64)
WIDTH, DEPTH, TOKENS = 256, 6, 96
AUTO_STEPS = 190
"""Ten windows of 16 steps, what is left out after a change, and the first two steps."""
TURNS, TURN_STEPS = 5, 64

Pair = tuple[int, int | None]


def slow_down(factor: float) -> None:
    """Has background processes sleep after each piece of work, so that they take `factor` times as long."""
    patch = f"""
import time
from lightning_zenflow.offload import worker
def slower(work):
    def call(self, *args):
        begin = time.perf_counter()
        work(self, *args)
        time.sleep(({factor} - 1) * (time.perf_counter() - begin))
    return call
worker.HostAdamW._sweep = slower(worker.HostAdamW._sweep)
"""
    process.BOOTSTRAP = process.BOOTSTRAP.replace("main(*", f"exec({patch!r})\nmain(*")


class Mlp(LightningModule):
    """A stack of layers; its loss does not matter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(DEPTH)
        ]
        self.layers = nn.Sequential(*layers)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layers(batch[0]).float().pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-5)


@dataclass
class Turn:
    """Steps at one pair of intervals, without those in which the change was felt."""

    pair: Pair
    secs: list[float] = field(default_factory=list)
    stall_secs: list[float] = field(default_factory=list)

    @property
    def mean_secs(self) -> float:
        return statistics.fmean(self.secs)

    @property
    def stall_ratio(self) -> float:
        return sum(self.stall_secs) / sum(self.secs)


class Program(Callback):
    """Runs the phases one after the other in one training; the tuner is another callback."""

    def __init__(self, update_intervals: tuple[int, ...]) -> None:
        self.update_intervals = update_intervals
        self.turns: list[Turn] = []
        self.decisions: list[str] = []
        self.phases = self._phases()
        self.left = self.skipped = 0

    def _phases(self) -> Iterator[tuple[Pair, int]]:
        """Pairs to set, and for how many steps."""
        for update_interval in self.update_intervals:
            for select_interval in SELECT_INTERVALS:
                yield (update_interval, select_interval), max(32, select_interval)
        best = min(self.turns, key=lambda turn: turn.mean_secs).pair
        yield self.chosen, 8
        self.turns_from = len(self.turns)
        for _ in range(TURNS):
            yield self.chosen, TURN_STEPS
            yield best, TURN_STEPS

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, ZenFlowStrategy)
        stats = strategy.step_stats
        if stats.step < AUTO_STEPS:
            return
        if stats.step == AUTO_STEPS:
            self._end_tuning(trainer)
        if self.left > 0:
            self.left -= 1
            skip = 2 * self.turns[-1].pair[0]
            self.skipped += 1
            if self.skipped > min(16, skip):
                self.turns[-1].secs.append(stats.step_secs)
                self.turns[-1].stall_secs.append(stats.update_stall_secs + stats.select_stall_secs)
        if self.left == 0:
            following = next(self.phases, None)
            if following is None:
                trainer.should_stop = True
                return
            pair, steps = following
            strategy.change_intervals(*pair)
            self.turns.append(Turn(pair))
            self.left, self.skipped = steps + min(16, 2 * pair[0]), 0

    def _end_tuning(self, trainer: Trainer) -> None:
        from lightning_zenflow import AutoTuner

        assert isinstance(trainer.strategy, ZenFlowStrategy)
        self.chosen = trainer.strategy.intervals
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        for callback in [callback for callback in callbacks if isinstance(callback, AutoTuner)]:
            self.decisions += [decision.reason for _, decision in callback.decisions]
            self.last_change = max((step for step, decision in callback.decisions if decision.changed), default=0)
            callbacks.remove(callback)


def main(factor: float) -> dict[str, Any]:
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {0})
    slow_down(factor)
    program = Program(UPDATE_INTERVALS if factor < SLOW_FACTOR else SLOW_UPDATE_INTERVALS)
    inputs = torch.randn(TOKENS, WIDTH).bfloat16()
    loader = DataLoader(TensorDataset(inputs.repeat(8, 1)), batch_size=TOKENS)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        precision="bf16-true",
        max_epochs=-1,
        strategy=ZenFlowStrategy(ZenFlowConfig(worker_cores=[1])),
        callbacks=[program],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Mlp(), loader)
    sweep, duel = (
        program.turns[: len(program.update_intervals) * len(SELECT_INTERVALS)],
        program.turns[program.turns_from :],
    )
    ours, theirs = duel[::2], duel[1::2]
    return {
        "factor": factor,
        "chosen": program.chosen,
        "best": theirs[0].pair,
        "last_change": program.last_change,
        "ratios": [a.mean_secs / b.mean_secs for a, b in zip(ours, theirs, strict=True)],
        "stall_ratio": statistics.median(turn.stall_ratio for turn in ours),
        "least_stall_ratio": min(turn.stall_ratio for turn in sweep),
        "sweep": [[*turn.pair, turn.mean_secs, turn.stall_ratio] for turn in sweep],
        "decisions": program.decisions,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(float(sys.argv[1]))) + "\n")
