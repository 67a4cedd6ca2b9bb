"""The guards of conftest.py: each one fails the test that it is there for, and cleans up behind it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from tests.conftest import RunRanks

REPO = Path(__file__).resolve().parents[2]

TESTS = """
import os, subprocess, sys, threading, time
from pathlib import Path
import torch
from tests import conftest

# Not the machine's: other tests that run meanwhile would take what is left there for their own.
conftest.SHARED_MEMORY = Path("shm")
conftest.SHARED_MEMORY.mkdir()

def test_process():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path("pid").write_text(str(child.pid))

def test_thread():
    threading.Thread(target=time.sleep, args=(8,)).start()

def test_environment():
    os.environ["SOME_SETTING"] = "1"

def test_environment_is_restored():
    assert "SOME_SETTING" not in os.environ

def test_known_environment():
    os.environ["MASTER_PORT"] = "1"

def test_affinity():
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

def test_affinity_is_restored():
    assert len(os.sched_getaffinity(0)) > 1

def test_process_group(free_port):
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{free_port}", rank=0, world_size=1)

def test_process_group_is_gone(own_process_group, free_port):
    assert not torch.distributed.is_initialized()
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{free_port}", rank=0, world_size=1)

def test_shared_memory():
    (conftest.SHARED_MEMORY / "left-by-a-test").write_text("x")

def test_nothing():
    pass
"""


@pytest.mark.long
def test_each_guard_fails_the_test_that_it_is_for_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "test_faults.py").write_text(TESTS)
    settings = tmp_path / "pytest.ini"
    settings.write_text("[pytest]\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        str(settings),
        "-p",
        "tests.conftest",
        "-p",
        "no:cacheprovider",
        "-rA",
    ]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    failed = {line.split("::")[1].split(" ")[0] for line in done.stdout.splitlines() if line.startswith("ERROR ")}
    guarded = ("process", "thread", "environment", "affinity", "process_group", "shared_memory")
    assert failed == {f"test_{name}" for name in guarded}, done.stdout[-5000:]
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_ranks_find_each_other_and_return_their_results_in_order(run_ranks: RunRanks) -> None:
    assert run_ranks("tests.unit.test_guards:gather", word="a") == [["a0", "a1"], ["a0", "a1"]]


def gather(word: str) -> list[str]:
    """Run by two ranks."""
    dist.init_process_group("gloo")
    words = [""] * dist.get_world_size()
    dist.all_gather_object(words, f"{word}{dist.get_rank()}")
    dist.destroy_process_group()
    return words


@pytest.mark.long
def test_a_failing_rank_is_shown_with_its_traceback(run_ranks: RunRanks) -> None:
    with pytest.raises(AssertionError, match=r"(?s)Rank 1 ended with 1:.*RuntimeError: rank 1 fails"):
        run_ranks("tests.unit.test_guards:fail_on_second")


def fail_on_second() -> None:
    """Run by two ranks: one fails, the other would wait for ever."""
    if os.environ["RANK"] == "1":
        raise RuntimeError("rank 1 fails")
    time.sleep(600)


@pytest.mark.long
def test_ranks_that_never_end_are_killed_at_the_timeout(run_ranks: RunRanks) -> None:
    before = psutil.Process().children()  # other tests keep a warm interpreter
    with pytest.raises(AssertionError, match=r"Rank 0 of 1 ran for over 8 s"):
        run_ranks("tests.unit.test_guards:never_end", world_size=1, timeout=8)
    assert psutil.Process().children() == before


def never_end() -> None:
    """Run by a rank: it does not even react to an interrupt."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
