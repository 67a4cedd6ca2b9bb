"""Runs the modes in turn, so that a machine that drifts does all of them the same harm."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

from lightning_zenflow.wording import in_words

from .arguments import Plan
from .figures import Measured
from .job import WARM_UP_STEPS, Job, Run
from .modes import why_not
from .processes import RunFailed, run_job

MEMORY_STEPS = WARM_UP_STEPS + 4
"""Every block has been updated and every buffer used by then."""

Runner = Callable[[Job, Mapping[str, str], float], Run]


def compare(
    plan: Plan,
    device_type: str,
    environment: Mapping[str, str],
    tell: Callable[[str], None],
    run: Runner = run_job,
) -> dict[str, Measured]:
    """Runs everything that can run here; what cannot keeps its reason.

    Args:
        plan: What to run.
        device_type: Of the accelerator.
        environment: Variables of every run.
        tell: Takes what is to be said meanwhile.
        run: Runs one job.
    """
    found = {mode: Measured(reason=why_not(mode, plan.stage, device_type)) for mode in plan.modes}
    timed = [(plan.job(mode), "") for _ in range(plan.repeats) for mode in plan.modes]
    depths = plan.of.memory_depths(plan.depth) if plan.memory else ()
    memory = [
        (plan.job(mode, depth, MEMORY_STEPS), f", memory at depth {depth}") for depth in depths for mode in plan.modes
    ]
    jobs = [entry for entry in (*timed, *memory) if found[entry[0].mode].reason is None]
    begin = time.monotonic()
    for number, (job, purpose) in enumerate(jobs, 1):
        mode = found[job.mode]
        if mode.reason is not None:
            continue  # it has failed meanwhile
        tell(f"[{number}/{len(jobs)}] {job.mode}{purpose} ... ")
        try:
            result = run(job, environment, plan.limit_secs)
        except RunFailed as error:
            mode.reason = str(error)
            tell(f"{error}\n")
            continue
        (mode.memory if purpose else mode.runs).append(result)
        left_secs = (time.monotonic() - begin) / number * (len(jobs) - number)
        left = f"; about {_clock(left_secs)} left" if number < len(jobs) else ""
        tell(f"{in_words(statistics.fmean(result.step_ms) / 1e3)} a step{left}\n")
    return found


def _clock(secs: float) -> str:
    return f"{secs / 60:.0f} min" if secs >= 90 else f"{secs:.0f} s"
