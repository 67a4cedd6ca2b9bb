"""From runs to the figures of a row: medians over the repeats, ratios, bytes per parameter."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_zenflow import traffic
from lightning_zenflow.work import Work

from .job import Job, Run
from .modes import is_ours


@dataclass
class Measured:
    """What was collected of one mode.

    Attributes:
        runs: The timed runs, in order.
        memory: Short runs at two depths, the smaller one first; empty without.
        reason: Why it was not run, or not to the end; `None` if all went well.
    """

    runs: list[Run] = field(default_factory=list)
    memory: list[Run] = field(default_factory=list)
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One mode, each figure the median over its repeats; `None` where there is none.

    Attributes:
        mean_ms: Mean step.
        median_ms: Median step.
        least_ms: Least mean of a repeat.
        most_ms: Greatest mean of a repeat.
        passes_ms: Mean of forward and backward.
        to_compute_ratio: Mean step as a multiple of that of `compute`.
        to_zenflow_ratio: Mean step as a multiple of that of `zenflow`.
        max_to_median_ratio: Slowest step as a multiple of the median.
        stall_ms: Mean wait for the host.
        stall_ratio: Its share of the step.
        reselection_ms: What the slowest step with a re-selection took beyond the median.
        memory_bytes: Resident memory per parameter beyond 16-bit weights.
        to_host_bytes: Per parameter and step.
        to_device_bytes: Per parameter and step.
        is_counted: Whether the two are counted, or else computed.
        from_ranks_bytes: Per parameter and step.
        intervals: Update and selection interval at the end of the last run.
    """

    mean_ms: float
    median_ms: float
    least_ms: float
    most_ms: float
    passes_ms: float
    to_compute_ratio: float | None
    to_zenflow_ratio: float | None
    max_to_median_ratio: float
    stall_ms: float | None
    stall_ratio: float | None
    reselection_ms: float | None
    memory_bytes: float | None
    to_host_bytes: float | None
    to_device_bytes: float | None
    is_counted: bool
    from_ranks_bytes: float
    intervals: list[int | None] | None


def figures_of(measured: Mapping[str, Measured], job: Job) -> dict[str, Figures]:
    """The figures of every mode that has run at least once; `job` is any of the jobs."""
    means = {mode: _over(found.runs, _mean) for mode, found in measured.items() if found.runs}
    slopes = {mode: slope_bytes(found.memory) for mode, found in measured.items()}
    return {
        mode: _figures(mode, measured[mode].runs, means, slopes, _moved_bytes(mode, measured[mode].runs, job))
        for mode in means
    }


def slope_bytes(runs: Sequence[Run]) -> float | None:
    """Resident bytes for one more parameter, from two runs; `None` without them."""
    if len(runs) < 2:
        return None
    small, large = runs
    return (large.resident_bytes - small.resident_bytes) / (large.numel - small.numel)


def _figures(
    mode: str,
    runs: list[Run],
    means: Mapping[str, float],
    slopes: Mapping[str, float | None],
    moved: tuple[float | None, float | None, bool],
) -> Figures:
    mean = means[mode]
    each = [_mean(run) for run in runs]
    stalls = [statistics.fmean(run.stall_ms) for run in runs if run.stall_ms is not None]
    stall = statistics.median(stalls) if stalls else None
    selected = [found for run in runs if (found := _reselection_ms(run)) is not None]
    own, base = slopes.get(mode), slopes.get("compute")
    return Figures(
        mean_ms=mean,
        median_ms=_over(runs, lambda run: statistics.median(run.step_ms)),
        least_ms=min(each),
        most_ms=max(each),
        passes_ms=_over(runs, lambda run: statistics.fmean(run.passes_ms)),
        to_compute_ratio=mean / means["compute"] if "compute" in means else None,
        to_zenflow_ratio=mean / means["zenflow"] if "zenflow" in means else None,
        max_to_median_ratio=_over(runs, lambda run: max(run.step_ms) / statistics.median(run.step_ms)),
        stall_ms=stall,
        stall_ratio=None if stall is None else stall / mean,
        reselection_ms=statistics.median(selected) if selected else None,
        memory_bytes=own - base if own is not None and base is not None and mode != "compute" else None,
        to_host_bytes=moved[0],
        to_device_bytes=moved[1],
        is_counted=moved[2],
        from_ranks_bytes=_over(runs, lambda run: run.from_ranks_bytes / run.numel),
        intervals=runs[-1].intervals,
    )


def _mean(run: Run) -> float:
    return statistics.fmean(run.step_ms)


def _over(runs: list[Run], figure: Callable[[Run], float]) -> float:
    return statistics.median(figure(run) for run in runs)


def _reselection_ms(run: Run) -> float | None:
    if not run.selected_at:
        return None
    return max(run.step_ms[place] for place in run.selected_at) - statistics.median(run.step_ms)


def _moved_bytes(mode: str, runs: list[Run], job: Job) -> tuple[float | None, float | None, bool]:
    """To the host and to the device per parameter and step, and whether this was counted."""
    counted = [run for run in runs if run.to_host_bytes is not None and run.to_device_bytes is not None]
    if counted:
        return (
            _over(counted, lambda run: (run.to_host_bytes or 0.0) / run.numel),
            _over(counted, lambda run: (run.to_device_bytes or 0.0) / run.numel),
            True,
        )
    if mode == "ds_zenflow" or is_ours(mode):
        return None, None, False
    numel = runs[0].numel
    work = Work(numel=numel, selected_numel=0, tokens=job.tokens, ranks=job.ranks, stage=job.stage)
    found = traffic.zero_offload(work) if mode == "zero_offload" else traffic.on_device(work)
    return found.to_host_bytes / numel, found.to_device_bytes / numel, False


def overhead_of_stage_3(found: Mapping[str, Figures]) -> str | None:
    """Whether ZenFlow adds no more to ZeRO-3 than to ZeRO-2, in words; `None` without the modes that tell."""
    if not {"compute", "zero_2", "zero", "zenflow_2", "zenflow"} <= found.keys():
        return None
    compute = found["compute"].mean_ms
    ours, under_2 = found["zenflow"].mean_ms - compute, found["zenflow_2"].mean_ms - compute
    own = found["zero"].passes_ms - compute
    verdict = "no more than" if ours <= under_2 + own else "MORE THAN"
    return (
        f"Beyond compute, a step of ZenFlow takes {ours:.0f} ms under ZeRO-3: {verdict} the {under_2 + own:.0f} ms of its"
        f" {under_2:.0f} ms under ZeRO-2 and the {own:.0f} ms that DeepSpeed's ZeRO-3 adds to forward and backward (of which"
        f" {found['zero'].passes_ms - found['zero_2'].passes_ms:.0f} ms more than its ZeRO-2)."
    )
