"""Records as `StallMonitor` writes them, from a little simulated machine whose host is slower than its device."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Line = dict[str, Any]
SHARD_NUMEL = 67_108_864
CHANGES = {48: (5, 64), 112: (6, 64), 208: (6, 128)}
"""What the simulated tuner changes at the end of a step: update and selection interval."""

FORWARD_SECS, NORM_SECS, LAUNCH_SECS, OPTIMIZER_SECS = 0.130, 0.003, 0.004, 0.014
WRITE_SECS, EXCHANGE_SECS, LOAD_SECS = 0.006, 0.005, 0.004
ACCUMULATE_SECS, ADAM_SECS, SELECT_SECS = 0.042, 0.610, 0.45
EVALUATION_SECS, EVALUATION_STEPS = 6.0, 200


def header(rank: int = 0, world_size: int = 1, **changes: Any) -> Line:
    """The line that begins a run."""
    return {
        "kind": "run",
        "format": 1,
        "started": "2026-11-29T18:00:00+00:00",
        "rank": rank,
        "world_size": world_size,
        "stage": 2,
        "device": "cpu",
        "precision": "bf16-true",
        "shard_numel": SHARD_NUMEL,
        "stall_budget": 0.05,
        "settings": {"topk_ratio": 0.1, "select_interval": "auto", "update_interval": "auto", "worker_cores": None},
        "versions": {"lightning_zenflow": "0.1.0", "torch": "2.13.0", "lightning": "2.6.6", "deepspeed": "0.19.8"},
        **changes,
    }


def step_line(step: int, **changes: Any) -> Line:
    """A step of 200 ms with 10 ms of stall, that begins 200 ms after the one before."""
    begin = round(0.2 * (step - 1), 6)
    return {
        "kind": "step",
        "step": step,
        "begin_secs": begin,
        "step_secs": 0.2,
        "update_stall_secs": 0.01,
        "select_stall_secs": 0.0,
        "reselected": False,
        "update_interval": 4,
        "select_interval": 64,
        "worker_accumulate_secs": 0.04,
        "worker_update_secs": 0.05,
        "to_host_bytes": 120_000_000,
        "to_device_bytes": 30_000_000,
        "skipped_steps": 0,
        "grad_norm": 1.5,
        "grad_norm_clipped": 1.0,
        "deferred_age_steps": 4,
        "spans": [
            ["device", "forward and backward", begin, 0.13],
            ["device", "wait for host", begin + 0.18, 0.01],
            ["device", "optimizer", begin + 0.13, 0.02],
            ["host", "accumulate", begin + 0.13, 0.04],
            ["host", "update", begin + 0.17, 0.05],
        ],
        **changes,
    }


def decision_line(step: int, new: tuple[int, int | None], old: tuple[int, int | None], reason: str = "") -> Line:
    """A decision at the end of `step`; equal intervals keep what is."""
    return {
        "kind": "decision",
        "step": step,
        "update_interval": new[0],
        "select_interval": new[1],
        "previous": {"update_interval": old[0], "select_interval": old[1]},
        "reason": reason or _reason(new, old),
        "window": {"steps": 16, "step_secs": 0.1934, "update_stall_secs": 0.0212, "agreement": None},
    }


def _reason(new: tuple[int, int | None], old: tuple[int, int | None]) -> str:
    if new[0] != old[0]:
        return (
            f"update_interval {old[0]} -> {new[0]}: the host needs {ACCUMULATE_SECS + ADAM_SECS / old[0]:.3f} s a step where"
            f" the device takes 0.157 s, and update stall is over the budget of 5 % of the step time"
        )
    if new[1] != old[1]:
        cost = "a re-selection costs 0.45 s, 4.0 % of the time"
        return f"select_interval {old[1]} -> {new[1]}: {cost}, and 94 % of the columns stay"
    return "kept: update stall 0.4 % and select stall 2.1 % of the step time are within the budget of 5 %"


class _Rank:
    """One rank's device and host: what each does, and when, in seconds of this rank's clock."""

    def __init__(self, rank: int, seed: int) -> None:
        self.chance = random.Random(seed + rank)
        self.now = 1.5
        self.host_free = 0.0
        self.slow_ratio = 1.0 + 0.12 * rank  # later ranks have the slower hosts
        self.blocks: list[list[list[Any]]] = []  # the host's spans of the steps whose block the device still lacks

    def jitter(self, share: float) -> float:
        return self.chance.gauss(1, share)

    def device(self, spans: list[list[Any]], name: str, secs: float) -> float:
        if secs > 0:
            spans.append(["device", name, round(self.now, 6), round(secs, 6)])
            self.now += secs
        return max(0.0, secs)

    def host(self, arrived: float, update_interval: int) -> None:
        start = max(arrived, self.host_free)
        accumulate = ACCUMULATE_SECS * self.slow_ratio * self.jitter(0.03)
        update = ADAM_SECS / update_interval * self.slow_ratio * self.jitter(0.03)
        self.host_free = start + accumulate + update
        spans = [("accumulate", start, accumulate), ("update", start + accumulate, update)]
        self.blocks.append([["host", name, round(begin, 6), round(secs, 6)] for name, begin, secs in spans])

    def step(self, step: int, forward_secs: float, intervals: tuple[int, int], reselect: bool) -> Line:
        begin, spans = self.now, list[list[Any]]()
        self.device(spans, "forward and backward", forward_secs)
        arrived = self.now - 0.01  # the last gradients leave while backward still runs
        self.device(spans, "gradient norm", NORM_SECS)
        select_stall = 0.0
        if reselect:
            select_stall += self.device(spans, "wait for host", self.host_free - self.now)
            select_stall += self.device(spans, "select", SELECT_SECS * self.jitter(0.04))
            arrived = self.now
        self.host(arrived, intervals[0])
        self.device(spans, "launch", LAUNCH_SECS)
        self.device(spans, "optimizer", OPTIMIZER_SECS)
        update_stall, worker_secs = 0.0, [0.0, 0.0]
        if len(self.blocks) > 1:  # lag 1: the block of the step before
            block = self.blocks.pop(0)
            update_stall = self.device(spans, "wait for host", block[-1][2] + block[-1][3] - self.now)
            worker_secs = [span[3] for span in block]
            spans.extend(block)
            self.device(spans, "write weights", WRITE_SECS)
        return step_line(
            step,
            begin_secs=begin,
            update_stall_secs=round(update_stall, 6),
            select_stall_secs=round(select_stall, 6),
            reselected=reselect,
            update_interval=intervals[0],
            select_interval=intervals[1],
            worker_accumulate_secs=worker_secs[0],
            worker_update_secs=worker_secs[1],
            to_host_bytes=int(2 * 0.9 * SHARD_NUMEL),
            to_device_bytes=int(2 * 0.9 * SHARD_NUMEL / intervals[0]),
            grad_norm=round(3 / (1 + step / 100) + self.chance.random(), 4),
            deferred_age_steps=intervals[0],
            spans=spans,
        )


def simulate(steps: int, ranks: int = 1, seed: int = 0, tuned: bool = True) -> list[list[Line]]:
    """One record for each rank of a run in which the host is too slow at first, and the tuner makes up for it.

    The device waits at the end of a step for the block that the host got in the step before, and in a re-selection for
    everything. Ranks end each step together, in an exchange. The clock of rank r is 0.05 r seconds behind that of rank 0.
    """
    chance = random.Random(seed)
    machines = [_Rank(rank, seed) for rank in range(ranks)]
    records = [[header(rank, ranks)] for rank in range(ranks)]
    intervals, selected_at = (4, 64), 1
    for step in range(1, steps + 1):
        reselect = step == 1 or step == selected_at + intervals[1]
        selected_at = step if reselect else selected_at
        forward_secs = FORWARD_SECS * chance.gauss(1, 0.015) + (0.9 if step == 1 else 0)
        lines = [machine.step(step, forward_secs, intervals, reselect) for machine in machines]
        together = max(machine.now for machine in machines) + (EXCHANGE_SECS if ranks > 1 else 0.0)
        for rank, (machine, line) in enumerate(zip(machines, lines, strict=True)):
            machine.device(line["spans"], "exchange", together - machine.now)
            begin, behind = line["begin_secs"], 0.05 * rank
            line["step_secs"] = round(machine.now - begin, 6)
            line["begin_secs"] = round(begin - behind, 6)
            line["spans"] = [[lane, name, round(at - behind, 6), secs] for lane, name, at, secs in line["spans"]]
            records[rank].append(line)
            machine.now += LOAD_SECS + (EVALUATION_SECS if step % EVALUATION_STEPS == 0 else 0)
        if tuned and step % 16 == 0:
            new = CHANGES.get(step, intervals)
            for record in records:
                record.append(decision_line(step, new, intervals))
            intervals = new
    return records


def write(path: Path, lines: Iterable[Line]) -> Path:
    """Writes `lines` as one file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    return path


def write_run(folder: Path, records: list[list[Line]]) -> Path:
    """Writes a record for each rank into `folder` under the names that `StallMonitor` gives them; returns that of rank 0."""
    for rank, lines in enumerate(records):
        write(folder / (f"zenflow.rank{rank}.jsonl" if rank else "zenflow.jsonl"), lines)
    return folder / "zenflow.jsonl"
