"""Runs a job in processes of its own, and leaves none of them behind: not by a time limit, nor by Ctrl-C."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

import psutil

from .engines import free_port
from .job import Job, Run

MARK = "LIGHTNING_ZENFLOW_BENCH_RUN"
"""Variable that every descendant inherits: by it those are found that have changed their session or lost their parent."""

END_SECS = 10.0
CHILD = [sys.executable, "-m", "lightning_zenflow.cli.bench.child"]


class RunFailed(Exception):
    """A mode could not be measured; the message says why, in one line."""


def run_job(job: Job, environment: Mapping[str, str], limit_secs: float, command: list[str] | None = None) -> Run:
    """Runs a job, one process for each rank, and waits for its result.

    Args:
        job: What to measure.
        environment: Variables beside those of this process.
        limit_secs: How long it may take.
        command: What to start, with the job and the path of the result behind it; `None` for the real thing.

    Raises:
        RunFailed: It failed, or took too long. In any case nothing of it is left.
    """
    mark = uuid.uuid4().hex
    marked = {**os.environ, **environment, MARK: mark}
    with tempfile.TemporaryDirectory(prefix="lightning-zenflow-bench-") as folder:
        result, log = Path(folder) / "run.json", Path(folder) / "log.txt"
        words = [*(command or CHILD), json.dumps(dataclasses.asdict(job)), str(result)]
        started: list[subprocess.Popen[bytes]] = []
        try:
            with log.open("wb") as sink:
                for ranked in _of_ranks(job.ranks, marked):
                    # A session of its own: Ctrl-C in the terminal is for us, who then end all of it.
                    started.append(
                        subprocess.Popen(
                            words,
                            stdin=subprocess.DEVNULL,
                            stdout=sink,
                            stderr=sink,
                            env=ranked,
                            start_new_session=True,
                        )
                    )
            status = _wait(started, limit_secs)
        finally:
            end_all(mark, started)
        if status:
            raise RunFailed(_reason(log.read_text(encoding="utf-8", errors="replace"), status))
        return Run.from_dict(json.loads(result.read_text(encoding="utf-8")))


def end_all(mark: str, started: list[subprocess.Popen[bytes]]) -> None:
    """Kills every process with the mark `mark`, and waits for those of `started`."""
    deadline = time.monotonic() + END_SECS
    while marked := _marked(mark):  # again, until none is left: one may have started another meanwhile
        for process in marked:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(marked, timeout=0.5)
        if time.monotonic() > deadline:
            break
    for popen in started:
        popen.kill()  # it may have died before it had the mark
        popen.wait(END_SECS)


def _marked(mark: str) -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if _environment(process).get(MARK) == mark]


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return {}
        return process.environ()
    except (psutil.Error, OSError):  # gone, or somebody else's
        return {}


def _of_ranks(ranks: int, environment: Mapping[str, str]) -> list[dict[str, str]]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
    bare = {name: value for name, value in environment.items() if name not in names}
    if ranks == 1:
        return [bare]
    group = {"WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    group["MASTER_PORT"] = str(free_port())
    return [{**bare, **group, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def _wait(started: list[subprocess.Popen[bytes]], limit_secs: float) -> int:
    """Exit code of the first rank that fails, or 0 when all have ended well."""
    deadline = time.monotonic() + limit_secs
    while True:
        codes = [popen.poll() for popen in started]
        failed = next((code for code in codes if code), 0)
        if failed or None not in codes:
            return failed
        if time.monotonic() > deadline:
            raise RunFailed(f"took longer than {limit_secs:g} s")
        time.sleep(0.05)


def _reason(log: str, status: int) -> str:
    """The last line of the log that names an error, shortened."""
    lines = [" ".join(line.split()) for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\[rank\d+\]: ?)?[\w.]*(Error|Exception|Interrupt|Exit)\b", line)]
    said = (errors or lines or ["no output"])[-1]
    ended = f"signal {-status}" if status < 0 else f"exit code {status}"
    return f"failed with {ended}: {said[:300]}"
