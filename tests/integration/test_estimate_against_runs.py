"""`estimate` against real runs: on two cores of this machine, one of which plays the device, as in `lightning-zenflow bench`.

Traffic is compared with counted bytes, to the last one. For times, the estimate measures models of three and six layers and
has to predict models of eight and sixteen; everything is measured in fresh processes, in turn, on the same cores.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from lightning_zenflow import traffic
from lightning_zenflow.cli.bench.settings import KEEP_MEMORY
from lightning_zenflow.work import Work
from tests import moved_bytes
from tests.conftest import RunRanks

REPO = Path(__file__).resolve().parents[2]
TOLERANCE_RATIO = 0.25
STEPS, UPDATE_INTERVAL, TOPK_RATIO = 20, 4, 0.1
MODES = ("compute", "zenflow", "zero_offload")

Samples = dict[str, list[float]]
"""Seconds by mode."""

RUN = """
import json, statistics, sys
from lightning_zenflow.cli.bench.job import Job
from lightning_zenflow.cli.bench.loop import measure
mode, tokens, depth, steps, topk_ratio = sys.argv[1], *map(float, sys.argv[2:])
job = Job(mode=mode, tokens=int(tokens), depth=int(depth), steps=int(steps), topk_ratio=topk_ratio)
print(json.dumps(statistics.median(measure(job).step_ms)))
"""


def output(*args: object) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, args)],
        cwd=REPO,
        env={**os.environ, **KEEP_MEMORY, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


def measured_secs(mode: str, tokens: int, depth: int) -> float:
    """Median step of a real run, without its first steps."""
    return float(output("-c", RUN, mode, tokens, depth, STEPS, TOPK_RATIO).strip().splitlines()[-1]) / 1e3


def estimated_secs(numel: int, tokens: int) -> dict[str, float]:
    """What the command says, from rates that it measures itself."""
    options = ("--batch-tokens", tokens, "--update-interval", UPDATE_INTERVAL, "--topk-ratio", TOPK_RATIO, "--json")
    found: dict[str, Any] = json.loads(output("-m", "lightning_zenflow.cli", "estimate", numel, *options))
    return {
        "compute": found["on_device"]["step"]["compute_secs"],
        "zenflow": found["zenflow"]["step"]["step_secs"],
        "zero_offload": found["zero_offload"]["step"]["step_secs"],
    }


def collect(tokens: int, depth: int, estimated: Samples, measured: Samples) -> None:
    """Adds two estimates with runs of every mode between them, so that a machine that drifts does less harm."""
    numel = depth * (2 * 1024 * 4096 + 4096 + 1024)
    before = estimated_secs(numel, tokens)
    for mode in MODES:
        measured[mode].append(measured_secs(mode, tokens, depth))
    after = estimated_secs(numel, tokens)
    for mode in MODES:
        estimated[mode] += [before[mode], after[mode]]


def too_far(estimated: Samples, measured: Samples) -> list[str]:
    """The modes whose median estimate is too far from the median of what was measured."""
    wrong = []
    for mode in MODES:
        estimate, real = statistics.median(estimated[mode]), statistics.median(measured[mode])
        if abs(estimate - real) > TOLERANCE_RATIO * real:
            wrong.append(f"{mode}: estimated {1e3 * estimate:.0f} ms, measured {1e3 * real:.0f} ms")
    return wrong


@pytest.mark.bench
@pytest.mark.timeout(900)
@pytest.mark.skipif(len(os.sched_getaffinity(0)) != 2, reason="one core plays the device, the other the host")
@pytest.mark.skipif(shutil.which("ninja") is None, reason="DeepSpeed compiles its CPU Adam for ZeRO-Offload")
@pytest.mark.parametrize(("tokens", "depth"), [(32, 8), (256, 8), (64, 4)])
def test_an_estimate_is_within_a_quarter_of_what_is_measured(tokens: int, depth: int) -> None:
    estimated: Samples = defaultdict(list)
    measured: Samples = defaultdict(list)
    collect(tokens, depth, estimated, measured)
    for _ in range(2):  # something else may have kept the machine busy: again then, and all of it counts
        if not too_far(estimated, measured):
            break
        collect(tokens, depth, estimated, measured)
    assert not too_far(estimated, measured), (dict(estimated), dict(measured))


ALL_CUT = {"stage3_param_persistence_threshold": 0}
NONE_KEPT = {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
ON_HOST = {"offload_param": {"device": "cpu"}}
RUNS: list[dict[str, Any]] = [
    ALL_CUT,
    {**ALL_CUT, **NONE_KEPT},
    {**ALL_CUT, **NONE_KEPT, "micro_batches": 3},
    {**ALL_CUT, **ON_HOST},
    {**ALL_CUT, **NONE_KEPT, **ON_HOST, "micro_batches": 2},
]


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_traffic_under_zero_3_is_what_is_counted(
    ranks: int, run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    for run, moved in zip(RUNS, run_ranks(moved_bytes.count_all, ranks, runs=RUNS)[0], strict=True):
        monkeypatch.setattr(traffic, "KEPT_NUMEL", 0 if "stage3_max_reuse_distance" in run else 10**9)
        numel = moved_bytes.LAYERS * moved_bytes.WIDTH**2
        work = Work(
            numel=numel,
            selected_numel=numel // 8,
            tokens=2,
            ranks=ranks,
            micro_batches=run.get("micro_batches", 1),
            stage=3,
            offload_parameters="offload_param" in run,
        )
        found = traffic.zenflow(work, 4)
        # What a collective fills includes the rank's own part; what it reduces to is that part alone.
        others = (ranks - 1) / ranks * moved.get("gathered", 0) + (ranks - 1) * moved.get("reduced", 0)
        assert found.from_ranks_bytes == others, run
        selected = 2 * work.selected_shard_numel if work.offload_parameters else 0
        assert found.to_host_bytes == moved["to_host"] + selected, run
        # On CPU an offloaded weight is where it is needed, so that its fetch is counted by what is asked for.
        come_back = moved["fetched"] // ranks if work.offload_parameters else moved["to_device"]
        assert found.to_device_bytes == come_back, run
