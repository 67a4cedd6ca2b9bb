"""The methods side by side, over how much slower the host is than the device."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

from lightning_zenflow.stats import StepStats

from .methods import Method, ShardMethod
from .pace import Clock, StepCost
from .tuned import TunedZenFlow
from .whole_model import WholeModel
from .workload import Workload

SYNCHRONOUS, WHOLE_MODEL, ZENFLOW, TUNED = "synchronous", "whole_model", "zenflow", "zenflow_auto"
METHODS = (SYNCHRONOUS, WHOLE_MODEL, ZENFLOW, TUNED)

ROUNDS, SHORT_ROUNDS = 2, 4
"""How often each method has its turn at a ratio: more often where the host is the slower side, and steps are short. The
fastest turn counts: whoever else uses the machine only slows down."""

HOST_STEPS = 12


@dataclass(frozen=True)
class Point:
    """What a method cost at a ratio, in seconds; means over steps.

    Attributes:
        method: One of `METHODS`.
        ratio: Host seconds for one update of everything, by device seconds of a step.
        update_interval: Steps in which each element is updated once.
        compute_secs: Forward and backward, as given.
        step_secs: A step.
        slowest_step_secs: The slowest of them.
        host_wait_secs: The device waited for the background process.
        link_wait_secs: It waited for copies.
        host_busy_secs: Work of the background process for a step; `None` where two of them share its cores.
    """

    method: str
    ratio: float
    update_interval: int
    compute_secs: float
    step_secs: float
    slowest_step_secs: float
    host_wait_secs: float
    link_wait_secs: float
    host_busy_secs: float | None

    @property
    def stall_ratio(self) -> float:
        """Share of the step during which the device does not compute, for whatever reason."""
        return max(0.0, 1 - self.compute_secs / self.step_secs)


@dataclass(frozen=True)
class Simulation:
    """All points, and what they were measured with.

    Attributes:
        workload: What was trained.
        link_bandwidth: Of the simulated link, bytes/s per direction.
        update_interval: Of ZenFlow and of the whole model's form.
        host_update_secs: Measured: an update of everything by the background process, while the device waits.
        points: By ratio, then by method.
    """

    workload: Workload
    link_bandwidth: float
    update_interval: int
    host_update_secs: float
    points: tuple[Point, ...]

    @property
    def ratios(self) -> list[float]:
        """All ratios, in order."""
        return sorted({point.ratio for point in self.points})

    def point(self, method: str, ratio: float) -> Point:
        """What `method` cost at `ratio`."""
        return next(point for point in self.points if (point.method, point.ratio) == (method, ratio))

    @property
    def drift(self) -> float:
        """How many times as long the host's update took at one ratio as at another, or as when it was measured first."""
        secs = [self.point(SYNCHRONOUS, ratio).host_busy_secs or self.host_update_secs for ratio in self.ratios]
        return max(*secs, self.host_update_secs) / min(*secs, self.host_update_secs)

    def speedup(self, point: Point) -> float:
        """How many times as fast as the synchronous schedule it is."""
        return self.point(SYNCHRONOUS, point.ratio).step_secs / point.step_secs


def simulate(
    workload: Workload,
    link_bandwidth: float,
    update_interval: int,
    ratios: Sequence[float],
    steps: int,
    clock: Clock,
    tell: Callable[[str], object],
) -> Simulation:
    """Measures all methods at all ratios.

    Args:
        workload: What to train.
        link_bandwidth: Of the link, bytes/s per direction.
        update_interval: Of ZenFlow and of the whole model's form.
        ratios: Host seconds for one update of everything, by device seconds of a step.
        steps: Steps of each round, at least; rounded up to whole intervals.
        clock: What tells the time.
        tell: Gets a line about what comes next.

    Raises:
        MemoryError: The host's memory does not suffice.
        WorkerDied: A background process has ended.
        WorkerTimeout: One has not answered.
    """
    with ExitStack() as opened:
        tell("Starting background processes")
        synchronous = opened.enter_context(closing(ShardMethod.synchronous(workload, link_bandwidth, clock)))
        methods: dict[str, Method] = {SYNCHRONOUS: synchronous}
        for name, make in ((WHOLE_MODEL, WholeModel), (ZENFLOW, ShardMethod.zenflow)):
            methods[name] = opened.enter_context(closing(make(workload, link_bandwidth, clock, update_interval)))
        methods[TUNED] = opened.enter_context(closing(TunedZenFlow(workload, link_bandwidth, clock)))
        tell("Measuring how long the host takes to update everything")
        host_secs = _host_update_secs(synchronous)
        points: list[Point] = []
        for number, ratio in enumerate(sorted(ratios), 1):  # upwards: see `TunedZenFlow`
            tell(f"Ratio {ratio:g} ({number} of {len(ratios)}): {1e3 * host_secs / ratio:.3g} ms of computing a step")
            points += _measure(methods, ratio, host_secs / ratio, steps)
    return Simulation(workload, link_bandwidth, update_interval, host_secs, tuple(points))


def _host_update_secs(method: ShardMethod) -> float:
    """The smallest of some medians, the first of which has touched the memory."""
    medians = []
    for _ in range(1 + SHORT_ROUNDS):
        secs = []
        for _ in range(HOST_STEPS):
            method.train(0.0)
            secs.append(method.stats.worker_update_secs)
        medians.append(statistics.median(secs))
    return min(medians[1:])


def _measure(methods: dict[str, Method], ratio: float, compute_secs: float, steps: int) -> list[Point]:
    rounds: dict[str, list[Point]] = {name: [] for name in methods}
    for number in range(SHORT_ROUNDS if ratio >= 1 else ROUNDS):
        for name, method in methods.items():
            if isinstance(method, TunedZenFlow) and number == 0:
                method.tune(compute_secs)
            rounds[name].append(_round(name, method, ratio, compute_secs, steps))
    return [min(points, key=lambda point: point.step_secs) for points in rounds.values()]


def _round(name: str, method: Method, ratio: float, compute_secs: float, steps: int) -> Point:
    """Whole intervals, so that the spikes of one are neither missed nor counted twice; the first is not counted."""
    interval = method.update_interval
    for _ in range(-(-4 // interval) * interval):  # what was queued at another pace is worked off
        method.train(compute_secs)
    costs: list[StepCost] = []
    busy_secs: list[float] = []
    for _ in range(-(-steps // interval) * interval):
        costs.append(method.train(compute_secs))
        if isinstance(method, ShardMethod):
            busy_secs.append(_busy_secs(method.stats))
    return Point(
        method=name,
        ratio=ratio,
        update_interval=interval,
        compute_secs=compute_secs,
        step_secs=statistics.fmean(cost.step_secs for cost in costs),
        slowest_step_secs=max(cost.step_secs for cost in costs),
        host_wait_secs=statistics.fmean(cost.host_wait_secs for cost in costs),
        link_wait_secs=statistics.fmean(cost.link_wait_secs for cost in costs),
        host_busy_secs=statistics.median(busy_secs) if busy_secs else None,
    )


def _busy_secs(stats: StepStats) -> float:
    return stats.worker_accumulate_secs + stats.worker_update_secs
