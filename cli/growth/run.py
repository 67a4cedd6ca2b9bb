"""Starts the measurements one after the other, each in processes of its own that end in time."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import measure
from ..passes import NUMEL, host_passes
from .results import CoresPoint, Growth, RanksPoint, StepPoint

LIMIT_SECS = 150.0
"""For one point, start of Python included."""
FACTOR = 4
SIZE_TENSORS = 8
MOST_CORES_POINTS = 8
CHILD = "lightning_zenflow.cli.growth.child"

KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 33), "MALLOC_MMAP_THRESHOLD_": str(1 << 25)}
"""Lets glibc keep what is freed (it takes no larger second value): fetching it again at every step takes longer than the work,
and not as long in one process as in the next."""


class GrowthError(RuntimeError):
    """A measurement failed or took too long; the message is one line for people."""


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        smallest: Parameters of the smallest model.
        largest: Parameters of the largest.
        tensors_numel: Total size of the models with few and many tensors.
        tensors: Their numbers of tensors.
        host_numel: Elements of the shard for the host's passes.
        ranks: Numbers of ranks.
        ranks_numel: Parameters of their model.
    """

    smallest: int = 1_000_000
    largest: int = 128_000_000
    tensors_numel: int = 10_000_000
    tensors: tuple[int, ...] = (10, 100, 1000, 5000)
    host_numel: int = NUMEL
    ranks: tuple[int, ...] = (1, 2, 4)
    ranks_numel: int = 8_000_000

    @property
    def sizes(self) -> list[int]:
        """From the smallest to the largest in steps of factor four; the last step may be smaller."""
        found = [self.smallest]
        while found[-1] * FACTOR < self.largest:
            found.append(found[-1] * FACTOR)
        return [*found, self.largest] if self.largest > found[-1] else found


def measure_all(plan: Plan, tell: Callable[[str], None]) -> Growth:
    """Runs the plan; `tell` gets a line before each point.

    Raises:
        GrowthError: A process failed or did not end in time; nothing is left running.
    """
    trainer, host = measure.split_cores()
    one = [trainer[0]], [host[-1]]
    sizes, tensors, ranks = [], [], []
    for numel in plan.sizes:
        tell(f"{numel / 1e6:g} M parameters")
        sizes.append(_step_point(_run(1, numel, SIZE_TENSORS, *one)[0]))
    for count in plan.tensors:
        tell(f"{plan.tensors_numel / 1e6:g} M parameters in {count} tensors")
        tensors.append(_step_point(_run(1, plan.tensors_numel, count, *one)[0]))
    cores = [_cores_point(chosen, plan.host_numel, tell) for chosen in _core_sets()]
    for count in plan.ranks:
        tell(f"{count} rank{'s' * (count > 1)}")
        ranks.append(_ranks_point(count, _run(count, plan.ranks_numel, SIZE_TENSORS, [], [])))
    return Growth(
        available_cores=len(os.sched_getaffinity(0)),
        torch=torch.__version__,
        sizes=tuple(sizes),
        tensors=tuple(tensors),
        cores=tuple(cores),
        ranks=tuple(ranks),
    )


def _step_point(found: dict[str, Any]) -> StepPoint:
    names = ("numel", "tensors", "plain_secs", "step_secs", "stall_secs", "host_secs", "core_ratio")
    return StepPoint(**{name: found[name] for name in names})


def _ranks_point(ranks: int, found: Sequence[dict[str, Any]]) -> RanksPoint:
    first = found[0]
    return RanksPoint(
        ranks=ranks,
        numel=first["numel"],
        plain_secs=max(rank["plain_secs"] for rank in found),
        step_secs=max(rank["step_secs"] for rank in found),
        reduced_bytes=first["reduced_bytes"],
        gathered_bytes=first["gathered_bytes"],
        calls=first["calls"],
        weights_bytes=2 * first["numel"],
    )


def _core_sets() -> list[list[int]]:
    """One core, two, four and so on, and all there are."""
    available = sorted(os.sched_getaffinity(0))
    counts = [1 << power for power in range(MOST_CORES_POINTS) if 1 << power < len(available)]
    return [available[-count:] for count in [*counts, len(available)]]


def _cores_point(cores: list[int], numel: int, tell: Callable[[str], None]) -> CoresPoint:
    tell(f"host passes on {len(cores)} core{'s' * (len(cores) > 1)}")
    copy = measure.host_bandwidth(cores)
    passes = host_passes(torch.bfloat16, cores, numel)
    return CoresPoint(**dataclasses.asdict(passes), copy_bandwidth=copy.bandwidth)


def _run(
    ranks: int, numel: int, tensors: int, trainer_cores: list[int], worker_cores: list[int]
) -> list[dict[str, Any]]:
    """Measures in `ranks` processes at a time; what each found."""
    arguments = json.dumps(
        {
            "numel": numel,
            "tensors": tensors,
            "trainer_cores": trainer_cores,
            "worker_cores": worker_cores,
            "ranks": ranks,
        }
    )
    environment = {
        **os.environ,
        **KEEP_MEMORY,
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(ranks),
        "LOCAL_SIZE": str(ranks),
    }
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="lightning-zenflow-growth-") as name:
        folder = Path(name)
        try:
            for rank in range(ranks):
                with open(folder / f"{rank}.out", "wb") as out, open(folder / f"{rank}.err", "wb") as err:
                    command = [sys.executable, "-m", CHILD, arguments]
                    own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                    processes.append(
                        subprocess.Popen(
                            command, env=own, stdin=subprocess.PIPE, stdout=out, stderr=err, start_new_session=True
                        )
                    )
            _join(processes, folder, f"{numel} parameters in {tensors} tensors on {ranks} ranks")
        finally:
            for process in processes:
                _end(process)
        return [json.loads((folder / f"{rank}.out").read_text().strip().splitlines()[-1]) for rank in range(ranks)]


def _join(processes: Sequence[subprocess.Popen[bytes]], folder: Path, what: str) -> None:
    """Waits for all, until one fails, or for the time limit."""
    deadline = time.monotonic() + LIMIT_SECS
    while True:
        codes = [process.poll() for process in processes]
        failed = next((rank for rank, code in enumerate(codes) if code), None)
        if failed is not None:
            lines = (folder / f"{failed}.err").read_text(errors="replace").strip().splitlines()
            raise GrowthError(f"{what} must run, got exit code {codes[failed]}: {lines[-1] if lines else 'no message'}")
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            raise GrowthError(f"{what} must end within {LIMIT_SECS:g} s, got none. Is the machine busy?")
        time.sleep(0.05)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process that still runs, and what it has started in its session; its background process ends with it."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)
    if process.stdin:
        process.stdin.close()  # open until here: its end would end the child


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
