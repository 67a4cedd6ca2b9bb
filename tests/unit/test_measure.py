"""Measurements: bounded, on the cores they are given, and with the right arithmetic."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_zenflow.cli import measure, passes, rehearsal
from lightning_zenflow.offload.worker import HostAdamW

ANY_CORE = [min(os.sched_getaffinity(0))]


def after(secs: float) -> Callable[..., float]:
    """In place of `median_secs`: runs once, and says that it took `secs`."""

    def run_once(run: Callable[[], object], *_: object, **__: object) -> float:
        run()
        return secs

    return run_once


def test_work_runs_on_the_given_cores_and_everything_is_put_back() -> None:
    before = os.sched_getaffinity(0), torch.get_num_threads()
    inside = []

    @measure.on_cores(ANY_CORE)
    def fails() -> None:
        inside.append((os.sched_getaffinity(0), torch.get_num_threads()))
        raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fails()
    assert inside == [(set(ANY_CORE), 1)]
    assert (os.sched_getaffinity(0), torch.get_num_threads()) == before


def test_cores_that_do_not_exist_are_refused_and_nothing_is_changed() -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(ValueError, match="1000000"), measure.on_cores([10**6]):
        pass
    assert os.sched_getaffinity(0) == before


def test_trainer_and_worker_share_the_cores_between_them() -> None:
    trainer, host = measure.split_cores()
    assert set(trainer) | set(host) == os.sched_getaffinity(0)
    assert not set(trainer) & set(host) or len(os.sched_getaffinity(0)) == 1


def test_a_single_core_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {7})
    assert measure.split_cores() == ([7], [7])


def test_a_time_is_the_median_without_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    ticks = itertools.accumulate([100.0, 0.3, 0, 0.1, 0, 0.2, 0, 0.5], initial=0.0)
    next(ticks)
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    # 0.3, 0.1, 0.2 s: three runs reach the limit of 0.5 s.
    assert measure.median_secs(lambda: runs.append(1), limit_secs=0.5, warm_ups=2) == pytest.approx(0.2)
    assert len(runs) == 2 + 3


def test_a_copy_counts_as_read_and_written_in_host_memory_and_once_on_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "COPY_BYTES", 4000)
    monkeypatch.setattr(measure, "median_secs", after(2.0))
    assert measure.host_bandwidth(ANY_CORE) == measure.HostBandwidth(bandwidth=4000.0, cores=1)
    assert measure.link(ANY_CORE, nbytes=4000) == measure.Link(2000.0, 2000.0, is_pinned=False)


def test_device_speed_is_six_operations_per_parameter_and_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "CPU_WIDTHS", (8, 16))
    monkeypatch.setattr(measure, "median_secs", after(0.5))
    found = measure.device_flops(10, torch.bfloat16, ANY_CORE)
    assert found == measure.DeviceSpeed(6 * (6 * 8 * 16) * 10 / 0.5, 10, torch.bfloat16)
    assert measure.device_flops(10**6, torch.float32, ANY_CORE).tokens == 512


def test_a_backward_pass_is_measured_and_not_only_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "CPU_WIDTHS", (8, 16))
    models: list[measure.LinearStack] = []

    class Watched(measure.LinearStack):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            models.append(self)

    monkeypatch.setattr(measure, "LinearStack", Watched)
    monkeypatch.setattr(measure, "median_secs", after(1.0))
    measure.device_flops(4, torch.bfloat16, ANY_CORE)
    grads = [param.grad for param in models[0].parameters()]
    assert all(grad is not None and grad.abs().sum() > 0 for grad in grads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_host_passes_are_the_workers_own_and_update_what_holds_gradients(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    update = HostAdamW._update

    def watched(self: HostAdamW, *arguments: Any) -> int:
        held.append(update(self, *arguments))
        return held[-1]

    monkeypatch.setattr(HostAdamW, "_update", watched)
    monkeypatch.setattr(measure, "LIMIT_SECS", 0.01)
    found = passes.host_passes(dtype, ANY_CORE, numel=10_000)
    assert found.wire_bytes == dtype.itemsize and found.cores == 1 and found.accumulate_secs > 0 < found.update_secs
    assert held[:4] == [1, 2, 3, 4] and set(held[4:]) == {4}  # what was accumulated, and the step's own
    assert found.accumulate_bandwidth == pytest.approx((8 + dtype.itemsize) / found.accumulate_secs)
    assert found.update_bandwidth == pytest.approx((28 + 2 * dtype.itemsize) / found.update_secs)


def test_no_thread_is_left_by_passes_on_several_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "LIMIT_SECS", 0.01)
    before = threading.active_count()
    assert passes.host_passes(torch.bfloat16, os.sched_getaffinity(0), numel=2_000_000).update_secs > 0
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before


def test_a_rehearsal_gives_every_rate_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "CPU_WIDTHS", (64, 96))
    monkeypatch.setattr(passes, "OFFLOAD_NUMEL", 1 << 12)
    trainer, host = measure.split_cores()
    begin = time.perf_counter()
    rates = rehearsal.rehearse(8, torch.bfloat16, 0.1, trainer, host)
    wall_secs = time.perf_counter() - begin
    values = {name: value for name, value in dataclasses.asdict(rates).items() if name != "link_overlaps"}
    assert values.pop("device_bandwidth") == values.pop("interconnect_bandwidth") == math.inf
    assert all(0 < value < math.inf for value in values.values()), values
    assert rates.link_overlaps is False  # the CPU plays the device
    # Per element, and not for all of them: no part took longer than the whole rehearsal.
    assert 3 * 64 * 96 * rates.down_secs < wall_secs
    assert 6 * 3 * 64 * 96 * 8 / rates.beside_flops < wall_secs


@pytest.mark.parametrize("topk_ratio", [0.0, 1.0])
def test_a_rehearsal_selects_nothing_or_everything_if_told_so(
    topk_ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "CPU_WIDTHS", (8, 10))
    stage = rehearsal.Stage(torch.float32, topk_ratio, ANY_CORE)
    try:
        assert stage.selected.layout.numel == topk_ratio * 3 * 8 * 10
        for number in range(1, 4):
            stage.step(torch.randn(2, 8), number)
        stage.move()
        assert stage.parts().accumulate > 0
    finally:
        stage.close()


BOUNDS = """
import time, torch
from pathlib import Path
from lightning_zenflow.cli import measure, passes, rehearsal

def kib(name):
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))

trainer, host = measure.split_cores()
measure.accelerator()
stage = lambda: rehearsal.rehearse(64, torch.bfloat16, 0.1, trainer, host)
for limit_secs, run in (
    (3, lambda: measure.host_bandwidth(host)),
    (3, lambda: measure.link(trainer)),
    (3, lambda: measure.device_flops(512, torch.bfloat16, trainer)),
    (3, lambda: passes.host_passes(torch.bfloat16, host)),
    (3, lambda: passes.host_passes(torch.float32, host)),
    (3, lambda: passes.offload_passes(torch.bfloat16, trainer)),
    (12, stage),
):
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    before, begin = kib("VmRSS"), time.perf_counter()
    print(run())
    secs, mib = time.perf_counter() - begin, (kib("VmHWM") - before) / 1024
    assert mib < 330 if run is stage else mib < 300, (run, mib)
    assert secs < limit_secs, (run, secs)
"""


@pytest.mark.long
@pytest.mark.timeout(240)
def test_every_measurement_is_short_and_small() -> None:
    # Once more if something else kept the machine busy.
    for attempt in (1, 2):
        done = subprocess.run([sys.executable, "-c", BOUNDS], capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode == 0:
            return
        assert attempt == 1, done.stdout[-2000:] + done.stderr[-3000:]
