"""The measuring loop: step times of one mode, in the process that calls it."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Collection
from typing import Any

import torch

from ..measure import accelerator
from .collectives import Received
from .engines import build_engine, join_group
from .job import WARM_UP_STEPS, Job, Run
from .modes import is_ours
from .resident import resident_bytes
from .settings import SETTINGS, cores_of


def clock(found: Any) -> Callable[[], float]:
    """Milliseconds of a monotonic clock, read when the device has done all that it was asked for."""

    def now() -> float:
        found.synchronize()  # launched is not done
        return 1e3 * time.perf_counter()

    return now


def run_on(cores: Collection[int]) -> None:
    """Binds this process, which has no other purpose, to `cores`, if there are any."""
    if cores:
        os.sched_setaffinity(0, cores)


def measure(job: Job, received: Received | None = None) -> Run:
    """Trains in this process and binds it to its cores: call it in a process of its own.

    Args:
        job: Any mode but `zenflow_auto`.
        received: What counts collectives, if anything does.
    """
    received = received or Received()
    setting, found, ours = SETTINGS[job.setting], accelerator(), is_ours(job.mode)
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    cores = cores_of(setting, found.device_name(), int(os.environ.get("LOCAL_RANK", "0")), job.ranks)
    run_on(cores.trainer if ours else cores.every)
    device = torch.device(found.current_device_name())
    torch.manual_seed(0)
    model = setting.build(job.depth)
    numel = sum(param.numel() for param in model.parameters())
    batch = setting.make_batch(job.tokens).to(device)
    engine: Any
    if job.mode == "compute":
        engine = model.to(device, torch.bfloat16)
    else:
        join_group(found)
        engine = build_engine(job, model, cores, pinned=device.type != "cpu")
    try:
        return _steps(job, engine, lambda: setting.loss_of(engine, batch), numel, received, clock(found))
    finally:
        if job.mode == "ds_zenflow":
            engine.optimizer.process.kill()  # it would outlive this one
        elif ours:
            engine.destroy()


def _steps(
    job: Job, engine: Any, forward: Callable[[], torch.Tensor], numel: int, received: Received, now: Callable[[], float]
) -> Run:
    steps, passes, stalls, selected, down, up, from_ranks = [], [], [], [], [], [], []
    for number in range(job.steps):
        before, start = received.nbytes, now()
        loss = forward()
        if job.mode == "compute":
            engine.zero_grad(set_to_none=True)
            loss.backward()
        else:
            engine.backward(loss)
        turn = now()
        if job.mode != "compute":
            engine.step()
        end = now()
        steps.append(end - start)
        passes.append(turn - start)
        from_ranks.append(received.nbytes - before)
        if is_ours(job.mode):
            stats = engine.optimizer.shard.stats
            stalls.append(1e3 * (stats.update_stall_secs + stats.select_stall_secs))
            down.append(stats.to_host_bytes)
            up.append(stats.to_device_bytes)
            if stats.select_stall_secs > 0 and number >= WARM_UP_STEPS:
                selected.append(number - WARM_UP_STEPS)
        elif job.mode == "zero_offload":
            stalls.append(end - turn)  # the host updates and copies in there, while the device waits
    if job.mode == "compute":
        engine.zero_grad(set_to_none=True)  # the others hold none either once a step is done
    counted = slice(WARM_UP_STEPS, None)
    return Run(
        numel=numel,
        step_ms=steps[counted],
        passes_ms=passes[counted],
        stall_ms=stalls[counted] if stalls else None,
        selected_at=selected,
        to_host_bytes=statistics.fmean(down[counted]) if down else None,
        to_device_bytes=statistics.fmean(up[counted]) if up else None,
        from_ranks_bytes=statistics.fmean(from_ranks[counted]),
        resident_bytes=resident_bytes(),
        intervals=list(engine.optimizer.shard.intervals) if is_ours(job.mode) else None,
    )
