"""The auto-tuner in charge of a synthetic machine, and what trying all intervals on that machine finds.

"Best" is the smallest interval that keeps to its half of the stall budget, or else the smallest within 2 % of the shortest
step, by brute force over the simulator, which knows nothing of the tuner.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from lightning_zenflow.tuner import Controller, Decision, Intervals, TunerOptions, Window, WindowCollector
from tests.machines import Machine, Run, best_update_interval, cost_of, tune

START = Intervals(4, 16)
SETTLED_AFTER_WINDOWS = 10
LADDER = sorted({2**n for n in range(13)} | {3 * 2**n for n in range(11)})
NOISE: dict[str, Any] = {"noise_ratio": 0.1, "spike_ratio": 0.01}

best = lru_cache(maxsize=None)(best_update_interval)
cost = lru_cache(maxsize=None)(cost_of)


def host(ratio: float, accumulate_ratio: float = 0.1, **other: Any) -> Machine:
    """A machine whose host needs `ratio` times the device's time for everything at once."""
    work = 0.1 * ratio
    accumulate = min(0.08, work * accumulate_ratio)
    return Machine(device_secs=0.1, accumulate_secs=accumulate, adam_secs=work - accumulate, **other)


def random_machines(count: int, seed: int) -> Iterator[Machine]:
    draw = random.Random(seed)
    for _ in range(count):
        disturbance = draw.choice([{}, {}, {"contention": 1.5}, {"drag": 0.4}, {"hidden_secs": 0.003}])
        yield host(
            math.exp(draw.uniform(math.log(0.1), math.log(16))), draw.uniform(0.05, 0.35), **NOISE, **disturbance
        )


def best_select_interval(machine: Machine, update_interval: int) -> int:
    measured = cost(machine, update_interval)
    return next(rung for rung in LADDER if measured.barrier_secs / rung <= 0.025 * measured.step_secs)


def is_within_budget(machine: Machine, intervals: Intervals) -> bool:
    """Whether both stalls together take at most 5 % of the step time at fixed intervals."""
    assert intervals.select_interval is not None
    measured = cost(machine, intervals.update_interval)
    barriers = measured.barrier_secs / intervals.select_interval
    stalls = measured.update_stall_ratio * measured.step_secs + barriers
    return stalls <= 0.05 * (measured.step_secs + barriers)


class Tuned:
    """A run with the tuner in charge; `run.machine` may be replaced at any time."""

    def __init__(
        self, machine: Machine, start: Intervals = START, seed: int = 0, options: TunerOptions | None = None
    ) -> None:
        self.run = Run(machine, start, seed)
        self.controller = Controller(options or TunerOptions(overlap=machine.overlap), start)
        self.collector = WindowCollector(self.controller.window_steps)

    def windows(self, count: int) -> list[Decision]:
        """Trains on for so many windows."""
        decisions = list(tune(self.run, self.controller, self.collector, count))
        assert all(one.intervals == after.previous for one, after in itertools.pairwise(decisions))
        return decisions

    @property
    def update_interval(self) -> int:
        return self.controller.intervals.update_interval

    @property
    def select_interval(self) -> int:
        assert self.controller.intervals.select_interval is not None
        return self.controller.intervals.select_interval

    def assert_near_the_best(self) -> None:
        """Within one step of the best fixed update interval, one rung of the best selection interval, and in budget."""
        machine = self.run.machine
        assert abs(self.update_interval - best(machine)) <= 1
        best_select = best_select_interval(machine, self.update_interval)
        assert abs(LADDER.index(self.select_interval) - LADDER.index(best_select)) <= 1
        if cost(machine, best(machine)).update_stall_ratio <= 0.025:
            assert is_within_budget(machine, self.controller.intervals)


def update_changes(decisions: list[Decision]) -> list[int]:
    """Numbers of the windows, from 1, after which `update_interval` changed."""
    return [
        number
        for number, one in enumerate(decisions, start=1)
        if one.intervals.update_interval != one.previous.update_interval
    ]


def copying_window(update_interval: int, whole_copy_secs: float, bare_secs: float = 0.1) -> Window:
    """Sixteen equal steps of a machine with a quick host, whose device takes `bare_secs` without copying."""
    copy_secs = whole_copy_secs / update_interval
    return Window(16, bare_secs + copy_secs, 0.0, None, 0.001, 0.004 / update_interval, copy_secs=copy_secs)
