"""Synthetic machines: observations as a real run would make them, from a queue worked through in simulated time.

The host takes one command after the other (accumulate, update a block); the trainer waits at the end of a step for the block
that is due. Nothing here knows how the tuner thinks: what a wait costs follows from the order of events alone.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from lightning_zenflow.tuner import Controller, Decision, Intervals, Observation, Window, WindowCollector


@dataclass(frozen=True)
class Machine:
    """What a machine is like; times in seconds.

    Attributes:
        device_secs: Compute of a step, undisturbed.
        accumulate_secs: Host work for a gradient, undisturbed.
        adam_secs: Host work for AdamW on everything.
        transfer_secs: What a barrier takes besides host work.
        overlap: Whether a block may arrive one step late.
        noise_ratio: Standard deviation of the logarithm of every time.
        spike_ratio: Share of steps with a pause of up to five steps in them, on one of both sides.
        contention: How many times longer host work takes while the device is busy.
        drag: How much longer the device takes while the host is busy, as a share.
        hidden_secs: Wait per host command that its busy time does not show.
        agreement: Share of columns that a re-selection keeps.
        mass_ratio: Deferred share of the gradient's squared norm.
        copy_secs: Work of the device to copy all blocks into the weights; a step copies one of them, a barrier all.
    """

    device_secs: float = 0.1
    accumulate_secs: float = 0.02
    adam_secs: float = 0.2
    transfer_secs: float = 0.05
    overlap: bool = True
    noise_ratio: float = 0.0
    spike_ratio: float = 0.0
    contention: float = 1.0
    drag: float = 0.0
    hidden_secs: float = 0.0
    agreement: float = 0.85
    mass_ratio: float = 0.5
    copy_secs: float = 0.0


@dataclass
class _Command:
    kind: str
    step: int
    work_secs: float
    hidden_secs: float
    busy_secs: float = 0.0


class Run:
    """A run of training on a machine; `machine` may be replaced at any time."""

    def __init__(self, machine: Machine, intervals: Intervals, seed: int = 0) -> None:
        self.machine, self.step = machine, 0
        self._random = random.Random(seed)
        self._queue: list[_Command] = []
        self._last = {"accumulate": 0.0, "update": 0.0}
        self._intervals, self._next_selection = intervals, 1

    @property
    def intervals(self) -> Intervals:
        return self._intervals

    def use(self, intervals: Intervals) -> None:
        """Changes the intervals between two steps; another number of blocks needs an idle host."""
        if intervals.update_interval != self._intervals.update_interval:
            self._drain()
        if intervals.select_interval != self._intervals.select_interval and intervals.select_interval is not None:
            self._next_selection = self.step + intervals.select_interval
        self._intervals = intervals

    def observe(self) -> Observation:
        """One step."""
        machine, self.step = self.machine, self.step + 1
        pause = self._pause()
        on_host = self._random.random() < 0.5
        device = self._compute(self._noisy(machine.device_secs) + (0.0 if on_host else pause))
        stall, select, copy, agreement, mass = 0.0, 0.0, 0.0, None, None
        stall += self._wait("accumulate", self.step - 2)  # the slot of the last one is overwritten behind the host
        if self._intervals.select_interval is not None and self.step == self._next_selection:
            self._next_selection += self._intervals.select_interval
            first = self.step == 1
            device += self._compute(0.2 * machine.device_secs)  # scores
            select = self._barrier(first)
            agreement, mass = None if first else machine.agreement, machine.mass_ratio
        self._launch("accumulate", machine.accumulate_secs, pause if on_host else 0.0)
        self._launch("update", machine.adam_secs / self._intervals.update_interval)
        stall += self._wait("update", self.step - (1 if machine.overlap else 0))
        if machine.copy_secs and select == 0:  # else the barrier has brought what was under way
            copy = self._compute(self._noisy(machine.copy_secs) / self._intervals.update_interval)
        return Observation(
            step_secs=device + copy + stall + select,
            update_stall_secs=stall,
            select_stall_secs=select,
            accumulate_secs=self._last["accumulate"],
            update_secs=self._last["update"],
            agreement=agreement,
            deferred_mass_ratio=mass,
            copy_secs=copy,
        )

    def _noisy(self, secs: float) -> float:
        return secs * math.exp(self._random.gauss(0.0, self.machine.noise_ratio)) if self.machine.noise_ratio else secs

    def _pause(self) -> float:
        happens = self._random.random() < self.machine.spike_ratio
        return self._random.uniform(0.5, 5.0) * self.machine.device_secs if happens else 0.0

    def _launch(self, kind: str, secs: float, pause: float = 0.0) -> None:
        self._queue.append(_Command(kind, self.step, self._noisy(secs) + pause, self.machine.hidden_secs))

    def _compute(self, work_secs: float) -> float:
        """The device computes while the host works through its queue; returns how long it takes."""
        taken = 0.0
        while work_secs > 0:
            if not self._queue:
                return taken + work_secs
            slow = 1 + self.machine.drag
            host_secs = self._host_secs(self._queue[0], device_busy=True)
            if host_secs > work_secs * slow:
                self._work(self._queue[0], work_secs * slow, device_busy=True)
                return taken + work_secs * slow
            taken, work_secs = taken + host_secs, work_secs - host_secs / slow
            self._finish(host_secs)
        return taken

    def _host_secs(self, command: _Command, device_busy: bool) -> float:
        return command.hidden_secs + command.work_secs * (self.machine.contention if device_busy else 1.0)

    def _work(self, command: _Command, secs: float, device_busy: bool) -> None:
        """Lets the host go on with a command for less time than it needs."""
        hidden = min(secs, command.hidden_secs)
        command.hidden_secs -= hidden
        command.busy_secs += secs - hidden
        command.work_secs -= (secs - hidden) / (self.machine.contention if device_busy else 1.0)

    def _finish(self, host_secs: float) -> None:
        command = self._queue.pop(0)
        self._last[command.kind] = command.busy_secs + host_secs - command.hidden_secs

    def _wait(self, kind: str, step: int) -> float:
        """The trainer waits until a command is done; the device is idle meanwhile."""
        waited = 0.0
        while any(command.kind == kind and command.step <= step for command in self._queue):
            secs = self._host_secs(self._queue[0], device_busy=False)
            self._finish(secs)
            waited += secs
        return waited

    def _drain(self) -> float:
        return self._wait("accumulate", self.step) + self._wait("update", self.step)

    def _barrier(self, first: bool) -> float:
        waited = self._drain()
        if not first:
            for _ in range(self._intervals.update_interval):
                self._launch("update", self.machine.adam_secs / self._intervals.update_interval)
            waited += self._drain()
        return waited + self._noisy(self.machine.transfer_secs + self.machine.copy_secs) + self._pause()


@dataclass(frozen=True)
class Cost:
    """What fixed intervals cost on a machine, measured on many steps of it without pauses."""

    step_secs: float
    update_stall_ratio: float
    barrier_secs: float
    copy_ratio: float


def cost_of(machine: Machine, update_interval: int, steps: int = 400, seed: int = 77) -> Cost:
    """Measures `update_interval`; shares are of the step without barriers, that of copies also without stalls."""
    calm = replace(machine, spike_ratio=0.0)
    run = Run(calm, Intervals(update_interval, None), seed)
    seen = [run.observe() for _ in range(steps)][4:]
    step = sum(one.step_secs for one in seen) / len(seen)
    selecting = Run(calm, Intervals(update_interval, 10), seed)
    barriers = [one.select_stall_secs for one in (selecting.observe() for _ in range(200)) if one.agreement is not None]
    stall = sum(one.update_stall_secs for one in seen) / len(seen)
    copy = sum(one.copy_secs for one in seen) / len(seen)
    return Cost(step, stall / step, sum(barriers) / len(barriers), copy / (step - stall))


def best_update_interval(machine: Machine, stall_budget: float = 0.05, highest: int = 16) -> int:
    """By trying them all: the smallest whose stall and copies each keep to half of the budget, or else the smallest
    within 2 % of the fastest step."""
    costs = {interval: cost_of(machine, interval) for interval in range(1, highest + 1)}
    for interval, cost in costs.items():
        if max(cost.update_stall_ratio, cost.copy_ratio) <= stall_budget / 2:
            return interval
    fastest = min(cost.step_secs for cost in costs.values())
    return next(interval for interval, cost in costs.items() if cost.step_secs <= 1.02 * fastest)


def tune(run: Run, controller: Controller, collector: WindowCollector, windows: int) -> Iterator[Decision]:
    """Trains for some windows with the tuner in charge, as the callback does it; yields its decisions."""
    while windows > 0:
        window = collector.add(run.observe())
        if window is None:
            continue
        windows -= 1
        decision = controller.decide(Window.from_numbers(window.to_numbers()))
        if decision.changed:
            run.use(decision.intervals)
            if decision.skip_steps:
                collector.restart(decision.skip_steps)
        collector.window_steps = controller.window_steps
        yield decision
