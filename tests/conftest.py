"""Guards that every test runs under, and real ranks for the tests that need more than one process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.fp16 import allow_fp16_on_any_cpu

allow_fp16_on_any_cpu()

# Two tests run at a time on a machine of two cores: more threads would only get in each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

REPO = Path(__file__).resolve().parent.parent
GRACE_SECS = 5.0
"""How long a test's leftovers may take to go away by themselves."""

KNOWN_ENVIRONMENT = {
    "PYTEST_CURRENT_TEST",  # pytest
    "PL_GLOBAL_SEED",  # seed_everything
    "PL_SEED_WORKERS",
    "MASTER_ADDR",  # Lightning's and DeepSpeed's rendezvous
    "MASTER_PORT",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_SIZE",
    "NODE_RANK",
    "PYTORCH_NVML_BASED_CUDA_CHECK",  # Lightning, when it is imported
    "TORCHINDUCTOR_CACHE_DIR",  # torch, when its compiler is imported
}
"""Variables that torch, Lightning and DeepSpeed set while they run. They are restored, but no fault of the test."""


def _wait_until(holds: Callable[[], bool], secs: float = GRACE_SECS) -> bool:
    deadline = time.monotonic() + secs
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


SHARED_MEMORY = Path("/dev/shm")
"""Where tests must leave nothing behind."""


# -- guards ------------------------------------------------------------------------------------------------------------


def _children() -> dict[int, psutil.Process]:
    # The resource tracker of multiprocessing lives until the interpreter ends, by design.
    found = psutil.Process().children(recursive=True)
    return {child.pid: child for child in found if "resource_tracker" not in _command(child)}


def _command(process: psutil.Process) -> str:
    try:
        return f"{process.pid} ({process.status()}): {' '.join(process.cmdline())}"
    except psutil.NoSuchProcess:
        return f"{process.pid} (gone)"


@pytest.fixture(autouse=True)
def no_leaked_processes() -> Iterator[None]:
    before = _children()
    yield
    if _wait_until(lambda: not _children().keys() - before.keys()):
        return
    leaked = [child for pid, child in _children().items() if pid not in before]
    commands = "\n".join(_command(child) for child in leaked)
    for child in leaked:
        _kill(child)
    pytest.fail(f"The test left processes behind:\n{commands}")


@pytest.fixture(autouse=True)
def no_leaked_threads() -> Iterator[None]:
    before = set(threading.enumerate())

    def leaked() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread not in before and not thread.daemon]

    yield
    if not _wait_until(lambda: not leaked()):
        pytest.fail(f"The test left threads behind: {leaked()}")


@pytest.fixture(autouse=True)
def environment_unchanged() -> Iterator[None]:
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    for name in changed - {"PYTEST_CURRENT_TEST"}:
        os.environ.pop(name, None)
        if name in before:
            os.environ[name] = before[name]
    unexpected = sorted(changed - KNOWN_ENVIRONMENT)
    if unexpected:
        pytest.fail(f"The test changed environment variables: {', '.join(unexpected)}")


@pytest.fixture(autouse=True)
def affinity_unchanged() -> Iterator[None]:
    before = os.sched_getaffinity(0)
    yield
    after = os.sched_getaffinity(0)
    if after != before:
        os.sched_setaffinity(0, before)
        pytest.fail(f"The test changed the CPU affinity from {sorted(before)} to {sorted(after)}")


@pytest.fixture(autouse=True)
def no_process_group_left() -> Iterator[None]:
    yield
    if destroy_process_group():
        pytest.fail(
            "The test left torch.distributed initialised. If Lightning did, use the fixture `own_process_group`."
        )


@pytest.fixture
def own_process_group() -> Iterator[None]:
    """For tests that train in this process: Lightning leaves the process group to the end of the interpreter."""
    yield
    destroy_process_group()


def destroy_process_group() -> bool:
    """Ends torch's process group and DeepSpeed's view of it; tells whether there was one."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return False
    torch.distributed.destroy_process_group()
    if "deepspeed" in sys.modules:
        import deepspeed

        deepspeed.comm.comm.cdb = None  # else the next deepspeed.init_distributed believes that it is done
        deepspeed.utils.groups._release_process_group_references()
    return True


def _in_use_elsewhere(path: Path) -> bool:
    """Whether a process outside this test run has `path` mapped; /dev/shm belongs to the whole machine."""
    own = {os.getpid(), *_children()}
    for process in psutil.process_iter():
        try:
            if process.pid not in own and str(path) in Path(f"/proc/{process.pid}/maps").read_text():
                return True
        except OSError:
            continue
    return False


@pytest.fixture(autouse=True)
def no_shared_memory_left() -> Iterator[None]:
    before = set(SHARED_MEMORY.iterdir())

    def left() -> list[Path]:
        return [path for path in set(SHARED_MEMORY.iterdir()) - before if not _in_use_elsewhere(path)]

    yield
    if not _wait_until(lambda: not left()):
        pytest.fail(f"The test left shared memory behind: {left()}")


@pytest.fixture(autouse=True)
def workers_start_fast(request: pytest.FixtureRequest) -> Iterator[None]:
    """In tests of training, background processes are forked; `real_worker` marks those that need one as users have it."""
    if "integration" not in request.path.parts or request.node.get_closest_marker("real_worker"):
        yield
        return
    from tests.forked import forked_workers

    with forked_workers():
        yield


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _counted_answers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests of bad input count what was accepted and what was refused, for the last lines of the run."""
    fuzz = sys.modules.get("tests.fuzz")
    before = dict(fuzz.COUNTS) if fuzz else {}
    yield
    for answer, count in fuzz.COUNTS.items() if fuzz else ():
        if count > before.get(answer, 0):
            request.node.user_properties.append((f"answers: {answer}", count - before.get(answer, 0)))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Says how many inputs the tests of bad input have tried."""
    totals: dict[str, int] = {}
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        if getattr(report, "when", None) == "teardown":
            for name, count in report.user_properties:
                totals[name] = totals.get(name, 0) + count
    answers = {name.removeprefix("answers: "): count for name, count in totals.items() if name.startswith("answers: ")}
    if answers:
        listed = ", ".join(f"{count} {answer}" for answer, count in sorted(answers.items()))
        terminalreporter.write_line(f"Bad input: {sum(answers.values())} cases tried, {listed}.")


# -- ranks -------------------------------------------------------------------------------------------------------------


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@pytest.fixture
def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on."""
    return _free_port()


_RANK_PROGRAM = """
import importlib, json, sys, torch
from tests.forked import forked_workers
from tests.fp16 import allow_fp16_on_any_cpu
allow_fp16_on_any_cpu()
module, _, name = sys.argv[1].partition(":")
with forked_workers():
    result = getattr(importlib.import_module(module), name)(**json.loads(sys.argv[2]))
torch.save(result, sys.argv[3])
"""


class RankFailed(AssertionError):
    """A rank ended with an error or not at all; the message ends with its output."""


RunRanks = Callable[..., list[Any]]
"""`run_ranks(target, world_size=2, timeout=120, env=None, **arguments)`; see the fixture of that name."""


@pytest.fixture
def run_ranks(tmp_path: Path) -> RunRanks:
    """A function that calls `target` in `world_size` fresh interpreters which can find each other over 127.0.0.1.

    `target` is a function at the top of a module, or its path such as `"tests.cases:train"`. The keyword arguments go
    through JSON, the results through `torch.save`; they come back in the order of the ranks. The environment holds what
    `torch.distributed`, DeepSpeed and Lightning read. When a rank fails, the others have `GRACE_SECS` to end by
    themselves; whatever still runs then, or after `timeout` seconds, is killed.
    """

    def run(
        target: str | Callable[..., Any],
        world_size: int = 2,
        timeout: float = 120.0,
        env: Mapping[str, str] | None = None,
        **arguments: Any,
    ) -> list[Any]:
        path = target if isinstance(target, str) else f"{target.__module__}:{target.__qualname__}"
        port = _free_port()
        folder = tmp_path / f"ranks-{port}"
        folder.mkdir()
        ranks = []
        try:
            for rank in range(world_size):
                command = [sys.executable, "-c", _RANK_PROGRAM, path, json.dumps(arguments), str(folder / f"{rank}.pt")]
                with open(folder / f"{rank}.log", "wb") as log:
                    environment = {**os.environ, **_rank_environment(rank, world_size, port), **(env or {})}
                    ranks.append(
                        subprocess.Popen(
                            command, cwd=REPO, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                        )
                    )
            _join(ranks, folder, timeout)
        finally:
            for process in ranks:
                if process.poll() is None:
                    _kill(psutil.Process(process.pid))
                process.wait(GRACE_SECS)
        return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world_size)]

    return run


def _rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_SIZE": str(world_size),
        "NODE_RANK": "0",
        "OMP_NUM_THREADS": "1",  # the ranks share the cores of a small machine
        "GLOO_SOCKET_IFNAME": "lo",
    }


def _join(ranks: list[subprocess.Popen[bytes]], folder: Path, timeout: float) -> None:
    def failed() -> list[int]:
        return [rank for rank, process in enumerate(ranks) if process.poll() not in (None, 0)]

    def ended() -> bool:
        return all(process.poll() is not None for process in ranks)

    in_time = _wait_until(lambda: bool(failed()) or ended(), timeout)
    if failed():
        _wait_until(ended)  # which rank failed first is not known: the others may have failed because of it
        told = "\n".join(
            f"Rank {rank} ended with {ranks[rank].returncode}:\n{_output(folder, rank)}" for rank in failed()
        )
        raise RankFailed(f"{len(failed())} of {len(ranks)} ranks failed.\n{told}")
    if not in_time:
        first = next(rank for rank, process in enumerate(ranks) if process.poll() is None)
        raise RankFailed(f"Rank {first} of {len(ranks)} ran for over {timeout} s:\n{_output(folder, first)}")


def _output(folder: Path, rank: int) -> str:
    return (folder / f"{rank}.log").read_text(errors="replace")[-8_000:]


def _kill(process: psutil.Process) -> None:
    """Kills a process and what it started, by pid."""
    try:
        family = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(family, timeout=GRACE_SECS)
